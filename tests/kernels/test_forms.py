"""Steps of any lengths need no other compiled forms than those of a few steps that are known."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from cairn import LLM
from cairn.attention.dsa_kernels import RowKernels
from cairn.attention.hsa.kernel_sparse import KernelSparse
from cairn.attention.torch_backend import TorchBackend
from cairn.attention.triton_backend import TritonBackend
from cairn.attention.widened import overflowing_seqs
from cairn.engine import sampler
from cairn.engine.inputs import Draws
from cairn.engine.plan import Advance, StepPlan
from cairn.engine.runner import Runner
from cairn.engine.warm_up import rehearsals, rehearse_head, rungs_of
from cairn.kernels import fp8_many, sparse_select
from cairn.kernels.packing import pack, unpack
from cairn.kernels.precompile import KernelForm, collecting
from cairn.kernels.sampling import sample
from cairn.kernels.sparse_shape import SparseShape
from cairn.memory.landmarks import LandmarkPool
from cairn.models import layers, loader
from cairn.models.loader import quantize
from cairn.models.module import Factory
from cairn.models.quantize import ROUNDINGS
from tests.engine.tiered import tiered
from tests.helpers import (
    TINY_EXPERTS,
    TINY_HILS,
    TINY_LATENT,
    TINY_LLAMA,
    TINY_OLMO3,
    write_model,
)
from tests.kernels.absent_gpu import use_absent_gpu

PAGE = 16
CONTEXT = 160_000  # tokens; 10,000 pages, of which groups of all sizes are made
SEQS = 70
# Sizes of weights are multiples of 16, so that no kernel has two forms because of them.
LARGE = {"hidden_size": 64, "vocab_size": 64, "max_position_embeddings": CONTEXT}
DENSE_BELOW = 100
SPARSE = {"attention_backend": "triton,hsa", "page_size": PAGE, "hsa_topk": 3, "hsa_window": 32}
SPARSE |= {"hsa_dense_below": DENSE_BELOW, "hsa_policy": "quest"}
SELECTING = {**SPARSE, "attention_backend": "hsa", "hsa_prefill": "sparse"}
INDEX = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "indexer_types": ["full", "shared"],
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": DENSE_BELOW,
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hils": ({**TINY_HILS, **LARGE, "full_attn_interleave": 2, "lmk_q_lora_dim": 16}, {}),
    "quest": ({**TINY_LLAMA, **LARGE}, {**SPARSE, "hsa_layers": "1"}),
    "quest-selecting": ({**TINY_LLAMA, **LARGE}, SELECTING),
    "mean": (
        {**TINY_LLAMA, **LARGE},
        {**SELECTING, "hsa_policy": "mean", "hsa_selection_strategy": "group"},
    ),
    "spread": (
        {**TINY_LLAMA, **LARGE},
        {**SELECTING, "hsa_policy": "spread", "page_size": 8, "hsa_topk": 111},
    ),
    "fp8": ({**TINY_LLAMA, **LARGE}, {**SELECTING, "kv_cache_dtype": "fp8"}),
    "fp8-windows": (
        {**TINY_OLMO3, **LARGE},
        {"attention_backend": "triton", "page_size": PAGE, "kv_cache_dtype": "fp8"},
    ),
    "torch": ({**TINY_LLAMA, **LARGE}, {"attention_backend": "torch", "page_size": PAGE}),
    "experts": ({**TINY_EXPERTS, **LARGE}, {"attention_backend": "triton", "page_size": PAGE}),
    "latents": (  # queries are a part of a wider product here, and not with an index
        {**TINY_LATENT, **LARGE, "q_lora_rank": None},
        {"attention_backend": "triton", "page_size": PAGE},
    ),
    "index": ({**TINY_LATENT, **LARGE, **INDEX}, {"page_size": PAGE}),
    "fp8-index": (
        {**TINY_LATENT, **LARGE, **INDEX},
        {"page_size": PAGE, "kv_cache_dtype": "fp8"},
    ),
    "windows": ({**TINY_OLMO3, **LARGE}, {"attention_backend": "triton", "page_size": PAGE}),
    "fp8-weights": ({**TINY_LLAMA, **LARGE}, {"attention_backend": "triton", "page_size": PAGE}),
    "fp8-experts": (
        {**TINY_EXPERTS, **LARGE},
        {"attention_backend": "triton", "page_size": PAGE},
    ),
    "int4-weights": (
        {**TINY_LLAMA, **LARGE, "tie_word_embeddings": True},
        {"attention_backend": "triton", "page_size": PAGE},
    ),
}
OWN_KERNELS = {
    "experts": "experts:_product_kernel",
    "latents": "latent:_latent_decode_kernel",
    "index": "row_attention:_row_attention_kernel",
    "fp8-index": "row_attention:_row_attention_kernel",
    "fp8-windows": "widen_pages:_widen_kernel",
    "fp8-weights": "packed:_widen_kernel",  # looks up tokens
    "fp8-experts": "fp8_experts:_fp8_product_kernel",
    "int4-weights": "packed:_widen_kernel",
}
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "bfloat16",
    "max_running_requests": SEQS,
    "chunked_prefill_size": 2048,
}

Batch = Sequence[tuple[int, int]]
"""Of each sequence, the tokens that are computed already and how many come to them."""
Forms = dict[tuple[str, str], set[str]]
"""By kernel and constants: types and alignments of arguments that it is compiled for."""


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does all that it does on a GPU, in memory of the host."""
    use_absent_gpu(monkeypatch, number=90)
    for kernels in (KernelSparse, RowKernels):
        monkeypatch.setattr(kernels, "refusal", staticmethod(lambda *_: None))
    monkeypatch.setattr(TritonBackend, "unavailable_reason", staticmethod(lambda _: None))
    monkeypatch.setattr(sampler, "has_kernels", lambda _: True)
    monkeypatch.setattr(
        loader,
        "Factory",
        lambda dtype, device, _, own, *__: Factory(dtype, device, True, own),
    )
    monkeypatch.setattr(layers, "_column_blocks", lambda _: 0)  # weights lie as on a GPU
    monkeypatch.setattr(layers, "_FEW_ROWS", 0)
    # All pages are the null page here, which has no landmark.
    monkeypatch.setattr(LandmarkPool, "seal", lambda *_, **__: None)


