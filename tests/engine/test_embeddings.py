"""Embeddings are transformers' hidden states, pooled, whatever else the engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from cairn import LLM, SamplingParams
from cairn.errors import RequestError
from tests.helpers import TINY, tokens_of
from tests.parallel.ranks import in_step, load

SHAPE = {**TINY, "vocab_size": 67, "max_position_embeddings": 256}
PROMPTS = [tokens_of(length, seed=length, vocab=67) for length in (1, 16, 40, 100, 150)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "page_size": 16}
POOLINGS: tuple[Literal["mean", "last"], ...] = ("mean", "last")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    config = LlamaConfig(**{k: v for k, v in SHAPE.items() if k != "model_type"})
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    folder = tmp_path_factory.mktemp("embedder")
    hf.save_pretrained(folder)
    return folder


@torch.no_grad()
def expected(folder: Path, pooling: str) -> torch.Tensor:
    hf = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    vectors = []
    for prompt in PROMPTS:
        hidden = hf.model(torch.tensor([prompt])).last_hidden_state[0]
        vectors.append(hidden.mean(0) if pooling == "mean" else hidden[-1])
    return torch.nn.functional.normalize(torch.stack(vectors), dim=-1)


@pytest.mark.parametrize("chunk", [512, 48])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_they_equal_transformers(
    folder: Path, pooling: Literal["mean", "last"], chunk: int
) -> None:
    """In one batch and in chunks, and again when the prompts are in the prefix cache."""
    with LLM(folder, chunked_prefill_size=chunk, **OPTIONS) as llm:
        wanted = expected(folder, pooling)
        torch.testing.assert_close(llm.embed(PROMPTS, pooling), wanted, rtol=0, atol=1e-5)
        llm.generate(PROMPTS, max_tokens=4)
        torch.testing.assert_close(llm.embed(PROMPTS, pooling), wanted, rtol=0, atol=1e-5)
        assert all(group.owned == 0 for group in llm.engine.usage())


def test_two_ranks_give_the_same(folder: Path) -> None:
    with load(folder, tp=2, dtype="float32", chunked_prefill_size=48) as llm:
        found = llm.embed(PROMPTS)
        in_step(llm.engine)
    torch.testing.assert_close(found, expected(folder, "mean"), rtol=0, atol=1e-5)


def test_they_run_next_to_generation(folder: Path) -> None:
    """Steps with both give each request what it gets alone."""
    with LLM(folder, chunked_prefill_size=32, **OPTIONS) as llm:
        alone = [result.token_ids for result in llm.generate(PROMPTS, max_tokens=12)]
        vectors = llm.embed(PROMPTS, "last")
        params = SamplingParams(max_tokens=12)
        engine = llm.engine
        writers = [engine.make_requests(prompt, params)[0] for prompt in PROMPTS]
        readers = [engine.make_requests(prompt, params, returns="last")[0] for prompt in PROMPTS]
        for writer, reader in zip(writers, readers, strict=True):
            engine.submit(writer)
            engine.submit(reader)
        while engine.has_work:
            engine.step()
        assert [writer.output_ids for writer in writers] == alone
        for reader, vector in zip(readers, vectors, strict=True):
            assert reader.num_output == 0 and reader.finish_reason == "length"
            torch.testing.assert_close(reader.embedding(), vector, rtol=0, atol=1e-5)


def test_a_retracted_prompt_is_summed_once(folder: Path) -> None:
    wanted = expected(folder, "mean")[-1]
    for steps in range(1, 5):
        with LLM(folder, chunked_prefill_size=48, **OPTIONS) as llm:
            engine = llm.engine
            (request,) = engine.make_requests(PROMPTS[-1], SamplingParams(), returns="mean")
            engine.submit(request)
            for _ in range(steps):
                engine.step()
            if request.pages is not None:
                engine.scheduler._retract(request)
            while engine.has_work:
                engine.step()
            torch.testing.assert_close(request.embedding(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_no_drafts_follow_a_prompt_that_is_only_read(
    folder: Path, pooling: Literal["mean", "last"]
) -> None:
    """The last chunk has one token, as a step of a generating request has."""
    prompt = [1, 2, 3, 4] * 4 + [1]  # of which a drafter would know how it goes on
    with LLM(folder, **OPTIONS) as llm:
        wanted, scores = llm.embed([prompt], pooling), llm.logprobs(prompt)
    with LLM(folder, speculative="ngram", chunked_prefill_size=16, **OPTIONS) as llm:
        torch.testing.assert_close(llm.embed([prompt], pooling), wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(llm.logprobs(prompt), scores, rtol=0, atol=1e-5)


def test_what_cannot_be_embedded_is_refused_by_name(folder: Path) -> None:
    cases: list[tuple[Any, str]] = [
        ("hello", "prompts is one prompt; give a list"),
        (PROMPTS[2], "prompts is one prompt; give a list"),
        ([], "prompts is empty"),
        ([[1], []], r"prompts\[1\]: the prompt is empty"),
    ]
    with LLM(folder, **OPTIONS) as llm:
        for prompts, named in cases:
            with pytest.raises(RequestError, match=named):
                llm.embed(prompts)
        with pytest.raises(RequestError, match="pooling is 'max'; choose mean or last"):
            llm.embed([[1]], "max")  # type: ignore[arg-type]
        assert not llm.engine.has_work
        rows: Any = torch.tensor([PROMPTS[1]])
        torch.testing.assert_close(llm.embed(rows), llm.embed([PROMPTS[1]]))


def test_a_model_of_another_library_has_none(folder: Path) -> None:
    with (
        LLM(folder, model_impl="transformers", **OPTIONS) as llm,
        pytest.raises(RequestError, match="hidden states"),
    ):
        llm.embed(PROMPTS)
