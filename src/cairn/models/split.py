"""How a decoder is divided among ranks: each has whole kv heads with their query heads, a share of
the MLP's width, and a share of the vocabulary.

The vocabulary's shares are equal and the last ones are padded; nothing else can be padded without
computing what nobody wants, so sizes that do not divide are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cairn.errors import ConfigError
from cairn.models.spec import DecoderSpec


def rank_spec(spec: DecoderSpec, tp_size: int) -> DecoderSpec:
    """What one rank computes: the same decoder with fewer heads and a narrower MLP."""
    if tp_size == 1:
        return spec
    dims = spec.dims
    sizes = {
        "num_key_value_heads": dims.num_kv_heads,
        "num_attention_heads": dims.num_heads,
        "intermediate_size": dims.intermediate_size,
    }
    for name, size in sizes.items():
        if size % tp_size:
            possible = [n for n in range(1, dims.num_kv_heads + 1) if _divides(n, sizes.values())]
            raise ConfigError(
                f"tp is {tp_size} and {spec.architecture} has {name} {size}, which cannot be "
                f"divided by it; use tp={' or '.join(map(str, possible))}"
            )
    return replace(
        spec,
        dims=replace(
            dims,
            num_heads=dims.num_heads // tp_size,
            num_kv_heads=dims.num_kv_heads // tp_size,
            intermediate_size=dims.intermediate_size // tp_size,
        ),
    )


def _divides(n: int, sizes: Iterable[int]) -> bool:
    return all(size % n == 0 for size in sizes)
