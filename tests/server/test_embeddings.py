"""The embeddings API, through the official client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from cairn import LLM
from tests.server.process import ServerProcess

TEXTS = ["One stone", "another", "x" * 700]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def test_embeddings(client: openai.OpenAI, server: ServerProcess, model_folder: Path) -> None:
    sparse: dict[str, Any] = {"attention_backend": "hsa", "page_size": 16, "hsa_window": 32}
    sparse |= {"hsa_topk": 4, "hsa_dense_below": 0}
    with LLM(model_folder, device="cpu", **sparse) as llm:
        for pooling in ("mean", "last"):
            answer = client.embeddings.create(
                model=server.model, input=TEXTS, extra_body={"pooling": pooling}
            )
            found = torch.tensor([each.embedding for each in answer.data])
            wanted = llm.embed(TEXTS, "mean" if pooling == "mean" else "last")
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
            torch.testing.assert_close(found.norm(dim=-1), torch.ones(3))
            assert answer.usage.prompt_tokens == sum(map(len, TEXTS))
    extra: Any = answer
    assert extra.cairn == {"pooling": "last", "normalized": True}
    alone: Any = client.embeddings.create(
        model=server.model,
        input=[int(server.token(letter)) for letter in "One stone"],
        encoding_format="float",
    )
    mean = client.embeddings.create(model=server.model, input="One stone")
    torch.testing.assert_close(
        torch.tensor(alone.data[0].embedding), torch.tensor(mean.data[0].embedding)
    )
    server.wait_until_idle()


def test_what_is_refused(client: openai.OpenAI, server: ServerProcess) -> None:
    for name, options in (
        ("input", {"input": []}),
        ("prompt", {"input": "x" * 5000}),
        ("pooling", {"input": "x", "extra_body": {"pooling": "max"}}),
        ("dimensions", {"input": "x", "dimensions": 7}),
        ("prompt", {"input": [[1], []]}),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model=server.model, **options)
        assert refused.value.param == name, refused.value
