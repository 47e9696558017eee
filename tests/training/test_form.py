"""The training form of a model is the engine's forward of its exported folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from cairn import LLM
from cairn.eval.haystack import need_tokenizer, read_text
from cairn.models.source import BUNDLED
from tests import hils_reference
from training.checkpoint import export_model, import_model
from training.model import Decoder
from training.model_config import Architecture, ModelConfig


def random_model(architecture: Architecture) -> Decoder:
    """Small, with weights that make every part of the computation matter."""
    config = ModelConfig(
        architecture=architecture, width=64, layers=2, ffn=96, calibration=8, top_k=4
    )
    model = Decoder(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.25 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(0.25 * noise)
            else:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
    return model


def scores_of(model: Decoder, ids: list[int], block: int = 0) -> torch.Tensor:
    with torch.no_grad():
        hidden = model(torch.tensor([ids]), block=block)
        return model.logits(hidden)[0].log_softmax(-1)


def random_ids(length: int) -> list[int]:
    return torch.randint(1, 4000, (length,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("architecture", ["hils", "full"])
def test_training_form_equals_engine(
    architecture: Architecture, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = random_model(architecture)
    folder = export_model(model, tokenizer, tmp_path / "model", torch.float32)
    ids = random_ids(2048)
    expected = scores_of(model, ids)
    with LLM(folder, device="cpu", dtype="float32", kv_cache_gib=0.1) as llm:
        for length in (1, 2, 62, 63, 64, 65, 127, 128, 190, 500, 2048):
            # A token's scores do not depend on what follows.
            scores = llm.logprobs(ids[:length])
            torch.testing.assert_close(scores, expected[:length], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("top_k", "longest"),
    [
        pytest.param(16, 2048, marks=pytest.mark.slow),
        pytest.param(16, 4096, marks=pytest.mark.slow),
        pytest.param(64, 4096, marks=pytest.mark.slow),
    ],
)
def test_training_form_equals_engine_on_the_shipped_checkpoint(top_k: int, longest: int) -> None:
    """On real text, with as many pages as it was trained for, and with all of them: a page may then
    not be taken for another that is as good within rounding, which changes the rows behind it."""
    model = import_model(BUNDLED["cairn-nano"], torch.device("cpu"))
    model.top_k = top_k
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.1}
    with LLM("cairn-nano", hsa_topk=top_k, **options) as llm:
        ids = need_tokenizer(llm).encode(read_text(None), add_special_tokens=False)[:longest]
        expected = scores_of(model, ids)
        for length in (63, 1008, longest):
            apart = (llm.logprobs(ids[:length]) - expected[:length]).abs().amax(1)
            assert (apart < 1e-4).float().mean() >= (1.0 if top_k == 64 or length <= 1008 else 0.9)


def test_training_form_equals_the_definition_in_float64(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = random_model("hils").double()
    folder = export_model(model, tokenizer, tmp_path / "model", torch.float64)
    config = model.config.to_json(0)
    ids = random_ids(700)
    expected = hils_reference.logprobs(config, hils_reference.load_weights(folder), ids)
    for length in (1, 62, 63, 64, 130, 700):
        # Norms and rope are computed in fp32.
        torch.testing.assert_close(
            scores_of(model, ids[:length]).double(), expected[:length], rtol=0, atol=1e-4
        )


def test_queries_in_blocks_change_nothing(tokenizer: Tokenizer) -> None:
    model, ids = random_model("hils"), random_ids(600)
    torch.testing.assert_close(
        scores_of(model, ids, block=100), scores_of(model, ids), rtol=0, atol=1e-5
    )


def test_a_window_over_everything_is_one_softmax(tokenizer: Tokenizer) -> None:
    """With no chunk to select, top-k is of no account."""
    model, ids = random_model("hils"), random_ids(300)
    model.window = 4096
    alone = scores_of(model, ids)
    model.top_k = 1
    torch.testing.assert_close(scores_of(model, ids), alone, rtol=0, atol=0)


@pytest.mark.parametrize("architecture", ["hils", "full"])
def test_export_and_import(
    architecture: Architecture, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = random_model(architecture)
    folder = export_model(model, tokenizer, tmp_path, torch.float32)
    again = import_model(folder, torch.device("cpu"))
    assert architecture == "full" or again.config == model.config
    ids = random_ids(100)
    torch.testing.assert_close(scores_of(again, ids), scores_of(model, ids), rtol=0, atol=0)


def test_gradients_reach_every_parameter() -> None:
    model = random_model("hils")
    model.window = 64
    scores = model.logits(model(torch.tensor([random_ids(500)]))).log_softmax(-1)
    scores[..., 7].mean().backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert float(parameter.grad.abs().max()) > 0, name


def test_recomputing_layers_gives_the_same_gradients() -> None:
    gradients = []
    for recompute in (False, True):
        model = random_model("hils")
        model.recompute = recompute
        model(torch.tensor([random_ids(200)])).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_nano_fits_its_size() -> None:
    assert Decoder(ModelConfig()).parameter_count() * 2 <= 15_900_000


def test_reading_all_chunks_is_a_large_top_k() -> None:
    model, ids = random_model("hils"), random_ids(900)
    selected = scores_of(model, ids)
    model.read_all = True
    everything = scores_of(model, ids)
    model.read_all, model.top_k = False, 100
    torch.testing.assert_close(scores_of(model, ids), everything, rtol=0, atol=1e-6)
    assert float((selected - everything).abs().max()) > 1e-3
