"""Builds an engine from its config: model, memory, backend, scheduler."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from cairn.config import EngineConfig
from cairn.engine.build_runner import build_runner
from cairn.engine.engine import Engine
from cairn.engine.load import load_model
from cairn.engine.locate import sampling_defaults
from cairn.engine.memory_plan import MemoryPlan, plan_memory
from cairn.engine.parallel.tp_options import check_tp, rank_device
from cairn.engine.resolve import EngineChoices, resolve, resolve_device, resolve_dtype
from cairn.engine.runner import Runner
from cairn.engine.scheduler import Scheduler
from cairn.errors import ConfigError
from cairn.memory.cache import PagedCache
from cairn.memory.copies import PageCopies
from cairn.models.loader import Progress
from cairn.models.parallel import Alone, Parallel
from cairn.models.source import ModelSource

if TYPE_CHECKING:
    from cairn.engine.parallel.ranks import Ranks


def build_engine(
    config: EngineConfig,
    source: ModelSource,
    progress: Progress | None = None,
    compiling: Progress | None = None,
) -> Engine:
    """Build an engine on one device, or on several ranks.

    `progress` reports weights that were read, `compiling` kernels that were compiled.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, source.config, device)
    _check_quantization(config, dtype, device)
    if config.tp == 1:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        return _build(config, source, dtype, device, progress, compiling, None)
    check_tp(config, source, device)
    # Imported here because an engine on one rank does not need it.
    from cairn.engine.parallel.ranks import Ranks

    ranks = Ranks(config, source, dtype, device.type)
    with ranks.ended_by_failure():
        first = rank_device(device.type, 0)
        return _build(config, source, dtype, first, progress, compiling, ranks)


def _build(
    config: EngineConfig,
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
    compiling: Progress | None,
    ranks: Ranks | None,
) -> Engine:
    parallel: Parallel = Alone() if ranks is None else ranks.group
    sampling_defaults(source)  # fail before the weights are read
    model, notes = load_model(config, source, dtype, device, progress, parallel)
    choices = resolve(config, model.spec, dtype, device)
    if ranks is not None:
        choices = replace(choices, config=ranks.agree_on_budget(choices.config, device))
    memory = plan_memory(choices)
    if ranks is None:
        runner, gpu_notes = build_runner(choices, memory, model, parallel, progress=compiling)
    else:
        runner, gpu_notes = ranks.build_runner(choices, memory, model, compiling)
    attention = choices.attention
    for warning in attention.warnings:
        logging.getLogger("cairn").warning(warning)
    cache = _build_cache(choices, memory, runner)
    runner.mark_ready()
    return Engine(
        model.spec,
        Scheduler(cache, memory.limits, time.perf_counter),
        runner,
        context_length=choices.context,
        eos_token_ids=source.eos_token_ids(),
        seed=config.seed,
        sparse=choices.sparse,
        overlap=device.type == "cuda" and not config.disable_overlap_schedule,
        notes=(
            *notes,
            *gpu_notes,
            *(() if ranks is None else (ranks.note,)),
            *attention.notes,
            *(() if memory.tier is None else (memory.tier.note,)),
            *attention.warnings,
        ),
    )


def _build_cache(choices: EngineChoices, memory: MemoryPlan, runner: Runner) -> PagedCache:
    copies = None
    if memory.tier is not None and runner.mover is not None:
        pages, frames = memory.num_pages[memory.tier.page_group], memory.num_pages[-1]
        copies = PageCopies(pages, frames, runner.mover)
    return PagedCache(
        choices.geometry,
        choices.groups,
        memory.num_pages,
        eviction="lfu" if choices.config.eviction == "lfu" else "lru",
        prefix_caching=not choices.config.disable_radix_cache,
        copies=copies,
    )


def _check_quantization(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
    if config.quantization == "none":
        return
    if device.type != "cpu" or dtype != torch.float32 or config.model_impl == "transformers":
        raise ConfigError(
            "quantization=int8 is for Cairn's own models on a CPU in float32; the device is "
            f"{device.type}, dtype {dtype}, model_impl {config.model_impl}"
        )
