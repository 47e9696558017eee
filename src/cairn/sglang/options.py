"""What a user may set, how it gets here, and what is refused.

SGLang's command line cannot be extended by a plug-in, but it hands any field to a model's config:

    --json-model-override-args '{"cairn_hsa": {"policy": "quest", "topk": 32}}'
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from cairn.config import EngineConfig
from cairn.engine.attention_options import AttentionPlan, plan_attention
from cairn.errors import ConfigError
from cairn.memory.geometry import PageGeometry
from cairn.models.spec import ModelSpec

FIELD = "cairn_hsa"
_PREFIX = "hsa_"
_ONE_OF_EACH = ("tp_size", "pp_size", "dp_size", "ep_size", "attn_cp_size")
_OFF = (
    "speculative_algorithm",
    "enable_hierarchical_cache",
    "enable_lmcache",
    "enable_hisparse",
    "enable_dp_attention",
    "enable_two_batch_overlap",
    "enable_pdmux",
    "enable_memory_saver",
    "enable_unified_memory",
)


def option_names() -> tuple[str, ...]:
    """Those of `cairn serve` that begin with --hsa-, without it."""
    names = (option.name for option in fields(EngineConfig))
    return tuple(name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX))


def read_plan(
    given: object, spec: ModelSpec, page_size: int, device: str
) -> tuple[AttentionPlan, PageGeometry]:
    """`given` is the config's field, None without one; `page_size` is SGLang's, in tokens."""
    geometry = _geometry(spec, page_size)
    options: dict[str, Any] = {f"{_PREFIX}{name}": own for name, own in _options(given).items()}
    if spec.sparsity is None:
        # A step that SGLang records cannot tell dense rows from others: generated rows all select.
        options.setdefault(f"{_PREFIX}dense_below", 0)
    config = EngineConfig(attention_backend="hsa", page_size=geometry.page_size, **options)
    return plan_attention(config, spec, device), geometry


def _options(given: object) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'{FIELD} is {given!r}; it must be an object such as {{"policy": "quest", "topk": 32}}'
        )
    known = option_names()
    unknown = sorted(str(name) for name in given if name not in known)
    if unknown:
        raise ConfigError(f"{FIELD} has {', '.join(unknown)}; known: {', '.join(known)}")
    return given


def _geometry(spec: ModelSpec, page_size: int) -> PageGeometry:
    if spec.sparsity is None:
        if page_size == 1:
            raise ConfigError(
                "page_size is 1, with which every row would be a page of its own; give "
                "--page-size 64"
            )
        return PageGeometry(page_size, page_size)
    rows = spec.sparsity.chunk_size
    tokens = spec.tokens_per_page(rows)
    if page_size != tokens:
        raise ConfigError(
            f"page_size is {page_size}; {spec.architecture} has chunks of {rows} rows, {tokens} of "
            f"them tokens and one a landmark that SGLang does not see: give --page-size {tokens}, "
            f"and a --chunked-prefill-size that is a multiple of it, such as {128 * tokens}"
        )
    return PageGeometry(rows, tokens)


def refuse_overrides(given: str) -> None:
    """For models that read config.json themselves: other fields given with
    --json-model-override-args would be changed for SGLang and not for the model."""
    others = sorted(set(json.loads(given)) - {FIELD})
    if others:
        raise ConfigError(
            f"json_model_override_args has {', '.join(others)}; of HiLS models only {FIELD} can be "
            "overridden: change config.json instead"
        )


def refuse_features(args: Any) -> None:
    """Refuse arguments of SGLang's server that hsa was not tested with. An argument that this
    version of SGLang does not have is not set."""
    prefill = args.prefill_attention_backend or args.attention_backend
    decode = args.decode_attention_backend or args.attention_backend
    if (prefill, decode) != ("hsa", "hsa"):
        raise ConfigError(
            f"prefill is computed by {prefill} and decode by {decode}; pages written by another "
            "backend would have no landmarks: give --attention-backend hsa alone (dense_below "
            "reads short prompts densely)"
        )
    for name in _ONE_OF_EACH:
        value = getattr(args, name, 1)
        if value not in (None, 1):
            raise ConfigError(f"{name} is {value}; hsa runs on one device: leave it out")
    for name in _OFF:
        value = getattr(args, name, None)
        if value:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{name} is {value!r}; hsa does not work with it: leave {flag} out")
    mode = getattr(args, "disaggregation_mode", "null")
    if mode != "null":
        raise ConfigError(
            f"disaggregation_mode is {mode!r}; pages that come from elsewhere would have no "
            "landmarks: leave --disaggregation-mode out"
        )
    graphs = getattr(args, "cuda_graph_config", None)
    if args.device == "cuda" and graphs is not None:
        backend = graphs.prefill.backend
        if getattr(backend, "value", backend) != "disabled":
            raise ConfigError(
                f"prefill is recorded as CUDA graphs ({backend}); hsa records decode steps only: "
                "give --cuda-graph-backend-prefill disabled"
            )
