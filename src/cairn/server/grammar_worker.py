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
from collections.abc import Sequence
from io import BufferedIOBase
from pathlib import Path

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

COMPILE_SECONDS, MASK_SECONDS = 5.0, 1.0  # of processor time
MEMORY_MIB = 128  # of a worker, beside what it shares with the host
_LONGEST_ERROR = 300
HEADER = struct.Struct("!I")  # length of the message that follows


class Ask(msgspec.Struct, array_like=True, frozen=True):
    """Which tokens may follow when a choice has continued by `tokens`? None: the choice ended."""

    choice: int
    tokens: list[int] | None


class Mask(msgspec.Struct, array_like=True, frozen=True):
    """The answer: one bit per token, lowest bit first. Empty if there is an error."""

    choice: int
    mask: bytes
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
            answer = encode(rules.answer(ask.choice, ask.tokens))
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

    def answer(self, choice: int, tokens: list[int]) -> Mask:
        compiled = self._fresh is not None
        signal.setitimer(signal.ITIMER_PROF, MASK_SECONDS if compiled else COMPILE_SECONDS)
        try:
            return Mask(choice, self._mask(choice, tokens))
        except BaseException as error:  # a panic of the library is no Exception
            return Mask(choice, b"", str(error).split("\n", 1)[0][:_LONGEST_ERROR])
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
