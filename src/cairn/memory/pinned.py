"""Host memory that a GPU reads and writes directly: mapped here and registered with CUDA.

torch's allocator for pinned memory rounds up to powers of two, which wastes too much for a pool of
many gigabytes. This module maps whole system pages that nothing else uses, and registers exactly
their size. Kernels then access the memory under the same address as the host.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from cairn.errors import ConfigError

_log = logging.getLogger("cairn.memory")

_GIB = 2**30
_PORTABLE, _MAPPED = 1, 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
_TELL_EVERY = 5.0  # seconds


class CudaRegistry:
    """Registers host memory with a device, so that the device can access it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> str | None:
        """Register memory; returns an error message, or None."""
        runtime = _runtime()
        with torch.cuda.device(self._device):
            error = runtime.cudaHostRegister(address, nbytes, _PORTABLE | _MAPPED)
            if error == runtime.cudaError.success:
                return None
            with contextlib.suppress(RuntimeError):
                # Clear the error, which CUDA would otherwise report for the next kernel.
                torch.ones(1, device=self._device).add_(1)
        return str(runtime.cudaGetErrorString(error))

    def unregister(self, address: int) -> None:
        runtime = _runtime()
        with torch.cuda.device(self._device):
            runtime.cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class PinnedMemory:
    """Tensors in registered memory; valid until `close`."""

    def __init__(self, registry: CudaRegistry, sizes: Sequence[int]) -> None:
        """Make one tensor of bytes for each of `sizes`.

        They are registered one after the other, which takes about a second per few gigabytes.
        """
        self.tensors: list[torch.Tensor] = []
        # Unregister even without `close`: CUDA must not keep addresses of unmapped memory.
        self._release = weakref.finalize(self, _unregister, registry, self.tensors)
        begin = told = time.monotonic()
        total, done = sum(sizes), 0
        for nbytes in sizes:
            try:
                tensor = _map(nbytes)
                problem = registry.register(tensor.data_ptr(), tensor.nbytes)
            except OSError as error:  # the system refuses to map more memory than it has
                problem = str(error)
            if problem is not None:
                self.close()
                raise ConfigError(
                    f"hisparse_config: {total / _GIB:.1f} GiB of host memory are wanted for pages "
                    f"and CUDA registered {done / _GIB:.1f} of them ({problem}); lower host_gib or "
                    "host_to_device_ratio, or raise what the container or system may lock"
                )
            self.tensors.append(tensor)
            done += nbytes
            now = time.monotonic()
            if now - told >= _TELL_EVERY:
                told = now
                message = "host memory: %.1f of %.1f GiB registered after %.0f s"
                _log.info(message, done / _GIB, total / _GIB, now - begin)

    def close(self) -> None:
        """Unregister and free the memory. Nothing may use it any more."""
        self._release()


def _unregister(registry: CudaRegistry, tensors: list[torch.Tensor]) -> None:
    while tensors:
        # A tensor stays in the list, and so mapped, until CUDA has unregistered it.
        registry.unregister(tensors[-1].data_ptr())
        tensors.pop()


def _map(nbytes: int) -> torch.Tensor:
    """Zeroed memory in its own pages, all of them committed."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)  # after a fork, copy-on-write would move the host's pages
    with contextlib.suppress(OSError):  # without huge pages it only takes longer
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    # All threads touch the pages here; registration would do it in a single thread.
    return tensor.zero_()
