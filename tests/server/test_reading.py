"""What the page asks for beyond OpenAI's API: dense answers, and how far a prompt is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cairn import LLM
from tests.server.process import ServerProcess

PROMPT = "".join(f"stone {i} of the cairn. " for i in range(40))


def complete(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
    answer = server.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def scores(answer: dict[str, Any]) -> list[float]:
    found: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
    return found


def test_a_dense_request_is_answered_as_a_dense_engine_does(
    server: ServerProcess, model_folder: Path
) -> None:
    with LLM(model_folder, device="cpu", page_size=16) as llm:
        wanted = llm.generate(PROMPT, max_tokens=24, ignore_eos=True, logprobs=0)
    sparse = complete(server, logprobs=0)
    dense = complete(server, logprobs=0, cairn={"dense": True, "trace": True})
    assert wanted.logprobs is not None
    assert scores(dense) == pytest.approx([s.logprob for s in wanted.logprobs], abs=1e-4)
    assert scores(sparse) != pytest.approx(scores(dense), abs=1e-3)
    # Its keys and values depend on dense attention, so it shares no prefix with sparse requests.
    assert dense["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    reads = dense["choices"][0]["cairn"]["reads"]
    assert len(reads) == 24
    assert all(read["window_page"] == 0 for read in reads)
    again = complete(server, logprobs=0, cairn={"dense": True})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 800
    assert scores(again) == pytest.approx(scores(dense), abs=1e-4)


def test_a_model_trained_with_sparse_attention_has_no_dense_answer(tmp_path: Path) -> None:
    with LLM("cairn-nano", device="cpu", kv_cache_gib=0.05) as llm:
        assert not llm.engine.can_read_densely


def test_a_stream_tells_how_far_the_prompt_is_read(model_folder: Path, tmp_path: Path) -> None:
    with ServerProcess(model_folder, tmp_path / "log", "--chunked-prefill-size=100") as server:
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_completion_tokens": 3}
        stream = {**body, "stream": True, "cairn": {"reading": True}}
        answer = server.post("/v1/chat/completions", json=stream)
        events = [json.loads(e[6:]) for e in answer.text.split("\n\n") if e.startswith("data: {")]
        told = [e["cairn"] for e in events if e["object"] == "cairn.reading"]
        total = len(PROMPT) + len("<user><assistant>")
        assert [one["read_tokens"] for one in told] == list(range(100, total, 100))
        assert {one["prompt_tokens"] for one in told} == {total}
        kinds = [e["object"] for e in events]
        assert kinds.index("cairn.reading") < len(kinds) - 1 - kinds[::-1].index("cairn.reading")
        assert kinds[-1] == "chat.completion.chunk"
        refused = {**body, "cairn": {"reading": True}}
        answer = server.post("/v1/chat/completions", json=refused)
        assert answer.status_code == 400 and "set stream" in answer.json()["error"]["message"]
