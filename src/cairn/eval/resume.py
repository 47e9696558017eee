"""Files of results, a JSON line each, so that a stopped run can be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from cairn.errors import ConfigError

T = TypeVar("T")  # of results: a dataclass or a dict


def earlier(path: str | None, flag: str, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The results in the file of an earlier run. Raises ConfigError if it did not ask the same."""
    if path is None:
        raise ConfigError(f"--resume needs {flag} FILE, the file of the run that was stopped")
    try:
        header, *lines = Path(path).read_text(encoding="utf-8").splitlines()
        before = json.loads(header)["asked"]
        results = _parse(lines)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{flag} {path} has no earlier results: {error!r}") from error
    for name, value in json.loads(json.dumps(asked)).items():
        if before.get(name) != value:
            raise ConfigError(
                f"{flag} {path}: {name} was {before.get(name)!r} there and is {value!r} now; ask "
                "the same, or leave the earlier results out"
            )
    return results


def _parse(lines: Sequence[str]) -> list[dict[str, Any]]:
    """The results, without the last if its line was cut off."""
    results = []
    for number, line in enumerate(lines, 2):  # the header is line 1
        try:
            results.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number <= len(lines):
                raise ValueError(f"line {number} is not JSON; remove it") from error
    return results


def take(
    asking: Iterator[T], path: str | None, asked: Mapping[str, Any], done: Sequence[T] = ()
) -> tuple[list[T], bool]:
    """The results, `done` first, and whether all arrived before Ctrl-C. Writes what is asked and
    each result to the file."""
    results = list(done)
    if path is not None and results:
        _replace(path, ({"asked": asked}, *results))
    with open(path or os.devnull, "a" if results else "w", encoding="utf-8") as file:
        if not results:
            print(_line({"asked": asked}), file=file, flush=True)
        try:
            for result in asking:
                results.append(result)
                print(_line(result), file=file, flush=True)
        except KeyboardInterrupt:
            if len(results) == len(done):
                raise
            return results, False
    return results, True


def _replace(path: str, values: Sequence[Any]) -> None:
    """Write the lines beside the file and then put them in its place, so that a kill in between
    loses nothing."""
    kept = Path(path).resolve()
    part = kept.with_name(f"{kept.name}.part")
    with open(part, "w", encoding="utf-8") as file:
        file.writelines(f"{_line(value)}\n" for value in values)
        file.flush()
        os.fsync(file.fileno())
    part.replace(kept)


def _line(value: Any) -> str:
    return json.dumps(asdict(value) if is_dataclass(value) else value)  # type: ignore[arg-type]


def say_stopped(count: int, path: str | None) -> str:
    again = "" if path is None else "; the same command with --resume continues"
    return f"cairn: stopped by Ctrl-C after {count} results{again}"
