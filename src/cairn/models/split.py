"""How a decoder is divided among ranks: each has whole kv heads with their query heads, a share of
the MLP's width or whole experts, and a share of the vocabulary.

The vocabulary is padded to equal shares. Other sizes must be divisible: padding would cost compute.
"""

from __future__ import annotations

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
            possible = [
                n
                for n in range(1, dims.num_kv_heads + 1)
                if all(size % n == 0 for size in sizes.values())
            ]
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


def share(what: str, size: int, tp_size: int) -> int:
    """A rank's part of something that is divided evenly."""
    if size % tp_size:
        raise ConfigError(
            f"tp is {tp_size} and {what} is {size}, which cannot be divided by it; use another tp"
        )
    return size // tp_size
