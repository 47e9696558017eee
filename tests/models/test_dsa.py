"""DeepSeek sparse attention: the rows that every query of every layer reads are exactly those of
the golden models and of the definition, however the prompt is computed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cairn import LLM
from cairn.attention.dsa_backend import DSABackend
from cairn.config import EngineConfig
from cairn.errors import ConfigError
from cairn.memory.layout import INDEX
from cairn.models.config_reader import ConfigReader
from cairn.models.registry import read_spec
from tests.helpers import GOLDENS, poison_free_memory, tokens_of, write_model
from tests.models.dsa_reference import Reference

CASES = sorted(
    path.name
    for path in GOLDENS.glob("hf_*")
    if (path / "layer_intermediates.safetensors").exists()
)
SHARED = "hf_glm_moe_dsa_shared_index"


class Recording(DSABackend):
    """Keeps the positions that each row read, by layer and by the row's own position."""

    name = "recording"

    def __init__(self, parts: Any) -> None:
        super().__init__(parts)
        self.read: dict[tuple[int, int], list[int]] = {}
        self.ready = False
        """Steps of the warm-up are over, which read anything."""

    def attend(self, layer: int, query: Any, piece: Any, positions: Any, step: Any) -> Any:
        for row, own in enumerate(positions.tolist()):
            place = layer, piece.first + row
            assert self.read.setdefault(place, own) == own, "another time it read other rows"
        return super().attend(layer, query, piece, positions, step)

    def forward_indexed(self, layer: int, query: Any, heads: Any, metadata: Any, index: Any) -> Any:
        out = super().forward_indexed(layer, query, heads, metadata, index)
        for rows in [run.kernels for run in metadata.runs if run.kernels and self.ready]:
            batch = metadata.batch
            seq = np.searchsorted(batch.cu_query, rows.rows, side="right") - 1
            places = rows.rows + (batch.kv_lens - batch.cu_query[1:])[seq]
            for place, own in zip(places.tolist(), rows.positions.tolist(), strict=True):
                own = [position for position in own if position >= 0]
                assert self.read.setdefault((layer, place), own) == own, "it read other rows"
        return out


def load(folder: Path, **options: Any) -> LLM:
    options = {"dtype": "float32", "device": "cpu", "page_size": 16, **options}
    llm = LLM(folder, attention_backend="tests.models.test_dsa:Recording", **options)
    poison_free_memory(llm.engine)
    backend: Any = llm.engine.runner.stepper.backend
    backend.ready = True
    return llm


def read_by(llm: LLM) -> dict[tuple[int, int], list[int]]:
    backend = llm.engine.runner.stepper.backend
    assert isinstance(backend, Recording)
    return backend.read


def check_selections(llm: LLM, case: str) -> None:
    """Of prompt a, and nothing else was computed."""
    golden = load_file(GOLDENS / case / "layer_intermediates.safetensors")
    read, layers = read_by(llm), len(llm.engine.spec.layers)
    for layer in range(layers):
        expected = golden[f"sel_idx_{layer}"]
        k = expected.shape[1]
        for position, rows in enumerate(expected.tolist()):
            if position < k:  # dense
                assert rows[: position + 1] == list(range(position + 1))
            else:
                assert read[layer, position] == rows, (layer, position)


SLOW = pytest.mark.slow
QUICK = [(case, 16, 100) for case in (SHARED, "hf_deepseek_v32_yarn_groups")]
CHUNKS = (1, 7, 199, 200, 100, 4096)


@pytest.mark.parametrize(
    ("case", "page_size", "chunk"),
    [
        pytest.param(case, size, chunk, marks=() if (case, size, chunk) in QUICK else SLOW)
        for case in CASES
        for size in (16, 64, 128)
        for chunk in CHUNKS
    ],
)
def test_selections_of_goldens_are_exact(case: str, page_size: int, chunk: int) -> None:
    golden = load_file(GOLDENS / case / "golden.safetensors")
    ids = golden["input_ids_a"].tolist()
    with load(GOLDENS / case, page_size=page_size, chunked_prefill_size=chunk) as llm:
        expected = golden["logits_a"].log_softmax(-1)
        torch.testing.assert_close(llm.logprobs(ids), expected, rtol=0, atol=2e-4)
        check_selections(llm, case)
        # Cold, and from the prefix cache: the recorder compares what is computed twice.
        for _ in range(2):
            result = llm.generate(ids, max_tokens=32, ignore_eos=True)
            assert result.token_ids == golden["greedy_ids_a"].tolist()
        read_by(llm).clear()
        prompts = {name: golden[f"input_ids_{name}"].tolist() for name in ("b", "short")}
        for name, prompt in prompts.items():  # the continuation of `short` crosses k
            read_by(llm).clear()
            expected = golden[f"logits_{name}"].log_softmax(-1)
            torch.testing.assert_close(llm.logprobs(prompt), expected, rtol=0, atol=2e-4)
            result = llm.generate(prompt, max_tokens=32, ignore_eos=True)
            assert result.token_ids == golden[f"greedy_ids_{name}"].tolist()
        llm.engine.scheduler.check()


