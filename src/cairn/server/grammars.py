"""The engine's side of grammars: asks worker processes which tokens may come next.

Nothing here waits. A choice whose mask is not there yet leaves out a step, and other requests go
on.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

import zmq

from cairn.engine.plan import Allowed
from cairn.errors import QueueFullError, RequestError
from cairn.server import grammar_worker
from cairn.server.grammar_worker import COMPILE_SECONDS, HEADER, MASK_SECONDS, MEMORY_MIB, Ask
from cairn.server.wire import Grammar
from cairn.text.tokenizer import Tokenizer

_MOST_WORKERS = 32  # different grammars at once
_IDLE_SECONDS = 60.0  # that a worker is kept for the next request with its grammar
_PATIENCE = 0.05  # seconds after which a worker gets a low priority
_NICE = 15
_MOST_SECONDS = 20.0  # for an answer, on a machine that has little processor time for workers
_PIECE = 1 << 16
_LIMITS = (
    f"it needs more than {COMPILE_SECONDS:g} s to be prepared, {MASK_SECONDS:g} s for a token, or "
    f"{MEMORY_MIB} MiB; send a simpler one"
)


class Follower:
    """Where a choice is in its grammar."""

    def __init__(self, grammars: Grammars, grammar: Grammar, number: int) -> None:
        self.grammar = grammar
        self.number = number
        self.output: list[int] = []
        self.drafts: Sequence[int] = ()
        self.allowed: Allowed | None = None  # what may follow the output; None: not known yet
        self.error: str | None = None
        self._grammars = grammars

    def __call__(self, count: int) -> Allowed | None:
        """What may follow an output of `count` tokens; None if that is not known yet."""
        # A step may be planned before this object is told what the last one brought.
        return self.allowed if count == len(self.output) else None

    def advance(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """The output has continued: ask what may follow, and what may follow drafts."""
        self.output += tokens
        self.drafts, self.allowed = drafts, None
        self._grammars.ask(self, tokens)

    def close(self) -> None:
        self._grammars.drop(self)


class Grammars:
    """The workers, by grammar. Choices with the same grammar share one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: frozenset[int]) -> None:
        if not ends:
            raise RequestError(
                "response_format and tools need a model with an end token, and this one has none"
            )
        self._given = tokenizer.fast.to_str(), vocab_size, sorted(ends)
        self._workers: dict[str, _Worker] = {}
        self._control: socket.socket | None = None  # to the host; None: there is none
        self.last_ask = 0.0  # time.perf_counter
        self._failed: list[Follower] = []

    @property
    def num_pending(self) -> int:
        """Number of masks that are being computed."""
        return sum(len(found.pending) for found in self._workers.values())

    def watched(self) -> Iterator[tuple[socket.socket, int]]:
        """Connections to wait for, each with flags of zmq's poll."""
        for found in self._workers.values():
            if found.pending:
                yield found.socket, zmq.POLLIN | (zmq.POLLOUT if found.unsent else 0)

    def follow(self, grammar: Grammar, numbers: Sequence[int]) -> list[Follower]:
        """Followers for new choices, whose first masks are under way. Raises QueueFullError."""
        if grammar.text not in self._workers:
            self._open(grammar.text)
        followers = [Follower(self, grammar, number) for number in numbers]
        for follower in followers:
            follower.advance(())
        return followers

    def ask(self, follower: Follower, tokens: Sequence[int]) -> None:
        text = follower.grammar.text
        try:
            found = self._workers.get(text) or self._open(text)
        except QueueFullError as error:
            self._fail(follower, str(error))
            return
        if follower.number not in found.followers:  # new, or its worker has died
            found.followers[follower.number] = follower
            tokens = follower.output
        found.pending.append(follower)
        found.asked = found.asked if len(found.pending) > 1 else time.monotonic()
        found.send(grammar_worker.encode(Ask(follower.number, list(tokens), list(follower.drafts))))
        self.last_ask = time.perf_counter()

    def drop(self, follower: Follower) -> None:
        found = self._workers.get(follower.grammar.text)
        if found is not None and found.followers.pop(follower.number, None) is not None:
            found.send(grammar_worker.encode(Ask(follower.number, None)))
            found.idle_since = time.monotonic()
            if found.pending and not found.followers and found.kill():
                self._close(found)  # nobody waits for what it computes

    def take(self) -> bool:
        """Take the answers that have come. Returns whether there were any."""
        news = False
        for found in list(self._workers.values()):
            if found.pending:
                before = len(found.pending)
                alive, failed = found.receive()
                self._failed += failed
                news |= not alive or len(found.pending) < before
                if not alive:
                    self._replace(found)
                else:
                    found.make_way()
            elif not found.followers and time.monotonic() - found.idle_since > _IDLE_SECONDS:
                self._close(found)
        return news

    def take_failed(self) -> list[Follower]:
        """Followers whose `error` was set since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def close(self) -> None:
        """End all workers and their host."""
        for found in list(self._workers.values()):
            self._close(found)
        if self._control is not None:
            self._control.close()

    # -- workers ------------------------------------------------------------------------------

    def _open(self, grammar: str) -> _Worker:
        if len(self._workers) >= _MOST_WORKERS:
            idle = [w for w in self._workers.values() if not w.followers and not w.pending]
            if not idle:
                raise QueueFullError(
                    f"{_MOST_WORKERS} different grammars are in use; send it again later"
                )
            self._close(min(idle, key=lambda w: w.idle_since))
        try:
            own, other = socket.socketpair()
        except OSError as error:
            raise QueueFullError(f"a grammar cannot be followed now: {error}") from error
        with other:
            try:
                socket.send_fds(self._control or self._start_host(), [b"+"], [other.fileno()])
            except OSError:  # the host was killed
                socket.send_fds(self._start_host(), [b"+"], [other.fileno()])
        found = self._workers[grammar] = _Worker(own)
        found.send(grammar.encode())
        return found

    def _start_host(self) -> socket.socket:
        """Start the host. It takes what it is sent once it has read the tokenizer."""
        if self._control is not None:
            self._control.close()
        self._control, other = socket.socketpair()
        process = multiprocessing.get_context("spawn").Process(
            target=grammar_worker.run_host,
            args=(other, *self._given),
            name="cairn-grammars",
            daemon=True,
        )

        def start() -> None:
            with other:
                process.start()

        # Starting waits until the new process has read its arguments.
        threading.Thread(target=start, daemon=True).start()
        return self._control

    def _replace(self, found: _Worker) -> None:
        """A worker has died of the question that it had first. Ask another one the rest."""
        self._close(found)
        guilty = found.pending[0]
        for follower in found.pending:
            if found.followers.get(follower.number) is not follower:
                continue  # it has ended
            if follower is guilty or not found.answered:  # or it died of the grammar itself
                self._fail(follower, _LIMITS)
            else:
                self.ask(follower, ())

    def _fail(self, follower: Follower, error: str) -> None:
        follower.error = error
        self._failed.append(follower)

    def _close(self, found: _Worker) -> None:
        for grammar, each in list(self._workers.items()):
            if each is found:
                del self._workers[grammar]
        found.socket.close()


class _Worker:
    """A connection to a worker process."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.followers: dict[int, Follower] = {}  # by number
        self.pending: deque[Follower] = deque()  # in the order in which they are answered
        self.answered = False
        self.unsent = bytearray()
        # When the first pending question was asked, came to be the first, or found a worker.
        self.asked = 0.0
        self.idle_since = 0.0
        self._pid: int | None = None  # the first thing that a worker says
        self._received = bytearray()

    def send(self, message: bytes) -> None:
        self.unsent += HEADER.pack(len(message)) + message
        self._flush()

    def receive(self) -> tuple[bool, list[Follower]]:
        """Take what has come. Returns whether the worker is alive, and followers that failed."""
        self._flush()
        alive = False
        try:
            while piece := self.socket.recv(_PIECE):
                self._received += piece
        except BlockingIOError:
            alive = True
        except ConnectionError:  # it died with questions unread
            pass
        if self._pid is None and len(self._received) >= HEADER.size:
            (self._pid,) = HEADER.unpack_from(self._received)
            del self._received[: HEADER.size]
            self.asked = time.monotonic()  # its host may have taken long to start
        failed = []
        while len(self._received) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            answer = grammar_worker.decode_mask(self._received[HEADER.size : end])
            del self._received[:end]
            self.answered, self.asked = True, time.monotonic()
            follower = self.pending.popleft()
            if answer.masks:
                drafts = tuple(follower.drafts[: len(answer.masks) - 1])
                follower.allowed = Allowed(tuple(answer.masks), drafts)
            if answer.error:
                follower.error = answer.error
                failed.append(follower)
        return alive, failed

    def make_way(self) -> None:
        """Lower the worker's priority if an answer takes long, or end it."""
        waited = time.monotonic() - self.asked if self.pending else 0.0
        if waited > _MOST_SECONDS:
            self.kill()
        elif waited > _PATIENCE and self._pid is not None:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._pid, _NICE)

    def kill(self) -> bool:
        """False if the process has not told its id yet."""
        if self._pid is None:
            return False
        with suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)
        return True

    def _flush(self) -> None:
        with suppress(OSError):  # it is full, or the worker is dead, which `receive` sees
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
