"""The options of `cairn bench tier`. Its flags are made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from cairn.errors import ConfigError

PARTS = ("throughput", "small", "hits", "ttft", "beyond", "prompt", "bandwidth")


def _option(default: Any, text: str, *choices: str) -> Any:
    commas = isinstance(default, tuple)  # how a flag separates several values
    return field(default=default, metadata={"help": text, "choices": choices, "commas": commas})


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBench:
    parts: Sequence[str] = _option(PARTS, "What to measure.", *PARTS)
    device: str = _option("cuda", "Where to run.", "cpu", "cuda")
    dtype: str | None = _option(None, "Default: bfloat16, float32 on a CPU.")
    model: str = _option("qwen3-0.6b-long", "A shape, with random weights; not for hits.")
    text: str | None = _option(None, "hits: text to read; prose otherwise.")
    contexts: Sequence[int] = _option((131072, 32768), "throughput, prompt: tokens of a context.")
    concurrency: Sequence[int] = _option(
        (1, 2, 4, 7, 14, 28), "throughput: requests at once, as far as they fit."
    )
    text_models: Sequence[str] = _option(
        ("smollm2", "cairn-nano"), "hits: models that read a text."
    )
    text_topk: Sequence[int] = _option(
        (16, 32), "hits: pages a query reads, where the model leaves it open."
    )
    hot_sizes: Sequence[float] = _option(
        (1.0, 2.0, 4.0), "hits: sizes of the hot cache, in selections."
    )
    kv_cache_gib: float = _option(16.0, "Device memory for the KV cache.")
    most_host_gib: float = _option(
        104.0, "Host memory for pages, at most. Fewer requests run if it does not hold them all."
    )
    page_size: int = _option(64, "Rows of a page.")
    topk: int = _option(32, "Pages a query reads outside its window.")
    window: int = _option(512, "Rows of its window.")
    warm_steps: int = _option(80, "Decode steps before those that are timed.")
    steps: int = _option(64, "Decode steps that are timed.")
    change: float = _option(
        0.03,
        "Share of a decode row's pages that change with every token. 0 keeps the selection of the "
        "random weights, which is hardly ever the same.",
    )
    short_context: int = _option(16384, "small: tokens of each context.")
    prefix: int = _option(25000, "ttft: tokens of the prefix.")
    longest: int = _option(262144, "beyond: tokens of the prompt.")
    chunk: int = _option(16384, "Rows of a prefill step.")
    text_tokens: int = _option(8000, "hits: tokens of the text.")
    text_rows: int = _option(256, "hits: tokens at its end that are read one by one.")
    bandwidth_gib: float = _option(2.0, "bandwidth: host memory that is copied from.")
    profile: bool = _option(False, "throughput: show kernels of a step.")

    @property
    def weights(self) -> str:
        """Type of the weights."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            least = 0 if option.name in ("change", "profile") else 1e-9
            if isinstance(value, int | float) and not least <= value:
                name = option.name.replace("_", "-")
                raise ConfigError(f"--{name} is {value}; it must be above 0")
        if self.profile and self.device != "cuda":
            raise ConfigError("--profile shows kernels of a GPU; leave it out with --device cpu")
        if self.profile and "throughput" not in self.parts:
            raise ConfigError(
                "--profile shows steps of the part throughput, which --parts leaves out"
            )
