"""LangChain's OpenAI package, with both APIs."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from tests.server.process import ServerProcess

langchain_openai: Any = pytest.importorskip("langchain_openai")


class Flags(BaseModel):
    """What is on."""

    model_config = ConfigDict(extra="forbid")
    on: bool


@pytest.mark.parametrize("responses", [False, True])
def test_chat(server: ServerProcess, responses: bool) -> None:
    model = langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="unused",
        model=server.model,
        temperature=0,
        max_tokens=100,
        use_responses_api=responses,
    )
    whole = model.invoke("Is it on?")
    assert "".join(part.text for part in model.stream("Is it on?")) == whole.text
    assert isinstance(model.with_structured_output(Flags).invoke("Is it on?"), Flags)
    bound = model.bind_tools([Flags], tool_choice="Flags")
    answer = bound.invoke("Is it on?")
    (call,) = answer.tool_calls
    assert call["name"] == "Flags" and isinstance(call["args"]["on"], bool)
    history = [("user", "Is it on?"), answer, {"role": "tool", "tool_call_id": call["id"]}]
    history[-1] = {**history[-1], "content": "yes"}
    assert model.invoke(history).usage_metadata["output_tokens"] > 0


def test_embeddings(server: ServerProcess) -> None:
    model = langchain_openai.OpenAIEmbeddings(
        base_url=f"{server.url}/v1",
        api_key="unused",
        model=server.model,
        check_embedding_ctx_length=False,
    )
    first, second = model.embed_documents(["one", "two"])
    assert len(first) == len(second) > 0 and first != second
