"""A rank other than 0: a process that runs rank 0's plans on its own part of the model. Also the
messages between it and rank 0.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, assert_never

import torch

from cairn.config import EngineConfig
from cairn.engine.build import build_runner, load_model
from cairn.engine.locate import locate
from cairn.engine.memory_budget import kv_budget
from cairn.engine.memory_plan import MemoryPlan
from cairn.engine.parallel.rank_group import PeerLostError, RankGroup, rank_device
from cairn.engine.plan import StepPlan
from cairn.engine.resolve import resolve
from cairn.engine.runner import Runner
from cairn.kernels.compilations import CompilationCounts
from cairn.memory.copies import Transfer
from cairn.memory.hisparse import TierStats

_LOOK_EVERY = 0.001  # seconds between checks of copies in progress

# -- to a rank ------------------------------------------------------------------------------------


class Build(NamedTuple):
    """All ranks have loaded: connect to the others, and make pools and runner."""

    memory: MemoryPlan


class Launch(NamedTuple):
    plan: StepPlan


class BackUp(NamedTuple):
    """Copy frames to host pages, after the steps launched so far."""

    transfers: tuple[Transfer, ...]


class Tell(NamedTuple):
    """Answer with a State."""

    fingerprint: bool = False


class Close(NamedTuple):
    """End."""


ToRank = Build | Launch | BackUp | Tell | Close

# -- from a rank ----------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """The rank's weights are loaded."""

    budget: int | None
    """Bytes that its device has for the KV cache; None if the cache is sized by need."""


class Ready(NamedTuple):
    """The rank waits for steps."""


class Compiled(NamedTuple):
    """Number of kernels that the rank has compiled so far; sent when it grows."""

    counts: CompilationCounts


class Backed(NamedTuple):
    """Copies to host memory that have ended."""

    transfers: tuple[Transfer, ...]


class State(NamedTuple):
    fingerprint: str | None
    """A digest of all state that plans decide, which must be equal on all ranks."""
    tier: TierStats | None


class Failed(NamedTuple):
    """The rank failed and ends."""

    message: str
    traceback: str
    peer_lost: bool
    """It failed because another rank did."""


FromRank = Loaded | Ready | Compiled | Backed | State | Failed

# -- the process ----------------------------------------------------------------------------------


class RankOptions(NamedTuple):
    config: EngineConfig
    """Its model is a path on disk or a preset, so that nothing is fetched again."""
    rank: int
    dtype: torch.dtype
    device_type: str
    threads: int
    meeting_place: Path


def run_rank(options: RankOptions, link: Connection) -> None:
    """The main function of the process: handle messages until told to close; report a failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C in the terminal
    threading.Thread(target=_end_with_parent, daemon=True).start()
    status = 1
    try:
        torch.set_num_threads(options.threads)
        _Rank(options, link).run()
        status = 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # rank 0 has ended
    except BaseException as error:
        what = f"{type(error).__name__}: {error}"
        words = Failed(what, traceback.format_exc(), isinstance(error, PeerLostError))
        try:
            link.send_bytes(pickle.dumps(words))
        except OSError:
            traceback.print_exc()
    finally:
        # Exit at once: the others wait in a collective until this rank's connections are closed.
        os._exit(status)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class _Rank:
    def __init__(self, options: RankOptions, link: Connection) -> None:
        self._options = options
        self._link = link
        self._device = rank_device(options.device_type, options.rank)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._group = RankGroup(options.rank, options.config.tp, self._device)
        self._backing = 0  # pages that are being copied to host memory
        self._compiled = CompilationCounts()  # as rank 0 knows it

    def run(self) -> None:
        runner = self._build()
        runner.mark_ready()
        self._report_compilations(runner)
        self._send(Ready())
        while True:
            self._report_compilations(runner)
            self._report_copies(runner)
            message = self._receive()
            match message:
                case Launch(plan):
                    runner.launch(plan)
                case BackUp(transfers):
                    assert runner.mover is not None
                    runner.mover.back_up(transfers)
                    self._backing += len(transfers)
                case Tell(fingerprint):
                    tables = runner.fingerprint() if fingerprint else None
                    self._send(State(tables, runner.tier_stats()))
                case Close():
                    runner.close()
                    return
                case Build():
                    raise RuntimeError("a rank is built once; this is a bug")
                case _:
                    assert_never(message)

    def _build(self) -> Runner:
        config = self._options.config
        model, _ = load_model(
            config, locate(config), self._options.dtype, self._device, None, self._group
        )
        choices = resolve(config, model.spec, self._options.dtype, self._device)
        self._send(Loaded(kv_budget(choices)))
        message = self._receive()
        assert isinstance(message, Build)
        self._group.connect(self._options.meeting_place)
        runner, _ = build_runner(choices, message.memory, model, self._group)
        return runner

    def _report_compilations(self, runner: Runner) -> None:
        counts = runner.compilations()
        if counts != self._compiled:
            self._compiled = counts
            self._send(Compiled(counts))

    def _report_copies(self, runner: Runner) -> None:
        """Wait until rank 0 sends a message, or until there is nothing more to report."""
        while self._backing:
            assert runner.mover is not None
            done = tuple(runner.mover.poll())
            if done:
                self._backing -= len(done)
                self._send(Backed(done))
            if self._link.poll(_LOOK_EVERY if self._backing else 0):
                return

    def _send(self, message: FromRank) -> None:
        self._link.send_bytes(pickle.dumps(message))

    def _receive(self) -> ToRank:
        message: ToRank = pickle.loads(self._link.recv_bytes())
        return message