@pytest.mark.parametrize(
    "case", [SHARED, pytest.param("hf_deepseek_v32_yarn_groups", marks=pytest.mark.slow)]
)
def test_batched_and_retracted_requests_say_the_same(case: str) -> None:
    golden = load_file(GOLDENS / case / "golden.safetensors")
    names = ("a", "short", "b")
    prompts = [golden[f"input_ids_{name}"].tolist() for name in names]
    with LLM(GOLDENS / case, dtype="float32", device="cpu", page_size=16) as llm:
        layers = llm.engine.spec.layers
        for _ in range(2):
            results = llm.generate(prompts, max_tokens=32, ignore_eos=True)
            for name, result in zip(names, results, strict=True):
                assert result.token_ids == golden[f"greedy_ids_{name}"].tolist()
        whole = golden["input_ids_a"].tolist()
        prompts = [whole[:60], whole[50:110], whole[100:160]]
        alone = [llm.generate(prompt, max_tokens=40, ignore_eos=True) for prompt in prompts]
    page_bytes = sum(layer.layout.of_type(torch.float32).page_bytes(16) for layer in layers)
    few = {"kv_cache_gib": 14 * page_bytes / 2**30, "max_running_requests": 3}
    with LLM(GOLDENS / case, dtype="float32", device="cpu", page_size=16, **few) as llm:
        poison_free_memory(llm.engine)
        results = llm.generate(prompts, max_tokens=40, ignore_eos=True)
        assert [one.token_ids for one in results] == [one.token_ids for one in alone]
        assert llm.engine.scheduler.stats.retractions > 0


# -- the definition ----------------------------------------------------------------------------


def random_config(seed: int) -> tuple[dict[str, Any], list[bool]]:
    """A tiny model without experts, and which of its layers have an index."""
    pick = random.Random(seed)
    heads, layers, rope = pick.choice([1, 2, 3]), pick.choice([1, 2, 4]), pick.choice([2, 4])
    full = [True] + [pick.random() < 0.5 for _ in range(layers - 1)]
    glm = seed % 2 == 0
    config: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM" if glm else "DeepseekV32ForCausalLM"],
        "vocab_size": 61,
        "hidden_size": heads * pick.choice([6, 10]),
        "intermediate_size": 14,
        "moe_intermediate_size": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": layers,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": pick.choice([5, 9]),
        "kv_lora_rank": pick.choice([6, 11]),
        "qk_nope_head_dim": pick.choice([3, 8]),
        "qk_rope_head_dim": rope,
        "v_head_dim": pick.choice([4, 7]),
        "index_n_heads": pick.choice([1, 2, 5]),
        "index_head_dim": rope + pick.choice([0, 3, 8]),
        "index_topk": pick.choice([1, 2, 5, 16, 40, 100]),
        "indexer_rope_interleave": glm if pick.random() < 0.7 else not glm,
        "max_position_embeddings": 256,
        "rope_theta": 1e4,
        "rms_norm_eps": pick.choice([1e-6, 1e-5]),
        "eos_token_id": None,
    }
    if glm:
        config["indexer_types"] = ["full" if own else "shared" for own in full]
    else:
        full = [True] * layers
    return config, full


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=() if n < 8 else pytest.mark.slow) for n in range(320)]
)
def test_the_engine_follows_the_definition(seed: int, tmp_path: Path) -> None:
    config, full = random_config(seed)
    folder = write_model(tmp_path, config, seed)
    pick = random.Random(seed)
    if pick.random() < 0.3:
        # Index keys of zero score every row alike: the earlier rows win.
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.0.self_attn.indexer.weights_proj.weight"].zero_()
        save_file(tensors, folder / "model.safetensors")
    ids = tokens_of(pick.choice([12, 45, 70]), seed)
    reference = Reference(folder, config, full)
    expected = reference.logprobs(ids)
    options = {
        "page_size": pick.choice([4, 16]),
        "chunked_prefill_size": pick.choice([1, 7, 30, 99]),
    }
    with load(folder, dtype="float64", **options) as llm:
        found = llm.logprobs(ids)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
        for (layer, position), rows in read_by(llm).items():
            assert rows == reference.selected[layer][position]
        sparse_rows = max(0, len(ids) - config["index_topk"])
        assert len(read_by(llm)) == sparse_rows * config["num_hidden_layers"]


