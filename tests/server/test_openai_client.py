"""The official client drives every endpoint."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from tests.patience import PATIENCE
from tests.server.process import ServerProcess

QUESTION: list[Any] = [{"role": "user", "content": "Where is the cairn?"}]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def test_models(client: openai.OpenAI, server: ServerProcess) -> None:
    (model,) = client.models.list().data
    assert model.id == server.model
    assert client.models.retrieve(server.model).id == server.model
    with pytest.raises(openai.NotFoundError, match="another"):
        client.models.retrieve("another/one")


def test_a_stream_says_what_the_whole_answer_says(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    options: Any = {"model": server.model, "messages": QUESTION, "max_tokens": 24}
    options |= {"temperature": 1, "seed": 5}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 24
    said, last, usage = "", None, None
    for chunk in client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            said += choice.delta.content or ""
            last = choice.finish_reason or last
    assert said == whole.choices[0].message.content
    assert last == "length"
    assert usage is not None
    assert usage.total_tokens == whole.usage.total_tokens == usage.prompt_tokens + 24


def test_completions_of_several_prompts_and_choices(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    options: Any = {"model": server.model, "max_tokens": 6, "n": 2}
    options |= {"temperature": 1, "seed": 3}
    both = client.completions.create(prompt=["One", "Another"], **options)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    alone = [client.completions.create(prompt=p, **options) for p in ("One", "Another")]
    assert [c.text for c in both.choices] == [c.text for a in alone for c in a.choices]
    assert both.choices[0].text != both.choices[1].text
    assert both.usage is not None
    assert (both.usage.prompt_tokens, both.usage.completion_tokens) == (3 + 7, 24)
    ids = client.completions.create(prompt=list(b"One"), **options)
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(prompt=["One", "Another"], stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in both.choices]
    assert len(ids.choices) == 2


def test_seeds_temperature_penalties_and_bias(client: openai.OpenAI, server: ServerProcess) -> None:
    def ask(**options: Any) -> str:
        given: Any = {"model": server.model, "messages": QUESTION, "max_tokens": 12, **options}
        return client.chat.completions.create(**given).choices[0].message.content or ""

    one, same, other = (ask(temperature=1, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert ask(temperature=0) == ask(temperature=0, seed=9)
    assert set(ask(logit_bias={server.token("x"): 100})) == {"x"}
    assert ask(temperature=0, presence_penalty=2, frequency_penalty=2) != ask(temperature=0)
    assert ask(temperature=1.5, top_p=0.0001, seed=4) == ask(temperature=0)


def test_stop_strings_end_the_text(client: openai.OpenAI, server: ServerProcess) -> None:
    options: Any = {"model": server.model, "messages": QUESTION, "max_tokens": 8}
    bias = {server.token("a"): 100}
    answer = client.chat.completions.create(**options, logit_bias=bias, stop="aaaa")
    assert answer.choices[0].message.content == ""
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 4


def test_logprobs(client: openai.OpenAI, server: ServerProcess) -> None:
    options: Any = {"model": server.model, "max_tokens": 5, "temperature": 0}
    chat = client.chat.completions.create(
        messages=QUESTION, logprobs=True, top_logprobs=3, **options
    )
    scores = chat.choices[0].logprobs
    assert scores is not None and scores.content is not None and len(scores.content) == 5
    for score in scores.content:
        assert score.bytes is not None and len(score.bytes) == 1
        assert len(score.top_logprobs) == 3
        assert score.logprob == score.top_logprobs[0].logprob <= 0
    streamed = []
    for chunk in client.chat.completions.create(
        messages=QUESTION, logprobs=True, stream=True, **options
    ):
        for choice in chunk.choices:
            if choice.logprobs is not None and choice.logprobs.content is not None:
                streamed += [score.logprob for score in choice.logprobs.content]
    assert streamed == [score.logprob for score in scores.content]
    echoed = client.completions.create(prompt="abc", logprobs=1, echo=True, **options)
    text = echoed.choices[0]
    assert text.text.startswith("abc")
    assert text.logprobs is not None and text.logprobs.token_logprobs is not None
    assert len(text.logprobs.token_logprobs) == 3 + 5
    assert text.logprobs.token_logprobs[0] is None


def test_errors_are_the_clients_own(client: openai.OpenAI, server: ServerProcess) -> None:
    def ask(**options: Any) -> Any:
        given: Any = {"model": server.model, "messages": QUESTION, **options}
        return client.chat.completions.create(**given)

    with pytest.raises(openai.NotFoundError) as unknown:
        ask(model="gpt-4")
    assert unknown.value.param == "model" and unknown.value.code == "model_not_found"
    for field, value in (
        ("temperature", -1),
        ("top_p", 7),
        ("n", 0),
        ("max_tokens", 0),
        ("frequency_penalty", 3),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"99999": 1}),
        ("top_logprobs", 2),
        ("stop", [""]),
        ("store", True),
        ("service_tier", "flex"),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("extra_body", {"use_beam_search": True}),
        ("extra_body", {"min_p": 2}),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(**{field: value})
        name = next(iter(value)) if field == "extra_body" and isinstance(value, dict) else field
        assert refused.value.param == name, refused.value
        assert name in str(refused.value)
    with pytest.raises(openai.BadRequestError, match="at most 4095") as long:
        client.completions.create(model=server.model, prompt="x" * 5000)
    assert long.value.code == "context_length_exceeded"
    part = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[0\]\.type"):
        ask(messages=[{"role": "user", "content": [part]}])


def test_fields_that_ask_for_nothing_are_taken(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    answer = client.chat.completions.create(
        model=server.model,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "Hi", "name": "ada"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "Go on."},
        ],
        max_completion_tokens=2,
        store=False,
        service_tier="auto",
        modalities=["text"],
        user="u-1",
        metadata={"run": "7"},
        extra_headers={"X-Request-ID": "my-own-id"},
        extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True, "cache_salt": "s"},
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer._request_id == "my-own-id"
    line = server.logged("my-own-id")
    assert line["user"] == "u-1" and line["metadata"] == {"run": "7"}
    assert line["completion_tokens"] == 2 and line["finish"] == ["length"]


def test_a_salt_keeps_prefixes_apart(client: openai.OpenAI, server: ServerProcess) -> None:
    def cached(salt: str) -> int:
        answer = client.completions.create(
            model=server.model, prompt="p" * 200, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("mine") == 0
    assert cached("mine") > 100
    assert cached("yours") == 0


def test_async_streams_side_by_side(server: ServerProcess) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": f"number {number}"}],
            max_tokens=16,
            temperature=0,
            stream=True,
        )
        said = ""
        async for chunk in stream:
            said += chunk.choices[0].delta.content or ""
        return said

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
            together = await asyncio.gather(*(ask(client, i) for i in range(8)))
            alone = [await ask(client, i) for i in range(8)]
            assert together == alone

    asyncio.run(main())


def test_tokenize_and_detokenize(server: ServerProcess) -> None:
    def post(path: str, body: Any) -> Any:
        return server.post(path, json=body)

    answer = post("/tokenize", {"prompt": "héllo"}).json()
    assert answer["count"] == len("héllo".encode()) == len(answer["tokens"])
    assert post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "héllo"}
    chat = post("/tokenize", {"messages": QUESTION}).json()
    text = post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"]
    assert text == "<user>Where is the cairn?<assistant>"
    for path, body, name in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": QUESTION}, "prompt"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ):
        refused = post(path, body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith(name)


def test_the_trace_tells_pages_and_shares(server: ServerProcess) -> None:
    body = {"prompt": "z" * 300, "max_tokens": 4, "ignore_eos": True, "cairn": {"trace": True}}
    answer = server.post("/v1/completions", json=body).json()
    told = answer["choices"][0]["cairn"]
    assert told["pages"]["prompt_tokens"] == 300
    assert "".join(told["pages"]["texts"]) == "z" * 300
    assert len(told["reads"]) == 4
    # The prompt is read densely: the row of its last token has everything in its window.
    first, *others = told["reads"]
    assert first["window_page"] == 0
    assert all(layer["pages"] == [] and layer["window"] == 1 for layer in first["layers"])
    for read in others:
        assert [layer["layer"] for layer in read["layers"]] == told["pages"]["sparse_layers"]
        for layer in read["layers"]:
            assert 1 <= len(layer["pages"]) <= 2 * 4  # kv heads choose four pages each
            assert max(layer["pages"]) < read["window_page"]
            assert sum(layer["weights"]) + layer["window"] == pytest.approx(1, abs=0.01)
    short = {"prompt": "all of it is window", "max_tokens": 2, "cairn": {"trace": True}}
    near = server.post("/v1/completions", json=short).json()
    for read in near["choices"][0]["cairn"]["reads"]:
        assert read["window_page"] == 0
        assert all(layer["pages"] == [] and layer["window"] == 1 for layer in read["layers"])
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=PATIENCE
    ) as stream:
        events = [
            json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")
        ]
    told = [event["choices"][0]["cairn"] for event in events]
    assert "pages" in told[0]
    assert sum(len(each.get("reads", ())) for each in told) == 4
