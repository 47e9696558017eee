"""LiteLLM, as a client of all three APIs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.process import ServerProcess

litellm: Any = pytest.importorskip("litellm")

QUESTION = [{"role": "user", "content": "Where is the cairn?"}]


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_chat(server: ServerProcess, provider: str) -> None:
    base = server.url if provider == "anthropic" else f"{server.url}/v1"
    options: dict[str, Any] = {
        "model": f"{provider}/{server.model}",
        "messages": QUESTION,
        "api_base": base,
        "api_key": "unused",
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = litellm.completion(**options)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    parts = [
        part.choices[0].delta.content or "" for part in litellm.completion(**options, stream=True)
    ]
    assert "".join(parts) == whole.choices[0].message.content


def test_responses_and_embeddings(server: ServerProcess) -> None:
    options = {"api_base": f"{server.url}/v1", "api_key": "unused"}
    model = f"openai/{server.model}"
    answer = litellm.responses(model=model, input="Hello", max_output_tokens=12, **options)
    assert answer.output[0].content[0].text
    found = litellm.embedding(model=model, input=["one", "two"], encoding_format="float", **options)
    assert len(found.data) == 2
