"""Cairn serves long-context language models from one machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "Generation", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from cairn.config import EngineConfig
    from cairn.engine.sampling_params import SamplingParams
    from cairn.llm import LLM
    from cairn.outputs import Generation

_HOMES = {
    "LLM": "cairn.llm",
    "EngineConfig": "cairn.config",
    "Generation": "cairn.outputs",
    "SamplingParams": "cairn.engine.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Public names load on first use: `cairn doctor` must not need torch to import."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'cairn' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
