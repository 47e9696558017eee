"""Turns the attention options into an `AttentionPlan`: the backend of each layer, and how sparse
layers select pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import cast

from cairn.attention.backend import AUTO_INDEXED, AUTO_SPARSE, SparseBackend, sparse_class
from cairn.config import EngineConfig
from cairn.errors import ConfigError
from cairn.memory.layout import KV
from cairn.models.spec import ModelSpec, NativeSparsity
from cairn.sparsity.config import ALL_ROWS, SparseConfig
from cairn.sparsity.policy import Fusion, Policy, PolicyShape, Strategy
from cairn.sparsity.registry import make_policy, policy_class

DEFAULT_PAGE_SIZE = 64
_DENSE_PAGE_SIZE = {"cuda": 128}
"""By device, for engines without sparse attention. FlashAttention-3 loads pages of 128 rows whole.
"""
_POLICY, _TOPK, _WINDOW, _SINKS = "quest", 32, 512, 1
"""Defaults for models that were not trained with sparse attention."""
AUTO = "auto"
_DRAFT_TOPK = 16
"""For drafts, which may be wrong."""


_DENSE_PAYS = {"cuda": (18432, 24576)}
"""By device, where it was measured: positions of generated rows and of prompt rows below which
dense kernels are at least as fast as sparse ones. On an H200, dense decoding of one sequence is as
fast as sparse decoding up to about 18,000 rows, and a prompt's rows up to about 24,000
(docs/lab-notes.md). Only a row's position decides, so that its result does not depend on the rest
of the batch."""


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
    page_size = config.page_size or DEFAULT_PAGE_SIZE
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
    sparse = _training_free(config, spec, page_size, device, kind)
    dense = (names[0], "auto") if len(names) == 2 else ("auto",)
    notes = [_summary(config, spec, sparse, page_size, kind)]
    if sparse.policy is not None and type(sparse.policy).score is not Policy.score:
        notes.append(f"{kind.name}: the policy has a score of its own, which runs in plain torch")
    return AttentionPlan(dense, sparse, page_size, kind, tuple(notes))


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
    page_size = config.page_size or DEFAULT_PAGE_SIZE
    if config.hsa_topk is None:
        config = replace(config, hsa_topk=_DRAFT_TOPK)
    sparse = _training_free(config, spec, page_size, "", kind)
    summary = _summary(config, spec, sparse, page_size, kind)
    return AttentionPlan(tuple(names), sparse, page_size, kind, (f"drafts by {summary}",))


def _training_free(
    config: EngineConfig,
    spec: ModelSpec,
    page_size: int,
    device: str,
    backend: type[SparseBackend],
) -> SparseConfig:
    """Without a `device`, rows are not dense only because dense kernels are as fast for them."""
    policy, kind, topk, sinks, budgets = None, Policy, config.hsa_topk or 0, 0, None
    layers = _layers(config.hsa_layers, config.hsa_dense_layers, spec)
    window = config.hsa_window or _WINDOW
    if backend.needs_landmarks:
        name = config.hsa_policy or _POLICY
        kind = policy_class(name)
        if kind.needs_landmark_rows:
            raise ConfigError(
                f"hsa_policy {name!r} needs a model trained with landmark rows, which "
                f"{spec.architecture} is not; use quest or mean"
            )
        topk = _TOPK if config.hsa_topk is None else config.hsa_topk
        if config.hsa_budget is not None:
            budgets = _budgets(config, len(layers))
            topk = max(budgets)
        least = topk if budgets is None else min(budgets)
        sinks = min(_SINKS, least) if config.hsa_sinks is None else config.hsa_sinks
        if kind.sinks_only:
            topk = least = _only_sinks(config, name, sinks)
        if sinks > least:
            option = "hsa_topk" if budgets is None else "the least hsa_budget"
            raise ConfigError(
                f"hsa_sinks is {sinks} and {option} {least}; sink pages are among the top-k, so "
                f"{option} must be at least {sinks}"
            )
        policy = make_policy(name, _policy_shape(spec, layers))
    fusion = cast("Fusion", config.hsa_fusion or kind.fusion)
    dense_below, dense_prompt_below = config.hsa_dense_below or 0, 0
    # With lse weights, attention over all pages equals dense attention. Rows that would select
    # every page can therefore be dense. Pages in host memory are always found by selection.
    if (
        policy is not None
        and config.hsa_dense_below is None
        and fusion == "lse"
        and not config.enable_hisparse
    ):
        # With top_p a row may leave out pages however few there are.
        all_selected = (least + 1) * page_size + window - 1 if config.hsa_top_p is None else 0
        generated, prompt = _DENSE_PAYS.get(device, (0, 0))
        dense_below = max(all_selected, generated)
        dense_prompt_below = max(all_selected, prompt)
    if "prefill" in backend.options and config.hsa_prefill != "sparse":
        dense_prompt_below = ALL_ROWS
    return SparseConfig(
        policy=policy,
        layers=layers,
        topk=topk,
        window=window,
        strategy=cast("Strategy", config.hsa_selection_strategy or kind.strategy),
        fusion=fusion,
        sinks=sinks,
        top_p=config.hsa_top_p,
        budgets=budgets,
        dense_below=dense_below,
        dense_prompt_below=dense_prompt_below,
    )


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
    own = ("layers", "dense_layers", "window", "sinks", "top_p", "budget")
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
        policy=make_policy(native.policy, _policy_shape(spec, native.layers)),
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
    summary = _summary(config, spec, sparse, native.chunk_size, backend)
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


def _policy_shape(spec: ModelSpec, layers: Sequence[int]) -> PolicyShape:
    """Shape of the sparse layers. They share one policy, so they must be alike."""
    first = spec.layers[layers[0]]
    for layer in layers:
        if spec.layers[layer] != first:
            raise ConfigError(
                f"hsa_layers: layers {layers[0]} and {layer} of {spec.architecture} differ in "
                "heads, scale or what they keep in the cache; name layers that are alike"
            )
    kept = [part.name for part in first.layout.parts]
    if KV not in kept:
        raise ConfigError(
            f"attention_backend is hsa, which reads keys and values of heads; layers of "
            f"{spec.architecture} keep {', '.join(kept)}: use another backend"
        )
    return PolicyShape(first.num_heads, first.num_kv_heads, first.head_dim, first.scale)


def _hsa_options(config: EngineConfig) -> list[str]:
    names = [option.name for option in fields(config) if option.name.startswith("hsa_")]
    return [name for name in names if getattr(config, name) is not None]


def _budgets(config: EngineConfig, layers: int) -> tuple[int, ...]:
    """The pages of each sparse layer that the option lists."""
    given = config.hsa_budget or ""
    if given == AUTO:
        raise ConfigError("hsa_budget is 'auto', which is not possible here; list the pages")
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts) or len(parts) != layers:
        raise ConfigError(
            f"hsa_budget is {given!r}; give pages for each of the {layers} sparse layers, such as "
            "4,8,8,16, or auto"
        )
    if config.hsa_topk is not None:
        raise ConfigError(
            f"hsa_budget lists the pages of each layer and hsa_topk is {config.hsa_topk}; give one "
            "(hsa_topk goes with hsa_budget=auto)"
        )
    return tuple(map(int, parts))


def _only_sinks(config: EngineConfig, name: str, sinks: int) -> int:
    """The number of pages of a policy that reads sinks and window only."""
    for option in ("hsa_topk", "hsa_top_p", "hsa_budget", "hsa_selection_strategy"):
        if getattr(config, option) is not None:
            raise ConfigError(
                f"{option} is given, and hsa_policy {name!r} selects no pages: it reads hsa_sinks "
                f"pages and hsa_window rows; leave {option} out"
            )
    if sinks == 0:
        raise ConfigError(f"hsa_sinks is 0; hsa_policy {name!r} reads at least 1 page of sinks")
    return sinks


def _layers(given: str | None, dense: int | None, spec: ModelSpec) -> tuple[int, ...]:
    """Parse layers such as `0-3,7`. None stands for all full-attention layers but the first
    `dense`."""
    full = [layer for layer, window in enumerate(spec.windows) if window is None]
    if given is None:
        if not full:
            raise ConfigError(f"{spec.architecture} has no full-attention layer for hsa to work on")
        if dense is not None and dense >= len(full):
            raise ConfigError(
                f"hsa_dense_layers is {dense}; {spec.architecture} has {len(full)} full-attention "
                f"layers, of which hsa needs one: use at most {len(full) - 1}"
            )
        return tuple(full[dense or 0 :])
    if dense is not None:
        raise ConfigError(
            f"hsa_dense_layers is {dense} and hsa_layers {given!r}; both say which layers are "
            "sparse: give one"
        )
    layers: set[int] = set()
    for part in given.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"hsa_layers is {given!r}; write layers and ranges such as 0-3,7")
        begin, end = int(first), int(last or first)
        if end < begin or end >= len(spec.windows):
            raise ConfigError(
                f"hsa_layers is {given!r}; the model has layers 0-{len(spec.windows) - 1}, and "
                "ranges ascend"
            )
        layers.update(range(begin, end + 1))
    windowed = sorted(layers - set(full))
    if windowed:
        raise ConfigError(
            f"hsa_layers is {given!r}, but layer {windowed[0]} has a sliding window and reads few "
            "pages anyway; name full-attention layers"
        )
    return tuple(sorted(layers))


def _summary(
    config: EngineConfig,
    spec: ModelSpec,
    sparse: SparseConfig,
    page_size: int,
    backend: type[SparseBackend],
) -> str:
    if sparse.policy is None:
        layers = f"{len(sparse.layers)} of {len(spec.windows)} layers"
        return f"{backend.name}: {layers}, pages of {page_size} rows, window {sparse.window}"
    name = config.hsa_policy or (spec.sparsity.policy if spec.sparsity else _POLICY)
    summary = (
        f"{backend.name}: {name}, {len(sparse.layers)} of {len(spec.windows)} layers, "
        f"top-{sparse.topk} pages of {page_size} rows, window {sparse.window}, "
        f"sinks {sparse.sinks}, {sparse.strategy}, {sparse.fusion} weights"
    )
    if sparse.budgets is not None:
        summary += f", pages by layer {','.join(map(str, sparse.budgets))}"
    if sparse.top_p is not None:
        summary += f", top-p {sparse.top_p}"
    if sparse.dense_below:
        summary += f", dense below row {sparse.dense_below}"
    if sparse.dense_prompt_below == ALL_ROWS:
        summary += ", dense prompts"
    elif sparse.dense_prompt_below > sparse.dense_below:
        summary += f", prompts dense below row {sparse.dense_prompt_below}"
    return summary
