"""JSON files of a model folder, which may be anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cairn.errors import CairnError

MOST_BYTES = 32 * 2**20
"""Python's objects take up to 25 times the bytes of their JSON."""


def read_object(path: Path, error: type[CairnError]) -> dict[str, Any]:
    """The object in a file. Raises `error`, which names the file, if there is none."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}") from problem
    if len(raw) > MOST_BYTES:
        raise error(f"{path} has more than {MOST_BYTES} bytes; so large a file is not read")
    return parse_object(raw, str(path), error)


def parse_object(raw: bytes, source: str, error: type[CairnError]) -> dict[str, Any]:
    """The object in some JSON. `source` names it in errors."""
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as problem:
        raise error(f"{source} is not valid JSON: {problem}") from problem
    if not isinstance(values, dict):
        raise error(f"{source} does not hold a JSON object")
    return values
