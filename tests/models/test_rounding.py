"""Rounding at load: what is rounded and how, by one rank and by several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cairn import LLM
from cairn.models import quantize as rounding_module
from cairn.models.config_reader import ConfigReader
from cairn.models.decoder import CausalLM
from cairn.models.loader import build_model, quantize, write_tensors
from cairn.models.parallel import Alone
from cairn.models.quantize import ROUNDINGS, to_int8
from tests.helpers import TINY_LLAMA, tokens_of, write_model

CPU = torch.device("cpu")
# The vocabulary divides into no pieces, groups of 16 outputs or ranks.
CONFIG = {**TINY_LLAMA, "hidden_size": 128, "intermediate_size": 64, "vocab_size": 75}
ENDS = ("model.embed_tokens.weight", "lm_head.weight")


def rounded_folder(folder: Path, choice: str, to: Path) -> Path:
    """The same model with the numbers that rounding makes, in float."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            round_one = to_int8 if name in ENDS else ROUNDINGS[choice].round
            tensors[name] = round_one(tensor).dense()
    to.mkdir()
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text((folder / "config.json").read_text())
    return to


def outputs_of(folder: Path, choice: str) -> tuple[tuple[str, ...], torch.Tensor, torch.Tensor]:
    """Notes of the engine; log-probabilities after each token, with the best ones that a request
    returns of its prompt and its next token; an embedding of the prompt."""
    ids = [token % CONFIG["vocab_size"] for token in tokens_of(40)]
    with LLM(folder, device="cpu", quantization=choice) as llm:
        result = llm.generate(ids, max_tokens=1, logprobs=2, prompt_logprobs=2, temperature=0)
        assert result.prompt_logprobs is not None and result.logprobs is not None
        scored = [score for score in (*result.prompt_logprobs, *result.logprobs) if score]
        best = torch.tensor([logprob for score in scored for _, logprob in score.top])
        whole = llm.logprobs(ids)
        return llm.engine.notes, torch.cat((whole.flatten(), best)), llm.embed([ids])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("choice", ROUNDINGS)
def test_embedding_and_output_head_have_8_bits(
    choice: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything the engine returns is what the rounded weights give in float; the rounding of
    inputs changes much less than that of weights. Matrices are rounded in pieces here."""
    monkeypatch.setattr(rounding_module, "MOST_ROUNDED", 20 * CONFIG["hidden_size"])
    folder = write_model(tmp_path / "plain", {**CONFIG, "tie_word_embeddings": tied})
    expected = outputs_of(rounded_folder(folder, choice, tmp_path / "rounded"), "none")
    plain, found = outputs_of(folder, "none"), outputs_of(folder, choice)
    said = f"{choice} weights, embedding and output head int8: relative error "
    assert any(note.startswith(said) for note in found[0])
    for own, other, unrounded in zip(found[1:], expected[1:], plain[1:], strict=True):
        assert (own - other).norm() < 0.05 * (own - unrounded).norm()


@pytest.mark.parametrize("tied", [False, True])
def test_ranks_round_their_shares_as_one_rank_does(tied: bool, tmp_path: Path) -> None:
    config = {**CONFIG, "tie_word_embeddings": tied}
    folder = write_model(tmp_path, config)
    tensors = load_file(folder / "model.safetensors")

    def ends(parallel: Alone) -> list[torch.Tensor]:
        model = build_model(ConfigReader(config, "test"), torch.float32, CPU, parallel)
        write_tensors(model, (("file", *item) for item in tensors.items()), "file")
        assert quantize(model, ROUNDINGS["fp8"]).overall > 0
        assert isinstance(model, CausalLM)
        found = [model.model.embed_tokens.dense()]
        return found if model.lm_head is None else [*found, model.lm_head.dense()]

    shares = [ends(Alone(rank, 2)) for rank in range(2)]
    for whole, *parts in zip(ends(Alone()), *shares, strict=True):
        joined = torch.cat(parts)
        assert len(joined) == 76  # the last rank has a row of zeros
        assert torch.equal(joined[:75], whole) and not joined[75:].any()


@pytest.mark.parametrize("choice", ROUNDINGS)
@pytest.mark.parametrize(
    "excluding",
    [
        {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]},
        {
            "quant_method": "compressed-tensors",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"weights": {"strategy": "channel"}}},
        },
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    ],
    ids=lambda given: given["quant_method"],
)
def test_quantised_checkpoints_keep_their_output_head(
    excluding: dict[str, Any], choice: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path, CONFIG)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if "_proj" in name]:
        tensors[name] = (tensors[name] * 256).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.full((len(tensors[name]), 1), 1 / 256)
    save_file(tensors, path)
    config = {**CONFIG, "quantization_config": excluding}
    (folder / "config.json").write_text(json.dumps(config))
    with LLM(folder, device="cpu", quantization=choice) as llm:
        said = f"{choice} weights, embedding and output head not rounded: relative error "
        assert any(note.startswith(said) for note in llm.engine.notes)
        model = llm.engine.runner.stepper.model
        assert isinstance(model, CausalLM) and model.lm_head is not None
        found = model.model.embed_tokens.dense(), model.lm_head.dense()
        assert all(map(torch.equal, found, (tensors[name] for name in ENDS)))