def plan_of(batch: Batch) -> StepPlan:
    advances = [
        Advance(str(s), s, past, past + new, array("q", [3] * new), past + new, samples=True)
        for s, (past, new) in enumerate(batch)
    ]
    return StepPlan(tuple(advances))


def forms_of(runner: Runner, batches: Iterable[Batch]) -> Forms:
    with collecting() as collected:
        for batch in batches:
            runner.launch(plan_of(batch))
    return by_constants(collected)


def by_constants(collected: Iterable[KernelForm]) -> Forms:
    forms: Forms = {}
    for form in collected:
        data = json.loads(form.data)
        constants = json.dumps([data["constant_keys"], data["constant_vals"], data["options"]])
        arguments = json.dumps([data["signature"], data["attrs_keys"], data["attrs_vals"]])
        forms.setdefault((form.name, constants), set()).add(arguments)
    return forms


def check(found: Forms, known: Forms) -> None:
    more = [name for name, _ in found.keys() - known.keys()]
    assert not more, more
    assert all(found[kernel] <= known[kernel] for kernel in found)
    several = {name for (name, _), forms in known.items() if len(forms) > 1}
    # Penalties and biases make logits float32.
    own = {f"cairn.kernels.sampling:{name}" for name in ("_blocks_kernel", "_pick_kernel")}
    assert several <= own, several


def most_pages(runner: Runner) -> int:
    return int(runner.tables.pages.shape[2]) - PAGE


def page_size(runner: Runner) -> int:
    return runner._choices.geometry.page_size


def rehearsed(runner: Runner) -> Forms:
    """Forms of all steps of the warm-up."""
    backend = runner.stepper.backend
    seqs, pages, size = SEQS, most_pages(runner), page_size(runner)
    if isinstance(backend, TorchBackend):
        seqs, pages = 2, OPTIONS["chunked_prefill_size"] // size
    steps = rehearsals(
        rungs_of(runner.stepper.model, backend, seqs, pages),
        page_size=size,
        max_pages=pages,
        chunk=OPTIONS["chunked_prefill_size"],
        dense_below=DENSE_BELOW,
        overflowing=overflowing_seqs(runner._choices.dense, runner._choices.shape, pages * size),
    )
    with collecting() as collected:
        for step in steps:
            step.run(runner.stepper, runner._choices, tiered=runner.tier is not None)
        rehearse_head(runner.stepper.model)
    return by_constants(collected)


def some_batches(runner: Runner, count: int, most_rows: int = 1500) -> list[Batch]:
    """Of all kinds: few and many sequences, short and long, single rows and chunks."""
    random = np.random.default_rng(5)
    longest = most_pages(runner) * (page_size(runner) - 1)
    batches: list[Batch] = []
    while len(batches) < count:
        seqs = int(2 ** random.uniform(0, np.log2(SEQS + 0.5)))
        past = (2 ** random.uniform(0, np.log2(longest - most_rows), seqs)).astype(int) - 1
        new = (2 ** random.uniform(0, np.log2(most_rows), seqs)).astype(int)
        new[random.random(seqs) < random.choice([0, 0.5, 1])] = 1
        if new.sum() <= most_rows:
            batches.append(list(zip(past.tolist(), new.tolist(), strict=True)))
    return batches


