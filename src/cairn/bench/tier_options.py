"""The options of `cairn bench tier`. Its flags are made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cairn.config import check_options, option
from cairn.errors import ConfigError

PARTS = ("throughput", "small", "hits", "ttft", "beyond", "prompt", "bandwidth")


def _list(default: Sequence[Any], text: str, *choices: str) -> Any:
    return field(default=default, metadata={"help": text, "choices": (), "listed": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBench:
    parts: Sequence[str] = _list(PARTS, "What to measure.", *PARTS)
    device: str = option("cuda", "Where to run.", "cpu", "cuda")
    dtype: str | None = option(None, "Default: bfloat16, float32 on a CPU.")
    model: str = option("qwen3-0.6b-long", "A shape, with random weights; not for hits.")
    text: str | None = option(None, "hits: text to read; prose otherwise.")
    contexts: Sequence[int] = _list((131072, 32768), "throughput, prompt: tokens of a context.")
    concurrency: Sequence[int] = _list(
        (1, 2, 4, 7, 14, 28), "throughput: requests at once, as far as they fit."
    )
    text_models: Sequence[str] = _list(("smollm2", "cairn-nano"), "hits: models that read a text.")
    text_topk: Sequence[int] = _list(
        (16, 32), "hits: pages a query reads, where the model leaves it open."
    )
    hot_sizes: Sequence[float] = _list(
        (1.0, 2.0, 4.0), "hits: sizes of the hot cache, in selections."
    )
    kv_cache_dtype: str = option("auto", "Type of the KV cache.", "auto", "fp8", "int8")
    kv_cache_gib: float = option(16.0, "Device memory for the KV cache.", above=0)
    most_host_gib: float = option(
        104.0,
        "Host memory for pages, at most. Fewer requests run if it does not hold them all.",
        above=0,
    )
    page_size: int = option(64, "Rows of a page.", low=1)
    topk: int = option(32, "Pages a query reads outside its window.", low=1)
    window: int = option(512, "Rows of its window.", low=1)
    warm_steps: int = option(80, "Decode steps before those that are timed.", low=1)
    steps: int = option(64, "Decode steps that are timed.", low=1)
    change: float = option(
        0.03,
        "Share of a decode row's pages that change with every token. 0 keeps the selection of the "
        "random weights, which is hardly ever the same.",
        low=0,
    )
    short_context: int = option(16384, "small: tokens of each context.", low=1)
    prefix: int = option(25000, "ttft: tokens of the prefix.", low=1)
    longest: int = option(262144, "beyond: tokens of the prompt.", low=1)
    chunk: int = option(16384, "Rows of a prefill step.", low=1)
    text_tokens: int = option(8000, "hits: tokens of the text.", low=1)
    text_rows: int = option(256, "hits: tokens at its end that are read one by one.", low=1)
    bandwidth_gib: float = option(2.0, "bandwidth: host memory that is copied from.", above=0)
    profile: bool = option(False, "throughput: show kernels of a step.")

    @property
    def weights(self) -> str:
        """Type of the weights."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        if self.profile and self.device != "cuda":
            raise ConfigError("--profile shows kernels of a GPU; leave it out with --device cpu")
        if self.profile and "throughput" not in self.parts:
            raise ConfigError(
                "--profile shows steps of the part throughput, which --parts leaves out"
            )
