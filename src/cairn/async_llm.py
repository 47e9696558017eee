"""The offline API for asyncio: a thread steps the engine, callers await chunks.

async with AsyncLLM("path/to/model") as llm:
    async for chunk in llm.stream("Once upon a time", max_tokens=32):
        print(chunk.text, end="")
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from cairn.config import EngineConfig
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import CairnError
from cairn.frontend import Frontend, Prompt, Sink, make_params
from cairn.outputs import Chunk, Generation
from cairn.text.tokenizer import Message

T = TypeVar("T")


class AsyncLLM:
    """Everything that touches the engine runs on one thread. Texts become tokens on others."""

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        if model is not None:
            options["model"] = str(model)
        self._frontend = Frontend(EngineConfig.from_kwargs(options))
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = False
        self._failure: BaseException | None = None
        # A call is either queued before the thread ends, and carried out, or refused.
        self._lock = threading.Lock()
        self._ended = False
        self._sinks: set[Sink] = set()
        self._thread = threading.Thread(target=self._loop, name="cairn-engine", daemon=True)
        self._thread.start()

    # -- generating ---------------------------------------------------------------------------

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        trace: bool = False,
        **sampling: Any,
    ) -> AsyncIterator[Chunk]:
        """Chunks of a prompt's choices. Leaving the loop early aborts them."""
        params = make_params(sampling_params, sampling)
        if isinstance(prompt, str):  # no step waits for a long text
            prompt = await asyncio.to_thread(self._frontend.encode, prompt)
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        ids: list[str] = []
        open_choices = params.n

        def sink(chunk: Chunk | Exception) -> None:
            try:
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)
            except RuntimeError:  # the caller's event loop is closed
                self._post(partial(self._abort_each, ids))

        def submit() -> None:
            requests = self._frontend.prepare(prompt, params, cache_salt, trace=trace)
            self._frontend.submit(requests, sink)
            ids.extend(request.id for request in requests)
            self._sinks.add(sink)

        try:
            await self._on_engine(submit)
            while open_choices:
                chunk = await chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                open_choices -= chunk.finish_reason is not None
                yield chunk
        finally:
            self._sinks.discard(sink)
            if open_choices:
                # Queued behind the submission, which may not have been carried out yet.
                self._post(partial(self._abort_each, ids))

    async def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **rest: Any,
    ) -> AsyncIterator[Chunk]:
        ids = await asyncio.to_thread(self._frontend.encode_chat, messages)
        async for chunk in self.stream(ids, sampling_params, **rest):
            yield chunk

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **rest: Any
    ) -> Generation:
        """The whole answer; of several choices the first, with the others as alternatives."""
        results: dict[int, Generation] = {}
        async for chunk in self.stream(prompt, sampling_params, **rest):
            if chunk.result is not None:
                results[chunk.choice] = chunk.result
        first, *others = (results[choice] for choice in sorted(results))
        return first.with_alternatives(others)

    def _abort_each(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._frontend.abort(request_id)

    async def abort(self, request_id: str) -> bool:
        return await self._on_engine(lambda: self._frontend.abort(request_id))

    # -- closing ------------------------------------------------------------------------------

    async def close(self) -> None:
        """Abort what runs and stop the thread."""
        self._closing = True
        self._post(lambda: None)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- the engine's thread ------------------------------------------------------------------

    def _post(self, call: Callable[[], None]) -> bool:
        """Queue a call for the engine's thread; False if the thread has ended."""
        with self._lock:
            if not self._ended:
                self._calls.put(call)
            return not self._ended

    async def _on_engine(self, call: Callable[[], T]) -> T:
        """Run `call` between two steps and await its result."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._ended:
                future.set_exception(self._gone())
                return
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        if not self._post(run):
            raise self._gone()
        return await asyncio.wrap_future(future)

    def _gone(self) -> CairnError:
        return CairnError(f"the engine is not running: {self._failure or 'it was closed'}")

    def _receive(self) -> bool:
        """Carry out the calls that are queued; wait for one while there is no other work."""
        if not self._frontend.engine.has_work:
            self._calls.get()()
        while not self._calls.empty():
            self._calls.get()()
        return not self._closing

    def _loop(self) -> None:
        try:
            self._frontend.run(self._receive)
        except BaseException as error:
            self._failure = error
            for sink in list(self._sinks):
                failure = CairnError(f"the engine failed: {error}")
                failure.__cause__ = error
                sink(failure)
            with suppress(Exception):  # what has failed may fail again
                self._frontend.engine.close()
        finally:
            with self._lock:
                self._ended = True
            while not self._calls.empty():
                self._calls.get()()
