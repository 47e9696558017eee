"""Builds an engine from its config: model, memory, attention backend, runner, scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch

from cairn.attention.backend import AttentionBackend, SparseParts, missing_module
from cairn.attention.widened import WidePool, dense_backend
from cairn.config import EngineConfig
from cairn.engine.engine import Engine
from cairn.engine.graphs import most_decode_rows
from cairn.engine.hisparse_options import prompt_stages, selectors
from cairn.engine.locate import sampling_defaults
from cairn.engine.memory_budget import GIB
from cairn.engine.memory_plan import MemoryPlan, plan_memory
from cairn.engine.quantization import resolve_quantization, width_notes
from cairn.engine.resolve import (
    EngineChoices,
    resolve,
    resolve_device,
    resolve_dtype,
    unbounded_frames,
)
from cairn.engine.runner import Runner
from cairn.engine.scheduler import Scheduler
from cairn.engine.speculation import Speculation
from cairn.engine.threads import check_auto, choose_threads
from cairn.errors import ConfigError
from cairn.kernels.fp8_rows import FP8
from cairn.kernels.interface import COPY_THREADS
from cairn.memory.cache import PagedCache
from cairn.memory.copies import Mover, PageCopies
from cairn.memory.device_swap import SwapShape
from cairn.memory.hisparse import HiSparseCoordinator
from cairn.memory.kv_pool import HostPool, KVPool
from cairn.memory.landmarks import LandmarkPool
from cairn.models.checkpoint import Checkpoint
from cairn.models.fp8_checkpoint import Fp8Weights
from cairn.models.interface import LanguageModel
from cairn.models.loader import (
    Progress,
    WeightSource,
    build_model,
    check_weights,
    fill,
    fill_dummy,
    quantize,
)
from cairn.models.packed_int4 import Packed, Packing, quantization_method, read_quantization
from cairn.models.parallel import Alone, Parallel
from cairn.models.quantize import ROUNDINGS
from cairn.models.registry import read_spec
from cairn.models.source import ModelSource


def build_engine(
    config: EngineConfig,
    source: ModelSource,
    progress: Progress | None = None,
    compiling: Progress | None = None,
) -> Engine:
    """Build an engine on one device, or on several ranks.

    `progress` reports weights that were read, `compiling` kernels that were compiled.
    """
    begin = time.perf_counter()
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, source.config, device)
    ranks: Ranks | None = None
    if config.tp > 1:
        check_tp(config, source, device)
        # Imported here because an engine on one rank does not need it.
        from cairn.engine.parallel.ranks import Ranks

        ranks = Ranks(config, source, dtype, device.type)
        device = ranks.device
    elif isinstance(config.threads, int):
        torch.set_num_threads(config.threads)
    elif config.threads == "auto":
        check_auto(device)
    with nullcontext() if ranks is None else ranks.ended_by_failure():
        sampling_defaults(source)  # fail before the weights are read
        model, notes = load_model(config, source, dtype, device, progress, ranks or Alone())
        loaded = time.perf_counter()
        eos_token_ids = source.eos_token_ids(model.spec.vocab_size)
        if config.threads == "auto":
            notes.append(choose_threads(model))
        choices = resolve(config, model.spec, dtype, device)
        if ranks is not None:
            choices = replace(choices, config=ranks.agree_on_budget(choices))
        memory = plan_memory(choices)
        if ranks is None:
            runner, more_notes = build_runner(choices, memory, model, Alone(), progress=compiling)
        else:
            runner, more_notes = ranks.build_runner(choices, memory, model, compiling)
            more_notes.append(ranks.note)
        if runner.warm_up_seconds:
            more_notes.append(_start_note(begin, loaded, runner.warm_up_seconds))
        attention = choices.attention
        for warning in attention.warnings:
            logging.getLogger("cairn").warning(warning)
        scheduler = Scheduler(
            _build_cache(choices, memory, runner.mover),
            memory.limits,
            time.perf_counter,
            speculation=_build_speculation(choices, model.spec.vocab_size),
        )
        runner.mark_ready()
        return Engine(
            model.spec,
            scheduler,
            runner,
            context_length=choices.context,
            eos_token_ids=eos_token_ids,
            seed=config.seed,
            sparse=None if choices.sparse_drafts else choices.sparse,
            overlap=device.type == "cuda" and not config.disable_overlap_schedule,
            notes=(*notes, *more_notes, *attention.notes, *memory.notes, *attention.warnings),
        )


def _build_cache(choices: EngineChoices, memory: MemoryPlan, mover: Mover | None) -> PagedCache:
    copies = None
    if mover is not None:
        num_pages, num_frames = memory.num_pages[choices.page_group], memory.num_pages[-1]
        copies = PageCopies(num_pages, num_frames, mover)
    return PagedCache(
        choices.geometry,
        choices.groups,
        memory.num_pages,
        eviction="lfu" if choices.config.eviction == "lfu" else "lru",
        prefix_caching=not choices.config.disable_radix_cache,
        copies=copies,
    )


def _build_speculation(choices: EngineChoices, vocab_size: int) -> Speculation | None:
    if choices.drafter is None:
        return None
    least, ahead = 0, False
    if choices.sparse_drafts and choices.sparse is not None:
        # Below this row drafting rows are dense, and save nothing.
        least = choices.sparse.dense_below
        # A GPU drafts while the host plans; a CPU does one after the other. Nothing tells other
        # ranks to draft between steps.
        ahead = choices.device.type == "cuda" and choices.config.tp == 1
    drafter = choices.drafter()
    return Speculation(drafter, choices.draft_tokens, vocab_size, least=least, ahead=ahead)


def _start_note(begin: float, loaded: float, warm_up: Mapping[str, float]) -> str:
    """Where the time since `begin` went; weights were `loaded` at that moment."""
    total = time.perf_counter() - begin
    parts = {"load weights": loaded - begin, **warm_up}
    parts["the rest"] = total - sum(parts.values())
    each = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in parts.items())
    return f"seconds to start the engine: {total:.1f} ({each})"


def check_tp(config: EngineConfig, source: ModelSource, device: torch.device) -> None:
    """Refuse what several ranks cannot serve, before any of them is started."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"tp is {config.tp} and the device {device.type}; several ranks run on cuda or cpu: "
            "use tp=1, or device=cpu"
        )
    if device.type == "cuda" and config.tp > torch.cuda.device_count():
        raise ConfigError(
            f"tp is {config.tp} and torch sees {torch.cuda.device_count()} CUDA devices, of which "
            "each rank needs one; lower tp, show more devices with CUDA_VISIBLE_DEVICES, or use "
            "device=cpu"
        )
    choices = ("keep", *ROUNDINGS) if device.type == "cpu" else ()
    for name, impossible, possible in (
        ("model_impl", "transformers", "cairn"),
        *(("quantization", choice, "none") for choice in choices),
        ("threads", "auto", "N"),
    ):
        if getattr(config, name) == impossible:
            raise ConfigError(
                f"tp is {config.tp} and {name} is {impossible!r}, which one rank alone can do; use "
                f"tp=1, or {name}={possible}"
            )
    read_spec(source.config, config.model_impl, tp=config.tp)


