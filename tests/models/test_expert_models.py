"""Mixtures of experts and latent attention: golden logits in every way a prompt can be computed,
random configurations against transformers, and the forms that checkpoints come in."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config, Qwen3MoeConfig

from cairn import LLM
from cairn.errors import ConfigError, LoadError
from cairn.models.config_reader import ConfigReader
from cairn.models.layers import Linear
from cairn.models.registry import read_spec
from tests.helpers import GOLDENS, poison_free_memory, tokens_of

FAMILIES = ("hf_qwen3_moe_", "hf_deepseek_v2_", "hf_deepseek_v3_")
CASES = sorted(p.name for p in GOLDENS.glob("hf_*") if p.name.startswith(FAMILIES))
V3 = "hf_deepseek_v3_yarn_groups"


def load(folder: Path, **options: Any) -> LLM:
    llm = LLM(folder, **{"dtype": "float32", "device": "cpu", "page_size": 16, **options})
    poison_free_memory(llm.engine)
    return llm


def quick(case: str, page_size: int, chunk: int) -> bool:
    return page_size == 16 and (chunk == 64 or (chunk > 1 and case == V3))


@pytest.mark.parametrize(
    ("case", "page_size", "chunk"),
    [
        pytest.param(case, size, chunk, marks=() if quick(case, size, chunk) else pytest.mark.slow)
        for case in CASES
        for size in (16, 64, 512)
        for chunk in (1, 7, 64, 4096)
    ],
)
def test_goldens_in_chunks_and_batches_cold_and_warm(case: str, page_size: int, chunk: int) -> None:
    golden = load_file(GOLDENS / case / "golden.safetensors")
    prompts = [golden[f"input_ids_{name}"].tolist() for name in "ab"]
    with load(GOLDENS / case, page_size=page_size, chunked_prefill_size=chunk) as llm:
        for warm in (False, True):
            results = llm.generate(prompts, max_tokens=32, ignore_eos=True)
            for name, result in zip("ab", results, strict=True):
                assert result.token_ids == golden[f"greedy_ids_{name}"].tolist()
                if warm and page_size < len(prompts[0]):
                    assert result.usage.cached_tokens > 0
        for name, prompt in zip("ab", prompts, strict=True):
            expected = golden[f"logits_{name}"].log_softmax(-1)
            torch.testing.assert_close(llm.logprobs(prompt), expected, rtol=0, atol=2e-4)
        llm.engine.scheduler.check()


@pytest.mark.parametrize("case", [V3, "hf_qwen3_moe_norm"])
def test_retracted_requests_say_the_same(case: str) -> None:
    golden = load_file(GOLDENS / case / "golden.safetensors")
    prompt = golden["input_ids_a"].tolist()
    with load(GOLDENS / case) as llm:
        spec, alone = llm.engine.spec, llm.generate(prompt[:90], max_tokens=60, ignore_eos=True)
    page_bytes = sum(layer.layout.of_type(torch.float32).page_bytes(16) for layer in spec.layers)
    few = {"kv_cache_gib": 22 * page_bytes / 2**30, "max_running_requests": 3}
    with load(GOLDENS / case, **few) as llm:
        prompts = [prompt[:90], prompt[50:130], prompt[100:190]]
        results = llm.generate(prompts, max_tokens=60, ignore_eos=True)
        assert results[0].token_ids == alone.token_ids
        assert llm.engine.scheduler.stats.retractions > 0


# -- random configurations ---------------------------------------------------------------------


def random_config(seed: int) -> Any:
    """A tiny model of one of the three families, whose sizes have little in common."""
    pick = random.Random(seed)
    heads = pick.choice([1, 2, 3, 4])
    groups = pick.choice([1, 2, 4])
    each = pick.choice([2, 3, 4])
    common: dict[str, Any] = {
        "vocab_size": 67,
        "hidden_size": heads * pick.choice([8, 12, 16]),
        "intermediate_size": pick.choice([20, 32]),
        "moe_intermediate_size": pick.choice([6, 10, 24]),
        "num_hidden_layers": pick.choice([2, 3]),
        "num_attention_heads": heads,
        "max_position_embeddings": 256,
        "tie_word_embeddings": pick.random() < 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    if seed % 3 == 0:
        return Qwen3MoeConfig(
            **common,
            num_key_value_heads=pick.choice([n for n in range(1, heads + 1) if heads % n == 0]),
            head_dim=pick.choice([8, 12]),
            num_experts=pick.choice([3, 5, 8]),
            num_experts_per_tok=pick.choice([1, 2, 3]),
            norm_topk_prob=pick.random() < 0.5,
            decoder_sparse_step=pick.choice([1, 2]),
            mlp_only_layers=pick.choice([[], [0], [1]]),
            attention_bias=pick.random() < 0.3,
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
    if pick.random() < 0.6:
        rope |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
        if pick.random() < 0.7:
            rope |= {"mscale": pick.choice([0.707, 1.0]), "mscale_all_dim": pick.choice([0.5, 1.0])}
    common |= {
        "num_key_value_heads": heads,
        "q_lora_rank": pick.choice([None, 9, 20]),
        "kv_lora_rank": pick.choice([8, 14, 24]),
        "qk_nope_head_dim": pick.choice([4, 10, 16]),
        "qk_rope_head_dim": pick.choice([2, 4, 8]),
        "v_head_dim": pick.choice([4, 6, 20]),
        "n_routed_experts": groups * each,
        "num_experts_per_tok": pick.randint(1, each),
        "n_shared_experts": pick.choice([1, 2]),
        "first_k_dense_replace": pick.choice([0, 1, 2]),
        "n_group": groups,
        "topk_group": pick.randint(1, groups),
        "routed_scaling_factor": pick.choice([1.0, 2.5]),
        "rope_parameters": rope,
    }
    if seed % 3 == 1:
        grouped = pick.random() < 0.5
        return DeepseekV2Config(
            **common, topk_method="group_limited_greedy" if grouped else "greedy"
        )
    return DeepseekV3Config(
        **common, norm_topk_prob=pick.random() < 0.7, rope_interleave=pick.random() < 0.7
    )


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=() if n < 3 else pytest.mark.slow) for n in range(60)]
)
@torch.no_grad()
def test_random_configurations_equal_transformers(seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    hf = AutoModelForCausalLM.from_config(
        random_config(seed), attn_implementation="eager", experts_implementation="eager"
    ).eval()
    for name, tensor in hf.state_dict().items():
        noise = torch.randn_like(tensor)
        if "norm" in name:
            tensor.copy_(1 + 0.25 * noise)
        elif "bias" in name:
            tensor.copy_(0.3 * noise)
        else:
            tensor.copy_(noise / tensor.shape[-1] ** 0.5)
    hf.save_pretrained(tmp_path)
    ids = tokens_of(110, seed, vocab=67)
    expected = hf(torch.tensor([ids])).logits[0].log_softmax(-1)
    generated = hf.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    with load(tmp_path, chunked_prefill_size=random.Random(seed).choice([7, 50, 200])) as llm:
        torch.testing.assert_close(llm.logprobs(ids), expected, rtol=0, atol=2e-4)
        result = llm.generate(ids, max_tokens=12)
        assert result.token_ids == generated[0, len(ids) :].tolist()


# -- checkpoints -------------------------------------------------------------------------------


def copy_of(case: str, folder: Path, change: Any, **config: Any) -> Path:
    """A golden model with changed tensors and config."""
    tensors = load_file(GOLDENS / case / "model.safetensors")
    change(tensors)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((GOLDENS / case / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **config}))
    return folder


def joined(tensors: dict[str, torch.Tensor]) -> None:
    """One tensor for all experts of a layer."""
    for prefix in {name.split("experts.")[0] for name in tensors if ".experts." in name}:
        by_part = {}
        for part in ("gate", "up", "down"):
            names = [f"{prefix}experts.{e}.{part}_proj.weight" for e in range(16)]
            by_part[part] = torch.stack([tensors.pop(name) for name in names])
        both = torch.cat((by_part["gate"], by_part["up"]), 1)
        tensors[f"{prefix}experts.gate_up_proj"] = both
        tensors[f"{prefix}experts.down_proj"] = by_part["down"]


def logprobs(folder: Path, **options: Any) -> torch.Tensor:
    with load(folder, **options) as llm:
        return llm.logprobs(tokens_of(50))


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    folder = copy_of(V3, tmp_path / "joined", joined)
    assert torch.equal(logprobs(folder), logprobs(GOLDENS / V3))

    def broken(tensors: dict[str, torch.Tensor]) -> None:
        joined(tensors)
        del tensors["model.layers.1.mlp.experts.down_proj"]

    folder = copy_of(V3, tmp_path / "broken", broken)
    with pytest.raises(LoadError, match=r"model.layers.1.mlp.experts.0.down_proj.weight.* missing"):
        load(folder)


def test_a_multi_token_predictor_is_left_out(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(4, 4)
        tensors["model.layers.3.self_attn.o_proj.weight"] = torch.ones(4, 4)

    folder = copy_of(V3, tmp_path / "more", add, num_nextn_predict_layers=1)
    assert torch.equal(logprobs(folder), logprobs(GOLDENS / V3))


def fp8_blocks(tensors: dict[str, torch.Tensor]) -> None:
    """Each projection as FP8 with blocks of 24 x 20, so that those at the edges are partial."""
    for name in [name for name in tensors if "_proj" in name]:
        weight = tensors[name]
        rows, columns = (-(-n // side) for n, side in zip(weight.shape, (24, 20), strict=True))
        scale = torch.rand(rows, columns) + 0.5
        wide = scale.repeat_interleave(24, 0).repeat_interleave(20, 1)
        wide = wide[: weight.shape[0], : weight.shape[1]]
        tensors[name] = (weight / wide).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale


def widened(tensors: dict[str, torch.Tensor]) -> None:
    """What FP8 blocks mean: a number times the scale of its block."""
    fp8_blocks(tensors)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        scale = tensors.pop(name)
        weight = tensors[name.removesuffix("_scale_inv")].float()
        rows, columns = (
            torch.arange(n) // side for n, side in zip(weight.shape, (24, 20), strict=True)
        )
        weight *= scale[rows][:, columns]
        tensors[name.removesuffix("_scale_inv")] = weight


def fp8(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensors[name].to(torch.float8_e4m3fn)}


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS = {"quantization_config": {**FP8, "weight_block_size": [24, 20]}}


def test_fp8_blocks_stay_so_or_are_dequantised_exactly(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = logprobs(copy_of(V3, tmp_path / "wide", widened), quantization="none")
    torch.manual_seed(0)
    folder = copy_of(V3, tmp_path / "blocks", fp8_blocks, **BLOCKS)
    assert torch.equal(logprobs(folder, quantization="none"), expected)
    with load(folder) as llm:
        assert "weights: FP8 as in the file" in llm.engine.notes
        found = llm.logprobs(tokens_of(50))
        matrices = [
            m for _, m in llm.engine.runner.stepper.model.named_modules() if isinstance(m, Linear)
        ]
        assert any(m.weight.numel() == 0 for m in matrices)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda t: None, {"quantization_config": {"quant_method": "hqq"}}, "quant_method is 'hqq'"),
        (lambda t: None, {"quantization_config": FP8}, "says that weights are FP8, but none has"),
        (
            lambda t: None,
            {"quantization_config": {**FP8, "weight_block_size": 128}},
            "block size is",
        ),
        (fp8_blocks, {}, "_scale_inv.* are not part of"),
        (lambda t: t.update(fp8("lm_head.weight", t)), {}, "float8_e4m3fn and no scales"),
        (
            fp8_blocks,
            {"quantization_config": {**FP8, "weight_block_size": [16, 20]}},
            "blocks of 16 x 20 need",
        ),
        (lambda t: None, {"topk_group": 1, "num_experts_per_tok": 5}, "leaves 4 experts"),
        (lambda t: None, {"attention_bias": True}, "attention_bias is True"),
        (lambda t: None, {"n_group": 3}, "n_group is 3"),
        (lambda t: None, {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        (lambda t: None, {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ],
)
def test_what_cannot_be_loaded_is_named(
    tmp_path: Path, change: Any, config: dict[str, Any], message: str
) -> None:
    folder = copy_of(V3, tmp_path / "model", change, **config)
    with pytest.raises((ConfigError, LoadError), match=message):
        load(folder)


def test_int8_experts_stay_close(tmp_path: Path) -> None:
    exact = logprobs(GOLDENS / V3)
    with load(GOLDENS / V3, quantization="int8") as llm:
        assert "int8 weights" in " ".join(llm.engine.notes)
        rounded = llm.logprobs(tokens_of(50))
        names = {name for name, _ in llm.engine.runner.stepper.model.named_tensors()}
        assert "model.layers.1.mlp.gate.weight" in names
    # Rounding may send a row to another expert; on average little changes.
    assert (rounded - exact).abs().median() < 0.1


@pytest.mark.parametrize("tp", [3, 5])
def test_experts_that_ranks_cannot_share_are_named(tp: int) -> None:
    config = json.loads((GOLDENS / V3 / "config.json").read_text())
    config |= {"num_attention_heads": 15, "num_key_value_heads": 15, "intermediate_size": 30}
    with pytest.raises(ConfigError, match=f"tp is {tp} and the number of experts is 16"):
        read_spec(ConfigReader(config, "test"), tp=tp)


def test_ranks_keep_whole_latent_rows_and_their_own_experts(tmp_path: Path) -> None:
    reader = ConfigReader(json.loads((GOLDENS / V3 / "config.json").read_text()), "test")
    one, two = (read_spec(reader, tp=tp).layers[0] for tp in (1, 2))
    assert one.layout == two.layout
    assert (one.num_heads, two.num_heads) == (4, 2)
