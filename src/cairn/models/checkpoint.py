"""Safetensors checkpoints, one file or sharded: what is in them, checked before it is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from cairn.errors import LoadError
from cairn.models.config_reader import shown
from cairn.models.json_file import MOST_BYTES, parse_object, read_object

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LONGEST_NAME = 255  # of a file


@dataclass(frozen=True)
class Checkpoint:
    """Tensors of a model folder: their shapes by name, by the file that holds them."""

    path: Path
    files: dict[Path, dict[str, tuple[int, ...]]]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for held in self.files.values() for name, shape in held.items()}

    @cached_property
    def types(self) -> tuple[str, ...]:
        """Names of the types of its matrices."""
        found = set()
        for path, names in self.files.items():
            with safe_open(path, framework="pt") as file:
                for name in (name for name, shape in names.items() if len(shape) > 1):
                    found.add(file.get_slice(name).get_dtype())
        return tuple(sorted(found))

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        single, index = folder / _SINGLE, folder / _INDEX
        if index.exists():
            return cls(folder, _read_index(index))
        if single.exists():
            return cls(folder, {single: _read_header(single)})
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


def _read_index(path: Path) -> dict[Path, dict[str, tuple[int, ...]]]:
    weight_map = read_object(path, LoadError).get("weight_map")
    if not isinstance(weight_map, dict):
        raise LoadError(f"{path} is not a safetensors index: it has no weight_map")
    wanted: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        # A plain name: no path to another folder, and nothing that the system refuses.
        if not isinstance(shard, str) or not shard.isprintable() or Path(shard).name != shard:
            raise LoadError(
                f"{path}: tensor {name} is in the shard {shown(shard)}, which is no file name"
            )
        wanted.setdefault(shard, set()).add(name)
    files = {}
    for shard, names in sorted(wanted.items()):
        shard_path = path.parent / shard
        if len(shard) > _LONGEST_NAME or not shard_path.is_file():
            raise LoadError(
                f"{shard_path} is missing; {path.name} says it holds {len(names)} tensors"
            )
        held = _read_header(shard_path)
        for name in sorted(names - set(held)):
            raise LoadError(f"{shard_path} lacks tensor {name}, which {path.name} promises")
        for name in sorted(set(held) - names):
            raise LoadError(f"{shard_path} holds tensor {name}, which {path.name} does not list")
        files[shard_path] = held
    return files


def _read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors by name, in file order, after checking that the file holds them."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or not 2 <= length <= min(MOST_BYTES, size - 8):
                raise LoadError(f"{path} is not a safetensors file, or its header is cut off")
            header = parse_object(file.read(length), f"{path}: its header", LoadError)
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from error
    for name, entry in header.items():
        match entry:
            case {"data_offsets": [int(), int() as end]} if 8 + length + end > size:
                raise LoadError(
                    f"{path} is truncated: tensor {name} ends at byte {8 + length + end}, "
                    f"the file at {size}; fetch it again"
                )
    # The library checks types, shapes and offsets against each other and the file.
    try:
        with safe_open(path, framework="pt") as tensors:
            return {
                name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.offset_keys()
            }
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path} has a corrupt safetensors header: {error}") from error
