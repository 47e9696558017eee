"""The API process's side of the engine: starts its process, exchanges messages, restarts it.

If the engine dies, or is silent for too long, its open requests get an error and another engine is
started, unless that has happened too often.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import zmq
import zmq.asyncio

from cairn.config import EngineConfig
from cairn.errors import CairnError, ConfigError
from cairn.server import wire
from cairn.server.answer import Answer, Choice
from cairn.server.api_error import ApiError, refusal
from cairn.server.metrics import Metrics
from cairn.server.options import ServeConfig
from cairn.server.reading import reading_event

State = Literal["loading", "ok", "restarting", "dead", "draining"]

_RESTART_WINDOW = 600.0
_STOP_SECONDS = 5.0  # for an engine to stop before it is killed
_RETRY_AFTER = 5
_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 1.0, 30.0  # between attempts to start an engine
_START_DIGITS = 6

_log = logging.getLogger("cairn.server")


@dataclass(frozen=True, slots=True)
class Health:
    state: State
    reason: str = ""


class EngineClient:
    def __init__(self, engine: EngineConfig, serve: ServeConfig, metrics: Metrics) -> None:
        self._engine_config = engine
        self._serve = serve
        self._metrics = metrics
        self._context = zmq.asyncio.Context()
        self._folder = tempfile.TemporaryDirectory(prefix="cairn-")
        most = zmq.IPC_PATH_MAX_LEN - len("/engine-") - _START_DIGITS
        if len(os.fsencode(self._folder.name)) > most:
            self._folder.cleanup()
            raise ConfigError(
                f"TMPDIR is {tempfile.gettempdir()}, too long a path for a socket; set it to a "
                "shorter one, such as /tmp"
            )
        self._starts = itertools.count()
        self._process: BaseProcess | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._numbers = itertools.count()
        self._choices: dict[int, Choice] = {}  # open ones, by number
        self._heard = 0  # number of messages
        self._lost: deque[float] = deque()  # times
        self._failure: wire.Failed | None = None  # the engine's last message, if it was an error
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._loaded: asyncio.Future[None]
        self.health = Health("loading", "the engine is starting")
        self.ready: wire.Ready | None = None
        self.stats: wire.Stats | None = None
        self.restarts = 0

    def start(self) -> None:
        self._loaded = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._supervise())

    async def loaded(self) -> None:
        """Returns when the first engine is ready, raises if it cannot be started."""
        await asyncio.shield(self._loaded)

    # -- requests -----------------------------------------------------------------------------

    def new_number(self) -> int:
        """The number of a new choice in messages to and from the engine."""
        return next(self._numbers)

    def submit(self, messages: Sequence[wire.Submit], answer: Answer) -> None:
        """Send the requests of one answer. `release` must follow."""
        self.check_running()
        self._choices.update((choice.number, choice) for choice in answer.choices)
        for message in messages:
            self._send(message)

    def release(self, answer: Answer) -> None:
        """Abort the choices that have not ended."""
        answer.outlet.close()
        numbers = [choice.number for choice in answer.choices]
        left = [number for number in numbers if self._choices.pop(number, None) is not None]
        if left:
            self._send(wire.End(left, "abort"))

    def fail_all(self, error: ApiError) -> None:
        """End every request with an error, here and in the engine."""
        for answer in {choice.answer for choice in self._choices.values()}:
            answer.fail(error)
            self.release(answer)

    def check_running(self) -> wire.Ready:
        if self.health.state != "ok" or self.ready is None:
            raise ApiError(
                503,
                f"the server is not ready: {self.health.state}, {self.health.reason}",
                code=self.health.state,
                retry_after=_RETRY_AFTER,
            )
        return self.ready

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.health = Health("draining", "the server is stopping")

    @property
    def num_open(self) -> int:
        """Number of answers that are not complete."""
        return len({choice.answer for choice in self._choices.values()})

    def _send(self, message: wire.ToEngine) -> None:
        assert self._socket is not None
        # Without a high-water mark a send never waits. It fails if the engine is gone, which
        # `_run_engine` is about to notice; then the answer fails too.
        sent = asyncio.ensure_future(self._socket.send(wire.encode(message), zmq.DONTWAIT))
        sent.add_done_callback(lambda future: future.exception())

    # -- the engine's process -----------------------------------------------------------------

    async def _supervise(self) -> None:
        wait = _RETRY_SECONDS
        while not self._closing.is_set():
            self._failure = None
            try:
                started = self._start_engine()
            except (OSError, zmq.ZMQError) as error:
                # There are no descriptors, processes or memory: try again until there are.
                reason = f"it cannot be started: {error}"
                if not self._loaded.done():
                    self._lose(reason)
                    return
                _log.error("the engine is lost: %s", reason)
                self._set_health(Health("restarting", reason))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), wait)
                wait = min(2 * wait, _LONGEST_RETRY_SECONDS)
                continue
            wait = _RETRY_SECONDS
            try:
                reason = await self._run_engine(*started)
            except OSError as error:
                reason = f"it cannot be watched: {error}"
            if self._closing.is_set():
                return
            self._metrics.engine_lost(self.stats)
            self.ready = self.stats = None
            if not self._lose(reason):
                return

    def _start_engine(self) -> tuple[BaseProcess, zmq.asyncio.Socket, Path]:
        """The engine's process, and a socket that it connects to. Raises OSError or ZMQError."""
        path = Path(self._folder.name, f"engine-{next(self._starts)}")
        process = multiprocessing.get_context("spawn").Process(
            target=run_engine, args=(self._engine_config, f"ipc://{path}"), name="cairn-engine"
        )
        socket = self._context.socket(zmq.PAIR)
        try:
            for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
                socket.setsockopt(option, 0)
            socket.bind(f"ipc://{path}")
            process.start()
        except BaseException:
            socket.close()
            raise
        return process, socket, path

    async def _run_engine(
        self, process: BaseProcess, socket: zmq.asyncio.Socket, path: Path
    ) -> str:
        """Read an engine's messages until it ends. Returns why it ended."""
        self._process, self._socket = process, socket
        loop = asyncio.get_running_loop()
        died = asyncio.Event()
        loop.add_reader(process.sentinel, died.set)
        watching = asyncio.create_task(died.wait())
        reader = asyncio.create_task(self._read(socket))
        try:
            reason = await self._watch(watching, reader)
        finally:
            loop.remove_reader(process.sentinel)
            for task in (watching, reader):
                task.cancel()
            await asyncio.wait({reader})
            if process.is_alive():
                process.kill()
            process.join()
            while await socket.poll(0):  # its last messages
                self._dispatch(wire.decode_from_engine(await socket.recv()))
            socket.close()
            path.unlink(missing_ok=True)
        if reason is None and self._failure is not None:
            reason = self._failure.message
        return reason or f"its process ended with exit code {process.exitcode}"

    async def _watch(self, died: asyncio.Task[bool], reader: asyncio.Task[None]) -> str | None:
        """Wait until the engine has to go. Returns why, None if it ended by itself."""
        limit = self._serve.engine_timeout
        silent = 0  # quarters of the limit without a message
        while True:
            heard = self._heard
            await asyncio.wait(
                {died, reader}, timeout=limit / 4, return_when=asyncio.FIRST_COMPLETED
            )
            if reader.done():  # it only ends by failing
                return f"what it says cannot be understood: {reader.exception()!r}"
            if died.done():
                return None
            # Quarters of this process, not seconds: if both processes were stopped, or the
            # machine slept, the engine gets the rest of its time to say something.
            silent = silent + 1 if self._heard == heard else 0
            if self.ready is not None and silent > 4:
                return f"it said nothing for {limit:g} s and was killed"

    def _lose(self, reason: str) -> bool:
        """The engine is gone. Fail all answers, and return whether to start another one."""
        error = ApiError(
            503, f"the engine was lost: {reason}", code="engine_lost", retry_after=_RETRY_AFTER
        )
        choices, self._choices = self._choices, {}
        for choice in choices.values():
            choice.answer.fail(error)
        if not self._loaded.done():
            self.health = Health("dead", reason)
            usage = self._failure is not None and self._failure.usage
            self._loaded.set_exception((ConfigError if usage else CairnError)(reason))
            return False  # the caller of `loaded` tells the user
        _log.error("the engine is lost: %s", reason)
        now = time.monotonic()
        self._lost.append(now)
        while self._lost[0] < now - _RESTART_WINDOW:
            self._lost.popleft()
        if len(self._lost) > self._serve.max_restarts:
            self.health = Health(
                "dead",
                f"{reason}; it was lost {len(self._lost)} times in ten minutes, "
                f"max_restarts is {self._serve.max_restarts}; start the server again",
            )
            return False
        self.restarts += self.health.state != "draining"
        self._set_health(Health("restarting", reason))
        return True

    def _set_health(self, health: Health) -> None:
        """Unless the server is stopping."""
        if self.health.state != "draining":
            self.health = health

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            message = await socket.recv()
            self._dispatch(wire.decode_from_engine(message))
            # `recv` does not yield while messages wait. Other tasks must have their turn.
            await asyncio.sleep(0)

    def _dispatch(self, message: wire.FromEngine) -> None:
        self._heard += 1
        match message:
            case wire.Report():
                self._take(message)
            case wire.Ready():
                self.ready = message
                self._set_health(Health("ok"))
                if not self._loaded.done():
                    self._loaded.set_result(None)
            case wire.Failed():
                self._failure = message

    def _take(self, report: wire.Report) -> None:
        for number in report.accepted:
            if (choice := self._choices.get(number)) is not None:
                choice.answer.accept()
        for refused in report.refused:
            if (choice := self._choices.get(refused.number)) is not None:
                choice.answer.fail(_refusal(refused))
        for number, tokens in report.reading:
            if (choice := self._choices.get(number)) is not None:
                choice.answer.outlet.write(reading_event(choice, tokens))
        for number, vector in report.vectors:
            if (choice := self._choices.pop(number, None)) is not None:
                choice.take_vector(vector)
                choice.answer.choice_ended()
        if report.numbers:
            begin = time.perf_counter()
            self._take_tokens(report, begin)
            self._metrics.text_took(time.perf_counter() - begin)
        if report.stats is not None:
            self.stats = report.stats

    def _take_tokens(self, report: wire.Report, now: float) -> None:
        details = {detail.at: detail for detail in report.details}
        for number, *drafts in report.drafts:
            if (choice := self._choices.get(number)) is not None:
                choice.drafted, choice.accepted = drafts
        came: list[Choice] = []
        stopped: list[int] = []  # by a stop string, which the engine does not know of
        for at, (number, token) in enumerate(zip(report.numbers, report.tokens, strict=True)):
            choice = self._choices.get(number)
            if choice is None:
                continue  # it has ended, and the engine did not know yet
            detail = details.get(at)
            came.append(choice)
            try:
                events = choice.take(token, detail)
                if events:
                    choice.answer.outlet.write(events)
            except Exception as error:  # only this answer fails
                _log.error("an answer failed", exc_info=error)
                told = f"the server failed on this answer: {type(error).__name__}: {error}"
                choice.answer.fail(ApiError(500, told))
                del self._choices[number]
                self._send(wire.End([number], "abort"))
                continue
            if choice.reason is not None:
                choice.answer.choice_ended()
                del self._choices[number]
                if detail is None or detail.reason is None:
                    stopped.append(number)
        if stopped:
            self._send(wire.End(stopped, "stop"))
        self._metrics.tokens_came(came, now)

    async def close(self) -> None:
        self._closing.set()
        self.drain()
        if self._process is not None and self._process.is_alive():
            if self.ready is None:
                self._process.kill()  # while it loads it reads no messages
            else:
                self._send(wire.Shutdown())
        if self._task is not None:
            try:
                await asyncio.wait_for(asyncio.shield(self._task), _STOP_SECONDS)
            except TimeoutError:
                if self._process is not None:
                    self._process.kill()
                await self._task
        self._context.destroy(linger=0)
        self._folder.cleanup()


def _refusal(refused: wire.Refused) -> ApiError:
    match refused.kind:
        case "request":
            return refusal(refused.message)
        case "full":
            return ApiError(429, refused.message, code="queue_full", retry_after=1)
        case "engine":
            return ApiError(500, f"the engine failed on this request: {refused.message}")


def run_engine(config: EngineConfig, endpoint: str) -> None:
    """The engine process's main. Only that process imports the engine, and torch."""
    from cairn.server import engine_process

    engine_process.run_engine(config, endpoint)
