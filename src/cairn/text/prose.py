"""Public-domain prose that comes with the package, to hide facts in and to calibrate with."""

from __future__ import annotations

from importlib import resources

PROSE = resources.files("cairn") / "text" / "data" / "prose.txt"


def bundled_prose() -> str:
    return PROSE.read_text(encoding="utf-8")
