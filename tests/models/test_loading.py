from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cairn import LLM
from cairn.errors import ConfigError, LoadError
from cairn.models import layers, loader
from cairn.models.config_reader import ConfigReader
from cairn.models.decoder import CausalLM
from cairn.models.experts import ExpertWeights
from cairn.models.layers import Embedding, Linear, named_slots
from cairn.models.loader import build_model, fill_dummy, quantize
from cairn.models.presets import PRESETS
from cairn.models.quantize import ROUNDINGS
from tests.helpers import TINY_EXPERTS, TINY_LLAMA, tokens_of, write_model

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", TINY_LLAMA)


def load(folder: Path, **options: Any) -> LLM:
    return LLM(folder, device="cpu", dtype="float32", **options)


def change_tensors(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"part-1.safetensors": names[::2], "part-2.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_sharded_checkpoint_is_the_same_model(folder: Path) -> None:
    ids = tokens_of(20)
    with load(folder) as llm:
        whole = llm.logprobs(ids)
    shard(folder)
    with load(folder) as llm:
        assert torch.equal(llm.logprobs(ids), whole)


def test_weights_of_16_bits_stay_so(folder: Path) -> None:
    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].bfloat16()
        tensors["model.norm.weight"] = tensors["model.norm.weight"].half()

    change_tensors(folder, narrow)
    ids = tokens_of(20)
    with load(folder, quantization="none") as llm:
        expected = llm.logprobs(ids)
    with load(folder) as llm:
        assert "weights: BF16 as in the file" in llm.engine.notes
        torch.testing.assert_close(llm.logprobs(ids), expected, rtol=0, atol=1e-4)
    with LLM(folder, device="cpu", dtype="bfloat16") as llm:
        assert not any("weights" in note for note in llm.engine.notes)


def test_fused_weights_are_the_checkpoints_rows(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    with load(folder) as llm:
        model = llm.engine.runner.stepper.model
        assert isinstance(model, CausalLM)
        linear = dict(model.named_modules())["model.layers.1.self_attn.qkv_proj"]
        assert isinstance(linear, Linear)
        names = ("q_proj", "k_proj", "v_proj")
        stacked = torch.cat([tensors[f"model.layers.1.self_attn.{n}.weight"] for n in names])
        assert torch.equal(linear.dense(), stacked)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update(extra=torch.ones(1)), "extra is not part of LlamaForCausalLM"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(5)}),
            r"model.norm.weight has shape \[5\], the config asks for \[32\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
            "model.norm.weight has type torch.int8",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder: Path, change: Any, message: str) -> None:
    change_tensors(folder, change)
    with pytest.raises(LoadError, match=message):
        load(folder)


