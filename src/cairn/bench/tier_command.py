"""The flags of `cairn bench tier`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cairn.errors import ConfigError

if TYPE_CHECKING:
    from cairn.bench.tier_engines import TierBench

_PARTS = ("throughput", "small", "hits", "ttft", "beyond", "prompt", "bandwidth")
_LISTS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "contexts": (int, "131072,32768", "throughput, prompt: tokens of a context"),
    "concurrency": (int, "1,2,4,7,14,28", "throughput: requests at once, as far as they fit"),
    "text_models": (str, "smollm2,cairn-nano", "hits: models that read a text"),
    "text_topk": (int, "16,32", "hits: pages a query reads, where the model leaves it open"),
    "hot_sizes": (float, "1,2,4", "hits: sizes of the hot cache, in selections"),
}
_NUMBERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "kv_cache_gib": (float, "device memory for the KV cache"),
    "most_host_gib": (float, "host memory for pages, at most"),
    "page_size": (int, "rows of a page"),
    "topk": (int, "pages a query reads outside its window"),
    "window": (int, "rows of its window"),
    "warm_steps": (int, "decode steps before those that are timed"),
    "steps": (int, "decode steps that are timed"),
    "change": (float, "share of a decode row's pages that change with every token; 0 for random"),
    "short_context": (int, "small: tokens of each context"),
    "prefix": (int, "ttft: tokens of the prefix"),
    "longest": (int, "beyond: tokens of the prompt"),
    "chunk": (int, "rows of a prefill step"),
    "text_tokens": (int, "hits: tokens of the text"),
    "text_rows": (int, "hits: tokens at its end that are read one by one"),
    "bandwidth_gib": (float, "bandwidth: host memory that is copied from"),
}


def add_tier_bench(kinds: Any) -> None:
    tier = kinds.add_parser(
        "tier", help="what KV in host memory buys, and what it costs", allow_abbrev=False
    )
    tier.add_argument("--parts", default=",".join(_PARTS), metavar="A,B", help="Of: %(default)s.")
    tier.add_argument("--model", help="A shape. Default: qwen3-0.6b-long.")
    tier.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    tier.add_argument("--dtype", help="Default: bfloat16, float32 on a CPU.")
    tier.add_argument("--text", metavar="FILE", help="hits: text to read; prose otherwise.")
    for name, (_, default, text) in _LISTS.items():
        tier.add_argument(_flag(name), default=default, metavar="A,B", help=f"{text}: %(default)s.")
    for name, (kind, text) in _NUMBERS.items():
        tier.add_argument(_flag(name), type=kind, metavar="N", help=f"{text}.")
    tier.add_argument("--profile", action="store_true", help="throughput: show kernels of a step.")
    tier.add_argument("--output", metavar="FILE", help="Write the JSON line to a file too.")
    tier.set_defaults(run=_run)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _run(arguments: argparse.Namespace) -> int:
    import torch

    from cairn.bench.report import show_rows
    from cairn.bench.tier import run

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no CUDA device; add --device cpu")
    if arguments.profile and arguments.device != "cuda":
        raise ConfigError("--profile shows kernels of a GPU; leave it out with --device cpu")
    parts = arguments.parts.split(",")
    unknown = sorted(set(parts) - set(_PARTS))
    if unknown:
        raise ConfigError(f"--parts has {unknown[0]!r}; choose among {', '.join(_PARTS)}")
    if arguments.profile and "throughput" not in parts:
        raise ConfigError("--profile shows steps of the part throughput, which --parts leaves out")
    rows = []
    for row in run(_settings(arguments), parts):
        print(", ".join(f"{name} {value}" for name, value in row.items()), file=sys.stderr)
        rows.append(row)
    show_rows("tier", rows, arguments.output)
    return 0


def _settings(arguments: argparse.Namespace) -> TierBench:
    from cairn.bench.tier_engines import TierBench

    given: dict[str, Any] = {"device": arguments.device, "profile": arguments.profile}
    given["dtype"] = arguments.dtype or ("float32" if arguments.device == "cpu" else "bfloat16")
    for name in ("model", "text", *_NUMBERS):
        value = getattr(arguments, name)
        if value is not None:
            given[name] = value
    for name, (kind, _, _) in _LISTS.items():
        given[name] = _list(name, getattr(arguments, name), kind)
    for name in (*_NUMBERS, "contexts", "concurrency", "text_topk", "hot_sizes"):
        values = given.get(name, 1)
        least = 0 if name == "change" else 1e-9
        if any(not least <= value for value in (values if isinstance(values, list) else [values])):
            raise ConfigError(f"{_flag(name)} must be above 0")
    return TierBench(**given)


def _list(name: str, text: str, kind: Callable[[str], Any]) -> Sequence[Any]:
    try:
        return [kind(item) for item in text.split(",")]
    except ValueError:
        raise ConfigError(f"{_flag(name)} is {text!r}; write numbers and commas") from None
