"""Rank 0's side of the other ranks: starts, instructs, watches and ends their processes.

Every wait for a rank also watches its process, so that a dead process is an error at once. If a
rank fails, the others are in the middle of a step that cannot be completed. So all ranks are ended,
and the engine with them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import socket
import struct
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal, TypeVar

import torch

from cairn.config import EngineConfig
from cairn.engine.build import build_runner
from cairn.engine.memory_budget import kv_budget
from cairn.engine.memory_plan import MemoryPlan
from cairn.engine.parallel import rank_group
from cairn.engine.parallel.lead_runner import LeadRunner
from cairn.engine.parallel.rank_group import PeerLostError, RankGroup, rank_device
from cairn.engine.parallel.rank_process import (
    Backed,
    Build,
    Close,
    Compiled,
    Failed,
    FromRank,
    Loaded,
    RankOptions,
    Ready,
    ToRank,
    run_rank,
)
from cairn.engine.resolve import EngineChoices
from cairn.engine.runner import Runner
from cairn.errors import RankError
from cairn.kernels.compilations import CompilationCounts
from cairn.memory.copies import Transfer
from cairn.models.interface import LanguageModel
from cairn.models.loader import Progress
from cairn.models.source import ModelSource

# A forked process would inherit locks held by threads it does not have, and the CUDA context.
_START_METHOD: Literal["spawn"] = "spawn"
_NOT_BUILT = (
    "it was not ready yet: see above what it printed. Every rank runs the script that makes an "
    "engine with tp above 1, which must therefore do so under `if __name__ == '__main__':`"
)
_CAUSE_SECONDS = 5.0  # to find out which rank failed
_CLOSE_SECONDS = 5.0  # for a rank to end by itself

M = TypeVar("M", bound=FromRank)


class Ranks(RankGroup):
    def __init__(
        self, config: EngineConfig, source: ModelSource, dtype: torch.dtype, device_type: str
    ) -> None:
        """Start the processes; they load their parts while rank 0 loads its own."""
        super().__init__(0, config.tp, rank_device(device_type, 0))
        self.failure: RankError | None = None
        self._built = False
        self._folder = tempfile.TemporaryDirectory(prefix="cairn-ranks-")
        self._threads = torch.get_num_threads()
        share = config.threads if isinstance(config.threads, int) else self._threads
        if device_type == "cpu":
            share = max(1, share // config.tp)
        self.note = f"tp: {config.tp} ranks, on cpu with {share} threads each"
        if device_type == "cuda":
            self.note = f"tp: {config.tp} ranks, cuda:0 to cuda:{config.tp - 1}"
        options = RankOptions(
            replace(config, model=_place(config, source)),
            rank=0,
            dtype=dtype,
            device_type=device_type,
            threads=share,
            meeting_place=Path(self._folder.name) / "store",
        )
        self._meeting_place = options.meeting_place
        self._processes: list[BaseProcess] = []
        self._links: list[Connection] = []
        self._backed: list[Transfer] = []
        self.compilations: dict[int, CompilationCounts] = {}
        """Kernels that each other rank has compiled, if any."""
        # An engine that is not closed must not leave processes behind.
        weakref.finalize(self, _kill, self._processes)
        context = multiprocessing.get_context(_START_METHOD)
        for rank in range(1, config.tp):
            link, its_end = context.Pipe()
            _limit_sending(link)
            process = context.Process(
                target=run_rank,
                args=(options._replace(rank=rank), its_end),
                name=f"cairn-rank-{rank}",
                daemon=True,
            )
            process.start()
            its_end.close()
            self._processes.append(process)
            self._links.append(link)
        torch.set_num_threads(share)

    @property
    def pids(self) -> list[int]:
        """Of ranks 1 and up."""
        return [process.pid for process in self._processes if process.pid is not None]

    # -- building -----------------------------------------------------------------------------

    def agree_on_budget(self, choices: EngineChoices) -> EngineConfig:
        """Wait until all ranks have loaded. The rank with the least memory decides for all."""
        budgets = [
            kv_budget(choices),
            *(said.budget for said in self.collect(Loaded, patient=True)),
        ]
        known, config = [own for own in budgets if own is not None], choices.config
        if not known:
            return config
        return replace(config, kv_cache_gib=max(1, min(known)) / 2**30, mem_fraction_static=None)

    def build_runner(
        self,
        choices: EngineChoices,
        memory: MemoryPlan,
        model: LanguageModel,
        progress: Progress | None,
    ) -> tuple[Runner, list[str]]:
        """Make pools and runner on every rank, at the same time."""
        self.send(Build(memory))
        self.connect(self._meeting_place)
        built = build_runner(choices, memory, model, self, LeadRunner, progress)
        self.collect(Ready, patient=True)
        self._built = True
        return built

    # -- talking ------------------------------------------------------------------------------

    def send(self, message: ToRank) -> None:
        data = pickle.dumps(message)
        for rank, link in enumerate(self._links, 1):
            try:
                link.send_bytes(data)
            except OSError as error:
                raise PeerLostError(f"rank {rank} does not listen: {error}") from error

    def collect(self, kind: type[M], *, patient: bool = False) -> list[M]:
        """The next message of a kind from every rank, in the order of ranks. With `patient` it may
        take long."""
        return [self._next(rank, kind, patient) for rank in range(1, self.size)]

    def _next(self, rank: int, kind: type[M], patient: bool) -> M:
        while True:
            if not self._speaking([rank], None if patient else _patience()):
                raise PeerLostError(f"rank {rank} said nothing for {_patience():g} s")
            message = self._receive(rank)
            if isinstance(message, kind):
                return message
            self._take(rank, message)

    def _take(self, rank: int, message: FromRank) -> None:
        """Handle a message that was not asked for."""
        if isinstance(message, Compiled):
            self.compilations[rank] = message.counts
            return
        assert isinstance(message, Backed), message
        self._backed += message.transfers

    def take_backed(self, *, waiting: bool) -> list[Transfer]:
        """Copies that ranks other than 0 have made, each once for every rank."""
        if waiting and not self._backed and self._wait_for_any(_patience()) is None:
            raise PeerLostError(f"ranks copied nothing to host memory for {_patience():g} s")
        self.watch()
        done, self._backed = self._backed, []
        return done

    def watch(self) -> None:
        """Handle messages that were not asked for; raise if a rank has failed or ended."""
        self.check()
        while (rank := self._wait_for_any(0)) is not None:
            self._take(rank, self._receive(rank))

    def check(self) -> None:
        if self.failure is not None:
            raise RankError(f"{self.failure}; start the engine again") from self.failure

    def _wait_for_any(self, timeout: float) -> int | None:
        """The first rank that has sent a message or ended."""
        return min(self._speaking(range(1, self.size), timeout), default=None)

    def _speaking(self, ranks: Iterable[int], timeout: float | None) -> set[int]:
        """Ranks that have sent something or ended."""
        rank_of: dict[object, int] = {}
        for rank in ranks:
            rank_of[self._links[rank - 1]] = rank_of[self._processes[rank - 1].sentinel] = rank
        return {rank_of[ready] for ready in wait(list(rank_of), timeout)}  # type: ignore[arg-type]

    def _receive(self, rank: int) -> FromRank:
        """The message of a rank that has sent one. Raises PeerLostError if the rank has ended."""
        link = self._links[rank - 1]
        try:
            if not link.poll():
                raise EOFError
            message: FromRank = pickle.loads(link.recv_bytes())
        except (EOFError, OSError) as error:
            raise PeerLostError(f"rank {rank} has ended") from error
        if isinstance(message, Failed):
            raise _FailedError(rank, message)
        return message

    # -- ending -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def ended_by_failure(self) -> Iterator[None]:
        """An error inside ends all ranks. If another rank caused it, its error is raised."""
        try:
            yield
        except PeerLostError as error:
            self.failure = self._cause(error)
            self._release()
            raise self.failure from error
        except BaseException as error:
            self.failure = RankError(f"rank 0 failed: {error!r}")
            self._release()
            raise

    def _cause(self, error: PeerLostError) -> RankError:
        """The error of the rank that failed first, not of one that only lost another."""
        if isinstance(error, _FailedError) and not error.words.peer_lost:
            return error.as_rank_error()
        deadline = time.monotonic() + _CAUSE_SECONDS
        open_ranks = set(range(1, self.size))
        while open_ranks and (left := deadline - time.monotonic()) > 0:
            for rank in sorted(self._speaking(open_ranks, left)):
                try:
                    self._receive(rank)
                except _FailedError as said:
                    if not said.words.peer_lost:
                        return said.as_rank_error()
                    open_ranks.discard(rank)
                except PeerLostError:
                    process = self._processes[rank - 1]
                    process.join(_CAUSE_SECONDS)
                    hint = "" if self._built else f"; {_NOT_BUILT}"
                    return RankError(f"rank {rank} ended with exit code {process.exitcode}{hint}")
        return RankError(f"{error}; no rank said why within {_CAUSE_SECONDS:g} s")

    def close(self) -> None:
        """Let all ranks finish their work."""
        if self.failure is None:
            self.failure = RankError("the ranks are closed")
            with contextlib.suppress(PeerLostError):  # it has ended before it was told to
                self.send(Close())
            deadline = time.monotonic() + _CLOSE_SECONDS
            for process in self._processes:
                process.join(max(0.0, deadline - time.monotonic()))
            self._release()

    def _release(self) -> None:
        self.abort()
        _kill(self._processes)
        for link in self._links:
            link.close()
        self._folder.cleanup()
        torch.set_num_threads(self._threads)


class _FailedError(PeerLostError):
    def __init__(self, rank: int, words: Failed) -> None:
        super().__init__(f"rank {rank} failed: {words.message}")
        self.words = words

    def as_rank_error(self) -> RankError:
        error = RankError(str(self))
        error.add_note(self.words.traceback)
        return error


def _patience() -> float:
    return rank_group.PATIENCE.total_seconds()


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()


def _place(config: EngineConfig, source: ModelSource) -> str:
    if source.gguf is not None:
        return str(source.gguf.path)
    return config.model if source.folder is None else str(source.folder)


def _limit_sending(link: Connection) -> None:
    """Limit how long sending may block, so that a stuck rank cannot block rank 0."""
    seconds = struct.pack("ll", int(_patience()), 0)
    with socket.socket(fileno=socket.dup(link.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
