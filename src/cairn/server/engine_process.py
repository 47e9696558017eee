"""The engine's process: takes requests from a zmq socket, steps, and reports what came of it.

Text is made here, not in the API process: stop strings end a request in the very step that
completes them, and where steps overlap the device hides the work.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Literal

import zmq

from cairn.config import EngineConfig
from cairn.engine.request import Request
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import CairnError, ConfigError, LoadError, QueueFullError, RequestError
from cairn.frontend import Frontend, Live
from cairn.outputs import Chunk
from cairn.server import wire
from cairn.server.page_reads import PageReads
from cairn.trace import Trace

if TYPE_CHECKING:
    from cairn.server.matcher import Follower, Matchers

_REPORT_EVERY = 0.25  # seconds between statistics, and between signs of life while idle
_LOG_EVERY = 60  # seconds between lines about the host tier, while there is work
_COMPILING_MS = 5  # how often to look whether a grammar is there
_LINGER_MS = 2000  # for last words

_log = logging.getLogger("cairn.server.engine")


class _Frontend(Frontend):
    """Traces leave step by step, so that the whole need not be put together at the end."""

    def _trace(self, request: Request) -> Trace:
        return Trace(self.engine.scheduler.cache.geometry.page_size, [], [])


class EngineLoop:
    def __init__(self, frontend: Frontend, socket: zmq.Socket[bytes]) -> None:
        self._frontend = frontend
        self._engine = frontend.engine
        self._socket = socket
        self._lives: dict[str, list[Live]] = {}  # by the API's request id
        self._accepted: list[str] = []
        self._refused: list[wire.Refused] = []
        self._pieces: list[wire.Piece] = []
        self._broken: dict[str, Exception] = {}  # requests that failed in this step
        self._grammars: dict[str, tuple[wire.Submit, Future[list[Follower]]]] = {}
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="cairn-grammar")
        self._matchers: Matchers | None = None
        self._told: dict[str, int] = {}  # traced tokens sent, by engine request id
        self._text_seconds = 0.0
        self._reported = 0.0
        self._logged = time.monotonic()
        self._stopping = False
        sparse = self._engine.sparse
        self._reads = PageReads(sparse, self._engine.scheduler.cache.geometry)
        self._sparse_layers = [] if sparse is None else list(sparse.layers)

    def run(self) -> None:
        # What is there now stays: the collector need not stop steps to go through it.
        gc.freeze()
        self._socket.send(wire.encode(self._ready()))
        while not self._stopping:
            self._receive()
            if self._engine.has_work:
                self._step()
            else:
                self._engine.watch()
            self._report()
        self._frontend.close()

    def _ready(self) -> wire.Ready:
        engine = self._engine
        geometry = engine.scheduler.cache.geometry
        return wire.Ready(
            context_length=engine.context_length,
            max_tokens=engine.max_tokens,
            vocab_size=engine.spec.vocab_size,
            page_size=geometry.page_size,
            tokens_per_page=geometry.tokens_per_page,
            can_trace=engine.can_trace,
            sparse_layers=self._sparse_layers,
            notes=list(engine.notes),
        )

    # -- what comes in ------------------------------------------------------------------------

    def _receive(self) -> None:
        """Everything that is there; while idle, wait for something, but not for long."""
        wait = 0 if self._engine.has_work else int(_REPORT_EVERY * 1000)
        if self._grammars:
            wait = min(wait, _COMPILING_MS)
        while self._socket.poll(wait):
            wait = 0
            message = wire.decode_to_engine(self._socket.recv())
            match message:
                case wire.Submit(grammar=None):
                    self._submit(message)
                case wire.Submit():
                    compiled = self._grammar_thread.submit(self._make_followers, message)
                    self._grammars[message.id] = message, compiled
                case wire.Abort():
                    self._abort(message.id)
                case wire.Shutdown():
                    self._stopping = True
        self._submit_compiled()

    def _submit(self, message: wire.Submit, followers: Sequence[Follower] = ()) -> None:
        try:
            params = SamplingParams.from_kwargs(message.params)
            requests = self._frontend.prepare(
                message.token_ids, params, message.cache_salt, trace=message.trace
            )
            if followers:
                for request, follower in zip(requests, followers, strict=True):
                    request.allowed_tokens = follower
                    request.host_tokens = True
            sink = partial(self._take, message.id)
            self._lives[message.id] = []  # there before the first chunk
            self._lives[message.id] += self._frontend.submit(requests, sink)
        except RequestError as error:
            self._refuse(message.id, "request", error)
        except QueueFullError as error:
            self._refuse(message.id, "full", error)
        else:
            self._accepted.append(message.id)

    def _make_followers(self, message: wire.Submit) -> list[Follower]:
        """In a thread: a grammar can take long to compile, and others want their tokens."""
        if self._matchers is None:
            from cairn.server.matcher import Matchers

            assert self._frontend.tokenizer is not None  # chat needs one
            self._matchers = Matchers(
                self._frontend.tokenizer,
                self._engine.spec.vocab_size,
                self._engine.eos_token_ids,
            )
        assert message.grammar is not None
        return [self._matchers.make(message.grammar) for _ in range(message.params.get("n", 1))]

    def _submit_compiled(self) -> None:
        for request_id, (message, compiled) in list(self._grammars.items()):
            if not compiled.done():
                continue
            del self._grammars[request_id]
            error = compiled.exception()
            if error is None:
                self._submit(message, compiled.result())
            else:
                own = isinstance(error, RequestError)
                self._refuse(request_id, "request" if own else "engine", error)

    def _refuse(
        self, request_id: str, kind: Literal["request", "full", "engine"], error: BaseException
    ) -> None:
        self._lives.pop(request_id, None)
        self._refused.append(wire.Refused(request_id, kind, str(error)))

    def _abort(self, request_id: str) -> None:
        self._grammars.pop(request_id, None)
        for live in self._lives.pop(request_id, []):
            self._frontend.abort(live.request.id)
            self._told.pop(live.request.id, None)

    # -- what goes out ------------------------------------------------------------------------

    def _step(self) -> None:
        begin = time.perf_counter()
        before = self._engine.stats.step_seconds
        try:
            self._frontend.step()
        except Exception as error:
            lost = [name for name, lives in self._lives.items() if not self._is_whole(lives)]
            if not lost:
                raise  # not one request's fault: the engine's
            self._broken |= dict.fromkeys(lost, error)
        for request_id, failure in self._broken.items():
            _log.error("a request failed", exc_info=failure)
            self._abort(request_id)
            self._refuse(request_id, "engine", failure)
        self._broken.clear()
        spent = time.perf_counter() - begin
        self._text_seconds += spent - (self._engine.stats.step_seconds - before)

    def _is_whole(self, lives: list[Live]) -> bool:
        return all(
            live.result is not None or self._frontend.is_live(live.request.id) for live in lives
        )

    def _take(self, request_id: str, chunk: Chunk) -> None:
        lives = self._lives.get(request_id)
        if not lives:  # aborted: nobody listens
            return
        try:
            self._pieces.append(self._piece(request_id, lives, chunk))
        except Exception as error:  # this request's trouble, and nobody else's
            self._broken[request_id] = error

    def _piece(self, request_id: str, lives: list[Live], chunk: Chunk) -> wire.Piece:
        request = lives[chunk.choice].request
        for back in range(len(chunk.token_ids)):
            self._reads.count(request.num_output + request.prompt_len - 1 - back)
        ended = None
        if chunk.result is not None:
            result = chunk.result
            ended = wire.Ended(
                reason=result.finish_reason,
                prompt_tokens=result.usage.prompt_tokens,
                completion_tokens=result.usage.completion_tokens,
                cached_tokens=result.usage.cached_tokens,
                queued_seconds=result.timings.queued or 0.0,
                prompt_logprobs=result.prompt_logprobs,
            )
            if all(live.result is not None for live in lives):
                del self._lives[request_id]
        return wire.Piece(
            id=request_id,
            choice=chunk.choice,
            text=chunk.text,
            token_ids=chunk.token_ids,
            logprobs=list(chunk.logprobs),
            reads=self._new_reads(request),
            ended=ended,
        )

    def _new_reads(self, request: Request) -> list[wire.TokenReads]:
        if not request.traced:
            return []
        told = self._told.get(request.id, 0)
        new = request.selections[told:]
        if request.finish_reason is None:
            self._told[request.id] = told + len(new)
        else:
            self._told.pop(request.id, None)
        first = request.prompt_len + told
        return [self._reads.tell(layers, first + i) for i, layers in enumerate(new)]

    def _report(self) -> None:
        now = time.monotonic()
        due = now - self._reported >= _REPORT_EVERY
        if not (due or self._accepted or self._refused or self._pieces):
            return
        stats = self._stats() if due else None
        self._reported = now if due else self._reported
        report = wire.Report(self._accepted, self._refused, self._pieces, stats)
        self._socket.send(wire.encode(report))
        self._accepted, self._refused, self._pieces = [], [], []

    def _stats(self) -> wire.Stats:
        engine, scheduler = self._engine, self._engine.scheduler
        totals, cache, compiled = engine.stats, scheduler.cache.stats, engine.compilations
        return wire.Stats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            pages=[wire.Pages(g.name, g.total, g.free, g.cached, g.owned) for g in engine.usage()],
            steps=totals.steps,
            scheduler_seconds=totals.scheduler_seconds,
            model_seconds=totals.step_seconds - totals.scheduler_seconds,
            text_seconds=self._text_seconds,
            prompt_tokens=cache.lookup_tokens,
            hit_tokens=cache.hit_tokens,
            computed_tokens=totals.computed_tokens,
            generated_tokens=totals.generated_tokens,
            evicted_pages=cache.evicted_pages,
            retractions=scheduler.stats.retractions,
            aborted=scheduler.stats.aborted,
            read_pages=self._reads.read,
            held_pages=self._reads.held,
            start_compilations=compiled.start,
            serving_compilations=compiled.serving,
            tier=self._tier(),
        )

    def _tier(self) -> wire.Tier | None:
        """The host tier's numbers; now and then a line of them for the log."""
        report = self._engine.tier()
        if report is None:
            return None
        now = time.monotonic()
        if self._engine.has_work and now - self._logged >= _LOG_EVERY:
            self._logged = now
            _log.info("%s", report)
        return wire.Tier(pages=report.pages, **dataclasses.asdict(report.totals))


def run_engine(config: EngineConfig, endpoint: str) -> None:
    """The process's main: load, serve until told to stop, say why if it cannot go on."""
    # The API process decides when to stop; a Ctrl-C in the terminal goes to both.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    # The other side never stops reading; a bound here could only lose tokens.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(endpoint)
    try:
        EngineLoop(_Frontend(config), socket).run()
    except (ConfigError, LoadError) as error:
        socket.send(wire.encode(wire.Failed(str(error), usage=True)))
    except Exception as error:
        traceback.print_exc()
        what = str(error) if isinstance(error, CairnError) else f"{type(error).__name__}: {error}"
        socket.send(wire.encode(wire.Failed(what, usage=False)))
    finally:
        socket.close()
        context.term()


def _end_with_parent() -> None:
    """An API process that is killed takes its engine with it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