@pytest.mark.parametrize("name", MODELS)
def test_lengths_need_no_other_forms(name: str, tmp_path: Path) -> None:
    config, options = MODELS[name]
    folder = write_model(tmp_path, config)
    with LLM(folder, kv_cache_gib=0.15, **{**OPTIONS, **options}) as llm:
        runner = llm.engine.runner
        if name.endswith(("-weights", "-experts")):  # on a CPU none rounds them for a GPU's kernels
            quantize(runner.stepper.model, ROUNDINGS[name.split("-")[0]])
        assert most_pages(runner) > 9000
        known = rehearsed(runner)
        long = (most_pages(runner) * (page_size(runner) - 1) - 10, 5)
        count = 10 if name == "torch" else 40  # torch's attention is computed
        found = forms_of(runner, [*some_batches(runner, count), [long] * SEQS])
    assert OWN_KERNELS.get(name, "rope_kv:_rope_kv_kernel") in {
        name.removeprefix("cairn.kernels.") for name, _ in found
    }
    check(found, known)


def test_products_of_torch_need_no_other_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch multiplies FP8, it has run with both kinds of scales when forms are known."""
    kinds = set()

    def scaled_mm(
        x: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor, out_dtype: torch.dtype
    ) -> torch.Tensor:
        kinds.add(tuple(own.numel() > max(own.shape) for own in scales))
        return torch.zeros(len(x), weight.shape[1], dtype=out_dtype)

    monkeypatch.setattr(fp8_many, "is_hopper", lambda _: True)
    monkeypatch.setattr(fp8_many, "torch_refusal", lambda _: None)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    config, options = MODELS["fp8-weights"]
    config = {**config, "hidden_size": 256, "intermediate_size": 384}
    with LLM(write_model(tmp_path, config), kv_cache_gib=0.15, **{**OPTIONS, **options}) as llm:
        runner = llm.engine.runner
        quantize(runner.stepper.model, ROUNDINGS["fp8"])
        known = rehearsed(runner)
        assert kinds == {(False, False), (True, True)}
        found = forms_of(runner, some_batches(runner, 40))
    names = {name.removeprefix("cairn.kernels.") for name, _ in found}
    assert "fp8_many:_round_kernel" in names and "fp8_many:_many_rows_kernel" not in names
    check(found, known)


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize(
    ("model", "more", "kernel"),
    [
        ("hils", {"hils_topk": 16}, "swap_in:_swap_plan_kernel"),
        ("index", {}, "swap_rows:_swap_find_kernel"),
    ],
)
def test_a_host_tier_needs_no_other_forms(
    model: str, more: dict[str, Any], kernel: str, resident: bool, tmp_path: Path
) -> None:
    config, _ = MODELS[model]
    config = {**config, "max_position_embeddings": 4000, **more}
    folder = write_model(tmp_path / model, config)
    with tiered(folder, frames=300, pages=400, hot=300, **OPTIONS) as llm:
        runner = llm.engine.runner
        assert runner._residency is not None and runner.tier is not None
        runner.tier.frames[:] = resident
        known = rehearsed(runner)
        found = forms_of(runner, some_batches(runner, 40, most_rows=500))
    names = {name for name, _ in found}
    assert (f"cairn.kernels.{kernel}" in names) != resident
    check(found, known)


def test_draws_of_any_number_need_one_form() -> None:
    forms = []
    for count in (1, 2, 3, 7, 8, 40):
        draws: Draws[np.ndarray] = Draws(
            np.arange(count), np.arange(count), np.zeros(count, dtype=np.float32)
        )
        packed = torch.from_numpy(pack(draws.arrays()))
        device = Draws.on_device(unpack(packed, (2 * count, count, count)))
        assert device.seeds.tolist() == device.places.tolist() == list(range(count))
        with collecting() as collected:
            sample(torch.zeros(count, 1000), device.temperatures, device.seeds)
        forms += [(form.name, form.key) for form in collected]
    assert len(set(forms)) == 2  # one for each of its two kernels


@pytest.mark.parametrize("topk", [1, 32, 65, 100, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rungs_are_where_the_grouping_of_pages_changes(topk: int, dtype: torch.dtype) -> None:
    shape = SparseShape(
        heads=4, kv_heads=2, head_dim=64, page_size=16, landmark_heads=4, landmark_width=64,
        topk=topk, window=64, scale=1.0, strategy="softmax_head", by_lse=False, sinks=0,
        null_split=True, hide_last=True,
    )  # fmt: skip
    tile, most = sparse_select._tile_of(shape, dtype), 70_000
    rungs = sparse_select.page_rungs(shape, dtype, most)
    least = tile + shape.window // shape.page_size + 1
    assert least in rungs
    kinds: dict[int, tuple[int, int]] = {}
    for begin, end in zip(rungs, (*rungs[1:], most), strict=True):
        if begin >= least:
            for pages in {begin, (begin + end) // 2, end - 1}:
                size, _, block = sparse_select._grouping(pages, topk, tile)
                assert kinds.setdefault(begin, (size, block)) == (size, block)
    assert len(set(kinds.values())) == len(kinds) > 2
