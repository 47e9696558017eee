"""Ranks that compute one model together: collectives over gloo on CPUs and NCCL on GPUs.

The process group is the engine's own, not the process's default one: a program may have several
engines, and use torch.distributed for itself.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cairn.errors import CairnError

PATIENCE = timedelta(seconds=60)
"""How long a collective waits for the other ranks. All ranks do the same work at the same time, so
one that is this late is stuck."""


def rank_device(kind: str, rank: int) -> torch.device:
    return torch.device(kind, rank) if kind == "cuda" else torch.device(kind)


class PeerLostError(CairnError):
    """A collective failed: another rank has ended, or does not answer."""


class RankGroup:
    """Call `connect` on all ranks, at the same time, before the first collective."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._group: Any = None

    def connect(self, meeting_place: Path) -> None:
        """`meeting_place` is the path of a file that does not exist yet, the same for all ranks."""
        store = dist.FileStore(str(meeting_place), self.size)  # type: ignore[attr-defined]
        store.set_timeout(PATIENCE)
        try:
            self._group = self._nccl(store) if self.device.type == "cuda" else self._gloo(store)
        except RuntimeError as error:
            raise PeerLostError(f"rank {self.rank} cannot reach the others: {error}") from error

    def _gloo(self, store: Any) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # All ranks are on this machine, whatever its name resolves to.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = PATIENCE
        return dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def _nccl(self, store: Any) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def abort(self) -> None:
        """End collectives that still wait for other ranks, where the library can."""
        if self._group is not None and self.device.type == "cuda":
            self._group.abort()

    # -- collectives --------------------------------------------------------------------------

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        self._run("allreduce", [x])
        return x

    def concat(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        own = part.to(self.device).contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._run("allgather", [parts], [own])
        return torch.cat(parts, dim).to(part.device)

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        self._run("broadcast", [x])
        return x

    def _run(self, name: str, *tensors: object) -> None:
        assert self._group is not None
        try:
            getattr(self._group, name)(*tensors).wait()
        except RuntimeError as error:
            raise PeerLostError(f"{name} failed on rank {self.rank}: {error}") from error
