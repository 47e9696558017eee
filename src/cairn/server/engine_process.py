"""The engine's process: takes requests from a zmq socket, steps, and reports what came of it.

Tokens leave as ids. What is made of them, text above all, is made in the API process, so that no
step waits for it. Stop strings are found there too: the API process then ends the request.
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
from typing import TYPE_CHECKING, Literal

import zmq

from cairn.config import EngineConfig
from cairn.engine.engine import Engine, Progress
from cairn.engine.request import Request
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import CairnError, ConfigError, LoadError, QueueFullError, RequestError
from cairn.frontend import load
from cairn.server import wire
from cairn.server.page_reads import PageReads
from cairn.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from cairn.server.matcher import Follower, Matchers

_REPORT_EVERY = 0.25  # seconds between statistics, and between signs of life while idle
_LOG_EVERY = 60  # seconds between lines about the host tier, while there is work
_COMPILING_MS = 5  # how often to look whether a grammar is there
_LINGER_MS = 2000  # for last words

_log = logging.getLogger("cairn.server.engine")


class EngineLoop:
    def __init__(
        self, engine: Engine, tokenizer: Tokenizer | None, socket: zmq.Socket[bytes]
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer  # for grammars
        self._socket = socket
        self._requests: dict[int, Request] = {}  # by the API's numbers
        self._numbers: dict[str, int] = {}  # and back, by the engine's ids
        self._accepted: list[int] = []
        self._refused: list[wire.Refused] = []
        self._grammars: dict[int, tuple[wire.Submit, Future[list[Follower]]]] = {}
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="cairn-grammar")
        self._matchers: Matchers | None = None
        self._message_seconds = 0.0
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
                self._report(self._engine.step())
            else:
                self._engine.watch()
                self._report([])
        self._engine.close()

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
        if wait:
            self._socket.poll(wait)
        begin = time.perf_counter()
        while self._socket.poll(0):
            message = wire.decode_to_engine(self._socket.recv())
            match message:
                case wire.Submit(grammar=None):
                    self._submit(message)
                case wire.Submit():
                    compiled = self._grammar_thread.submit(self._make_followers, message)
                    self._grammars[message.number] = message, compiled
                case wire.End():
                    self._end(message.numbers, message.reason)
                case wire.Shutdown():
                    self._stopping = True
        if self._grammars:
            self._submit_compiled()
        self._message_seconds += time.perf_counter() - begin

    def _submit(self, message: wire.Submit, followers: Sequence[Follower] = ()) -> None:
        try:
            requests = self._engine.make_requests(
                message.token_ids,
                SamplingParams.from_kwargs(message.params),
                cache_salt=message.cache_salt,
                traced=message.trace,
            )
            if followers:
                for request, follower in zip(requests, followers, strict=True):
                    request.allowed_tokens = follower
                    request.host_tokens = True
            self._engine.submit_all(requests)
        except RequestError as error:
            self._refuse(message.number, "request", error)
        except QueueFullError as error:
            self._refuse(message.number, "full", error)
        else:
            for number, request in enumerate(requests, message.number):
                self._requests[number] = request
                self._numbers[request.id] = number
            self._accepted.append(message.number)

    def _make_followers(self, message: wire.Submit) -> list[Follower]:
        """In a thread: a grammar can take long to compile, and others want their tokens."""
        if self._matchers is None:
            from cairn.server.matcher import Matchers

            assert self._tokenizer is not None  # chat needs one
            self._matchers = Matchers(
                self._tokenizer, self._engine.spec.vocab_size, self._engine.eos_token_ids
            )
        assert message.grammar is not None
        return [self._matchers.make(message.grammar) for _ in range(message.params.get("n", 1))]

    def _submit_compiled(self) -> None:
        for number, (message, compiled) in list(self._grammars.items()):
            if not compiled.done():
                continue
            del self._grammars[number]
            error = compiled.exception()
            if error is None:
                self._submit(message, compiled.result())
            else:
                own = isinstance(error, RequestError)
                self._refuse(number, "request" if own else "engine", error)

    def _refuse(
        self, number: int, kind: Literal["request", "full", "engine"], error: BaseException
    ) -> None:
        self._refused.append(wire.Refused(number, kind, str(error)))

    def _end(self, numbers: Sequence[int], reason: Literal["stop", "abort"]) -> None:
        """Choices that may have ended meanwhile, or whose grammar is still being compiled."""
        for number in numbers:
            self._grammars.pop(number, None)
            if (request := self._requests.get(number)) is not None:
                self._engine.scheduler.finish(request.id, reason)
                self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._requests[self._numbers.pop(request.id)]

    # -- what goes out ------------------------------------------------------------------------

    def _report(self, progress: Sequence[Progress]) -> None:
        """Tell the API process what a step brought; while idle, now and then that all is well."""
        begin = time.perf_counter()
        due = begin - self._reported >= _REPORT_EVERY
        if not (due or self._accepted or self._refused or progress):
            return
        numbers = [self._numbers[each.request.id] for each in progress]
        tokens = [each.new_tokens[0] for each in progress]
        self._reads.count([each.request for each in progress])
        details = self._details(progress)
        stats = self._stats() if due else None
        self._reported = begin if due else self._reported
        report = wire.Report(self._accepted, self._refused, numbers, tokens, details, stats)
        self._socket.send(wire.encode(report))
        self._accepted, self._refused = [], []
        self._message_seconds += time.perf_counter() - begin

    def _details(self, progress: Sequence[Progress]) -> list[wire.Detail]:
        details = []
        for each in progress:
            request = each.request
            if not (
                request.finish_reason or request.num_output == 1 or each.logprobs or request.traced
            ):
                continue
            number = self._numbers[request.id]
            try:
                details.append(self._detail(number, each))
            except Exception as error:  # this request's trouble, and nobody else's
                _log.error("a request failed", exc_info=error)
                self._refuse(number, "engine", error)
                self._engine.abort(request.id)
                self._forget(request)
                continue
            if request.finish_reason is not None:
                self._forget(request)
        return details

    def _detail(self, number: int, progress: Progress) -> wire.Detail:
        request = progress.request
        start = reads = None
        if request.num_output == 1:
            scores = request.prompt_logprobs
            start = wire.Start(
                cached_tokens=request.cached_tokens,
                queued_seconds=request.times.first_scheduled - request.times.arrival,
                prompt_logprobs=[None, *scores] if request.prompt_scores == "top" else None,
            )
        if request.traced:
            # They leave token by token: the engine need not keep them.
            known = len(request.token_ids) - 1
            reads = self._reads.tell(request.selections.pop(), known, request.prompt_len)
        reason = request.finish_reason
        assert reason != "abort"  # who is aborted makes no progress
        return wire.Detail(
            number, start, progress.logprobs[0] if progress.logprobs else None, reads, reason
        )

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
            message_seconds=self._message_seconds,
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
        EngineLoop(*load(config), socket).run()
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