def test_a_tied_head_may_be_in_the_file_only_if_it_is_the_embedding(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=True)
    change_tensors(
        folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    load(folder).close()
    change_tensors(folder, lambda t: t["lm_head.weight"].mul_(2))
    with pytest.raises(LoadError, match=r"lm_head.weight differs from the embedding"):
        load(folder)


def test_a_truncated_file_names_the_file_and_the_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(LoadError, match=r"model.safetensors is truncated: tensor model\.\S+ ends"):
        load(folder)


@pytest.mark.parametrize(
    "junk", [b"", b"hello", b"\xff" * 64, (20).to_bytes(8, "little") + b"x" * 20]
)
def test_a_corrupt_file_is_named(folder: Path, junk: bytes) -> None:
    (folder / "model.safetensors").write_bytes(junk)
    with pytest.raises(LoadError, match=r"model\.safetensors"):
        load(folder)


def test_broken_shards_are_named(folder: Path) -> None:
    shard(folder)
    held = load_file(folder / "part-1.safetensors")
    name = sorted(held)[0]
    save_file({k: v for k, v in held.items() if k != name}, folder / "part-1.safetensors")
    with pytest.raises(LoadError, match=rf"part-1.safetensors lacks tensor {name}"):
        load(folder)
    save_file({**held, "stray": torch.ones(1)}, folder / "part-1.safetensors")
    with pytest.raises(LoadError, match=r"part-1.safetensors holds tensor stray"):
        load(folder)
    (folder / "part-2.safetensors").unlink()
    save_file(held, folder / "part-1.safetensors")
    with pytest.raises(LoadError, match=r"part-2.safetensors is missing"):
        load(folder)


def test_a_folder_without_weights_says_so(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=r"neither model.safetensors nor"):
        load(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("attn_logit_softcapping", 30.0),
        ("logit_scale", 0.5),
        ("quantization_config", {"bits": 4}),
        ("sliding_window", 64),
        ("num_experts", 8),
        ("hidden_size", "32"),
        ("num_attention_heads", 3),
        ("vocab_size", 0),
        ("rms_norm_eps", True),
        ("tie_word_embeddings", "yes"),
        ("architectures", ["SomethingElse"]),
        ("architectures", []),
    ],
)
def test_config_fields_that_cannot_be_honoured_are_named(
    folder: Path, field: str, value: Any
) -> None:
    change_config(folder, **{field: value})
    with pytest.raises(ConfigError, match=field.rstrip("s")):
        load(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("hidden_size", 10**18),
        ("vocab_size", 10**30),
        ("head_dim", 10**6),
        ("max_position_embeddings", 10**12),
        ("rope_theta", float("inf")),
        ("rope_theta", 10**400),
        ("rms_norm_eps", float("nan")),
        ("original_max_position_embeddings", -1),
        ("rope_scaling", {"rope_type": "linear", "factor": 1e11}),
        ("rope_scaling", {"type": "yarn", "factor": 2, "original_max_position_embeddings": 0.5}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e-320}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4,
                          "high_freq_factor": 4}),
    ],
)  # fmt: skip
def test_sizes_that_no_model_has_are_refused(folder: Path, field: str, value: Any) -> None:
    change_config(folder, **{field: value})
    with pytest.raises(ConfigError, match=field.replace("_", ".")):
        load(folder)


def test_sizes_are_compared_with_the_tensors_before_the_model_is_built(folder: Path) -> None:
    change_config(folder, intermediate_size=2**24, hidden_size=2**24, head_dim=8)
    with pytest.raises(
        LoadError, match=r"has shape \[61, 32\], the config asks for \[61, 16777216"
    ):
        load(folder)


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("token", [61, -1, 10**30, True, "2", [2, [3]]])
def test_an_end_token_beyond_the_vocabulary_is_refused(
    folder: Path, where: str, token: Any
) -> None:
    values = TINY_LLAMA if where == "config.json" else {}
    (folder / where).write_text(json.dumps({**values, "eos_token_id": token}))
    with pytest.raises(ConfigError, match=r"eos_token_id holds .*from 0 to 60"):
        load(folder)


