"""Which quantised weights stay as the file has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cairn import LLM
from cairn.config import EngineConfig
from cairn.engine import quantization
from cairn.engine.quantization import resolve_quantization, width_notes
from cairn.kernels import code_rows, few_rows, fp8_many
from cairn.models.layers import Linear
from cairn.models.loader import quantize
from cairn.models.quantize import ROUNDINGS
from tests.helpers import TINY_LLAMA, write_model


@pytest.mark.parametrize(
    ("types", "choice", "slow", "keeps"),
    [
        (("FP8",), "auto", "it has 9.0", True),
        (("Q4_K", "Q6_K"), "auto", "it has 9.0", False),
        (("Q4_K", "Q6_K"), "keep", "it has 9.0", True),
        (("INT4",), "auto", "it has 9.0", False),
        (("Q4_K", "Q6_K"), "auto", None, True),
        (("AWQ",), "auto", None, True),
    ],
)
def test_what_a_gpu_keeps(
    types: tuple[str, ...],
    choice: str,
    slow: str | None,
    keeps: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FP8 always. Codes where the fast kernels run; elsewhere several rows are slower, so only if
    asked for."""
    of_codes, of_fp8 = (None, slow) if "FP8" in types else (slow, None)
    monkeypatch.setattr(code_rows, "refusal", lambda _: of_codes)
    monkeypatch.setattr(few_rows, "refusal", lambda _: of_fp8)
    monkeypatch.setattr(quantization, "use_kernels", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(fp8_many, "torch_refusal", lambda _: "torch is old")
    config = EngineConfig(model="any", quantization=choice)
    found = resolve_quantization(config, types, torch.bfloat16, torch.device("cuda"))
    assert found.keep == keeps
    assert any("it has 9.0" in note for note in found.notes) == (slow is not None)
    assert any("torch is old" in note for note in found.notes) == ("FP8" in types)
    assert any("quantization=keep" in note for note in found.notes) == (not keeps)


@pytest.mark.parametrize(("width", "is_slow"), [(64, True), (256, False)])
def test_widths_that_fast_kernels_do_not_read_are_noted(
    width: int, is_slow: bool, tmp_path: Path
) -> None:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width}
    folder = write_model(tmp_path, {**TINY_LLAMA, **sizes})
    with LLM(folder, device="cpu", dtype="bfloat16", kv_cache_gib=0.01) as llm:
        model = llm.engine.runner.stepper.model
        for _, own in model.named_modules():
            if isinstance(own, Linear):
                own._fused = True  # stored as for a GPU
        assert not list(width_notes(model))
        quantize(model, ROUNDINGS["int4"])
        notes = list(width_notes(model))
    assert bool(notes) == is_slow
    assert all("multiples of 128" in note for note in notes)
