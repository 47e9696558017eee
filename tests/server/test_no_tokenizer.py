"""A model without a tokenizer: token ids in, token ids out, and streams that do not wait."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.helpers import TINY_LLAMA, write_model
from tests.patience import PATIENCE
from tests.server.process import ServerProcess

COMPLETE = "/v1/completions"
LONGEST = 100_000
PROMPT = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def mute(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("mute")
    shape = {"vocab_size": 256, "max_position_embeddings": LONGEST, "eos_token_id": 255}
    model = write_model(folder / "model", {**TINY_LLAMA, **shape})
    with ServerProcess(model, folder / "log", "--kv-cache-gib=0.25", "--dtype=float64") as running:
        yield running


def complete(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, **fields}
    answer = server.post(COMPLETE, body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def streamed(server: ServerProcess, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, without the last line."""
    body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
    answer = server.post(COMPLETE, body)
    assert answer.status_code == 200, answer.text
    *lines, done = (line for line in answer.text.splitlines() if line)
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_tokens_arrive_while_the_request_runs(mute: ServerProcess) -> None:
    wanted = LONGEST - len(PROMPT)
    body = {"prompt": PROMPT, "max_tokens": wanted, "ignore_eos": True, "stream": True}
    headers = {"x-request-id": "left"}
    with httpx.stream(
        "POST", mute.url + COMPLETE, json=body, headers=headers, timeout=PATIENCE
    ) as stream:
        lines = (line for line in stream.iter_lines() if line)
        for _ in range(3):
            (choice,) = json.loads(next(lines).removeprefix("data: "))["choices"]
            assert choice["text"] == "" and choice["finish_reason"] is None
            assert len(choice["token_ids"]) == 1
        assert mute.stats()["open_requests"] == 1
    left = mute.logged("left")
    assert left["error"] == "the client left"
    assert 3 <= left["completion_tokens"] < wanted
    mute.wait_until_idle()


def test_each_token_is_an_event_with_its_id(mute: ServerProcess) -> None:
    (whole,) = complete(mute, max_tokens=6, return_token_ids=True)["choices"]
    *events, usage = streamed(mute, max_tokens=6, stream_options={"include_usage": True})
    choices = [event["choices"][0] for event in events]
    assert [choice["token_ids"] for choice in choices] == [[token] for token in whole["token_ids"]]
    assert all(choice["text"] == "" for choice in choices)
    assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["length"]
    assert usage["usage"]["completion_tokens"] == 6
    # Prompts' ids are for those who ask.
    first, *rest = streamed(mute, max_tokens=6, return_token_ids=True)
    assert first["choices"][0]["prompt_token_ids"] == PROMPT
    assert [event["choices"][0]["token_ids"] for event in rest] == [
        choice["token_ids"] for choice in choices
    ]


def test_a_stop_token_and_several_choices(mute: ServerProcess) -> None:
    (whole,) = complete(mute, max_tokens=6, return_token_ids=True)["choices"]
    ids = whole["token_ids"]
    length = ids.index(ids[3]) + 1
    choices = [
        event["choices"][0]
        for event in streamed(mute, max_tokens=6, n=2, stop_token_ids=[ids[3]], logprobs=1)
    ]
    for index in (0, 1):
        own = [choice for choice in choices if choice["index"] == index]
        assert [choice["token_ids"] for choice in own] == [[token] for token in ids[:length]]
        assert [choice["finish_reason"] for choice in own] == [None] * (length - 1) + ["stop"]
        assert all(len(choice["logprobs"]["tokens"]) == 1 for choice in own)
