"""The engine's process: takes requests from a zmq socket, steps, and sends back token ids.

The API process turns them into text, so that no step waits for that. It also finds stop strings,
and then ends the request.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Literal

import zmq

from cairn.config import EngineConfig
from cairn.engine.engine import Engine, Progress
from cairn.engine.request import Request
from cairn.errors import CairnError, ConfigError, LoadError, QueueFullError, RequestError
from cairn.frontend import Driver, load
from cairn.server import wire
from cairn.server.log import start_logging
from cairn.server.page_reads import PageReads
from cairn.server.reading import Reading
from cairn.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from cairn.server.grammars import Follower, Grammars

_REPORT_EVERY = 0.25  # seconds between statistics, which also show that the engine is alive
_LOG_EVERY = 60  # seconds between log lines about the host tier, while there is work
_MASK_SECONDS = 0.002  # that a step waits for masks, which are mostly there sooner
_LINGER_MS = 2000  # to send the last message

_log = logging.getLogger("cairn.server.engine")


class EngineLoop(Driver[int]):
    """Drives the engine for the API process. Requests are known by the API's choice numbers."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer | None, socket: zmq.Socket[bytes]
    ) -> None:
        super().__init__(engine)
        self._tokenizer = tokenizer  # for grammars
        self._socket = socket
        self._accepted: list[int] = []
        self._refused: list[wire.Refused] = []
        self._grammars: Grammars | None = None  # made for the first grammar
        self._followers: dict[int, Follower] = {}  # of open choices, by number
        self._compiling: dict[int, wire.Submit] = {}  # by the number of the first choice
        self._message_seconds = 0.0
        self._reported = 0.0
        self._logged = time.monotonic()
        self._stopping = False
        self._reading = Reading()
        self._reads = PageReads(engine.sparse, engine.selected)

    def serve(self) -> None:
        # What exists now stays: the garbage collector need not visit it again between steps.
        gc.freeze()
        engine, geometry = self.engine, self.engine.scheduler.cache.geometry
        ready = wire.Ready(
            context_length=engine.context_length,
            max_tokens=engine.max_tokens,
            vocab_size=engine.spec.vocab_size,
            eos_token_ids=sorted(engine.eos_token_ids),
            page_size=geometry.page_size,
            tokens_per_page=geometry.tokens_per_page,
            unit_size=engine.selected.page_size,
            tokens_per_unit=engine.selected.tokens_per_page,
            can_trace=engine.can_trace,
            can_read_densely=engine.can_read_densely,
            sparse_layers=[] if engine.sparse is None else list(engine.sparse.layers),
            sparse_topk=0 if engine.sparse is None else engine.sparse.topk,
            notes=list(engine.notes),
        )
        self._socket.send(wire.encode(ready))
        self.run(self._receive)

    # -- messages from the API process --------------------------------------------------------

    def _receive(self) -> bool:
        """Take all messages and masks that are there; while idle, wait a little for one."""
        begin = time.perf_counter()
        news = self._take()
        while not (self._accepted or self._refused or self._stopping):
            if not self.engine.has_work or (self.engine.stalled and not news):
                until = begin + _REPORT_EVERY
            elif self._grammars is not None and self._grammars.num_pending:
                until = self._grammars.last_ask + _MASK_SECONDS
            else:
                break
            wait = until - time.perf_counter()
            if wait <= 0 or not self._poll(wait):
                break
            news |= self._take()
        return not self._stopping

    def _poll(self, seconds: float) -> bool:
        """Wait for a message or a mask. False if none came."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if self._grammars is not None:
            for connection, flags in self._grammars.watched():
                poller.register(connection, flags)
        return bool(poller.poll(math.ceil(seconds * 1000)))

    def _take(self) -> bool:
        """Take messages and masks without waiting. Returns whether there were any."""
        begin = time.perf_counter()
        news = False
        while self._socket.poll(0):
            news = True
            message = wire.decode_to_engine(self._socket.recv())
            match message:
                case wire.Submit(grammar=None):
                    self._submit(message)
                case wire.Submit():
                    self._compile(message)
                case wire.End():
                    for number in message.numbers:  # some may have ended meanwhile
                        self._drop(number)
                        self.end(str(number), message.reason)
                case wire.Shutdown():
                    self._stopping = True
        if self._grammars is not None:
            news |= self._take_masks(self._grammars)
        self._message_seconds += time.perf_counter() - begin
        return news

    def _submit(self, message: wire.Submit, followers: Sequence[Follower] = ()) -> None:
        try:
            requests = self.engine.make_requests(
                message.token_ids,
                message.params,
                cache_salt=message.cache_salt,
                traced=message.trace,
                dense=message.dense,
                returns=message.returns,
                first_id=message.number,
            )
            for request, follower in zip(requests, followers, strict=bool(followers)):
                request.allowed_tokens = follower
                request.host_tokens = True
            self.add(requests, _numbers(message))
        except (RequestError, QueueFullError) as error:
            for follower in followers:
                self._drop(follower.number)
            self._refuse(message.number, error)
        else:
            self._accepted.append(message.number)
            if message.reading:
                self._reading.watch(message.number, requests[0])

    def _refuse(self, number: int, error: Exception) -> None:
        kind: Literal["request", "full", "engine"] = "engine"
        if isinstance(error, RequestError | QueueFullError):
            kind = "request" if isinstance(error, RequestError) else "full"
        self._refused.append(wire.Refused(number, kind, str(error)))

    # -- grammars -----------------------------------------------------------------------------

    def _compile(self, message: wire.Submit) -> None:
        """Begin to follow a request's grammar. The request runs once its first masks are there."""
        assert message.grammar is not None
        try:
            if self._grammars is None:
                from cairn.server.grammars import Grammars

                assert self._tokenizer is not None  # chat needs one
                vocab_size, ends = self.engine.spec.vocab_size, self.engine.eos_token_ids
                self._grammars = Grammars(self._tokenizer, vocab_size, ends)
            followers = self._grammars.follow(message.grammar, _numbers(message))
        except (RequestError, QueueFullError) as error:
            self._refuse(message.number, error)
            return
        self._followers.update((follower.number, follower) for follower in followers)
        self._compiling[message.number] = message

    def _take_masks(self, grammars: Grammars) -> bool:
        news = grammars.take()
        for follower in grammars.take_failed():
            if self._followers.get(follower.number) is follower:
                self._fail(follower)
        for message in list(self._compiling.values()):
            followers = [self._followers[number] for number in _numbers(message)]
            if all(follower.allowed is not None for follower in followers):
                del self._compiling[message.number]
                self._submit(message, followers)
        return news

    def _fail(self, follower: Follower) -> None:
        """End the request of a grammar that cannot be followed any more."""
        error = RequestError(f"{follower.grammar.field} cannot be followed: {follower.error}")
        numbers = range(follower.number, follower.number + 1)
        for message in self._compiling.values():
            if follower.number in _numbers(message):
                numbers = _numbers(message)
        self._refuse(numbers[0], error)
        for number in numbers:
            self._drop(number)
            self.end(str(number), "abort")

    def _drop(self, number: int) -> None:
        """A choice has ended."""
        self._compiling.pop(number, None)
        if (follower := self._followers.pop(number, None)) is not None:
            follower.close()

    # -- messages to the API process ----------------------------------------------------------

    def deliver(self, progress: Sequence[Progress]) -> None:
        """Report what a step brought; while idle, now and then that the engine is alive."""
        begin = time.perf_counter()
        due = begin - self._reported >= _REPORT_EVERY
        reading = self._reading.news()
        if not (due or self._accepted or self._refused or progress or reading):
            return
        vectors = [self._vector(each.request) for each in progress if not each.new_tokens]
        progress = [each for each in progress if each.new_tokens]
        numbers = [self._open[each.request.id] for each in progress]
        tokens = list(chain.from_iterable(each.new_tokens for each in progress))
        if len(tokens) > len(numbers):  # some have several
            pairs = zip(numbers, progress, strict=True)
            numbers = [number for number, each in pairs for _ in each.new_tokens]
        drafts = [
            (self._open[own.id], own.drafted_tokens, own.accepted_tokens)
            for own, _, _ in progress
            if own.drafted_tokens
        ]
        self._reads.count(
            [each.request for each in progress], [len(each.new_tokens) for each in progress]
        )
        details = self._details(progress)
        if self._followers:
            self._follow(progress)
        stats = self._stats() if due else None
        self._reported = begin if due else self._reported
        report = wire.Report(
            self._accepted,
            self._refused,
            numbers,
            tokens,
            details,
            stats,
            vectors=vectors,
            reading=reading,
            drafts=drafts,
        )
        self._socket.send(wire.encode(report))
        self._accepted, self._refused = [], []
        self._message_seconds += time.perf_counter() - begin

    def _vector(self, request: Request) -> tuple[int, bytes]:
        """The embedding of a request that has ended."""
        vector: bytes = request.embedding().numpy().tobytes()
        return self._open.pop(request.id), vector

    def _follow(self, progress: Sequence[Progress]) -> None:
        """Ask what may follow the new tokens, and drafts behind them."""
        speculation = self.engine.scheduler.speculation
        for request, tokens, _ in progress:
            if (follower := self._followers.get(int(request.id))) is None:
                continue
            if request.finish_reason is None:
                drafts = [] if speculation is None else speculation.suggest(request)
                follower.advance(tokens, drafts)
            else:
                self._drop(follower.number)

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()
        super().close()

    def _details(self, progress: Sequence[Progress]) -> list[wire.Detail]:
        details: list[wire.Detail] = []
        at = 0
        for each in progress:
            request, count = each.request, len(each.new_tokens)
            at += count
            first = request.num_output == count
            if not (request.finish_reason or first or each.logprobs or request.traced):
                continue
            number = self._open[request.id]
            try:
                details += [self._detail(each, i, at - count) for i in range(count)]
            except Exception as error:  # only this request fails
                _log.error("a request failed", exc_info=error)
                self._refuse(number, error)
                self.end(request.id, "abort")
            if request.finish_reason is not None:
                self._open.pop(request.id, None)
        return details

    def _detail(self, progress: Progress, i: int, at: int) -> wire.Detail:
        """More about the i-th new token of a request, whose first one has the place `at`."""
        request, before = progress.request, len(progress.new_tokens) - i
        start = reads = None
        if request.num_output == before and i == 0:
            scores = request.prompt_logprobs
            start = wire.Start(
                cached_tokens=request.cached_tokens,
                prompt_logprobs=[None, *scores] if request.prompt_scores == "top" else None,
            )
        if request.traced:
            # They are sent token by token, so the engine need not keep them.
            known = len(request.token_ids) - before
            reads = self._reads.of_token(request.selections.pop(0), known, request)
        reason = request.finish_reason if before == 1 else None
        assert reason != "abort"  # an aborted request makes no progress
        return wire.Detail(
            at + i, start, progress.logprobs[i] if progress.logprobs else None, reads, reason
        )

    def _stats(self) -> wire.Stats:
        engine, scheduler = self.engine, self.engine.scheduler
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
            drafted_tokens=scheduler.stats.drafted,
            accepted_tokens=scheduler.stats.accepted,
            read_pages=self._reads.read,
            held_pages=self._reads.held,
            start_compilations=compiled.start,
            serving_compilations=compiled.serving,
            longest_prefill_step=totals.longest_prefill_step,
            tier=self._tier(),
        )

    def _tier(self) -> wire.Tier | None:
        """Statistics of the host tier, which are also logged now and then."""
        report = self.engine.tier()
        if report is None:
            return None
        now = time.monotonic()
        if self.engine.has_work and now - self._logged >= _LOG_EVERY:
            self._logged = now
            _log.info("%s", report)
        return wire.Tier(pages=report.pages, **dataclasses.asdict(report.totals))


def _numbers(message: wire.Submit) -> range:
    """The numbers of a request's choices."""
    return range(message.number, message.number + message.params.n)


def run_engine(config: EngineConfig, endpoint: str) -> None:
    """The process's main: load, serve until told to stop, report an error that ends it."""
    # The API process decides when to stop; a Ctrl-C in the terminal reaches both processes.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log = start_logging()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    # The other side never stops reading, and a limit on queued messages could only lose tokens.
    for option, value in ((zmq.LINGER, _LINGER_MS), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
        socket.setsockopt(option, value)
    socket.connect(endpoint)
    try:
        EngineLoop(*load(config), socket).serve()
    except (ConfigError, LoadError) as error:
        socket.send(wire.encode(wire.Failed(str(error), usage=True)))
    except Exception as error:
        _log.exception("the engine failed")
        what = str(error) if isinstance(error, CairnError) else f"{type(error).__name__}: {error}"
        socket.send(wire.encode(wire.Failed(what, usage=False)))
    finally:
        socket.close()
        context.term()
        log.close()


def _end_with_parent() -> None:
    """End this process when the API process is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