def test_deeply_nested_json_is_named(folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        kept = (folder / name).read_text() if (folder / name).exists() else "{}"
        (folder / name).write_text('{"a":' + "[" * 100_000)
        with pytest.raises(ConfigError, match=rf"{name} is not valid JSON"):
            load(folder)
        (folder / name).write_text(kept)


@pytest.mark.parametrize("shard", ["../model.safetensors", "a\x00b", "x" * 300, 3, "", "."])
def test_shards_are_files_of_the_folder(folder: Path, shard: object) -> None:
    index = {"weight_map": {"model.norm.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match=r"is no file name|is missing"):
        load(folder)


def test_a_header_that_contradicts_itself_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [2**20, 2**20]
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + raw[8 + length :])
    with pytest.raises(LoadError, match=r"model.safetensors has a corrupt safetensors header"):
        load(folder)


def test_an_unknown_field_can_be_declared_harmless(folder: Path) -> None:
    change_config(folder, note_to_self="hello")
    with pytest.raises(ConfigError, match=r"ignore_config_fields='note_to_self'"):
        load(folder)
    load(folder, ignore_config_fields="note_to_self").close()


def test_neutral_values_of_unknown_fields_are_harmless(folder: Path) -> None:
    change_config(folder, logit_scale=None, use_mamba=False, experts=[], _private="x")
    load(folder).close()


def test_config_that_is_no_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json is not valid JSON"):
        load(folder)


def test_a_model_that_is_neither_folder_nor_preset_lists_the_presets() -> None:
    with pytest.raises(ConfigError, match=r"known: cairn-nano, smollm2, qwen3-0.6b"):
        LLM("no-such-model")


def test_a_preset_needs_dummy_weights() -> None:
    with pytest.raises(ConfigError, match="load_format=dummy"):
        LLM("qwen3-0.6b")


def test_dummy_weights_have_the_stated_distribution_and_follow_the_seed() -> None:
    config = {**TINY_LLAMA, "hidden_size": 128, "vocab_size": 512, "attention_bias": True}
    models = []
    for seed in (1, 1, 2):
        model = build_model(ConfigReader(config, "test"), torch.float32, CPU)
        fill_dummy(model, seed)
        models.append(dict(model.named_tensors()))
    first, same, other = models
    norms = {name for name, slot in named_slots(model).items() if slot.is_norm}
    for name, parameter in first.items():
        assert torch.equal(parameter, same[name])
        if name in norms:
            assert (parameter == 1).all()
        elif parameter.dim() == 1:
            assert (parameter == 0).all()
        else:
            assert not torch.equal(parameter, other[name])
            assert abs(parameter.std().item() - 0.02) < 0.001
            assert abs(parameter.mean().item()) < 0.001


@pytest.mark.parametrize(
    ("given", "name"),
    [(TINY_LLAMA, "int4"), (TINY_LLAMA, "int8"), (TINY_LLAMA, "fp8"), (TINY_EXPERTS, "fp8")],
)
def test_dummy_weights_are_drawn_as_rounding_would_make_them(
    given: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for kernels on a GPU: the same forms and bytes as rounded floats have, and as large."""
    pytest.importorskip("triton")
    monkeypatch.setattr(loader, "use_kernels", lambda *_: True)
    monkeypatch.setattr(layers, "_column_blocks", lambda _: 0)  # weights lie as on a GPU
    config = {**given, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
    config["attention_bias"] = given is TINY_LLAMA
    models = []
    for drawn in (False, True):
        model = build_model(ConfigReader(config, "test"), torch.float32, CPU)
        fill_dummy(model, 1, ROUNDINGS[name] if drawn else None)
        if not drawn:
            quantize(model, ROUNDINGS[name])
        models.append(dict(model.named_modules()))
    assert any(module.quantised_bytes for module in models[0].values())
    for rounded, module in zip(models[0].values(), models[1].values(), strict=True):
        assert module.quantised_bytes == rounded.quantised_bytes
        assert getattr(module, "form", None) == getattr(rounded, "form", None)
        if isinstance(module, Linear | Embedding):
            assert abs(module.dense().std().item() - 0.02) < 0.001
        if isinstance(module, ExpertWeights):
            for stack in module._fp8.values():
                assert stack.scale is not None
                assert abs((stack.values.float() * stack.scale).std().item() - 0.02) < 0.001
        if isinstance(module, Linear) and module.bias is not None:
            assert (module.bias == 0).all()


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("qwen3-0.6b", 596),
        ("dense-345m", 345),
        ("dense-345m-hd128", 383),
        ("qwen3-30b-a3b", 30532),
        ("deepseek-v2-lite", 15706),
        ("dsv3-slice", 1868),
        ("dsv32-slice", 1924),
        ("glm5-slice", 2960),
    ],
)
def test_presets_have_their_published_size(name: str, millions: int) -> None:
    config = ConfigReader(PRESETS[name], name)
    model = build_model(config, torch.float32, torch.device("meta"))
    count = sum(tensor.numel() for _, tensor in model.named_tensors())
    assert abs(count / 1e6 - millions) < 6


def test_dummy_weights_from_a_config_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    with LLM(tmp_path, load_format="dummy", device="cpu") as llm:
        assert len(llm.generate([1, 2, 3], max_tokens=4, ignore_eos=True).token_ids) == 4
