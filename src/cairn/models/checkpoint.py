"""Safetensors checkpoints, one file or sharded: what is in them, checked before it is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from cairn.errors import LoadError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER = 100 * 2**20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Tensor names of a model folder by the file that holds them."""

    files: dict[Path, tuple[str, ...]]

    @property
    def names(self) -> set[str]:
        return {name for names in self.files.values() for name in names}

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        single, index = folder / _SINGLE, folder / _INDEX
        if index.exists():
            return cls(_read_index(index))
        if single.exists():
            return cls({single: tuple(_read_header(single))})
        raise LoadError(
            f"{folder} has neither {_SINGLE} nor {_INDEX}; convert the weights to safetensors, or "
            "use load_format=dummy for random ones"
        )

    def tensors(self) -> Iterator[tuple[Path, str, torch.Tensor]]:
        """All tensors, one at a time."""
        for path, names in self.files.items():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in names:
                        yield path, name, _read(file, path, name)
            except (SafetensorError, OSError) as error:
                raise LoadError(f"{path} cannot be read: {error}") from error


def _read(file: safe_open, path: Path, name: str) -> torch.Tensor:
    try:
        tensor: torch.Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise LoadError(f"{path}: tensor {name} cannot be read: {error}") from error
    return tensor


def _read_index(path: Path) -> dict[Path, tuple[str, ...]]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        wanted: dict[str, set[str]] = {}
        for name, shard in weight_map.items():
            wanted.setdefault(str(shard), set()).add(str(name))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path} is not a safetensors index: {error!r}") from error
    files = {}
    for shard, names in sorted(wanted.items()):
        shard_path = path.parent / shard
        if shard_path.parent != path.parent:
            raise LoadError(f"{path} names the shard {shard!r}, which is outside its folder")
        if not shard_path.exists():
            raise LoadError(
                f"{shard_path} is missing; {path.name} says it holds {len(names)} tensors"
            )
        held = _read_header(shard_path)
        for name in sorted(names - set(held)):
            raise LoadError(f"{shard_path} lacks tensor {name}, which {path.name} promises")
        for name in sorted(set(held) - names):
            raise LoadError(f"{shard_path} holds tensor {name}, which {path.name} does not list")
        files[shard_path] = tuple(held)
    return files


def _read_header(path: Path) -> list[str]:
    """Tensor names in file order, after checking that the file holds all their bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise LoadError(f"{path} is not a safetensors file, or its header is cut off")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        spans = sorted((entry["data_offsets"], name) for name, entry in header.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path} has a corrupt safetensors header: {error!r}") from error
    for (_, end), name in spans:
        if 8 + length + end > size:
            raise LoadError(
                f"{path} is truncated: tensor {name} ends at byte {8 + length + end}, "
                f"the file at {size}; fetch it again"
            )
    return [name for _, name in spans]
