"""Follows grammars in processes of their own, which the kernel ends if they take too much.

The grammar library cannot be interrupted, and a short schema can make it run for hours or fill all
memory. A host process reads the tokenizer once. For each grammar it forks a worker, which shares
the tokenizer's memory. The processor time of each answer and the memory of a worker are limited.
A worker that exceeds a limit dies, which the engine sees as the end of the connection.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from io import BufferedIOBase
from pathlib import Path

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

COMPILE_SECONDS, MASK_SECONDS = 5.0, 1.0  # of processor time
_AHEAD_SECONDS = 0.05  # of processor time, after which no more drafts are looked at
MEMORY_MIB = 128  # of a worker, beside what it shares with the host
_LONGEST_ERROR = 300
HEADER = struct.Struct("!I")  # length of the message that follows


class Ask(msgspec.Struct, array_like=True, frozen=True):
    """Which tokens may follow when a choice has continued by `tokens`? None: the choice ended. And
    which may follow each of `drafts`, if it continues by them?"""

    choice: int
    tokens: list[int] | None
    drafts: list[int] = []


class Mask(msgspec.Struct, array_like=True, frozen=True):
    """The answer: one bit per token, lowest bit first. The first mask is that of the next token;
    others follow for drafts, as far as they are allowed. None if there is an error."""

    choice: int
    masks: list[bytes]
    error: str = ""


encode = msgspec.msgpack.Encoder().encode
decode_ask = msgspec.msgpack.Decoder(Ask).decode
decode_mask = msgspec.msgpack.Decoder(Mask).decode


def run_host(control: socket.socket, tokenizer: str, vocab_size: int, ends: Sequence[int]) -> None:
    """The host's main: fork a worker for each connection that comes, until the engine is gone."""
    os.setpgid(0, 0)  # a Ctrl-C in the terminal is not meant for these processes
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers need no waiting for
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    tokens: LLTokenizer | None = None
    problem = ""
    try:
        tokens = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(ends))
    except Exception as error:  # the library raises nothing narrower
        problem = f"the grammar library cannot read this model's tokenizer: {error}"
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            os.killpg(0, signal.SIGKILL)  # the engine is gone; workers may be busy
        with socket.socket(fileno=descriptors[0]) as connection:
            if _fork() == 0:
                control.close()
                _work(connection, tokens, problem)


def _fork() -> int:
    try:
        return os.fork()
    except OSError:  # no memory, or too many processes: the engine sees the connection end
        return -1


def _work(connection: socket.socket, tokens: LLTokenizer | None, problem: str) -> None:
    """A worker's main. It ends when the connection does."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library reports panics there
        _limit_memory()
        connection.sendall(HEADER.pack(os.getpid()))
        stream = connection.makefile("rwb")
        rules = _Rules(tokens, problem, _read(stream).decode())
        while message := _read(stream):
            ask = decode_ask(message)
            if ask.tokens is None:
                rules.drop(ask.choice)
                continue
            answer = encode(rules.answer(ask.choice, ask.tokens, ask.drafts))
            stream.write(HEADER.pack(len(answer)) + answer)
            stream.flush()
    finally:
        os._exit(0)


def _limit_memory() -> None:
    table = Path("/proc/self/statm")
    if table.exists():  # macOS has neither the table nor the limit
        held = int(table.read_text().split()[0]) * resource.getpagesize()
        most = held + MEMORY_MIB * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _read(stream: BufferedIOBase) -> bytes:
    """The next message; empty at the end."""
    header = stream.read(HEADER.size)
    return stream.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else b""


class _Rules:
    """A grammar, and where each choice is in it."""

    def __init__(self, tokens: LLTokenizer | None, problem: str, grammar: str) -> None:
        self._tokens = tokens
        self._problem = problem
        self._grammar = grammar
        self._fresh: LLMatcher | None = None
        self._matchers: dict[int, LLMatcher] = {}

    def drop(self, choice: int) -> None:
        self._matchers.pop(choice, None)

    def answer(self, choice: int, tokens: list[int], drafts: Sequence[int]) -> Mask:
        compiled = self._fresh is not None
        signal.setitimer(signal.ITIMER_PROF, MASK_SECONDS if compiled else COMPILE_SECONDS)
        try:
            masks = [self._mask(choice, tokens)]
            try:
                masks.extend(self._ahead(choice, drafts))
            except BaseException:  # of drafts only: the answer goes on without their masks
                masks = masks[:1]
            return Mask(choice, masks)
        except BaseException as error:  # a panic of the library is no Exception
            return Mask(choice, [], str(error).split("\n", 1)[0][:_LONGEST_ERROR])
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _mask(self, choice: int, tokens: list[int]) -> bytes:
        if self._tokens is None:
            raise ValueError(self._problem)
        if self._fresh is None:
            limits = LLParserLimits(verbose_errors=False)
            self._fresh = LLMatcher(self._tokens, self._grammar, log_level=0, limits=limits)
        if choice not in self._matchers:
            self._matchers[choice] = self._fresh.deep_copy()
        matcher = self._matchers[choice]
        if tokens and not matcher.is_error():
            matcher.consume_tokens(tokens)
        mask: bytes = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        if not any(mask):
            raise ValueError("no token of this model can continue the answer")
        return mask

    def _ahead(self, choice: int, drafts: Sequence[int]) -> Iterator[bytes]:
        """The masks after drafts, while the grammar allows them and there is time. They move a copy
        of the matcher, so that an error with drafts does not concern the answer."""
        begin = time.process_time()
        ahead: LLMatcher | None = None
        for draft in drafts:
            if time.process_time() - begin > _AHEAD_SECONDS:
                return
            signal.setitimer(signal.ITIMER_PROF, MASK_SECONDS)
            ahead = self._matchers[choice].deep_copy() if ahead is None else ahead
            if not ahead.try_consume_tokens([draft]):
                return
            mask: bytes = ahead.compute_bitmask()
            if ahead.is_error() or not any(mask):
                return
            yield mask
