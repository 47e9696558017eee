"""Stands in for a GPU that is not here: kernels are compiled for it, and launches do nothing."""

from __future__ import annotations

from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from cairn.kernels import paged_extend, pdl


class AbsentGPU:
    """Triton's driver, of an H100. A number of its own keeps kernels apart from a real GPU's."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.utils = self
        self.launcher_cls = Launcher

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills, threads."""
        return 1, 1, 1, 0, 1024

    def unload_module(self, module: int) -> None:
        pass


class Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *_: Any) -> None:
        pass


def use_absent_gpu(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(driver, "_active", AbsentGPU(number))
    for module in (pdl, paged_extend):
        monkeypatch.setattr(module, "is_hopper", lambda _: True)
