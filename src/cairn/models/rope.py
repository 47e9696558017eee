"""Rotary position embeddings: default, linear, dynamic, yarn and llama3 scaling.

Configs come in two forms: transformers 4 (`rope_theta` and `rope_scaling`) and transformers 5
(`rope_parameters`, possibly one per layer type). Both become `RopeParameters`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cairn.errors import ConfigError
from cairn.models.config_reader import ConfigReader

_LEAST, _MOST = 1e-9, 1e12  # of any number here: powers and logarithms of them are finite
_MOST_POSITIONS = 2**31 - 1

_KNOWN_FIELDS = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": set(
        "factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate".split()
    ),
    "divided": {"divisors"},  # of GGUF files
}


@dataclass(frozen=True, slots=True)
class RopeParameters:
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    """Positions the model was trained on, before scaling."""
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    divisors: tuple[float, ...] = ()
    """What each frequency is divided by: the tensor rope_freqs of GGUF files."""
    least_frequency: float = 0.0
    """Dimensions of a lower frequency, too low for one turn in the context, do not turn."""
    rotated_share: float = 1.0
    """Share of the pairs of dimensions that a "hope" rope turns; the others do not turn."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rope by layer type, and the context length that follows from it."""

    by_layer_type: Mapping[str, RopeParameters]
    context_length: int


def read_rope(
    config: ConfigReader,
    layer_types: Sequence[str],
    default_theta: float,
    *,
    scale_only: str | None = None,
    default_context: int | None = None,
) -> RopeConfig:
    """Rope of every layer type. With `scale_only`, a transformers-4 `rope_scaling` applies to that
    layer type alone and the others keep the default."""
    context = config.take_positive("max_position_embeddings", default_context)
    theta = config.take("rope_theta", float, default_theta)
    if not theta > 0:
        raise config.out_of_range("rope_theta", theta, _LEAST, _MOST)
    config.require("partial_rotary_factor", (1, 1.0), 1.0)
    scaling = config.take_optional("rope_scaling", dict)
    given = config.take_optional("rope_parameters", dict)
    outer_original = None
    if config.peek("original_max_position_embeddings") is not None:
        outer_original = config.take_positive("original_max_position_embeddings")
    if scaling is not None and given is not None:
        raise ConfigError(f"{config.source}: has both rope_scaling and rope_parameters; keep one")
    types = sorted(set(layer_types))
    by_type: dict[str, RopeParameters] = {}
    for layer_type in types:
        if given is not None:
            nested = any(t in given for t in ("full_attention", "sliding_attention"))
            values = given.get(layer_type) if nested else given
            field = f"rope_parameters.{layer_type}" if nested else "rope_parameters"
        else:
            applies = scale_only is None or layer_type == scale_only
            values, field = (scaling if applies else None), "rope_scaling"
        by_type[layer_type] = _parse(config, field, values or {}, theta, context, outer_original)
    length = max(_scaled_context(rope, context) for rope in by_type.values())
    if length > _MOST_POSITIONS:
        raise config.out_of_range("the context with rope scaling", length, 1, _MOST_POSITIONS)
    return RopeConfig(by_type, length)


