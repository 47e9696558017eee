"""Turns the attention options into an `AttentionPlan`: the backend of each layer, and how sparse
layers select pages."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import cast

from cairn.attention.backend import AUTO_INDEXED, AUTO_SPARSE, SparseBackend, sparse_class
from cairn.config import EngineConfig
from cairn.engine.training_free import DEFAULT_PAGE_SIZE, KERNEL_POLICY, policy_shape, training_free
from cairn.errors import ConfigError
from cairn.models.spec import ModelSpec, NativeSparsity
from cairn.sparsity.config import ALL_ROWS, SparseConfig
from cairn.sparsity.policy import Policy, Strategy
from cairn.sparsity.registry import make_policy, policy_class, policy_name

_DENSE_PAGE_SIZE = {"cuda": 128}
"""By device, for engines without sparse attention. FlashAttention-3 loads pages of 128 rows whole.
"""
_DRAFT_TOPK, _DRAFT_WINDOW = 8, 256
"""For drafts, which may be wrong."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    dense: tuple[str, ...]
    """Backend of the layers that are not sparse, or two backends: one for prefill, one for decode.
    """
    sparse: SparseConfig | None
    page_size: int
    backend: type[SparseBackend] | None = None
    """Backend of the sparse layers; None if there are none."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Notes that are also logged as warnings."""


def plan_attention(
    config: EngineConfig, spec: ModelSpec, device: str, *, drafts: bool = False
) -> AttentionPlan:
    """Choose the attention backends and check the attention options against the model.

    `device` is the device type, such as "cuda". With `drafts`, sparse attention only drafts tokens
    for dense attention. Raises ConfigError.
    """
    given = "auto" if config.attention_backend is None else config.attention_backend
    names = [name.strip() for name in given.split(",")]
    kind = sparse_class(names)
    if drafts:
        return _sparse_drafts(config, spec, device, names, kind)
    if spec.sparsity is not None:
        return _native(config, spec, spec.sparsity, names, kind)
    if config.disable_dsa and spec.index_topk is None:
        raise ConfigError(f"disable_dsa is given, {spec.architecture} has no index; leave it out")
    if spec.index_topk is not None and not config.disable_dsa:
        return _indexed(config, spec, spec.index_topk, names, kind)
    if kind is not None and kind.reads_index:
        why = "disable_dsa is given" if config.disable_dsa else f"{spec.architecture} has no index"
        raise ConfigError(f"attention_backend is {given!r} and {why}; use another backend")
    if kind is None:
        page_size = config.page_size or _DENSE_PAGE_SIZE.get(device, DEFAULT_PAGE_SIZE)
        for name in _hsa_options(config):
            raise ConfigError(
                f"{name} is given but attention_backend is {given!r}; it works with "
                "attention_backend=hsa"
            )
        if len(names) > 2:
            raise ConfigError(
                f"attention_backend is {given!r}; give one backend, or two as PREFILL,DECODE"
            )
        return AttentionPlan(tuple(names), None, page_size)
    own = names[-1]
    if len(names) > 2 or sparse_class(names[:-1]) is not None:
        raise ConfigError(
            f"attention_backend is {given!r}; use {kind.name}, or DENSE,{kind.name} for a dense "
            "prefill and sparse decoding"
        )
    for name in _hsa_options(config):
        if name.removeprefix("hsa_") not in kind.options:
            raise ConfigError(f"{name} is given and attention_backend {own!r} does not have it")
    if len(names) == 2 and "prefill" not in kind.options:
        raise ConfigError(
            f"attention_backend is {given!r}, and {own} reads prompts itself; use {own} alone"
        )
    if len(names) == 2 and config.hsa_prefill == "sparse":
        raise ConfigError(
            f"attention_backend is {given!r}, which reads prompts densely with {names[0]}, and "
            f"hsa_prefill is 'sparse'; use attention_backend={own}, or leave hsa_prefill out"
        )
    sparse, page_size = training_free(config, spec, device, kind)
    dense = (names[0], "auto") if len(names) == 2 else ("auto",)
    summary = _summary(spec, sparse, page_size, kind)
    return AttentionPlan(dense, sparse, page_size, kind, (summary,))


def _sparse_drafts(
    config: EngineConfig,
    spec: ModelSpec,
    device: str,
    names: list[str],
    given: type[SparseBackend] | None,
) -> AttentionPlan:
    """Dense attention, and sparse attention for rows that draft."""
    if given is not None or spec.sparsity is not None:
        raise ConfigError(
            f"speculative is {config.speculative!r}, which drafts for dense attention, and the "
            "attention is sparse already; use speculative=ngram, or a dense attention_backend"
        )
    if config.hsa_prefill is not None:
        raise ConfigError(
            f"hsa_prefill is {config.hsa_prefill!r} and speculative {config.speculative!r}, with "
            "which prompts are read densely; leave it out"
        )
    if config.hsa_budget is not None:
        raise ConfigError(
            f"hsa_budget is {config.hsa_budget!r} and speculative {config.speculative!r}; drafts "
            "read hsa_topk pages in every layer: leave hsa_budget out"
        )
    if len(names) > 2:
        raise ConfigError(
            f"attention_backend is {','.join(names)!r}; give one backend, or two as PREFILL,DECODE"
        )
    kind = sparse_class([AUTO_SPARSE])
    assert kind is not None
    policy, topk = config.hsa_policy or KERNEL_POLICY, config.hsa_topk
    if policy_class(policy).observed:
        raise ConfigError(
            f"hsa_policy is {policy!r}, which lets the end of a prompt choose pages, and drafts "
            "choose their own; use quest"
        )
    if topk is None and not policy_class(policy).sinks_only:
        topk = _DRAFT_TOPK
    window = config.hsa_window or _DRAFT_WINDOW
    config = replace(config, hsa_policy=policy, hsa_topk=topk, hsa_window=window)
    sparse, page_size = training_free(config, spec, device, kind, drafts=True)
    summary = _summary(spec, sparse, page_size, kind)
    return AttentionPlan(tuple(names), sparse, page_size, kind, (f"drafts by {summary}",))


