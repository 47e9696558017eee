from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cairn import LLM
from cairn.async_llm import AsyncLLM
from cairn.errors import CairnError, QueueFullError, RequestError
from cairn.frontend import Output
from cairn.text.tokenizer import Tokenizer
from tests.helpers import TINY_LLAMA, byte_tokenizer, write_model
from tests.patience import PATIENCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("async-model")
    write_model(path, {**TINY_LLAMA, "vocab_size": 256})
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


def run(folder: Path, body: Callable[[AsyncLLM], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with AsyncLLM(folder, device="cpu", **options) as llm:
            return await asyncio.wait_for(body(llm), PATIENCE)

    return asyncio.run(main())


def test_concurrent_requests_get_what_they_would_alone(folder: Path) -> None:
    prompts = [f"prompt number {i}" for i in range(8)]
    with LLM(folder, device="cpu") as llm:
        expected = [r.text for r in llm.generate(prompts, max_tokens=12, ignore_eos=True)]

    async def body(llm: AsyncLLM) -> list[str | None]:
        calls = [llm.generate(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts]
        return [result.text for result in await asyncio.gather(*calls)]

    assert run(folder, body) == expected


def test_texts_become_tokens_beside_the_engines_thread(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    encode = Tokenizer.encode

    def watched(*given: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return encode(*given, **options)

    async def body(llm: AsyncLLM) -> None:
        monkeypatch.setattr(Tokenizer, "encode", watched)
        await llm.generate("hello", max_tokens=2, ignore_eos=True)
        assert len(threads) == 1 and threads[0] not in ("MainThread", llm._thread.name)

    run(folder, body)


def test_a_stream_that_is_left_is_aborted(folder: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        stream = llm.stream("hello", max_tokens=400, ignore_eos=True)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await llm.generate("another", max_tokens=2, ignore_eos=True)
        while llm._frontend.engine.has_work:
            await asyncio.sleep(0)
        assert llm._frontend.engine.scheduler.stats.aborted == 1

    run(folder, body)


def test_bad_requests_and_a_full_queue_are_errors_of_their_caller_alone(folder: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        good = asyncio.create_task(llm.generate("fine", max_tokens=30, ignore_eos=True))
        with pytest.raises(RequestError, match="prompt is empty"):
            await llm.generate("")
        with pytest.raises(RequestError, match="temperature"):
            await llm.generate("x", temperature=-1.0)
        many = [llm.generate("x", max_tokens=30, ignore_eos=True) for _ in range(8)]
        results = await asyncio.gather(*many, return_exceptions=True)
        assert any(isinstance(result, QueueFullError) for result in results)
        assert len((await good).token_ids) == 30

    run(folder, body, max_running_requests=1, max_queued_requests=2)


def test_an_engine_failure_reaches_every_waiting_caller(folder: Path) -> None:
    closed: list[bool] = []

    async def body(llm: AsyncLLM) -> None:
        def broken(plan: object) -> None:
            raise RuntimeError("the device is gone")

        runner = llm._frontend.engine.runner
        close = runner.close
        runner.launch = broken  # type: ignore
        runner.close = lambda: (close(), closed.append(True))  # type: ignore
        calls = [llm.generate("x", max_tokens=4) for _ in range(3)]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, CairnError)
            assert "the device is gone" in str(result)
        with pytest.raises(CairnError, match="not running"):
            await llm.generate("x")

    run(folder, body)
    assert closed == [True]  # host memory and other ranks are freed


def test_text_that_fails_ends_its_own_stream_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Output.take

    def failing(output: Output, progress: Any) -> None:
        if output.request.prompt_len == 3 and output.request.num_output == 5:
            raise RuntimeError("no text")
        take(output, progress)

    monkeypatch.setattr(Output, "take", failing)

    async def body(llm: AsyncLLM) -> None:
        calls = [llm.generate(text, max_tokens=20, ignore_eos=True) for text in ("bad", "fine")]
        bad, fine = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(bad, RuntimeError) and str(bad) == "no text"
        assert not isinstance(fine, BaseException) and len(fine.token_ids) == 20
        assert len((await llm.generate("later", max_tokens=2, ignore_eos=True)).token_ids) == 2

    run(folder, body)


def test_cancelled_callers_leave_nothing_behind(folder: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        tasks = [
            asyncio.create_task(llm.generate("hello", max_tokens=400, ignore_eos=True))
            for _ in range(6)
        ]
        for turns, task in enumerate(tasks):
            for _ in range(turns):  # cancelled before, during and after submission
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await llm.generate("another", max_tokens=2, ignore_eos=True)
        while llm._frontend.engine.has_work or llm._frontend._open:
            await asyncio.sleep(0)  # ends, or runs into the time limit

    run(folder, body)


def test_closing_ends_every_stream_and_refuses_what_comes_later(folder: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(folder, device="cpu")
        task = asyncio.create_task(llm.generate("hello", max_tokens=400, ignore_eos=True))
        while not llm._frontend.engine.has_work:
            await asyncio.sleep(0)
        await llm.close()
        assert (await task).finish_reason == "abort"
        with pytest.raises(CairnError, match="it was closed"):
            await llm.generate("x")

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_choices_and_chat_stream(folder: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        result = await llm.generate("x", n=3, temperature=1.0, seed=1, max_tokens=6)
        assert len(result.alternatives) == 2
        with pytest.raises(RequestError, match="no chat template"):
            async for _ in llm.stream_chat([{"role": "user", "content": "hi"}]):
                pass

    run(folder, body)