# -- what is kept, shown and refused -----------------------------------------------------------


def config_of(case: str, **changes: Any) -> ConfigReader:
    values = json.loads((GOLDENS / case / "config.json").read_text())
    return ConfigReader({**values, **changes}, "test")


def test_index_keys_stay_on_the_device_and_only_where_they_are_read() -> None:
    layers = read_spec(config_of(SHARED)).layers
    kept = [[part.name for part in layer.layout.parts] for layer in layers]
    assert kept == [["latent", "index"]] * 3 + [["latent"]] * 3
    assert not layers[0].layout.part(INDEX).may_leave


def test_a_trace_gathers_rows_by_page() -> None:
    golden = load_file(GOLDENS / SHARED / "golden.safetensors")
    ids = golden["input_ids_a"].tolist()
    with load(GOLDENS / SHARED) as llm:
        plain = llm.generate(ids, max_tokens=8, ignore_eos=True)
        traced = llm.generate(ids, max_tokens=8, ignore_eos=True, trace=True)
        read = dict(read_by(llm))
        short = llm.generate(ids[:9], max_tokens=2, ignore_eos=True, trace=True)
    assert traced.token_ids == plain.token_ids and traced.trace is not None
    for number, token in enumerate(traced.trace.tokens):
        assert [own.layer for own in token.layers] == list(range(6))
        for own in token.layers:
            rows = read[own.layer, len(ids) - 1 + number]
            assert own.pages == [sorted({row // 16 for row in rows})]
            for shares, window in zip(own.weights[0], own.window_weight, strict=True):
                assert sum(shares) + window == pytest.approx(1, abs=1e-5)
    assert short.trace is not None
    assert all(own.pages == [[]] for token in short.trace.tokens for own in token.layers)


def test_the_dense_twin_reads_every_row(tmp_path: Path) -> None:
    case = "hf_deepseek_v32_all_dense"
    ids = tokens_of(120)
    values = json.loads((GOLDENS / case / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "index_topk": 500}))
    (tmp_path / "model.safetensors").symlink_to(GOLDENS / case / "model.safetensors")
    with LLM(tmp_path, device="cpu", dtype="float32") as llm:
        expected = llm.logprobs(ids)
    with LLM(GOLDENS / case, device="cpu", dtype="float32", disable_dsa=True) as llm:
        assert llm.engine.runner.stepper.backend.name == "torch"
        torch.testing.assert_close(llm.logprobs(ids), expected, rtol=0, atol=2e-5)
    with LLM(GOLDENS / case, device="cpu", dtype="float32") as llm:
        assert llm.engine.runner.stepper.backend.name == "dsa"
        assert (llm.logprobs(ids) - expected).abs().max() > 1


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (SHARED, {"attention_backend": "torch"}, "reads the rows that its index selects"),
        (SHARED, {"attention_backend": "hsa"}, "reads the rows that its index selects"),
        (SHARED, {"attention_backend": "torch,dsa"}, "reads the rows that its index selects"),
        (SHARED, {"hsa_topk": 4}, "hsa_topk is given"),
        (SHARED, {"disable_dsa": True, "attention_backend": "dsa"}, "disable_dsa is given"),
        ("hf_llama_gqa", {"attention_backend": "dsa"}, "has no index"),
        ("hf_deepseek_v3_no_q_lora", {"disable_dsa": True}, "has no index"),
    ],
)
def test_options_that_do_not_fit_are_named(
    case: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(GOLDENS / case, device="cpu", **options)
    assert EngineConfig(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_types": ["shared"] * 6}, "layer 0 shares a selection"),
        ({"indexer_types": ["full"]}, "indexer_types"),
        ({"indexer_types": None, "index_topk_pattern": "FX"}, "index_topk_pattern"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"index_head_dim": 8}, "index_head_dim is 8"),
        ({"index_local_tokens": 4}, "index_local_tokens is 4"),
    ],
)
def test_configs_that_cannot_be_honoured_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_spec(config_of(SHARED, **changes))


def test_which_layers_share_a_selection() -> None:
    many = {"num_hidden_layers": 78, "indexer_types": None}
    layers = read_spec(config_of(SHARED, **many)).layers
    full = [i for i, layer in enumerate(layers) if len(layer.layout.parts) == 2]
    assert full == [0, 1, 2, *range(6, 78, 4)] and len(full) == 21
    by_pattern = {"indexer_types": None, "index_topk_pattern": "FSS"}
    layers = read_spec(config_of(SHARED, **by_pattern)).layers
    assert [len(layer.layout.parts) for layer in layers] == [2, 1, 1, 2, 2, 2]
