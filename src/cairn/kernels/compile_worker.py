"""Worker process of `precompile`: compiles kernels for a GPU without touching the GPU.

It reads lines of JSON from stdin: first the target GPU, then one line per kernel. It answers each
kernel with one line: null, or the error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver


class _AbsentGPU:
    """The part of Triton's driver interface that compilation needs."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a compiler may print, and stdout is for answers only
    order = json.loads(sys.stdin.readline())
    launchers = order.pop("launchers")
    driver.set_active(_AbsentGPU(GPUTarget(**order)))
    for line in sys.stdin:
        error = None
        try:
            _compile(**json.loads(line), launchers=launchers)
        except Exception:
            error = traceback.format_exc()
        print(json.dumps(error), file=answers, flush=True)


def _compile(kernel: str, data: str, launchers: bool) -> None:
    module, _, name = kernel.partition(":")
    found: Any = getattr(importlib.import_module(module), name)
    compiled = getattr(found, "jit", found).preload(data)
    if launchers:
        nvidia.CudaLauncher(compiled.src, compiled.metadata)


if __name__ == "__main__":
    main()
