"""Kernels of quantised matrices in Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cairn import LLM
from cairn.attention.triton_backend import TritonBackend
from cairn.bench.products import CODE_FORMS
from cairn.kernels import fp8_many
from cairn.models import layers, loader
from cairn.models.experts import ExpertWeights
from cairn.models.fp8 import to_fp8
from cairn.models.module import Factory
from cairn.models.narrow import Narrow
from tests.helpers import TINY_EXPERTS, tokens_of, write_model
from tests.kernels import expert_case, fp8_case, packed_case
from tests.kernels.expert_case import Sizes
from tests.models import test_fp8, test_packed_int4

CPU = torch.device("cpu")


@pytest.mark.parametrize("before", ["nothing", "silu", "norm"])
@pytest.mark.parametrize("group", [0, 64, 128])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_few_rows(rows: int, group: int, before: str) -> None:
    """The last group is partial."""
    adds = before != "nothing"
    fp8_case.check_product(rows, 1040, group, CPU, torch.float32, before=before, adds=adds)


@pytest.mark.parametrize(
    ("group", "of_blocks"), [(0, False), (64, False), (128, False), (128, True)]
)
def test_many_rows(group: int, of_blocks: bool) -> None:
    fp8_case.check_product(
        70, 208, group, CPU, torch.float32, before="norm", adds=True, outputs=150,
        of_blocks=of_blocks, tolerance=2e-3,
    )  # fmt: skip


def test_many_rows_in_bands() -> None:
    """More blocks of rows than a band has."""
    fp8_case.check_product(520, 160, 0, CPU, torch.float32, outputs=300, tolerance=2e-3)


def scaled_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """What torch has on a Hopper GPU."""

    def wide(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for dim in range(2):
            scale = scale.repeat_interleave(numbers.shape[dim] // scale.shape[dim], dim)
        return numbers.float() * scale

    assert len(x) % 16 == 0
    return (wide(x, x_scale) @ wide(weight.t(), scale.t()).t()).to(out_dtype)


@pytest.mark.parametrize(("group", "of_blocks"), [(0, False), (128, False), (128, True)])
@pytest.mark.parametrize("rows", [9, 128, 129])
def test_many_rows_by_torch(
    rows: int, group: int, of_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_many, "is_hopper", lambda _: True)
    monkeypatch.setattr(fp8_many, "torch_refusal", lambda _: None)
    monkeypatch.setattr(fp8_many, "_by_triton", None)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    for outputs, width in ((256, 512), (272, 512), (256, 640), *([(32, 144)] * (group == 0))):
        fp8_case.check_product(
            rows, width, group, CPU, torch.bfloat16,
            outputs=outputs, of_blocks=of_blocks, tolerance=5e-3,
        )  # fmt: skip


@pytest.mark.parametrize("group", [0, 64, 128])
def test_rows_that_fp8_has_exactly_stay_as_they_are(group: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 208).to(torch.float8_e4m3fn).float()
    x[:, ::50] = 448 / 32
    x[1] = 0
    numbers, scale = fp8_many.round_rows(x, group)
    assert torch.equal(Narrow(numbers, scale.t(), group or 208).dense()[:3], x)


@pytest.mark.parametrize("form", CODE_FORMS)
@pytest.mark.parametrize(
    ("rows", "before"), [(1, "nothing"), (1, "silu"), (1, "norm"), (3, "norm"), (40, "nothing")]
)
def test_packed_codes(form: str, rows: int, before: str) -> None:
    packed_case.check_product(form, rows, 1280, CPU, torch.float32, before=before)


@pytest.mark.parametrize("form", CODE_FORMS)
def test_widened_codes(form: str) -> None:
    packed_case.check_widened(form, 1280, CPU)


@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_experts(rows: int, group: int) -> None:
    sizes = Sizes(5, 3, 160, 48)
    expert_case.check_experts(sizes, rows, CPU, torch.float32, fused=True, fp8_group=group)


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("rows", [41, 220])
def test_experts_with_many_rows(rows: int, group: int) -> None:
    """Rows are rounded. An expert has one block of pairs, or several."""
    sizes = Sizes(5, 3, 272, 144)
    expert_case.check_experts(
        sizes, rows, CPU, torch.float32, fused=True, fp8_group=group, rounds=True, tolerance=5e-3
    )


def write(kind: str, folder: Path) -> Path:
    """A quantised model. Experts have FP8 matrices with a scale for each output."""
    if kind == "AWQ":
        return test_packed_int4.write(folder, test_packed_int4.AWQ)[1]
    if kind == "blocks":
        return test_fp8.write(folder, test_fp8.DEEPSEEK)[1]
    target = write_model(folder, TINY_EXPERTS)
    tensors = load_file(target / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        matrix = to_fp8(tensors[name])
        assert matrix.scale is not None
        tensors |= {name: matrix.values, f"{name}_scale": matrix.scale}
    save_file(tensors, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = test_fp8.compressed("channel")
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("kind", ["blocks", pytest.param("AWQ", marks=pytest.mark.slow), "experts"])
def test_a_whole_engine(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through kernels that read what the file has, and in torch from the same weights in float. So
    few rows at a time that inputs are not rounded."""
    folder = write(kind, tmp_path)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.02}
    options |= {"page_size": 16, "chunked_prefill_size": 16, "quantization": "none"}
    answers = []
    for in_kernels in (False, True):
        if in_kernels:
            monkeypatch.setattr(TritonBackend, "unavailable_reason", staticmethod(lambda _: None))
            monkeypatch.setattr(
                loader,
                "Factory",
                lambda dtype, device, *_: Factory(dtype, device, fused=True, keep=True),
            )
            monkeypatch.setattr(layers, "_column_blocks", lambda _: 0)  # weights lie as on a GPU
        backend = "triton" if in_kernels else "torch"
        with LLM(folder, attention_backend=backend, **options) as llm:
            modules = [module for _, module in llm.engine.runner.stepper.model.named_modules()]
            sort = ExpertWeights if kind == "experts" else layers.Linear
            forms = [module.form for module in modules if isinstance(module, sort)]
            assert any(forms) == in_kernels
            answers.append(llm.logprobs(tokens_of(3)))
    torch.testing.assert_close(*answers, rtol=0, atol=1e-3)