def load_model(
    config: EngineConfig,
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
    parallel: Parallel,
) -> tuple[LanguageModel, list[str]]:
    """The model, or one rank's part of it, and notes for the user about how it was loaded."""
    if config.model_impl == "transformers":
        if source.folder is None or config.load_format == "dummy":
            raise ConfigError(
                "model_impl=transformers needs a model folder or a hub id, with weights"
            )
        from cairn.models.hf_model import load_transformers_model

        return load_transformers_model(source.folder, dtype, device), []
    weights = None if config.load_format == "dummy" else _weights(config, source)
    types = ("F32",) if weights is None else weights.types
    quantization = resolve_quantization(config, types, dtype, device)
    notes = [*quantization.notes]
    if weights is not None and config.model_impl == "cairn":
        check_weights(source.config, weights)
    keep, kernels = quantization.keep, quantization.kernels
    model = build_model(source.config, dtype, device, parallel, config.model_impl, keep, kernels)
    rounding = ROUNDINGS.get(config.quantization)
    if weights is None and rounding is not None and device.type == "cuda" and parallel.size == 1:
        fill_dummy(model, config.seed, rounding)
        return model, [*notes, *width_notes(model)]
    if weights is None:
        fill_dummy(model, config.seed)
    else:
        fill(model, weights, progress)
    if rounding is not None:
        # Makers of a quantised checkpoint have decided what embedding and output head need.
        ends = quantization_method(source.config) is None
        notes.append(str(quantize(model, rounding, ends=ends)))
    return model, [*notes, *width_notes(model)]


def _weights(config: EngineConfig, source: ModelSource) -> WeightSource:
    if source.gguf is not None:
        return source.gguf
    if source.folder is None:
        raise ConfigError(
            f"model {config.model!r} is a preset, a shape without weights; use load_format=dummy"
        )
    weights = Checkpoint.open(source.folder)
    form = read_quantization(source.config)
    if form is None:
        return weights
    return Packed(weights, form) if isinstance(form, Packing) else Fp8Weights(weights, form)


