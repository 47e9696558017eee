"""Which quantised weights stay as the file has them."""

from __future__ import annotations

import pytest
import torch

from cairn.config import EngineConfig
from cairn.engine import quantization
from cairn.engine.quantization import resolve_quantization
from cairn.kernels import fp8_many


@pytest.mark.parametrize(
    ("types", "choice", "keeps"),
    [
        (("FP8",), "auto", True),
        (("Q4_K", "Q6_K"), "auto", False),
        (("Q4_K", "Q6_K"), "keep", True),
        (("INT4",), "auto", False),
    ],
)
def test_what_a_gpu_keeps(
    types: tuple[str, ...], choice: str, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 by default; codes are slower for several rows, so only if asked for."""
    monkeypatch.setattr(quantization, "use_kernels", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(fp8_many, "library_refusal", lambda _: "torch is old")
    config = EngineConfig(model="any", quantization=choice)
    found = resolve_quantization(config, types, torch.bfloat16, torch.device("cuda"))
    assert found.keep == keeps
    assert any("torch is old" in note for note in found.notes) == ("FP8" in types)
    assert any("quantization=keep" in note for note in found.notes) == (not keeps)
