"""What can be asked of the host tier, what is refused and why, and how memory is divided."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn import LLM
from cairn.attention.backend import AttentionShape
from cairn.attention.dsa_backend import DSABackend
from cairn.attention.hsa.backend import HSABackend
from cairn.config import EngineConfig
from cairn.engine import tier_sizes
from cairn.engine.attention_options import AttentionPlan
from cairn.engine.hisparse_options import (
    HiSparseOptions,
    check_together,
    hisparse_options,
    selectors,
    split_group,
)
from cairn.engine.limits import Limits
from cairn.engine.memory_plan import plan_memory
from cairn.engine.resolve import EngineChoices, resolve
from cairn.engine.tier_sizes import TierSizes, size_tier
from cairn.errors import ConfigError
from cairn.kernels.interface import MOST_HOT_SLOTS
from cairn.memory.device_swap import SwapBytes
from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import LayerGroup, group_layers
from cairn.memory.kv_pool import KVPool
from cairn.memory.landmarks import LandmarkShape
from cairn.memory.layout import INDEX, LATENT, CacheLayout, CachePart
from cairn.models.config_reader import ConfigReader
from cairn.models.presets import PRESETS
from cairn.models.registry import read_spec
from cairn.sparsity.config import ALL_ROWS, SparseConfig
from cairn.sparsity.policy import PolicyShape
from cairn.sparsity.registry import make_policy
from tests.helpers import GOLDENS, TINY_HILS, TINY_LLAMA, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), TINY_LLAMA)


def load(folder: Path, config: dict[str, Any] | str | None = None, **options: Any) -> LLM:
    text = json.dumps(config) if isinstance(config, dict) else config
    small = {"kv_cache_gib": 0.01, "max_running_requests": 2, "device": "cpu"}
    return LLM(folder, **{**small, "enable_hisparse": True, "hisparse_config": text, **options})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "hisparse_config is not JSON"),
        ("[1]", r"hisparse_config is \[1\]; it must be an object"),
        ({"hot": 1, "a": 2}, "unknown keys a, hot; known: top_k, device_buffer_size"),
        ({"top_k": 0}, "top_k is 0; it must be a whole number from 1"),
        ({"top_k": 100}, "top_k is 100 tokens and page_size 64; .* use 64 or 128"),
        ({"top_k": 10}, "top_k is 10 tokens and page_size 64; .* use 64$"),
        ({"device_buffer_size": 1.5}, "device_buffer_size is 1.5; it must be a whole number"),
        ({"device_buffer_size": 64}, "a query reads 32 pages of 64; it must be at least 2048"),
        ({"host_to_device_ratio": -1}, "host_to_device_ratio is -1; it must be a number from 0"),
        ('{"host_to_device_ratio": NaN}', "host_to_device_ratio is nan; it must be a number"),
        ('{"host_gib": Infinity}', "host_gib is inf; it must be a number"),
        ({"host_gib": 0}, "0.000000 GiB of host memory hold no page"),
        ({"host_gib": 1, "host_to_device_ratio": 3}, "size the same memory; give one"),
        ({"host_gib": True}, "host_gib is True; it must be a number"),
        ({"host_gib": 1e6}, "host_gib is 1000000.0 and .* GiB of memory are free"),
        (
            {"swap_in_block_size": 96},
            "swap_in_block_size is 96; choose one of 32, 64, 128, 256",
        ),
        ({"swap_in_block_size": True}, "swap_in_block_size is True; choose one of"),
        ({"swap_in_block_size": 512}, "swap_in_block_size is for CUDA and the device is cpu"),
        ({"async_backup": 1}, "async_backup is 1; it must be true or false"),
    ],
)
def test_bad_options_are_named(folder: Path, config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_backend": "torch"}, "attention_backend is 'torch'; use attention_backend=hsa"),
        (
            {"attention_backend": "torch", "hisparse_config": '{"top_k": 64}'},
            "attention_backend is 'torch'; use attention_backend=hsa",
        ),
        (
            {"attention_backend": "torch,hsa", "hsa_prefill": "sparse"},
            "which reads prompts densely with torch, and hsa_prefill is 'sparse'",
        ),
        ({"enable_hisparse": False, "hisparse_config": "{}"}, "enable_hisparse is not; set it"),
        ({"hsa_topk": 3, "hisparse_config": '{"top_k": 128}'}, "2 pages, but hsa_topk is 3"),
        ({"kv_cache_gib": 1e-5, "hisparse_config": '{"host_gib": 0.1}'}, "one request needs"),
    ],
)
def test_what_does_not_go_together_is_refused(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, **options)


def test_devices_that_cannot_serve_it_are_refused() -> None:
    config, options = EngineConfig(attention_backend="hsa"), HiSparseOptions(swap_in_block_size=64)
    plan = AttentionPlan((), sparse((0,)), 64, HSABackend)
    cuda = torch.device("cuda")
    check_together(config, options, plan, cuda, refused=None)
    with pytest.raises(ConfigError, match="runs on CUDA and on a CPU and the device is mps"):
        check_together(config, options, plan, torch.device("mps"), refused="no")
    with pytest.raises(ConfigError, match="they cannot serve this model: head_dim is 80"):
        check_together(config, options, plan, cuda, refused="head_dim is 80")


def test_the_environment_names_a_backend_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKEND", "torch")
    with pytest.raises(ConfigError, match="attention_backend is 'torch'"):
        load(folder)


def test_it_turns_sparse_attention_on_by_itself(folder: Path, tmp_path: Path) -> None:
    with load(folder, {"top_k": 128}) as llm:
        notes = "\n".join(llm.engine.notes)
        assert "top-2 pages of 64" in notes
        assert "hisparse:" in notes and "resident" in notes
    with load(write_model(tmp_path / "hils", TINY_HILS)) as llm:
        assert "pages in host memory" in "\n".join(llm.engine.notes)


@pytest.mark.parametrize(
    ("options", "dense"),
    [
        ({}, True),
        ({"hsa_prefill": "dense"}, True),
        ({"attention_backend": "torch,hsa"}, True),
        ({"hsa_prefill": "sparse"}, False),
    ],
)
def test_prompts_are_read_densely_unless_asked_otherwise(
    folder: Path, options: dict[str, Any], dense: bool
) -> None:
    with load(folder, **options) as llm:
        assert ("dense prompts" in "\n".join(llm.engine.notes)) == dense
        tier = llm.engine.runner.tier
        assert tier is not None and (tier.stage is not None) == dense


def test_no_option_means_no_tier() -> None:
    assert hisparse_options(EngineConfig()) is None
    assert hisparse_options(EngineConfig(enable_hisparse=True)) == HiSparseOptions()


# -- sizes ------------------------------------------------------------------------------------


def sparse(layers: tuple[int, ...], **options: Any) -> SparseConfig:
    policy = make_policy("quest", PolicyShape(4, 2, 8, 1.0))
    return SparseConfig(
        policy, layers, topk=4, window=32, strategy="group", fusion="lse", **options
    )


def test_sparse_layers_leave_their_group_and_dense_ones_stay() -> None:
    groups = group_layers([None, 8, None, None])
    split = split_group(groups, sparse((0, 3)))
    assert split == (
        LayerGroup("full", (2,)),
        LayerGroup("window-8", (1,), 8),
        LayerGroup("resident", (0, 3), 32, copy_of=0),
    )
    assert split_group(groups, sparse((0, 2, 3), dense_below=100))[-1].window == 100


def test_layers_that_share_a_selection_are_one_group_and_keep_what_they_keep() -> None:
    full, shared = (CacheLayout.of_latents(6, width).of_type(torch.float32) for width in (4, 0))
    layouts = [full, shared, full, shared, shared]
    by_row = replace(sparse((0, 1, 2, 3, 4), dense_below=100), window=1, by_row=True)
    ids, frames = split_group(group_layers([None] * 5, layouts), by_row)
    assert (ids.layers, frames.layers, frames.copy_of) == ((), (0, 1, 2, 3, 4), 0)
    assert frames.window == 1  # rows that read everything find it wherever it is
    index = frames.layout.part(INDEX)
    assert frames.layers_with(index) == (0, 2)
    assert frames.page_bytes(16) == 5 * 16 * 6 * 4 and frames.staying_bytes(16) == 2 * 16 * 4 * 4
    assert selectors(frames) == {0: 0, 1: 0, 2: 2, 3: 2, 4: 2}
    pool = KVPool((ids, frames), [20, 5], 16, torch.device("cpu"), hot_pages=3)
    assert len(pool.part(0, INDEX)) == 21 and len(pool.part(1, LATENT)) == 9
    with pytest.raises(KeyError):
        pool.part(1, INDEX)


SHARED = GOLDENS / "hf_glm_moe_dsa_shared_index"  # selects 16 rows


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"device_buffer_size": 15}, {}, "a query reads 16 rows; it must be at least 16, better"),
        ({"top_k": 64}, {}, "top_k is 64, and the index of .* selects 16 rows; leave top_k out"),
        (
            {"host_gib": 0.02},
            {"kv_cache_gib": 0.001},
            r"has 0\.001 GiB and one request needs 0\.00\d: 0\.00\d of index keys for \d+ pages in "
            r"host memory, and .* of windows and tails, .* of hot cache; raise kv_cache_gib",
        ),
        ({}, {"attention_backend": "hsa"}, "reads the rows that its index selects"),
        ({}, {"disable_dsa": True}, "disable_dsa makes every layer read all rows"),
        ({}, {"speculative": "ngram"}, "use one of them"),
    ],
)
def test_what_a_tier_of_rows_refuses(
    config: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(SHARED, config, **options)


def test_a_tier_of_rows_says_what_it_holds() -> None:
    with load(SHARED, {"device_buffer_size": 33, "top_k": 16}, page_size=16) as llm:
        notes = "\n".join(llm.engine.notes)
        assert re.search(
            r"\d+ resident and 66 hot rows on the device, beside .* of index keys", notes
        )
        pool = llm.engine.runner.stepper.pool
        ids, frames = (allocator.num_pages for allocator in llm.engine.scheduler.cache.allocators)
        assert len(pool.part(0, INDEX)) == ids + 1
        assert len(pool.part(0, LATENT)) == frames + 1 + 5  # 66 rows in pages of 16


def test_rows_need_kernels_on_a_gpu() -> None:
    plan = AttentionPlan((), replace(sparse((0,)), by_row=True), 64, DSABackend)
    given = EngineConfig(), HiSparseOptions(), plan, torch.device("cuda")
    assert check_together(*given, refused=None).by_row
    with pytest.raises(ConfigError, match=r"kernels of dsa, and they cannot serve .*: too wide"):
        check_together(*given, refused="too wide")


def test_a_prompt_of_a_million_tokens_in_three_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows take 4.3 GiB in host memory, its index keys 1 GiB of those on the device."""
    spec = read_spec(ConfigReader(PRESETS["dsv32-slice-long"], "test"))
    config = EngineConfig(
        kv_cache_gib=3,
        context_length=1_000_100,
        page_size=64,
        enable_hisparse=True,
        hisparse_config='{"host_gib": 4.5}',
        max_running_requests=1,
        chunked_prefill_size=8192,
        device="cpu",
    )
    monkeypatch.setattr(tier_sizes, "free_memory", lambda _: 64 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    choices = resolve(config, spec, torch.bfloat16, torch.device("cpu"))
    cuda = replace(choices.shape, device=torch.device("cuda"))
    plan = plan_memory(replace(choices, kernel_refusal=None, shape=cuda))
    assert plan.max_pages * 64 >= 1_000_100
    assert plan.limits.max_running_requests == 1 and plan.hot_slots == 4096
    assert plan.num_pages[-1] > 8192 // 64


def test_the_default_host_pool_leaves_room_for_requests() -> None:
    """Index keys of host pages stay on the device; they may take half of its budget."""
    options: dict[str, Any] = {"kv_cache_gib": 0.05, "enable_hisparse": True, "device": "cpu"}
    with LLM(GOLDENS / "hf_deepseek_v32_yarn_groups", **options) as llm:
        assert llm.generate([1, 2, 3], max_tokens=4, ignore_eos=True).token_ids


@pytest.mark.parametrize("preset", ["dsv32-slice-long", "glm5-slice"])
def test_dense_rows_beside_a_tier_of_rows_are_read_by_kernels(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window of frames is no window of attention, so it is no reason against a kernel."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    spec = read_spec(ConfigReader(PRESETS[preset], preset))
    config = EngineConfig(model=preset, enable_hisparse=True, context_length=100_000)
    choices = resolve(config, spec, torch.bfloat16, torch.device("cuda"))
    assert choices.dense[0].name == "triton" and "torch" not in [
        kind.name for kind in choices.dense
    ]
    assert not choices.attention.warnings


GIB = 2**30


def sizes(
    budget: int,
    host: int,
    *,
    running: int = 8,
    dense: tuple[int, ...] = (),
    chunk: int = 256,
    buffer: int | None = None,
    swap: SwapBytes | None = None,
    landmark_rows: bool = False,
    dense_prompt_below: int = 0,
    page_bytes: int = 2**20,
    context: int = 100_000,
    buffers: int = 0,
) -> TierSizes:
    """Pages of 16 rows, 1 MiB in each layer; a landmark takes 1 KiB. Kernels keep `buffers` MiB."""
    layers = tuple(layer for layer in range(4) if layer not in dense)
    attention = sparse(layers, landmark_rows=landmark_rows, dense_prompt_below=dense_prompt_below)
    groups = split_group(group_layers([None] * 4), attention)
    mib = 2**20
    part = CachePart("page", (page_bytes,), torch.uint8, per="page")
    groups = tuple(replace(group, layout=CacheLayout((part,))) for group in groups)
    device = torch.device("cpu")
    choices = EngineChoices(
        config=EngineConfig(kv_cache_gib=budget * mib / GIB),
        limits=Limits(chunk, running, max_queued_requests=1),
        context=context,
        geometry=PageGeometry(16, 16),
        attention=AttentionPlan((), attention, 16, HSABackend),
        shape=AttentionShape(4, 2, 8, 1.0, 16, torch.float32, device, groups),
        dense=(),
        dense_reason="",
        kernel_refusal=None if swap else "not asked for",
        landmarks=LandmarkShape((0,), 1, 255, False, torch.float32),
        hisparse=HiSparseOptions(host_gib=host * mib / GIB, device_buffer_size=buffer),
        unrecorded=None,
        drafter=None,
        draft_tokens=0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SwapBytes, "of", lambda *_: swap)
        patch.setattr(HSABackend, "buffer_bytes", lambda _: buffers * mib)
        return size_tier(choices)


def test_memory_is_divided() -> None:
    found = sizes(budget=2000, host=4000)
    ids, frames = found.num_pages
    assert ids == 1000  # four layers of 1 MiB
    assert found.max_running_requests == 8 and found.hot_slots == 8 * 2 * 4
    landmarks = 1000 / 1024
    assert frames == (2000 - landmarks) // 4 - found.hot_slots
    assert "max_running_requests" not in found.note


def test_kernels_pay_for_their_stage_and_tables() -> None:
    found = sizes(budget=4000, host=4000, swap=SwapBytes(per_page=2**17, per_slot=2**18))
    ids, frames = found.num_pages
    assert ids == 1000 and found.hot_slots == 64
    # One layer of all 1,000 pages, as many tables and landmarks, and tables of 64 slots.
    beside = 1000 + 1000 / 8 + 1000 / 1024 + 64 / 4
    assert frames == (4000 - beside) // 4 - found.hot_slots


def test_errors_name_buffers_of_kernels() -> None:
    given: dict[str, Any] = {"host": 4000, "swap": SwapBytes(0, 0)}
    assert sizes(budget=4000, buffers=512, **given) == sizes(budget=4000, **given)
    with pytest.raises(
        ConfigError,
        match=r"of hot cache, and buffers of kernels take 0\.500 GiB beside .*; raise kv_c",
    ):
        sizes(budget=1000, buffers=512, **given)
    with pytest.raises(
        ConfigError,
        match=r"are free .*, and buffers of kernels take 1024\.000 GiB beside .*; lower it",
    ):
        sizes(budget=4000, buffers=2**20, **given)


def test_prompts_that_are_read_densely_have_two_stages() -> None:
    given: dict[str, Any] = {"budget": 4000, "host": 4000, "swap": SwapBytes(0, 0)}
    beside = 2 * 1000 + 1000 / 1024
    found = sizes(**given, dense_prompt_below=ALL_ROWS)
    assert found.num_pages[-1] == (4000 - beside) // 4 - found.hot_slots
    # Fewer pages of host memory than the longest request has: no more is ever staged.
    few = sizes(budget=4000, host=400, swap=SwapBytes(0, 0), dense_prompt_below=ALL_ROWS)
    assert few.num_pages == [100, 100]
    given["budget"] = 1500
    assert sizes(**given).max_running_requests >= 1
    with pytest.raises(
        ConfigError, match=r"1\.953 of stages of prompts.*; raise kv_cache_gib.* or .*=sparse"
    ):
        sizes(**given, dense_prompt_below=ALL_ROWS)


def test_the_hot_cache_is_as_large_as_a_kernel_can_plan() -> None:
    swap = SwapBytes(0, 0)
    small: dict[str, Any] = {"budget": 2000, "host": 100, "page_bytes": 256, "swap": swap}
    found = sizes(**small, running=20_000, chunk=16, buffer=16 * 64)
    assert found.max_running_requests == 512 and found.hot_slots == MOST_HOT_SLOTS
    assert f"plans with at most {MOST_HOT_SLOTS} hot pages" in found.note
    with pytest.raises(ConfigError, match=r"50000 pages .* lower device_buffer_size"):
        sizes(**small, buffer=800_000, context=10**6)


def test_landmark_rows_need_twice_the_selection() -> None:
    assert sizes(budget=2000, host=4000, buffer=16 * 8, landmark_rows=True).hot_slots == 64
    assert sizes(budget=2000, host=4000, buffer=16 * 4).hot_slots == 32
    with pytest.raises(ConfigError, match=r"come beside tokens; it must be at least 128$"):
        sizes(budget=2000, host=4000, buffer=16 * 7, landmark_rows=True)


def test_dense_layers_are_paid_for_every_host_page() -> None:
    with_dense = sizes(budget=2000, host=3000, dense=(3,))
    ids, frames = with_dense.num_pages
    assert ids == 1000  # three layers each
    assert 3 * (frames + with_dense.hot_slots) <= 2000 - 1000 - 1
    with pytest.raises(ConfigError, match=r"0\.001 of landmarks, 0\.977 of dense layers for 1000 "):
        sizes(budget=900, host=3000, dense=(3,))


def test_fewer_run_at_once_where_the_hot_cache_would_be_too_small() -> None:
    found = sizes(budget=300, host=4000)
    assert 1 <= found.max_running_requests < 8
    assert f"max_running_requests is {found.max_running_requests}" in found.note
    frames = found.num_pages[-1]
    assert 4 * (frames + found.hot_slots) <= 300


def test_a_chunk_that_does_not_fit_is_no_reason_to_refuse() -> None:
    found = sizes(budget=100, host=4000, chunk=8192)
    assert found.max_running_requests >= 1 and found.num_pages[-1] < 8192 // 16
