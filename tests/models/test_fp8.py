"""FP8 weights: what checkpoints hold, shares and stacks of them, and rounding at load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file

from cairn import LLM
from cairn.bench.products import random_codes
from cairn.errors import CairnError, ConfigError
from cairn.models import experts
from cairn.models.experts import ExpertWeights
from cairn.models.fp8 import fit_fp8, readable, to_fp8
from cairn.models.layers import Linear
from cairn.models.module import Factory
from cairn.models.parallel import Alone
from cairn.models.quantize import ROUNDINGS
from tests.helpers import TINY_LLAMA, tokens_of, write_model

CONFIG = {**TINY_LLAMA, "hidden_size": 160, "intermediate_size": 200}
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


def compressed(strategy: str, kind: str = "float") -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    group = {"weights": weights, "targets": ["Linear"], "input_activations": None}
    groups = {"config_groups": {"group_0": group}, "format": f"{kind}-quantized"}
    return {"quant_method": "compressed-tensors", **groups, "ignore": ["lm_head"]}


def strategy_of(options: dict[str, Any]) -> str:
    if options["quant_method"] == "compressed-tensors":
        return str(options["config_groups"]["group_0"]["weights"]["strategy"])
    return "block" if "weight_block_size" in options else "tensor"


def kind_of(options: dict[str, Any]) -> str:
    return "int" if options.get("format") == "int-quantized" else "float"


def widened(numbers: torch.Tensor, scale: torch.Tensor, strategy: str, kind: str) -> torch.Tensor:
    """The weights as compressed-tensors defines them, not rounded to the type of the scales."""
    block = {"block_structure": [128, 128]} if strategy == "block" else {}
    args = QuantizationArgs(num_bits=8, type=kind, strategy=strategy, symmetric=True, **block)
    wide: torch.Tensor = dequantize(numbers, scale.float(), args=args, dtype=torch.float32)
    return wide.contiguous()


def write(folder: Path, options: dict[str, Any]) -> tuple[Path, Path]:
    """A model with random weights of 8 bits, and the same model with float weights."""
    plain, packed = folder / "plain", folder / "packed"
    write_model(plain, CONFIG)
    packed.mkdir()
    draw = torch.Generator().manual_seed(1)
    floats, written = load_file(plain / "model.safetensors"), {}
    strategy = strategy_of(options)
    name_of_scale = "weight_scale_inv" if options is DEEPSEEK else "weight_scale"
    for name, tensor in floats.items():
        if "_proj" not in name:
            written[name] = tensor
            continue
        outputs, columns = tensor.shape
        dtype = torch.int8 if kind_of(options) == "int" else torch.float8_e4m3fn
        numbers = (torch.randn(outputs, columns, generator=draw) * 8).to(dtype)
        size = {"tensor": (1,), "channel": (outputs, 1)}.get(
            strategy, (-(-outputs // 128), -(-columns // 128))
        )
        scale = (torch.rand(size, generator=draw) + 0.5) / 256
        if strategy == "channel":
            scale = scale.bfloat16()
        floats[name] = widened(numbers, scale, strategy, kind_of(options))
        stem = name.removesuffix(".weight")
        written[name] = numbers
        written[f"{stem}.{name_of_scale}"] = scale
        if options in (STATIC, MODELOPT):
            written[f"{stem}.input_scale"] = torch.tensor(0.1)
    save_file(floats, plain / "model.safetensors")
    save_file(written, packed / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": options}))
    return plain, packed


@pytest.mark.parametrize(
    "options",
    [
        *(DEEPSEEK, STATIC, MODELOPT, *map(compressed, ("channel", "tensor", "block"))),
        *(compressed("channel", "int"), compressed("tensor", "int")),
    ],
    ids=["deepseek", "static", "modelopt", "channel", "tensor", "block", "int8", "int8-tensor"],
)
def test_weights_are_what_the_format_says(options: dict[str, Any], tmp_path: Path) -> None:
    plain, packed = write(tmp_path, options)
    ids = tokens_of(40)
    with LLM(plain, device="cpu", quantization="none") as llm:
        expected = llm.logprobs(ids)
    with LLM(packed, device="cpu") as llm:
        name = "INT8" if kind_of(options) == "int" else "FP8"
        assert f"weights: {name} as in the file" in llm.engine.notes
        torch.testing.assert_close(llm.logprobs(ids), expected, rtol=0, atol=1e-4)
    with LLM(packed, device="cpu", quantization="none") as llm:
        assert torch.equal(llm.logprobs(ids), expected)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({**DEEPSEEK, "fmt": "e5m2"}, "quantization_config.fmt is 'e5m2'"),
        ({**DEEPSEEK, "weight_block_size": [64, 128]}, "blocks of 64 x 128 need"),
        ({**MODELOPT, "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4'"),
        ({**compressed("channel"), "format": "pack-quantized"}, "format is 'pack-quantized'"),
        (compressed("group"), "group_0.weights.strategy is 'group'"),
        (compressed("channel", "int"), "matrices of int8 here"),
        ({**compressed("channel"), "format": "int-quantized"}, "group_0.weights.type is 'float'"),
        ({**compressed("channel"), "config_groups": {}}, "config_groups is {}"),
    ],
)
def test_what_is_not_supported_is_named(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    _, packed = write(tmp_path, DEEPSEEK)
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": options}))
    with pytest.raises(CairnError, match=named):
        LLM(packed, device="cpu")


def test_missing_and_odd_tensors_are_named(tmp_path: Path) -> None:
    _, packed = write(tmp_path, DEEPSEEK)
    path, name = packed / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name].float().to(torch.float8_e5m2)}, path)
    with pytest.raises(CairnError, match=f"{name} has type torch.float8_e5m2"):
        LLM(packed, device="cpu")
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, path)
    with pytest.raises(CairnError, match=f"{name} has type torch.float8_e4m3fn and no scales"):
        LLM(packed, device="cpu")
    message = "quantization=fp8 is not possible here: only CUDA, and a CPU in float32 on one rank"
    with pytest.raises(CairnError, match=message):
        LLM(packed, device="cpu", dtype="float64", quantization="fp8")


@pytest.mark.parametrize("span", [None, 64, 128])
def test_shares(span: int | None) -> None:
    torch.manual_seed(0)
    matrix = to_fp8(torch.randn(10, 320), span)
    dense = matrix.dense()
    assert torch.equal(matrix.narrow(0, 3, 5).dense(), dense[3:8])
    for begin, count in ((0, 160), (160, 160), (96, 96)):
        share = matrix.narrow(1, begin, count)
        assert torch.equal(share.dense(), dense[:, begin : begin + count])
        assert readable(share)


def test_scales_that_fit_change_weights_less() -> None:
    """No output suffers, none needs more than twice its smallest scale, and zeros stay."""
    torch.manual_seed(0)
    dense = torch.randn(200, 320) * torch.rand(200, 1)
    dense[7] = 0
    plain, fitted = to_fp8(dense), fit_fp8(dense)
    errors = [(own.dense() - dense).square().sum(1) for own in (plain, fitted)]
    assert (errors[1] <= errors[0]).all() and errors[1].sum() < 0.95 * errors[0].sum()
    assert plain.scale is not None and fitted.scale is not None
    assert (fitted.scale >= plain.scale).all() and (fitted.scale < 2 * plain.scale).all()
    assert torch.equal(fitted.dense()[7], dense[7])


def test_rounding_is_to_the_nearest_number() -> None:
    torch.manual_seed(0)
    dense = torch.randn(6, 96) * torch.rand(6, 1)
    dense[2] = 0
    rounded = to_fp8(dense).dense()
    assert torch.equal(rounded[2], dense[2])
    assert torch.allclose(rounded.amax(), dense.amax(), rtol=1e-6)
    largest = dense.abs().amax(1, keepdim=True)
    # e4m3 has steps of an eighth of a power of two, and of 2**-9 at the least.
    assert ((rounded - dense).abs() <= (dense.abs() / 16).maximum(largest / 448 / 1024)).all()


@pytest.mark.parametrize(
    ("choice", "error"), [("fp8", 0.03), ("int8", 0.01), ("int4", 0.2)], ids=str
)
def test_rounded_when_loaded(choice: str, error: float, tmp_path: Path) -> None:
    folder = write_model(tmp_path, {**TINY_LLAMA, "hidden_size": 128, "intermediate_size": 64})
    ids = tokens_of(40)
    with LLM(folder, device="cpu") as llm:
        expected = llm.logprobs(ids)
    with LLM(folder, device="cpu", quantization=choice) as llm:
        said = f"{choice} weights, embedding and output head int8: relative error "
        note = next(note for note in llm.engine.notes if said in note)
        assert 0 < float(note.split("error ")[1].split(" %")[0]) < 100 * error
        found = llm.logprobs(ids)
    assert not torch.equal(found, expected)
    assert (found - expected).abs().median() < 0.2


@pytest.mark.parametrize("split", ["out", "in"])
@pytest.mark.parametrize("kind", ["fp8", "fp8-blocks", "AWQ"])
def test_ranks_keep_their_shares_of_quantised_matrices(kind: str, split: Any) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    rows, columns, ranks = 96, 512, 2
    whole: Any = random_codes("AWQ", rows, columns)
    if kind != "AWQ":
        whole = to_fp8(torch.randn(rows, columns), 128 if kind == "fp8-blocks" else None)
    shares = []
    for rank in range(ranks):
        parallel = Alone(rank, ranks)
        factory = Factory(torch.float32, torch.device("cpu"), True, parallel, keep=True)
        size = (rows, columns // ranks) if split == "in" else (rows // ranks, columns)
        linear = Linear(size[1], {"own": size[0]}, factory, split=split)
        ((_, slot),) = linear.slots("layer.own")
        assert slot.shape == (rows, columns) and slot.keep is not None
        slot.keep(whole)
        assert linear.form is not None
        shares.append(linear.dense())
    assert torch.equal(torch.cat(shares, int(split == "in")), whole.dense())


def test_a_share_that_would_divide_a_scale_is_refused() -> None:
    with pytest.raises(ConfigError, match="shares of 192, and 128 columns have one scale"):
        random_codes("AWQ", 4, 768).narrow(1, 192, 192)


def test_experts_are_rounded_several_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For kernels: each as if it were alone."""
    monkeypatch.setattr(experts, "MOST_ROUNDED", 2 * 32 * 48)
    torch.manual_seed(0)
    factory = Factory(torch.float32, torch.device("cpu"), fused=True)
    weights = ExpertWeights(48, 16, 5, factory)
    floats = {"gate_up": torch.randn(5, 32, 48), "down": torch.randn(5, 48, 16)}
    for name, stack in floats.items():
        getattr(weights, name).copy_(stack)
    pairs = list(weights.quantize(ROUNDINGS["fp8"]))
    assert sum(len(before) for before, _ in pairs) == 5 * (32 + 48) and len(pairs) == 3 + 2
    for name, stack in floats.items():
        kept = weights._fp8[name]
        for expert, matrix in enumerate(stack):
            alone = fit_fp8(matrix)
            assert alone.scale is not None and kept.scale is not None
            assert torch.equal(kept.values[expert].float(), alone.values.float())
            assert torch.equal(kept.scale[expert], alone.scale)
