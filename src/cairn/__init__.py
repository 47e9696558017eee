"""Cairn serves long-context language models from one machine."""

from __future__ import annotations

import os
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

# Threads that wait for each other must not keep the processor from the one they wait for. OpenMP's
# spin for milliseconds by default (libgomp, in torch's wheels for Linux, 300,000 times; LLVM's and
# Intel's libraries 200 ms), which beside another busy process costs a factor of ten. 8,000 times
# is about 0.2 ms: enough for the gaps between the operations of a layer. The libraries read this
# when torch is imported; processes that we start inherit it.
_WAITING = {"GOMP_SPINCOUNT": "8000", "KMP_BLOCKTIME": "0"}
if not {"OMP_WAIT_POLICY", *_WAITING} & set(os.environ):  # else the user has decided
    os.environ.update(_WAITING)


def __getattr__(name: str) -> Any:
    """Public names load on first use: `cairn doctor` must not need torch to import."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'cairn' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
