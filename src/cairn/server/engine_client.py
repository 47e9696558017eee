"""The API process's side of the engine: starts it, talks to it, notices when it is gone.

Tokens become text here, not in the engine's process, whose steps would have to wait for it.

An engine that dies, or says nothing for too long, takes its requests with it: every client is told,
and another engine is started, unless that has happened too often.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal, Protocol

import zmq
import zmq.asyncio

from cairn.config import EngineConfig
from cairn.errors import CairnError, ConfigError
from cairn.server import wire
from cairn.server.answer import Answer, Choice
from cairn.server.api_error import ApiError, refusal
from cairn.server.options import ServeConfig

State = Literal["loading", "ok", "restarting", "dead", "draining"]

_RESTART_WINDOW = 600.0
_STOP_SECONDS = 5.0  # an engine that is told to stop gets, before it is killed
_RETRY_AFTER = 5

_log = logging.getLogger("cairn.server")


class Observer(Protocol):
    """What the metrics want to know."""

    def tokens_came(self, choices: Sequence[Choice], now: float) -> None: ...
    def text_took(self, seconds: float) -> None: ...
    def engine_lost(self, last: wire.Stats | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Health:
    state: State
    reason: str = ""


class EngineClient:
    def __init__(self, engine: EngineConfig, serve: ServeConfig, observer: Observer) -> None:
        self._engine_config = engine
        self._serve = serve
        self._observer = observer
        self._context = zmq.asyncio.Context()
        self._folder = tempfile.TemporaryDirectory(prefix="cairn-")
        self._lives = itertools.count()
        self._process: BaseProcess | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._numbers = itertools.count()
        self._choices: dict[int, Choice] = {}  # that have not ended, by number
        self._heard = 0.0
        self._lost: deque[float] = deque()
        self._last_words: list[wire.Failed] = []
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self.health = Health("loading", "the engine is starting")
        self.ready: wire.Ready | None = None
        self.stats: wire.Stats | None = None
        self.restarts = 0
        self.became_ready = asyncio.Event()
        self.failure: CairnError | None = None
        """The engine never came up; there is nothing to serve."""
        self.failed = asyncio.Event()

    @property
    def engine_pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        self._task = asyncio.create_task(self._supervise())

    # -- requests -----------------------------------------------------------------------------

    def new_number(self) -> int:
        """What the engine is to call a choice."""
        return next(self._numbers)

    def submit(self, messages: Sequence[wire.Submit], answer: Answer) -> None:
        """Requests of one answer. Ends with `release`."""
        self.check_running()
        self._choices.update((choice.number, choice) for choice in answer.choices)
        for message in messages:
            answer.expect(message.number)
            self._send(message)

    def release(self, answer: Answer) -> None:
        """Nobody waits for it any more: what has not ended is aborted."""
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
        """New requests are refused from now on."""
        self.health = Health("draining", "the server is stopping")

    @property
    def num_open(self) -> int:
        """Answers that are not complete."""
        return len({choice.answer for choice in self._choices.values()})

    def _send(self, message: wire.ToEngine) -> None:
        assert self._socket is not None
        # Without a high-water mark a send never waits. It fails if the engine is gone, which
        # `_live` is about to notice: then the answer fails too.
        sent = asyncio.ensure_future(self._socket.send(wire.encode(message), zmq.DONTWAIT))
        sent.add_done_callback(lambda future: future.exception())

    # -- the engine's life --------------------------------------------------------------------

    async def _supervise(self) -> None:
        while True:
            reason = await self._live()
            if self._closing:
                return
            self._observer.engine_lost(self.stats)
            self.ready = self.stats = None
            if not self._lose(reason):
                return

    async def _live(self) -> str:
        """Start an engine, listen to it, and return why it ended."""
        endpoint = f"ipc://{self._folder.name}/engine-{next(self._lives)}"
        socket = self._context.socket(zmq.PAIR)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            socket.setsockopt(option, 0)
        socket.bind(endpoint)
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(
            target=run_engine, args=(self._engine_config, endpoint), name="cairn-engine"
        )
        self._last_words.clear()
        process.start()
        self._process, self._socket = process, socket
        loop = asyncio.get_running_loop()
        died = asyncio.Event()
        loop.add_reader(process.sentinel, died.set)
        reader = asyncio.create_task(self._read(socket))
        try:
            silent = await self._watch(died, reader)
        finally:
            loop.remove_reader(process.sentinel)
            reader.cancel()
            await asyncio.wait({reader})
            if process.is_alive():
                process.kill()
            process.join()
            while await socket.poll(0):  # last words
                self._dispatch(wire.decode_from_engine(await socket.recv()))
            socket.close()
            Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
        if silent:
            return f"it said nothing for {self._serve.engine_timeout:g} s and was killed"
        if self._last_words:
            return self._last_words[-1].message
        return f"its process ended with exit code {process.exitcode}"

    async def _watch(self, died: asyncio.Event, reader: asyncio.Task[None]) -> bool:
        """Wait for the engine's end; True if it is stuck."""
        limit = self._serve.engine_timeout
        waiting = asyncio.create_task(died.wait())
        try:
            while True:
                await asyncio.wait(
                    {waiting, reader}, timeout=limit / 4, return_when=asyncio.FIRST_COMPLETED
                )
                if reader.done():  # it never ends but by failing
                    what = f"what it says cannot be understood: {reader.exception()!r}"
                    self._last_words.append(wire.Failed(what, usage=False))
                    return False
                if died.is_set():
                    return False
                if self.ready is not None and time.monotonic() - self._heard > limit:
                    return True
        finally:
            waiting.cancel()

    def _lose(self, reason: str) -> bool:
        """The engine is gone: tell everybody, and decide whether there will be another."""
        _log.error("the engine is lost: %s", reason)
        error = ApiError(
            503, f"the engine was lost: {reason}", code="engine_lost", retry_after=_RETRY_AFTER
        )
        choices, self._choices = self._choices, {}
        for choice in choices.values():
            choice.answer.fail(error)
        if not self.became_ready.is_set():
            self.health = Health("dead", reason)
            usage = any(words.usage for words in self._last_words)
            self.failure = (ConfigError if usage else CairnError)(reason)
            self.failed.set()
            return False
        now = time.monotonic()
        self._lost.append(now)
        while self._lost and self._lost[0] < now - _RESTART_WINDOW:
            self._lost.popleft()
        if len(self._lost) > self._serve.max_restarts:
            self.health = Health(
                "dead",
                f"{reason}; it was lost {len(self._lost)} times in ten minutes, "
                f"max_restarts is {self._serve.max_restarts}; start the server again",
            )
            return False
        if self.health.state != "draining":
            self.restarts += 1
            self.health = Health("restarting", reason)
        return True

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            message = await socket.recv()
            self._dispatch(wire.decode_from_engine(message))
            # While messages wait, `recv` does not; others must have their turn all the same.
            await asyncio.sleep(0)

    def _dispatch(self, message: wire.FromEngine) -> None:
        self._heard = time.monotonic()
        match message:
            case wire.Report():
                self._take(message)
            case wire.Ready():
                self.ready = message
                if self.health.state != "draining":
                    self.health = Health("ok")
                self.became_ready.set()
            case wire.Failed():
                self._last_words.append(message)

    def _take(self, report: wire.Report) -> None:
        for number in report.accepted:
            if (choice := self._choices.get(number)) is not None:
                choice.answer.accept(number)
        for refused in report.refused:
            if (choice := self._choices.get(refused.number)) is not None:
                choice.answer.fail(_refusal(refused))
        if report.numbers:
            begin = time.perf_counter()
            self._take_tokens(report, begin)
            self._observer.text_took(time.perf_counter() - begin)
        if report.stats is not None:
            self.stats = report.stats

    def _take_tokens(self, report: wire.Report, now: float) -> None:
        details = {detail.number: detail for detail in report.details}
        came: list[Choice] = []
        stopped: list[int] = []  # here, which the engine does not know
        for number, token in zip(report.numbers, report.tokens, strict=True):
            choice = self._choices.get(number)
            if choice is None:
                continue  # ended, and the engine had not heard of it
            detail = details.get(number)
            came.append(choice)
            try:
                events = choice.take(token, detail)
                if events:
                    choice.answer.outlet.write(events)
            except Exception as error:  # this answer's trouble, and nobody else's
                _log.error("an answer failed", exc_info=error)
                told = f"the server failed on this answer: {type(error).__name__}: {error}"
                choice.answer.fail(ApiError(500, told))
                del self._choices[number]
                self._send(wire.End([number], "abort"))
                continue
            if choice.ended is not None:
                choice.answer.choice_ended()
                del self._choices[number]
                if detail is None or detail.reason is None:
                    stopped.append(number)
        if stopped:
            self._send(wire.End(stopped, "stop"))
        self._observer.tokens_came(came, now)

    async def close(self) -> None:
        self._closing = True
        self.drain()
        if self._process is not None and self._process.is_alive():
            if self.ready is None:
                self._process.kill()  # it is loading, and listens to nobody
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
