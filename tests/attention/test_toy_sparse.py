"""A sparse backend of one's own: named on the command line, and served as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cairn import LLM
from cairn.cli.main import main
from cairn.errors import ConfigError, RequestError
from tests.attention.toy_sparse import ToySparse, visible
from tests.helpers import (
    TINY_LLAMA,
    TINY_OLMO3,
    byte_tokenizer,
    poison_free_memory,
    tokens_of,
    write_model,
)

PAGE, WINDOW = 16, 20
TOY = "tests.attention.toy_sparse:ToySparse"
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "page_size": PAGE}
SPARSE: dict[str, Any] = {"attention_backend": TOY, "hsa_window": WINDOW, "max_running_requests": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**TINY_LLAMA, "model_type": "llama", "vocab_size": 300}
    path = write_model(tmp_path_factory.mktemp("toy"), config)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@torch.no_grad()
def by_hand(folder: Path, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of transformers' model with the toy's visibility as its mask."""
    places = np.arange(len(ids))
    sees = torch.from_numpy(visible(places[:, None], places, WINDOW, PAGE))
    mask = torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, float("-inf"))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    logits: torch.Tensor = model(torch.tensor([ids]), attention_mask=mask[None, None]).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("chunk", [7, 64, 512])
def test_it_is_attention_by_hand(folder: Path, chunk: int) -> None:
    prefix = tokens_of(70)
    prompts = [prefix + tokens_of(n, seed=n) for n in (30, 61, 1)] + [tokens_of(9, seed=3)]
    with LLM(folder, chunked_prefill_size=chunk, **OPTIONS, **SPARSE) as llm:
        poison_free_memory(llm.engine)
        # All at once, the first three on one cached prefix; then again from the cache.
        for _ in range(2):
            results = llm.generate(prompts, max_tokens=20, ignore_eos=True)
            for prompt, result in zip(prompts, results, strict=True):
                whole = prompt + result.token_ids
                scores = by_hand(folder, whole)
                expected = scores[len(prompt) - 1 : -1].argmax(-1).tolist()
                assert result.token_ids == expected
        assert results[0].usage.cached_tokens >= len(prefix) // PAGE * PAGE
        torch.testing.assert_close(llm.logprobs(whole), scores.float(), rtol=0, atol=1e-5)
        llm.engine.scheduler.check()
        assert llm.engine.notes[-1].startswith("toy: 2 of 2 layers")
    with LLM(folder, **OPTIONS) as dense:
        assert (dense.logprobs(prompts[1]) - by_hand(folder, prompts[1])).abs().max() > 0.01


def test_layers_with_windows_go_to_the_dense_partner(tmp_path: Path) -> None:
    """Without a row outside the toy's reach all of attention is dense."""
    folder = write_model(tmp_path, TINY_OLMO3)
    prompt = tokens_of(60)
    options: dict[str, Any] = {**OPTIONS, "hsa_window": 200}
    with LLM(folder, attention_backend=TOY, **options) as llm:
        toy = llm.logprobs(prompt)
    with LLM(folder, **OPTIONS) as llm:
        torch.testing.assert_close(toy, llm.logprobs(prompt), rtol=0, atol=1e-6)


def test_it_runs_from_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--attention-backend", TOY, "--model", str(folder), "--device", "cpu"]
    assert main(["generate", "some text", "--max-tokens", "2", *flags]) == 0
    assert "toy: 2 of 2 layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hsa_topk": 3}, r"hsa_topk is given and attention_backend '.*ToySparse' does not have"),
        ({"hsa_prefill": "dense"}, "hsa_prefill is given"),
        ({"attention_backend": f"torch,{TOY}"}, "reads prompts itself; use .*:ToySparse alone"),
        ({"attention_backend": f"{TOY},torch"}, "use toy, or DENSE,toy"),
        ({"enable_hisparse": True, "hisparse_config": '{"host_gib": 0.1}'}, "toy cannot read"),
        ({"attention_backend": "tests.attention.toy_sparse:Toy"}, "cannot be imported"),
        ({"attention_backend": "tests.attention.toy_sparse:visible"}, "is not a subclass of"),
    ],
)
def test_what_it_cannot_do_is_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(folder, **OPTIONS, **{**SPARSE, **options})


def test_a_device_it_cannot_run_on_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = classmethod(lambda cls, device: f"it needs rain, this is {device.type}")
    monkeypatch.setattr(ToySparse, "unavailable_reason", why)
    with pytest.raises(ConfigError, match="'toy' cannot run here: it needs rain, this is cpu"):
        LLM(folder, **OPTIONS, **SPARSE)


def test_it_cannot_be_traced(folder: Path) -> None:
    with (
        LLM(folder, **OPTIONS, **SPARSE) as llm,
        pytest.raises(RequestError, match="trace shows which pages sparse attention reads"),
    ):
        llm.generate(tokens_of(5), max_tokens=1, trace=True)