def _native(
    config: EngineConfig,
    spec: ModelSpec,
    native: NativeSparsity,
    names: list[str],
    given: type[SparseBackend] | None,
) -> AttentionPlan:
    backend = given or sparse_class([AUTO_SPARSE])
    assert backend is not None
    if len(names) > 1 or not (names == ["auto"] or (given is not None and given.serves_trained)):
        raise ConfigError(
            f"attention_backend is {','.join(names)!r}; {spec.architecture} was trained with "
            f"sparse attention for prompts and answers alike: use {AUTO_SPARSE}"
        )
    if config.page_size not in (None, native.chunk_size):
        raise ConfigError(
            f"page_size is {config.page_size} and the model's chunk_size {native.chunk_size}; a "
            f"page must be a chunk: use page_size={native.chunk_size}"
        )
    own = ("unit_size", "layers", "dense_layers", "window", "sinks", "top_p", "budget")
    for name in (*own, "fusion", "prefill", "dense_below"):
        value = getattr(config, f"hsa_{name}")
        if value is not None:
            raise ConfigError(
                f"hsa_{name} is {value!r}, but {spec.architecture} was trained with its own; "
                "leave it out (hsa_topk and hsa_selection_strategy may be changed)"
            )
    if config.hsa_policy not in (None, native.policy):
        raise ConfigError(
            f"hsa_policy is {config.hsa_policy!r}, but {spec.architecture} was trained with "
            f"{native.policy!r}; leave it out"
        )
    kind = policy_class(native.policy)
    topk = native.topk if config.hsa_topk is None else config.hsa_topk
    sparse = SparseConfig(
        policy=make_policy(native.policy, policy_shape(spec, native.layers)),
        layers=native.layers,
        topk=topk,
        window=native.window,
        strategy=cast("Strategy", config.hsa_selection_strategy or kind.strategy),
        fusion=kind.fusion,
        null_split=native.null_split,
        landmark_rows=True,
    )
    warnings = []
    for option, value, trained in (
        ("hsa_topk", topk, native.topk),
        ("hsa_selection_strategy", sparse.strategy, kind.strategy),
    ):
        if value != trained:
            warnings.append(f"{option} {value} where the model has {trained}: an approximation")
    summary = _summary(spec, sparse, native.chunk_size, backend)
    return AttentionPlan(("auto",), sparse, native.chunk_size, backend, (summary,), tuple(warnings))


def _indexed(
    config: EngineConfig,
    spec: ModelSpec,
    topk: int,
    names: list[str],
    given: type[SparseBackend] | None,
) -> AttentionPlan:
    """Every layer reads the rows that an index selects."""
    backend = given or sparse_class([AUTO_INDEXED])
    assert backend is not None
    if len(names) > 1 or not (names == ["auto"] or (backend.reads_index and given is not None)):
        raise ConfigError(
            f"attention_backend is {','.join(names)!r}; {spec.architecture} reads the rows that "
            f"its index selects: use {AUTO_INDEXED}, or disable_dsa to read every row"
        )
    for name in _hsa_options(config):
        raise ConfigError(f"{name} is given; {spec.architecture} has its own index: leave it out")
    page_size = config.page_size or DEFAULT_PAGE_SIZE
    sparse = SparseConfig(
        policy=None,
        layers=tuple(range(len(spec.layers))),
        topk=topk,
        window=1,
        strategy=Policy.strategy,
        fusion=Policy.fusion,
        dense_below=topk,  # rows that see no more than they select
        by_row=True,
    )
    note = f"{backend.name}: queries read the {topk} rows that score highest in each layer's index"
    return AttentionPlan(("auto",), sparse, page_size, backend, (note,))


def _hsa_options(config: EngineConfig) -> list[str]:
    names = [option.name for option in fields(config) if option.name.startswith("hsa_")]
    return [name for name in names if getattr(config, name) is not None]


def _summary(
    spec: ModelSpec,
    sparse: SparseConfig,
    page_size: int,
    backend: type[SparseBackend],
) -> str:
    if sparse.policy is None:
        layers = f"{len(sparse.layers)} of {len(spec.windows)} layers"
        return f"{backend.name}: {layers}, pages of {page_size} rows, window {sparse.window}"
    name, units = policy_name(type(sparse.policy)), sparse.units
    kind, read = "pages", f"pages of {page_size} rows"
    if units > 1:
        kind, read = "units", f"units of {page_size // units} rows in {read}"
    summary = (
        f"{backend.name}: {name}, {len(sparse.layers)} of {len(spec.windows)} layers, "
        f"top-{sparse.topk} {read}, window {sparse.window}, "
        f"sinks {sparse.sinks}, {sparse.strategy}, {sparse.fusion} weights"
    )
    if sparse.budgets is not None:
        summary += f", {kind} by layer {','.join(map(str, sparse.budgets))}"
    if sparse.top_p is not None:
        summary += f", top-p {sparse.top_p}"
    if sparse.dense_below:
        summary += f", dense below row {sparse.dense_below}"
    if sparse.dense_prompt_below == ALL_ROWS:
        summary += ", dense prompts"
    elif sparse.dense_prompt_below > sparse.dense_below:
        summary += f", prompts dense below row {sparse.dense_prompt_below}"
    return summary
