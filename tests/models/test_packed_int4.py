"""GPTQ and AWQ checkpoints, written here as their definitions say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cairn import LLM
from cairn.errors import CairnError
from tests.helpers import TINY_LLAMA, tokens_of, write_model

CONFIG = {**TINY_LLAMA, "hidden_size": 128, "intermediate_size": 64}
GROUP = 32
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "GEMM", "zero_point": True}


def pack(numbers: torch.Tensor, bits: int, order: list[int]) -> torch.Tensor:
    """[rows, n] -> int32 [rows, n * bits / 32]; bits i * `bits` onwards hold number order[i]."""
    many = 32 // bits
    by_word = numbers.long().view(len(numbers), -1, many)[..., order]
    words = (by_word << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def write(folder: Path, options: dict[str, Any], *, same_zero: bool = False) -> tuple[Path, Path]:
    """A model with random codes, packed, and the same model with float weights."""
    plain, packed = folder / "plain", folder / "packed"
    write_model(plain, CONFIG)
    packed.mkdir()
    bits, gptq = options["bits"], options["quant_method"] == "gptq"
    many, draw = 32 // bits, torch.Generator().manual_seed(1)
    order = list(range(many)) if gptq else [0, 2, 4, 6, 1, 3, 5, 7]
    floats, written = load_file(plain / "model.safetensors"), {}
    for name, tensor in floats.items():
        if "_proj" not in name:
            written[name] = tensor
            continue
        outputs, columns = tensor.shape
        codes = torch.randint(0, 2**bits, (outputs, columns), generator=draw)
        zeros = torch.randint(1, 16, (outputs, columns // GROUP), generator=draw)
        if same_zero:
            zeros.fill_(2 ** (bits - 1))
        scales = (torch.rand(outputs, columns // GROUP, generator=draw) / 2**bits / 8).half()
        wide_scales, wide_zeros = (x.repeat_interleave(GROUP, 1) for x in (scales, zeros))
        floats[name] = (codes - wide_zeros) * wide_scales.float()
        stem = name.removesuffix(".weight")
        if gptq:
            written[f"{stem}.qweight"] = pack(codes, bits, order).t().contiguous()
            stored = zeros.t() - int(options.get("checkpoint_format") != "gptq_v2")
            written[f"{stem}.g_idx"] = (torch.arange(columns) // GROUP).int()
        else:
            written[f"{stem}.qweight"] = pack(codes.t(), bits, order)
            stored = zeros.t()
        written[f"{stem}.qzeros"] = pack(stored, bits, order)
        written[f"{stem}.scales"] = scales.t().contiguous()
    save_file(floats, plain / "model.safetensors")
    save_file(written, packed / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": options}))
    return plain, packed


@pytest.mark.parametrize(
    ("options", "same_zero"),
    [
        (GPTQ, False),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, False),
        ({**GPTQ, "bits": 8, "sym": True}, True),
        (AWQ, False),
        (AWQ, True),
    ],
)
def test_packed_matrices_are_multiplied_as_they_are(
    options: dict[str, Any], same_zero: bool, tmp_path: Path
) -> None:
    plain, packed = write(tmp_path, options, same_zero=same_zero)
    ids = tokens_of(40)
    with LLM(plain, device="cpu") as llm:
        expected = llm.logprobs(ids)
    with LLM(packed, device="cpu", quantization="none") as llm:
        torch.testing.assert_close(llm.logprobs(ids), expected, rtol=0, atol=1e-5)
    with LLM(packed, device="cpu", quantization="keep") as llm:
        assert f"weights: {options['quant_method'].upper()} as in the file" in llm.engine.notes
        result = llm.logprobs(ids)
        assert not torch.equal(result, expected)
        torch.testing.assert_close(result, expected, rtol=0, atol=5e-3)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({**GPTQ, "bits": 3}, "quantization_config.bits is 3"),
        ({**GPTQ, "desc_act": True}, "quantization_config.desc_act is True"),
        ({**AWQ, "version": "marlin"}, "quantization_config.version is 'marlin'"),
        ({**AWQ, "group_size": 16}, "quantization_config.group_size is 16"),
        ({**AWQ, "group_size": 64}, "do not fit groups of 64"),
    ],
)
def test_what_is_not_supported_is_named(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    written = GPTQ if options["quant_method"] == "gptq" else AWQ
    _, packed = write(tmp_path, written)
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": options}))
    with pytest.raises(CairnError, match=named):
        LLM(packed, device="cpu")


def test_missing_parts_and_other_groups_are_named(tmp_path: Path) -> None:
    _, packed = write(tmp_path, GPTQ)
    path = packed / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj"
    save_file({**tensors, f"{name}.g_idx": tensors[f"{name}.g_idx"].flip(0)}, path)
    with pytest.raises(CairnError, match=f"{name}.g_idx assigns columns to groups in another"):
        LLM(packed, device="cpu")
    del tensors[f"{name}.scales"]
    save_file(tensors, path)
    with pytest.raises(CairnError, match=f"{name}.scales missing from the checkpoint"):
        LLM(packed, device="cpu")
