"""Tokenises in threads: the library releases the GIL.

Texts wait only for texts of similar length: short and middle-sized ones have threads of their own.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from cairn.errors import RequestError
from cairn.server.api_error import bad_request
from cairn.text.tokenizer import Message, Tokenizer

T = TypeVar("T")

THREADS = "cairn-text"  # their names begin like this
_SHORT, _MIDDLE = 20_000, 500_000  # characters


class TextThreads:
    def __init__(self, tokenizer: Tokenizer | None, threads: int) -> None:
        self.tokenizer = tokenizer
        self._short = ThreadPoolExecutor(1, thread_name_prefix=f"{THREADS}-short")
        self._middle = ThreadPoolExecutor(threads, thread_name_prefix=f"{THREADS}-middle")
        self._long = ThreadPoolExecutor(1, thread_name_prefix=f"{THREADS}-long")

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        tokenizer = self.need("a text prompt")
        call = partial(tokenizer.encode, text, add_special_tokens=special)
        return await self._run(call, len(text), param="prompt")

    async def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        special: bool = False,
        **options: Any,
    ) -> tuple[list[int], str]:
        """Token ids of a conversation, and its text. `options` are the chat template's."""
        tokenizer = self.need("chat")
        if tokenizer.template is None:
            raise bad_request(
                "messages",
                "this model has no chat template; use /v1/completions, or add "
                "chat_template.jinja to the model's folder",
            )

        def call() -> tuple[list[int], str]:
            text = tokenizer.render_chat(messages, tools, **options)
            return tokenizer.encode(text, add_special_tokens=special), text

        return await self._run(call, _length(messages) + _length(tools), param="messages")

    async def decode(self, ids: Sequence[int]) -> str:
        return await self._run(partial(self.need("detokenising").decode, ids), len(ids))

    async def decode_each(self, parts: Sequence[Sequence[int]]) -> list[str]:
        """Texts of the pages of a prompt."""
        tokenizer = self.need("a page map")
        length = sum(map(len, parts))
        return await self._run(lambda: [tokenizer.decode(part) for part in parts], length)

    def need(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise bad_request(
                "prompt",
                f"{what} needs a tokenizer and this model has no tokenizer.json; add one, or send "
                "token ids to /v1/completions",
            )
        return self.tokenizer

    async def _run(self, call: Callable[[], T], length: int, *, param: str | None = None) -> T:
        pool = self._short if length <= _SHORT else self._middle
        if length > _MIDDLE:
            pool, call = self._long, partial(_then_trim, call)
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, call)
        except RequestError as error:
            raise bad_request(param, str(error)) from error

    def close(self) -> None:
        for pool in (self._short, self._middle, self._long):
            pool.shutdown(wait=False, cancel_futures=True)


def _then_trim(call: Callable[[], T]) -> T:
    """Give back what tokenising has freed: glibc would keep a gigabyte after a text of 8 MiB."""
    try:
        return call()
    finally:
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)


def _length(value: object) -> int:
    """Approximate number of characters in nested messages."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_length, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_length, value))
    return 0