def _parse(
    config: ConfigReader,
    field: str,
    values: Mapping[str, Any],
    theta: float,
    context: int,
    outer_original: int | None,
) -> RopeParameters:
    if not isinstance(values, Mapping):
        raise config.unsupported(field, values, "it must be an object")
    kind = values.get("rope_type", values.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KNOWN_FIELDS:
        raise config.unsupported(
            f"{field}.rope_type", kind, f"supported: {', '.join(_KNOWN_FIELDS)}"
        )
    known = _KNOWN_FIELDS[kind] | {"rope_theta", "original_max_position_embeddings"}
    numbers: dict[str, Any] = {}
    for name, value in values.items():
        # `finetuned` was written by early YaRN exports and never read; null means the default.
        # A magnitude of 0 means that there is none.
        absent = value is None or (value == 0 and name in ("mscale", "mscale_all_dim"))
        if absent or name in ("rope_type", "type", "finetuned"):
            continue
        if name == "partial_rotary_factor" and value == 1:
            continue
        if name not in known:
            raise config.unsupported(f"{field}.{name}", value, f"rope type {kind!r} has no such")
        if name == "divisors":
            numbers[name] = _divisors(config, f"{field}.{name}", value)
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name == "truncate":
            if not isinstance(value, bool):
                raise config.unsupported(f"{field}.{name}", value, "it must be true or false")
        elif not is_number or not _LEAST <= value <= _MOST:
            raise config.out_of_range(f"{field}.{name}", value, _LEAST, _MOST)
        numbers[name] = value
    theta = float(numbers.pop("rope_theta", theta))
    own_original = numbers.pop("original_max_position_embeddings", None)
    if own_original is not None and own_original < 1:
        name = f"{field}.original_max_position_embeddings"
        raise config.out_of_range(name, own_original, 1, _MOST_POSITIONS)
    original = context
    if kind in ("yarn", "llama3"):
        original = int(outer_original or own_original or context)
    if kind == "yarn" and "factor" not in numbers and original < context:
        numbers["factor"] = context / original
    required = {"factor", "low_freq_factor", "high_freq_factor", "divisors"} & _KNOWN_FIELDS[kind]
    for name in sorted(required - numbers.keys()):
        raise ConfigError(f"{config.source}: {field}.{name} is missing for rope type {kind!r}")
    if numbers.get("factor", 1) < 1:
        raise ConfigError(
            f"{config.source}: {field}.factor is {numbers['factor']}; it must be at least 1"
        )
    if kind == "yarn" and theta <= 1:
        raise config.unsupported("rope_theta", theta, "with yarn it must be above 1")
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise config.unsupported(
            f"{field}.low_freq_factor",
            numbers["low_freq_factor"],
            f"it must be below high_freq_factor, {numbers['high_freq_factor']}",
        )
    # Dynamic scaling starts from max_position_embeddings, whatever else the config says.
    return RopeParameters(theta=theta, kind=kind, original_context=original, **numbers)


def _divisors(config: ConfigReader, field: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(type(value) is float for value in values):
        raise config.unsupported(field, values, "it must be a list of numbers")
    for value in values:
        if not _LEAST <= value <= _MOST:
            raise config.out_of_range(field, value, _LEAST, _MOST)
    return tuple(values)


def _scaled_context(rope: RopeParameters, context: int) -> int:
    if rope.kind in ("linear", "dynamic"):
        return int(context * rope.factor)
    if rope.kind == "yarn":
        return max(context, int(rope.original_context * rope.factor))
    return context


CosSin = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles that a layer asks for."""

    rope: RopeParameters
    head_dim: int
    heads: tuple[int, int] | None = None
    """Heads that are rotated, and heads behind them that stay as they are, for layers that rotate
    all of them at once. None: one row of angles for every head."""


class Rotary:
    """Turns positions into the cosines and sines that rotate queries and keys."""

    def __init__(
        self,
        rotation: Rotation,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fused: bool = False,
    ) -> None:
        rope, head_dim = rotation.rope, rotation.head_dim
        self._rope, self._head_dim, self._heads = rope, head_dim, rotation.heads
        self._fused = fused and rope.kind != "dynamic"
        # Angles as transformers computes them, in float32; more only for float64 models.
        self._angle_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._dtype = dtype
        if device.type == "meta":
            return  # never called, and torch takes seconds to import arithmetic for this device
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device)
        self._exponents = exponents.to(self._angle_dtype) / head_dim
        frequencies, self._scale = _frequencies(rope, head_dim, self._exponents)
        still = frequencies < rope.least_frequency
        still[0] = False
        self._frequencies = frequencies.masked_fill(still, 0)  # [head_dim / 2]

    def __call__(self, positions: torch.Tensor, lengths: torch.Tensor) -> CosSin:
        """positions, lengths [rows] -> cos, sin [rows, 1 or all heads, head_dim], for `rotate`.

        `lengths` is the sequence length each row is rotated for; only dynamic scaling reads it.
        """
        cos, sin = self._angles(positions, lengths)
        if self._heads is None:
            return cos, sin
        rotated, unrotated = ((len(cos), heads, self._head_dim) for heads in self._heads)
        return (
            torch.cat((cos.expand(rotated), cos.new_ones(unrotated)), 1),
            torch.cat((sin.expand(rotated), sin.new_zeros(unrotated)), 1),
        )

    def _angles(self, positions: torch.Tensor, lengths: torch.Tensor) -> CosSin:
        frequencies = self._frequencies
        if self._fused:
            from cairn.kernels.rope_angles import rope_angles

            return rope_angles(positions, frequencies, self._scale, self._dtype)
        if self._rope.kind == "dynamic":
            frequencies = self._dynamic_frequencies(lengths)
        angles = positions.to(self._angle_dtype)[:, None] * frequencies
        cos = (angles.cos() * self._scale).to(self._dtype)
        sin = (angles.sin() * self._scale).to(self._dtype)
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]

    def _dynamic_frequencies(self, lengths: torch.Tensor) -> torch.Tensor:
        rope, dim = self._rope, self._head_dim
        length = lengths.clamp(min=rope.original_context).to(self._angle_dtype)
        stretch = rope.factor * length / rope.original_context - (rope.factor - 1)
        theta = rope.theta * stretch ** (dim / (dim - 2))  # [rows]
        return 1.0 / theta[:, None] ** self._exponents  # [rows, head_dim / 2]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, head_dim]; dimensions j and j + head_dim / 2 form a pair.

    Rolling by half a head exchanges the two; the sign of the exchange is in `sin`.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rotation_order(dim: int, *, interleaved: bool) -> torch.Tensor:
    """The checkpoint's dimension for each dimension that `rotate` takes, [dim]. With `interleaved`
    pairs are neighbours in the checkpoint. Dot products do not depend on the order."""
    order = torch.arange(dim)
    return order.view(-1, 2).t().flatten() if interleaved else order


def _frequencies(
    rope: RopeParameters, dim: int, exponents: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [dim / 2], and the factor on cos and sin."""
    if rope.kind == "hope":
        return _hope(rope, dim, exponents), 1.0
    inverse = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return inverse / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, dim, inverse), _yarn_attention_factor(rope)
    if rope.kind == "divided":
        if len(rope.divisors) != dim // 2:
            raise ConfigError(
                f"rope has {len(rope.divisors)} divisors; heads of {dim} need {dim // 2}"
            )
        return inverse / inverse.new_tensor(rope.divisors), 1.0
    return inverse, 1.0


def _hope(rope: RopeParameters, dim: int, exponents: torch.Tensor) -> torch.Tensor:
    """Only the first pairs of dimensions turn, with wavelengths from 1 to theta."""
    turning = min(max(round(rope.rotated_share * dim / 2), 1), dim // 2)
    index = torch.arange(dim // 2, dtype=exponents.dtype, device=exponents.device)
    base = rope.theta
    if not base:
        # The slowest pair completes one turn in the trained context.
        base = (rope.original_context / (2 * math.pi)) ** (turning / max(turning - 1, 1))
    return torch.where(index < turning, base ** (-index / turning), 0)


def _llama3(rope: RopeParameters, inverse: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, the band between blended."""
    turns = rope.original_context * inverse / (2 * math.pi)  # rotations within the old context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * inverse / rope.factor + blend * inverse


def _yarn(rope: RopeParameters, dim: int, inverse: torch.Tensor) -> torch.Tensor:
    """Dimensions that turn more than beta_fast times in the old context are kept, those that
    turn less than beta_slow times stretched, with a linear ramp between."""

    def dimension(rotations: float) -> float:
        turns = rope.original_context / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # an infinitely steep ramp
    index = torch.arange(dim // 2, dtype=inverse.dtype, device=inverse.device)
    stretched = ((index - low) / (high - low)).clamp(0, 1)
    return inverse / rope.factor * stretched + inverse * (1 - stretched)


def _yarn_attention_factor(rope: RopeParameters) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_magnitude(rope, rope.mscale) / yarn_magnitude(rope, rope.mscale_all_dim)
    return yarn_magnitude(rope, 1.0)


def yarn_magnitude(rope: RopeParameters, mscale: float) -> float:
    return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0
