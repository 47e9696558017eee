"""Host memory that a GPU reads and writes directly: mapped here, and registered with CUDA.

torch's allocator of pinned memory rounds up to powers of two, which a pool of many gigabytes cannot
afford. Memory is mapped here in whole pages of the system, shared with nothing else, and registered
at its exact size. A kernel then finds it under the address that the host knows it by.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from cairn.errors import ConfigError

_log = logging.getLogger("cairn.memory")

_GIB = 2**30
_PORTABLE, _MAPPED = 1, 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
_TELL_EVERY = 5.0  # seconds


class Registry(Protocol):
    """Registers host memory with a device, so that the device can access it."""

    def register(self, address: int, nbytes: int) -> str | None:
        """An error message, or None."""
        ...

    def unregister(self, address: int) -> None: ...


class CudaRegistry:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> str | None:
        runtime = _runtime()
        with torch.cuda.device(self._device):
            error = runtime.cudaHostRegister(address, nbytes, _PORTABLE | _MAPPED)
            if error == runtime.cudaError.success:
                return None
            with contextlib.suppress(RuntimeError):
                # CUDA would blame the next kernel for it.
                torch.ones(1, device=self._device).add_(1)
        return str(runtime.cudaGetErrorString(error))

    def unregister(self, address: int) -> None:
        runtime = _runtime()
        with torch.cuda.device(self._device):
            runtime.cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _Region(NamedTuple):
    address: int
    tensor: torch.Tensor  # keeps the mapping


class PinnedMemory:
    """Tensors in registered memory, until `close`."""

    def __init__(self, registry: Registry, sizes: Sequence[int]) -> None:
        """One tensor of bytes for each of `sizes`.

        They are registered one after the other, which takes a second for every few gigabytes.
        """
        self.tensors: list[torch.Tensor] = []
        regions: list[_Region] = []
        # Also where nobody closes it: CUDA must not keep addresses of memory that is gone.
        self._release = weakref.finalize(self, _unregister, registry, regions)
        begin = told = time.monotonic()
        total, done = sum(sizes), 0
        for nbytes in sizes:
            try:
                tensor = _map(nbytes)
                problem = registry.register(tensor.data_ptr(), tensor.nbytes)
            except OSError as error:  # the system promises no more memory than it has
                problem = str(error)
            if problem is not None:
                self.close()
                raise ConfigError(
                    f"hisparse_config: {total / _GIB:.1f} GiB of host memory are wanted for pages "
                    f"and CUDA registered {done / _GIB:.1f} of them ({problem}); lower host_gib or "
                    "host_to_device_ratio, or raise what the container or system may lock"
                )
            regions.append(_Region(tensor.data_ptr(), tensor))
            self.tensors.append(tensor)
            done += nbytes
            now = time.monotonic()
            if now - told >= _TELL_EVERY:
                told = now
                message = "host memory: %.1f of %.1f GiB registered after %.0f s"
                _log.info(message, done / _GIB, total / _GIB, now - begin)

    def close(self) -> None:
        """Nothing may be reading or writing it any more."""
        self.tensors.clear()
        self._release()


def _unregister(registry: Registry, regions: list[_Region]) -> None:
    while regions:
        # It stays in the list, and so mapped, until CUDA has let go of it.
        registry.unregister(regions[-1].address)
        regions.pop()


def _map(nbytes: int) -> torch.Tensor:
    """Zeroed memory in pages of its own, all of them backed."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)  # a child would have the host write to copies of pages
    with contextlib.suppress(OSError):  # a system without large pages takes longer
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    # By all threads; CUDA would have the pages made by one.
    return tensor.zero_()