def build_runner(
    choices: EngineChoices,
    memory: MemoryPlan,
    model: LanguageModel,
    parallel: Parallel,
    kind: type[Runner] = Runner,
    progress: Progress | None = None,
) -> tuple[Runner, list[str]]:
    """What one rank runs, and notes for the user about how it runs on a GPU."""
    groups, sparse, device = choices.groups, choices.sparse, choices.device
    weights = _allocated(device)
    # A recorded mixed step has one more sequence, for padding.
    landmark_rows = model.spec.sparsity is not None
    max_seqs = most_decode_rows(memory.limits.max_running_requests, landmark_rows) + 1
    most_rows = 1 + choices.draft_tokens
    shape = replace(choices.shape, max_seqs=max_seqs, most_rows=most_rows, cpu=model.cpu)
    page_size = choices.geometry.page_size
    pool = KVPool(groups, memory.num_pages, page_size, device, hot_pages=memory.hot_pages)
    notes: list[str] = []
    if choices.shape.cache_dtype == FP8:
        pool.use_scales(model.cache_scales)
        notes = pool.use_hadamard(() if sparse is None else sparse.layers)
    if device.type == "cuda":
        notes.append(choices.dense_reason)
    dense_shape = unbounded_frames(shape)
    wide_pool = WidePool(dense_shape)
    dense = dense_backend(choices.dense, dense_shape, pool, wide_pool)
    notes.extend(dense.notes)
    backend: AttentionBackend = dense
    tier = in_stage = landmarks = None
    if sparse is not None and choices.attention.backend is not None:
        if choices.hisparse is not None:
            tier = _build_tier(choices, memory, pool, max_seqs)
            if tier.stage is not None:
                in_stage = dense_backend(choices.dense[:1], dense_shape, tier.stage, wide_pool)
        if choices.landmarks is not None:
            num_pages = memory.num_pages[choices.page_group]
            landmarks = LandmarkPool(choices.landmarks, num_pages, device)
        backend = choices.attention.backend(
            SparseParts(
                shape=shape,
                pool=pool,
                config=sparse,
                max_pages=memory.max_pages,
                dense=dense,
                landmarks=landmarks,
                tier=tier,
                in_stage=in_stage,
                drafts=choices.sparse_drafts,
            )
        )
        notes.extend(backend.notes)
    runner = kind(choices, memory, model, pool, backend, tier, parallel)
    if device.type == "cuda":
        cache = _allocated(device) - weights
        unrecorded = choices.unrecorded
        if unrecorded is None and not backend.graphs:
            unrecorded = f"attention backend {backend.name} cannot be recorded"
        if missing_module("triton", "triton") is None:  # without it there is nothing to compile
            runner.warm_up(records=unrecorded is None, progress=progress)
        if unrecorded is not None:
            notes.append(f"steps are not recorded as CUDA graphs: {unrecorded}")
        notes.append(_memory_note(runner, weights, cache))
    return runner, notes


def _allocated(device: torch.device) -> int:
    """Bytes of all tensors on a GPU; 0 on other devices."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _memory_note(runner: Runner, weights: int, cache: int) -> str:
    """What the GPU's memory is used for."""
    stepper = runner.stepper
    graphs = 0 if stepper.graphs is None else stepper.graphs.memory_bytes()
    free, total = torch.cuda.mem_get_info(stepper.device)
    parts = {
        "weights": weights,
        "KV cache and its buffers": cache,
        "CUDA graphs": graphs,
        "activations": stepper.activation_bytes,
        "free": free,
    }
    told = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    return f"GiB of {total / GIB:.1f} on the GPU: {told}"


def _build_tier(
    choices: EngineChoices, memory: MemoryPlan, pool: KVPool, max_seqs: int
) -> HiSparseCoordinator:
    options, sparse, device = choices.hisparse, choices.sparse, choices.device
    assert options is not None and sparse is not None
    swap = None
    if choices.kernel_refusal is None:
        threads = options.swap_in_block_size or COPY_THREADS
        stages = prompt_stages(sparse)
        swap = SwapShape(max_seqs, sparse.topk, memory.max_pages, threads, stages)
    asynchronous = options.async_backup
    if asynchronous is None:
        asynchronous = device.type == "cuda"
    num_pages = memory.num_pages[choices.page_group]
    return HiSparseCoordinator(
        pool,
        HostPool(choices.groups[-1], num_pages, pool.page_size, device=device),
        num_frames=memory.num_pages[-1],
        hot_slots=memory.hot_slots,
        asynchronous=asynchronous,
        kernels=swap,
        page_group=choices.page_group,
        longest=memory.max_pages if sparse.stages_prompts else None,
        rows=sparse.by_row,
        selectors=selectors(choices.groups[-1]) if sparse.by_row else None,
    )
