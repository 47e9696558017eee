"""Options of sparse attention for models that were not trained with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from cairn.attention.backend import SparseBackend
from cairn.config import EngineConfig
from cairn.errors import ConfigError
from cairn.memory.layout import KV
from cairn.models.spec import ModelSpec
from cairn.sparsity.config import ALL_ROWS, SparseConfig
from cairn.sparsity.policy import Fusion, Policy, PolicyShape, Strategy
from cairn.sparsity.registry import make_policy, policy_class

AUTO = "auto"
DEFAULT_PAGE_SIZE = 64
KERNEL_POLICY, _POLICY = "quest", "spread"
"""The default policies: on CUDA, with the host tier and for drafts; and elsewhere, where facts must
not get lost (docs/quality.md)."""
_SINKS = 1


class _Defaults(NamedTuple):
    unit_size: int | None  # None for whole pages
    topk: int
    window: int


_OWN: Mapping[str, _Defaults] = {"spread": _Defaults(8, 111, 128)}
"""By policy. `spread` needs small units; these are 1,024 rows, a quarter of 4,096."""
_OTHERS = _Defaults(None, 32, 512)

_DENSE_PAYS = {"cuda": (16384, 24576)}
"""By device, where it was measured: positions of generated rows and of prompt rows below which
dense kernels are at least as fast as sparse ones. On an H200, dense decoding of one sequence is as
fast as sparse decoding up to about 16,000 rows, and a prompt's rows up to about 24,000
(docs/lab-notes.md). Only a row's position decides, so that its result does not depend on the rest
of the batch."""


def _defaults(config: EngineConfig, device: str) -> tuple[str, _Defaults]:
    """The policy, and what it reads unless options say otherwise.

    On CUDA short texts are dense anyway, and the small pages of `spread` make dense rows slower
    (docs/sparse-attention.md). With pages in host memory, landmarks stay on the device: those of
    `spread` would take an eighth of all KV bytes there.
    """
    name = config.hsa_policy
    if name is None:
        fast = device == "cuda" or config.enable_hisparse
        name = KERNEL_POLICY if fast else _POLICY
    return name, _OWN.get(name, _OTHERS)


def default_page_size(config: EngineConfig) -> int:
    """Of an engine with pages in host memory."""
    return _sizes(replace(config, page_size=None), _defaults(config, "")[1], whole=True)[0]


def _sizes(config: EngineConfig, defaults: _Defaults, *, whole: bool) -> tuple[int, int]:
    """The page size and the number of units of a page. If `whole`, it is 1 unless an option says
    otherwise: small units are small pages."""
    unit, page_size = config.hsa_unit_size or defaults.unit_size, config.page_size
    if page_size is None:
        page_size = unit if whole and unit is not None else DEFAULT_PAGE_SIZE
    if config.hsa_unit_size is None and (unit is None or whole or page_size % unit):
        return page_size, 1
    assert unit is not None
    if page_size % unit:
        raise ConfigError(
            f"hsa_unit_size is {unit} and page_size {page_size}; a page has whole units: use a "
            f"divisor of {page_size}"
        )
    if config.enable_hisparse and unit != page_size:
        raise ConfigError(
            f"hsa_unit_size is {unit} and page_size {page_size}; enable_hisparse moves whole pages "
            f"between host and device: use page_size={unit}, or leave hsa_unit_size out"
        )
    return page_size, page_size // unit


def training_free(
    config: EngineConfig,
    spec: ModelSpec,
    device: str,
    backend: type[SparseBackend],
    *,
    drafts: bool = False,
) -> tuple[SparseConfig, int]:
    """How sparse layers select pages, and the page size.

    Rows that draft are not dense only because dense kernels are as fast for them.
    """
    name, defaults = _defaults(config, device)
    if not backend.needs_landmarks:
        defaults = _OTHERS
    # Kernels and the host tier read whole pages.
    whole = device == "cuda" or config.enable_hisparse or "unit_size" not in backend.options
    page_size, units = _sizes(config, defaults, whole=whole)
    policy, kind, topk, sinks, budgets = None, Policy, config.hsa_topk or 0, 0, None
    layers = _layers(config.hsa_layers, config.hsa_dense_layers, spec)
    window = config.hsa_window or defaults.window
    if backend.needs_landmarks:
        kind = policy_class(name)
        if kind.needs_landmark_rows:
            raise ConfigError(
                f"hsa_policy {name!r} needs a model trained with landmark rows, which "
                f"{spec.architecture} is not; use spread or quest"
            )
        topk = defaults.topk if config.hsa_topk is None else config.hsa_topk
        if config.hsa_budget is not None:
            budgets = _budgets(config, len(layers))
            topk = max(budgets)
        least = topk if budgets is None else min(budgets)
        sinks = min(_SINKS, least) if config.hsa_sinks is None else config.hsa_sinks
        if kind.sinks_only:
            topk = least = _only_sinks(config, name, sinks)
        if kind.observed:
            _check_observed(config, name)
        if sinks > least:
            option = "hsa_topk" if budgets is None else "the least hsa_budget"
            raise ConfigError(
                f"hsa_sinks is {sinks} and {option} {least}; sink pages are among the top-k, so "
                f"{option} must be at least {sinks}"
            )
        policy = make_policy(name, policy_shape(spec, layers))
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
        all_selected = (
            (least + 1) * (page_size // units) + window - 1 if config.hsa_top_p is None else 0
        )
        generated, prompt = (0, 0) if drafts else _DENSE_PAYS.get(device, (0, 0))
        dense_below = max(all_selected, generated)
        dense_prompt_below = max(all_selected, prompt)
    if "prefill" in backend.options and config.hsa_prefill != "sparse":
        dense_prompt_below = ALL_ROWS
    sparse = SparseConfig(
        policy=policy,
        layers=layers,
        topk=topk,
        window=window,
        strategy=cast("Strategy", config.hsa_selection_strategy or kind.strategy),
        fusion=fusion,
        sinks=sinks,
        top_p=config.hsa_top_p,
        budgets=budgets,
        units=units,
        dense_below=dense_below,
        dense_prompt_below=dense_prompt_below,
    )
    return sparse, page_size


def policy_shape(spec: ModelSpec, layers: Sequence[int]) -> PolicyShape:
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


def _check_observed(config: EngineConfig, name: str) -> None:
    """Refuse what does not go with pages that the end of the prompt chooses for the answer."""
    for option, refused in (
        ("hsa_prefill", config.hsa_prefill == "sparse"),
        ("hsa_top_p", config.hsa_top_p is not None),
        ("hsa_selection_strategy", config.hsa_selection_strategy is not None),
        ("enable_hisparse", config.enable_hisparse),
    ):
        if refused:
            raise ConfigError(
                f"{option} is {getattr(config, option)!r}, and hsa_policy {name!r} lets the end of "
                f"a prompt choose pages for the answer; leave {option} out, or use spread or quest"
            )


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
