"""Every option of the engine, in one place. Keyword arguments and CLI flags are made from it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cairn.errors import CairnError, ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")

MODEL_IMPLS = ("cairn", "transformers")
MOST_DRAFTS = 64
"""Tokens to draft at most, whatever drafts them."""


def option(
    default: Any,
    text: str = "",
    *choices: Any,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    word: str | None = None,
) -> Any:
    """A field with its help text: one of `choices`, a number from `low` (or above `above`) to
    `high` or in its place `word`, or any value of the field's type. Without `high`, whole numbers
    end at 2**31 - 1."""
    rule = {"choices": choices, "low": low, "above": above, "high": high, "word": word}
    return field(default=default, metadata={"help": text, **rule})


def from_names(
    kind: type[Options], values: Mapping[str, Any], error: type[CairnError], unknown: str
) -> Options:
    """An object of the dataclass `kind`. Raises `error` with the words `unknown` for names that it
    does not have."""
    known = [own.name for own in fields(kind)]
    others = sorted(set(values) - set(known))
    if others:
        raise error(f"{unknown} {', '.join(others)}; known: {', '.join(known)}")
    return kind(**values)


def check_options(given: DataclassInstance, error: type[CairnError], prefix: str = "") -> None:
    """Raise `error` if a field of `given` does not hold what its `option` takes. Fields whose
    default is None may be None."""
    for known in fields(given):
        value = getattr(given, known.name)
        if value is None and known.default is None:
            continue
        wanted = _wanted(known, value)
        if wanted is not None:
            raise error(f"{prefix}{known.name} is {value!r}; {wanted}")


def _wanted(known: Field[Any], value: object) -> str | None:
    """What a field takes, if that is not `value`."""
    kind, rule = str(known.type).removesuffix(" | None"), known.metadata
    word = rule.get("word")
    if word is not None:
        kind = kind.removesuffix(" | str")
        if value == word:
            return None
    if rule["choices"]:
        fits = value in rule["choices"] and not isinstance(value, bool)
        return None if fits else f"choose one of {', '.join(map(str, rule['choices']))}"
    if kind in ("str", "bool"):
        fits = isinstance(value, str if kind == "str" else bool)
        return None if fits else f"it must be {'a string' if kind == 'str' else 'true or false'}"
    if kind not in ("int", "float"):
        return None
    whole, above = kind == "int", rule["above"]
    low = -math.inf if rule["low"] is None else rule["low"]
    high = rule["high"] or (2**31 - 1 if whole else math.inf)
    if (
        isinstance(value, int if whole else int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
        and low <= value <= high
        and (above is None or value > above)
    ):
        return None
    least = f"from {low}" if above is None else f"above {above}"
    most = "" if high == math.inf else f" to {high}"
    other = "" if word is None else f", or {word}"
    return f"it must be a {'whole ' if whole else ''}number {least}{most}{other}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: str = option(
        "smollm2",
        "Model folder, .gguf file, hub id (owner/name), pulled or bundled model, or preset.",
    )
    model_impl: str = option(
        "cairn",
        "cairn: Cairn's model code; transformers: theirs with Cairn's attention; module:function: "
        "yours.",
    )
    load_format: str = option(
        "auto", "Read the model's weights, or draw random ones.", "auto", "dummy"
    )
    ignore_config_fields: str = option(
        "", "Comma-separated fields of config.json that are known not to change the output."
    )
    device: str = option(
        "auto", "Where to run: auto takes cuda, then mps, then cpu.", "auto", "cpu", "cuda", "mps"
    )
    dtype: str = option(
        "auto",
        "Type of weights: auto is the checkpoint's, float32 on a CPU.",
        "auto",
        "float32",
        "float16",
        "bfloat16",
        "float64",
    )
    kv_cache_dtype: str = option(
        "auto",
        "Type of cached keys and values: auto is that of the weights; fp8 (e4m3) and int8 have "
        "one scale per row and kv head. int8 is more precise.",
        "auto",
        "fp8",
        "int8",
    )
    quantization: str = option(
        "auto",
        "Keep matrices as they are in the file, convert them to the model's type (none), or round "
        "them to fp8, int8 or int4, with embedding and output head in int8. auto keeps them where "
        "fast kernels read them: on CPUs, on Hopper GPUs, and FP8 on others.",
        "auto",
        "keep",
        "none",
        "fp8",
        "int8",
        "int4",
    )
    tp: int = option(
        1,
        "Ranks that share the model: one GPU each, or one process each on a CPU. kv_cache_gib is "
        "per rank.",
        low=1,
        high=64,
    )
    threads: int | str | None = option(
        None,
        "CPU threads, which tp divides among ranks; by default one for each core. auto measures at "
        "start which number is fastest.",
        low=1,
        word="auto",
    )
    context_length: int | None = option(
        None,
        "Most tokens of a request, prompt and output; the model's own limit by default.",
        low=1,
    )
    page_size: int | None = option(
        None,
        "Rows of the KV cache in a page. By default 64; on CUDA 128 without hsa, and 8 with "
        "hsa_policy=spread; for HiLS models their chunk size.",
        low=1,
    )
    kv_cache_gib: float | None = option(
        None,
        "Memory for the KV cache. By default a quarter of free memory on a CPU, and on CUDA what "
        "mem_fraction_static leaves.",
        above=0,
    )
    mem_fraction_static: float | None = option(
        None,
        "CUDA: share of the device for weights and KV cache together; 0.85 by default.",
        above=0,
    )
    disable_radix_cache: bool = option(False, "Do not reuse the KV of common prefixes.")
    eviction: str = option("lru", "Which cached pages to give up first.", "lru", "lfu")
    chunked_prefill_size: int | None = option(
        None,
        "Most rows that a step computes, prefill and decode together. By default 2048 tokens, on "
        "CUDA 8192, and their landmark rows.",
        low=1,
    )
    max_running_requests: int | None = option(
        None, "Most requests in a batch. By default 64, on CUDA 256.", low=1, high=2**16
    )
    max_queued_requests: int = option(10_000, "Requests that may wait; more are refused.", low=1)
    max_step_ms: float | None = option(
        None, "Shrink prefill chunks so that a step stays under this time.", above=0
    )
    attention_backend: str | None = option(
        None,
        "Attention kernels: auto, torch, triton, sgl_kernel, sgl_kernel_fp8, flashinfer, "
        "flash_mla, hsa, dsa, your own as module:Class, or a pair PREFILL,DECODE. By default "
        "ATTN_BACKEND in the environment, or auto.",
    )
    disable_dsa: bool = option(
        False,
        "Let models with DeepSeek sparse attention read every row, for comparison. The output "
        "differs.",
    )
    disable_cuda_graph: bool = option(False, "CUDA: launch kernels one by one, not as graphs.")
    disable_overlap_schedule: bool = option(
        False, "CUDA: wait for a step's tokens before planning the next."
    )
    speculative: str | None = option(
        None,
        "Draft tokens and verify several in a step; the text stays the same. ngram copies what "
        "followed the last tokens earlier; sparse lets a dense model draft with sparse attention "
        "(set by hsa_*); or your own as module:Class.",
    )
    speculative_tokens: int | None = option(
        None,
        "speculative: most tokens to draft. By default 7, with sparse 4.",
        low=1,
        high=MOST_DRAFTS,
    )
    hsa_policy: str | None = option(
        None,
        "hsa: how pages are selected: spread (the default on a CPU), quest (on CUDA), mean, "
        "snapkv, streaming, or your own as module:Class.",
    )
    hsa_unit_size: int | None = option(
        None,
        "hsa: rows that share a landmark and are selected together, a divisor of page_size. By "
        "default page_size, with spread on a CPU 8.",
        low=1,
    )
    hsa_topk: int | None = option(
        None,
        "hsa: pages, or units of hsa_unit_size rows, that a query reads outside its window. By "
        "default 32, with spread 111.",
        low=1,
    )
    hsa_selection_strategy: str | None = option(
        None,
        "hsa: how the query heads of a kv head select pages together: by the sum of scores, the "
        "best score, or the best share of attention (the default).",
        "group",
        "head",
        "softmax_head",
    )
    hsa_layers: str | None = option(None, "hsa: sparse layers, such as 0-3,7; all by default.")
    hsa_dense_layers: int | None = option(
        None, "hsa: number of first layers that stay dense; instead of hsa_layers.", low=0
    )
    hsa_window: int | None = option(
        None, "hsa: rows a query always reads. By default 512, with spread 128.", low=1
    )
    hsa_sinks: int | None = option(
        None, "hsa: number of first pages or units that are always selected. By default 1.", low=0
    )
    hsa_top_p: float | None = option(
        None,
        "hsa: select pages until they and the window hold this share of the attention that the "
        "policy expects; at most hsa_topk.",
        above=0,
        high=1,
    )
    hsa_budget: str | None = option(
        None,
        "hsa: pages of each sparse layer, such as 4,8,8,16. auto distributes them by where dense "
        "attention lies in a text, hsa_topk on average, and logs the list.",
    )
    hsa_fusion: str | None = option(
        None,
        "hsa: weight of a selected page: its landmark's score, or its exact log-sum-exp (lse, the "
        "default).",
        "landmark",
        "lse",
    )
    hsa_prefill: str | None = option(
        None,
        "hsa: how ordinary models read prompts: all of the past (dense, the default), or selected "
        "pages (sparse; on CUDA from row 24,576 on).",
        "dense",
        "sparse",
    )
    hsa_dense_below: int | None = option(
        None,
        "hsa: rows below this position attend densely. By default those for which dense attention "
        "is not slower; 16,384 for generated rows on CUDA.",
        low=0,
    )
    enable_hisparse: bool = option(
        False, "Keep the KV of sparse layers in host memory, and on the device only what is read."
    )
    hisparse_config: str | None = option(
        None,
        "JSON for enable_hisparse: top_k, device_buffer_size, host_to_device_ratio, host_gib, "
        "swap_in_block_size, async_backup.",
    )
    seed: int = option(
        0, "Seed of dummy weights, and of requests without a seed.", low=0, high=2**63 - 1
    )

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        if not self.model:
            raise ConfigError("model is empty; give a model folder or a preset's name")
        if self.model_impl not in MODEL_IMPLS and ":" not in self.model_impl:
            raise ConfigError(
                f"model_impl is {self.model_impl!r}; choose one of {', '.join(MODEL_IMPLS)}, or "
                "name your own as module:function"
            )
        if self.disable_radix_cache and self.eviction != "lru":
            raise ConfigError(
                f"eviction is {self.eviction!r} and disable_radix_cache is set, so that nothing is "
                "cached; leave one of them out"
            )
        if self.mem_fraction_static is not None:
            if self.mem_fraction_static >= 1:
                raise ConfigError(
                    f"mem_fraction_static is {self.mem_fraction_static!r}; it must be between 0 "
                    "and 1"
                )
            if self.kv_cache_gib is not None:
                raise ConfigError(
                    "mem_fraction_static and kv_cache_gib size the same pool; give one"
                )

    @classmethod
    def from_kwargs(cls, values: dict[str, Any]) -> EngineConfig:
        return from_names(cls, values, ConfigError, "unknown option")


def cache_folder() -> Path:
    """Where pulled models and compiled kernels are kept: $CAIRN_CACHE, or the user's cache."""
    own = os.environ.get("CAIRN_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cairn"
