"""Well-known shapes without weights, for benchmarks and tests: `--load-format dummy`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_GIVEN = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))


def _config(name: str) -> dict[str, Any]:
    """The fields of a preset, and of the one it is like."""
    own = dict(_GIVEN[name])
    base = own.pop("like", None)
    return own if base is None else {**_config(base), **own}


PRESETS: Mapping[str, Mapping[str, Any]] = {name: _config(name) for name in _GIVEN}
"""config.json of each preset."""
