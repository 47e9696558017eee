"""Text is made in the API process: answers must be what the engine's tokens say, to the token."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from cairn import LLM, frontend
from cairn.config import EngineConfig
from cairn.engine.build import build_engine
from cairn.engine.engine import Engine
from cairn.outputs import Generation
from cairn.server import engine_client
from cairn.server import service as service_module
from cairn.server.app import build_app
from cairn.server.engine_process import run_engine
from cairn.server.middleware import RequestLog
from cairn.server.options import ServeConfig
from cairn.server.service import Service
from cairn.text.detokenizer import Detokenizer
from tests.patience import PATIENCE
from tests.server.conftest import SPARSE
from tests.server.process import ServerProcess

TOKENS = 48
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> Iterator[LLM]:
    options = {
        flag[2:].partition("=")[0].replace("-", "_"): flag.partition("=")[2] for flag in SPARSE
    }
    fields: dict[str, Any] = {k: int(v) if v.isdigit() else v for k, v in options.items()}
    with LLM(model_folder, device="cpu", dtype="float64", **fields) as running:
        yield running


def complete(server: ServerProcess, **body: Any) -> dict[str, Any]:
    answer = server.post("/v1/completions", json={**SAMPLED, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def stream(server: ServerProcess, **body: Any) -> list[dict[str, Any]]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    given = {**SAMPLED, **body, **options}
    answer = server.post("/v1/completions", json=given)
    assert answer.status_code == 200, answer.text
    *events, done = answer.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def check_same(server: ServerProcess, expected: Generation, **body: Any) -> None:
    """Answers, whole and streamed, of one prompt are those of the engine without a server."""
    each = [expected, *expected.alternatives]
    whole = complete(server, **body)
    texts = [""] * len(each)
    reasons: list[list[str]] = [[] for _ in each]
    *events, last = stream(server, **body)
    for event in events:
        (choice,) = event["choices"]
        assert not reasons[choice["index"]], "nothing comes after the end"
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] += [r for r in [choice["finish_reason"]] if r]
    for index, result in enumerate(each):
        choice = whole["choices"][index]
        assert choice["text"] == texts[index] == result.text
        assert [choice["finish_reason"]] == reasons[index] == [result.finish_reason]
    tokens = sum(result.usage.completion_tokens for result in each)
    for usage in (whole["usage"], last["usage"]):
        assert usage["prompt_tokens"] == expected.usage.prompt_tokens
        assert usage["completion_tokens"] == tokens


def test_stop_strings_end_answers_where_they_did(server: ServerProcess, llm: LLM) -> None:
    prompt = "stones"
    text = llm.generate(prompt, max_tokens=TOKENS, **SAMPLED).text
    assert text is not None
    rng = random.Random(2)
    places = [0, 1, len(text) - 2, *(rng.randrange(len(text) - 4) for _ in range(6))]
    for place in places:
        for length in (1, 3):
            stop = [text[place : place + length], "never said"]
            expected = llm.generate(prompt, max_tokens=TOKENS, stop=stop, **SAMPLED)
            assert expected.finish_reason == "stop"
            check_same(server, expected, prompt=prompt, max_tokens=TOKENS, stop=stop)
    # What looks like the beginning of a stop string is said after all.
    begun = [text[-3:] + "never said"]
    expected = llm.generate(prompt, max_tokens=TOKENS, stop=begun, **SAMPLED)
    assert expected.text == text and expected.finish_reason == "length"
    check_same(server, expected, prompt=prompt, max_tokens=TOKENS, stop=begun)


def test_a_stop_string_completed_by_the_last_token(server: ServerProcess, llm: LLM) -> None:
    """The engine ends the request by its length, and the string by the same token: it counts."""
    prompt = "stones"
    text = llm.generate(prompt, max_tokens=TOKENS, **SAMPLED).text
    assert text is not None
    stop = [text[20:24]]
    short = llm.generate(prompt, max_tokens=TOKENS, stop=stop, **SAMPLED)
    exactly = short.usage.completion_tokens
    for limit, reason in ((exactly, "stop"), (exactly - 1, "length")):
        expected = llm.generate(prompt, max_tokens=limit, stop=stop, **SAMPLED)
        assert expected.finish_reason == reason
        check_same(server, expected, prompt=prompt, max_tokens=limit, stop=stop)


def test_choices_stop_on_their_own(server: ServerProcess, llm: LLM) -> None:
    prompt = "a heap of stones"
    whole = llm.generate(prompt, max_tokens=TOKENS, n=3, **SAMPLED)
    texts = [result.text or "" for result in (whole, *whole.alternatives)]
    # Strings that end the choices at different places, and the last one perhaps not at all.
    stop = [texts[0][5:8], texts[1][30:33]]
    expected = llm.generate(prompt, max_tokens=TOKENS, n=3, stop=stop, **SAMPLED)
    ends = {r.usage.completion_tokens for r in (expected, *expected.alternatives)}
    assert len(ends) > 1
    check_same(server, expected, prompt=prompt, max_tokens=TOKENS, n=3, stop=stop)


def test_a_stop_token_is_not_said(server: ServerProcess, llm: LLM) -> None:
    prompt = "stones"
    tokens = llm.generate(prompt, max_tokens=TOKENS, **SAMPLED).token_ids
    for place in (0, 7):
        stop = [tokens[place]]
        expected = llm.generate(prompt, max_tokens=TOKENS, stop_token_ids=stop, **SAMPLED)
        assert expected.usage.completion_tokens == tokens.index(tokens[place]) + 1
        check_same(server, expected, prompt=prompt, max_tokens=TOKENS, stop_token_ids=stop)


def test_scores_and_pages_come_for_every_token_of_the_text(server: ServerProcess, llm: LLM) -> None:
    prompt = "path " * 20
    text = llm.generate(prompt, max_tokens=TOKENS, **SAMPLED).text
    assert text is not None
    stop = [text[9:12]]
    expected = llm.generate(prompt, max_tokens=TOKENS, stop=stop, logprobs=2, trace=True, **SAMPLED)
    assert expected.trace is not None and expected.logprobs is not None
    count = expected.usage.completion_tokens
    body = {"prompt": prompt, "max_tokens": TOKENS, "stop": stop, "logprobs": 2}
    (whole,) = complete(server, **body, cairn={"trace": True})["choices"]
    assert whole["text"] == expected.text
    scores = [score.logprob for score in expected.logprobs]
    assert whole["logprobs"]["token_logprobs"] == pytest.approx(scores, abs=1e-5)
    assert len(whole["cairn"]["reads"]) == count == len(expected.trace.tokens)
    reads, logprobs = [], []
    for event in stream(server, **body, cairn={"trace": True})[:-1]:
        (choice,) = event["choices"]
        reads += choice.get("cairn", {}).get("reads", [])
        logprobs += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    assert reads == whole["cairn"]["reads"]
    assert logprobs == pytest.approx(whole["logprobs"]["token_logprobs"], abs=1e-9)
    echo = complete(server, **body, echo=True)["choices"][0]
    assert echo["text"] == prompt + (expected.text or "")
    assert len(echo["logprobs"]["tokens"]) == expected.usage.prompt_tokens + count


def test_a_stop_string_ends_a_grammar_too(server: ServerProcess) -> None:
    schema = {"type": "object", "properties": {"name": {"enum": ["cairn"]}}, "required": ["name"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {
        "messages": [{"role": "user", "content": "stones"}],
        "response_format": form,
        "stop": ["air"],
        "max_tokens": 64,
    }
    answer = server.post("/v1/chat/completions", json=body).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].replace(" ", "") == '{"name":"c'
    # One byte is one token, and those of the stop string count.
    assert answer["usage"]["completion_tokens"] == len(choice["message"]["content"]) + 3


def test_what_a_stop_string_ended_is_no_abort_and_leaves_nothing(server: ServerProcess) -> None:
    before = server.wait_until_idle()
    text = complete(server, prompt="stones", max_tokens=TOKENS)["choices"][0]["text"]
    for _ in range(5):
        complete(server, prompt="stones", max_tokens=3000, stop=[text[3:5]])
    after = server.wait_until_idle()
    assert after["aborted"] == before["aborted"]
    # The engine was told, and did not go on to the end.
    assert after["generated_tokens"] - before["generated_tokens"] < 5 * 2000


def run_overlapping_engine(config: EngineConfig, endpoint: str) -> None:
    """The engine process's main, launching each step before the last one's tokens are known."""

    def overlapping(*given: Any) -> Engine:
        engine = build_engine(*given)
        engine.overlap = True
        return engine

    with patch.object(frontend, "build_engine", overlapping):
        run_engine(config, endpoint)


@asynccontextmanager
async def serving(model: Path, **options: Any) -> AsyncIterator[tuple[Service, httpx.AsyncClient]]:
    """The API in this process, the engine in another."""
    engine = EngineConfig(model=str(model), device="cpu", **options)
    serve = ServeConfig(request_log="off")
    service = Service(engine, serve)
    app = build_app(service, engine, serve, RequestLog("off"))
    try:
        service.start()
        await service.started()
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield service, client
    finally:
        await service.close()


def test_tokens_that_were_under_way_are_dropped(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "run_engine", run_overlapping_engine)
    prompts = [f"path {number}" for number in range(8)]
    with LLM(model_folder, device="cpu", dtype="float64") as llm:
        texts = [each.text or "" for each in llm.generate(prompts, max_tokens=TOKENS, **SAMPLED)]
        stops = [[text[3 * i : 3 * i + 2]] for i, text in enumerate(texts)]
        expected = [
            llm.generate(prompt, max_tokens=TOKENS, stop=stop, **SAMPLED)
            for prompt, stop in zip(prompts, stops, strict=True)
        ]

    async def main() -> None:
        async with serving(model_folder, dtype="float64") as (service, client):
            bodies = [
                {**SAMPLED, "prompt": prompt, "stop": stop, "max_tokens": TOKENS}
                for prompt, stop in zip(prompts, stops, strict=True)
            ]
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=body, timeout=PATIENCE) for body in bodies)
            )
            for answer, result in zip(answers, expected, strict=True):
                (choice,) = answer.json()["choices"]
                assert choice["text"] == result.text
                assert choice["finish_reason"] == result.finish_reason == "stop"
                used = answer.json()["usage"]["completion_tokens"]
                assert used == result.usage.completion_tokens
            assert service.client.num_open == 0
            needed = sum(result.usage.completion_tokens for result in expected)
            while (stats := service.client.stats) is None or (
                stats.running or stats.generated_tokens < needed
            ):
                await asyncio.sleep(0.02)
            assert stats.generated_tokens > needed  # some came too late to be said
            assert stats.aborted == 0

    asyncio.run(main())


class FailingDetokenizer(Detokenizer):
    """Fails on the fifth token of the prompt that asks for it."""

    def __init__(self, tokenizer: Any, stop: Any, prompt_ids: Any, **options: Any) -> None:
        super().__init__(tokenizer, stop, prompt_ids, **options)
        self._left = 5 if tokenizer.decode(prompt_ids) == "fail" else -1

    def push(self, token_ids: Any) -> str:
        self._left -= 1
        if self._left == 0:
            raise ValueError("no text for this token")
        return super().push(token_ids)


def test_an_answer_that_fails_in_its_text_is_lost_alone(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "Detokenizer", FailingDetokenizer)

    async def main() -> None:
        async with serving(model_folder) as (service, client):

            async def ask(prompt: str, **body: Any) -> httpx.Response:
                given = {"prompt": prompt, "max_tokens": 30, "ignore_eos": True, **body}
                return await client.post("/v1/completions", json=given, timeout=PATIENCE)

            good, bad, streamed, pair = await asyncio.gather(
                ask("good"), ask("fail"), ask("fail", stream=True), ask("fail", n=2)
            )
            assert good.status_code == 200
            assert good.json()["usage"]["completion_tokens"] == 30
            for failed in (bad, pair):
                assert failed.status_code == 500
                assert "no text for this token" in failed.json()["error"]["message"]
            assert streamed.status_code == 200
            last = json.loads(streamed.text.strip().rpartition("data: ")[2])
            assert "no text for this token" in last["error"]["message"]
            assert service.client.num_open == 0
            assert (await ask("good")).status_code == 200
            while service.client.stats is None or service.client.stats.aborted < 4:
                await asyncio.sleep(0.02)  # the engine has let go of them too

    asyncio.run(main())
