"""Samples tokens from logits, all rows at once.

Parameters are kept on the host, one entry per slot, and are set when a request takes its slot. Each
step sends those of the rows it samples. Token counts and biases are tables [slots, vocab] on the
device, allocated when a request first needs them.

Random numbers depend only on the request's seed and the token's position. How a row is sampled
depends only on its own parameters. A request therefore draws the same tokens in any batch. On CUDA
a kernel samples rows without filters, so CUDA and CPU draw different tokens. Ties go to the lower
id.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch

from cairn.attention.batch import to_device
from cairn.engine.inputs import Draws
from cairn.engine.plan import Admission

_MASK = 2**64 - 1
_LEAST_TEMPERATURE = 1e-5  # below it sampling is greedy

# Columns of the parameter table `_numbers`.
_TOP_P, _MIN_P, _REPETITION, _PRESENCE, _FREQUENCY = range(5)


class Draw(NamedTuple):
    """One row to sample: slot, position of the new token, number of output tokens before it."""

    slot: int
    position: int
    num_output: int
    allowed: bytes | None = None  # bit mask of tokens; None allows all


class Sampler:
    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab = vocab_size
        self._device = device
        self._fused = device.type == "cuda" and find_spec("triton") is not None
        self._shape = (num_slots, vocab_size)
        self._numbers = np.zeros((num_slots, 5), dtype=np.float32)
        self._top_k = np.full(num_slots, vocab_size, dtype=np.int64)
        self._seeds = np.zeros(num_slots, dtype=np.uint64)
        self._temperatures = np.zeros(num_slots, dtype=np.float32)  # 0 for the most likely token
        self._filtered = np.zeros(num_slots, dtype=bool)
        self._penalized = np.zeros(num_slots, dtype=bool)
        self._biased = np.zeros(num_slots, dtype=bool)
        self._min_tokens = np.zeros(num_slots, dtype=np.int64)
        self._special = np.zeros(num_slots, dtype=bool)  # any of the four above
        self._counts: torch.Tensor | None = None  # [slots, vocab] occurrences in the output
        self._in_prompt: torch.Tensor | None = None  # [slots, vocab] bool
        self._bias: torch.Tensor | None = None  # [slots, vocab]
        self._ends: torch.Tensor | None = None  # [slots, vocab] tokens that min_tokens forbids

    # -- when a request takes a slot ----------------------------------------------------------

    def admit(self, admission: Admission) -> None:
        slot, params = admission.slot, admission.params
        self._numbers[slot] = (
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        top_k = params.top_k if params.top_k > 0 else self._vocab
        self._top_k[slot] = min(top_k, self._vocab)
        self._seeds[slot] = admission.seed
        random = params.temperature >= _LEAST_TEMPERATURE
        self._temperatures[slot] = params.temperature if random else 0.0
        filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self._filtered[slot] = filtered and random  # filters never drop the most likely token
        self._penalized[slot] = params.has_penalties
        self._biased[slot] = bool(params.bias)
        self._min_tokens[slot] = params.min_tokens if admission.stop_token_ids else 0
        self._special[slot] = (
            self._filtered[slot]
            or self._penalized[slot]
            or self._biased[slot]
            or self._min_tokens[slot] > 0
        )
        if params.has_penalties:
            self._count(slot, admission)
        if params.bias:
            if self._bias is None:
                self._bias = torch.zeros(self._shape, device=self._device)
            self._bias[slot] = 0
            ids, values = zip(*params.bias, strict=True)
            self._bias[slot, self._ids(ids)] = self._values(values)
        if self._min_tokens[slot]:
            if self._ends is None:
                self._ends = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._ends[slot] = False
            self._ends[slot, self._ids(sorted(admission.stop_token_ids))] = True

    def _count(self, slot: int, admission: Admission) -> None:
        if self._counts is None or self._in_prompt is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        self._counts[slot] = 0
        self._in_prompt[slot] = False
        self._in_prompt[slot, self._ids(admission.prompt_ids)] = True
        if admission.output_ids:
            ids = self._ids(admission.output_ids)
            self._counts[slot] += torch.bincount(ids, minlength=self._vocab).int()

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        return self._to_device(np.array(ids, dtype=np.int64))

    def _values(self, values: Sequence[float]) -> torch.Tensor:
        return self._to_device(np.array(values, dtype=np.float32))

    # -- every step ---------------------------------------------------------------------------

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """logits [rows, vocab] -> token ids [rows]"""
        slots = np.array([draw.slot for draw in draws])
        logits = self._adjusted(logits, draws, slots)
        random, filtered = self._temperatures[slots] > 0, self._filtered[slots]
        if self._fused:
            tokens = self._draw(logits, draws, slots)
            plain = np.zeros(0, dtype=np.int64)
        else:
            tokens = logits.argmax(-1)
            plain = np.flatnonzero(random & ~filtered)
        for rows, method in (
            (plain, self._sample_plain),
            (np.flatnonzero(filtered), self._sample_filtered),
        ):
            if len(rows):
                index = self._to_device(rows)
                tokens[index] = method(logits[index], [draws[int(row)] for row in rows])
        penalized = np.flatnonzero(self._penalized[slots])
        if len(penalized):
            assert self._counts is not None
            where = (self._to_device(slots[penalized]), tokens[self._to_device(penalized)])
            one = torch.ones((), dtype=torch.int32, device=self._device)
            self._counts.index_put_(where, one, accumulate=True)
        return tokens

    def plain_draws(self, slots: np.ndarray, positions: np.ndarray) -> Draws[np.ndarray] | None:
        """Temperatures and seeds of these slots; None if any slot needs filters, penalties, bias or
        min_tokens."""
        if self._special[slots].any():
            return None
        return Draws(slots, _seeds(self._seeds[slots], positions), self._temperatures[slots])

    def _draw(self, logits: torch.Tensor, draws: Sequence[Draw], slots: np.ndarray) -> torch.Tensor:
        """Sample greedy and unfiltered rows in one kernel."""
        from cairn.kernels.sampling import sample

        positions = np.array([draw.position for draw in draws])
        seeds = self._to_device(_seeds(self._seeds[slots], positions))
        return sample(logits, self._to_device(self._temperatures[slots]), seeds)

    def _adjusted(
        self, logits: torch.Tensor, draws: Sequence[Draw], slots: np.ndarray
    ) -> torch.Tensor:
        """Logits after bias, penalties, min_tokens and token masks; unchanged if none applies."""
        early = np.array([draw.num_output for draw in draws]) < self._min_tokens[slots]
        penalized, biased = self._penalized[slots], self._biased[slots]
        bound = np.array([draw.allowed is not None for draw in draws])
        rows = np.flatnonzero(early | penalized | biased | bound)
        if not len(rows):
            return logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        for flags, change in (
            (biased, self._add_bias),
            (penalized, self._penalize),
            (early, self._hold_back_ends),
        ):
            rows = np.flatnonzero(flags)
            if len(rows):
                index = self._to_device(rows)
                wide[index] = change(wide[index], slots[rows])
        rows = np.flatnonzero(bound)
        if len(rows):
            index = self._to_device(rows)
            forbidden = self._forbidden([draws[int(row)] for row in rows])
            wide[index] = wide[index].masked_fill(forbidden, float("-inf"))
        return wide

    def _forbidden(self, draws: Sequence[Draw]) -> torch.Tensor:
        """The forbidden tokens, bool [rows, vocab], of draws that all have a mask."""
        bits = np.zeros((len(draws), -(-self._vocab // 8)), dtype=np.uint8)
        for row, draw in enumerate(draws):
            given = np.frombuffer(draw.allowed or b"", dtype=np.uint8)[: bits.shape[1]]
            bits[row, : len(given)] = given
        allowed = np.unpackbits(bits, axis=1, count=self._vocab, bitorder="little")
        return self._to_device(allowed == 0)

    def _add_bias(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        assert self._bias is not None
        return logits + self._bias[self._to_device(slots)]

    def _penalize(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        assert self._counts is not None and self._in_prompt is not None
        index = self._to_device(slots)
        counts = self._counts[index]
        numbers = self._to_device(self._numbers[slots]).to(logits.dtype)
        seen = self._in_prompt[index] | (counts > 0)
        repetition = numbers[:, _REPETITION, None]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
        logits = logits - counts * numbers[:, _FREQUENCY, None]
        return logits - (counts > 0) * numbers[:, _PRESENCE, None]

    def _hold_back_ends(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        assert self._ends is not None
        return logits.masked_fill(self._ends[self._to_device(slots)], float("-inf"))

    def _sample_plain(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        return self._invert(self._tempered(logits, draws).softmax(-1), draws)

    def _sample_filtered(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """Apply top_k, then top_p, then min_p, and draw from the tokens left."""
        slots = np.array([draw.slot for draw in draws])
        tempered, order = self._tempered(logits, draws).sort(dim=-1, descending=True, stable=True)
        numbers = self._to_device(self._numbers[slots]).to(tempered.dtype)
        ranks = torch.arange(self._vocab, device=self._device)[None, :]
        beyond = ranks >= self._to_device(self._top_k[slots])[:, None]
        probabilities = tempered.masked_fill(beyond, float("-inf")).softmax(-1)
        # Keep a token if the more likely tokens together do not reach top_p.
        before = probabilities.cumsum(-1) - probabilities
        outside = (before >= numbers[:, _TOP_P, None]) & (ranks > 0)
        outside |= probabilities < numbers[:, _MIN_P, None] * probabilities[:, :1]
        choice = self._invert(probabilities.masked_fill(outside, 0), draws)
        return order.gather(-1, choice[:, None]).squeeze(-1)

    def _tempered(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        slots = np.array([draw.slot for draw in draws])
        temperatures = self._to_device(self._temperatures[slots]).to(wide.dtype)
        # Subtracting the maximum first keeps tiny temperatures finite.
        shifted = wide - wide.amax(-1, keepdim=True)
        return shifted / temperatures[:, None]

    def _invert(self, weights: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """Draw an index in proportion to its weight: the first index whose cumulative weight
        exceeds a uniform share of the total. Never draws an index of weight zero."""
        numbers = [uniform_number(int(self._seeds[draw.slot]), draw.position) for draw in draws]
        uniform = self._values(numbers).to(weights.dtype)[:, None]
        cumulative = weights.cumsum(-1)
        target = uniform * cumulative[:, -1:]
        index = (cumulative <= target).sum(-1)
        # If rounding makes the target equal the total, take the last index with weight.
        last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).to(torch.uint8).argmax(-1)
        return torch.minimum(index, last)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self._device)


def _seeds(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One seed per draw, mixed from the request's seed and the position by splitmix64."""
    x = seeds + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = (x ^ (x >> np.uint64(31))).astype(np.int64)
    return mixed


def uniform_number(seed: int, index: int) -> float:
    """A number in [0, 1) from (seed, index), by splitmix64. Its 24 bits are exact in float32."""
    value = (_mix(seed & _MASK) + index * 0x9E3779B97F4A7C15) & _MASK
    return (_mix(value) >> 40) / 2**24


def derived_seed(seed: int, choice: int) -> int:
    """The seed of choice number `choice` of a request; the first keeps the seed itself."""
    return seed if choice == 0 else _mix((_mix(seed & _MASK) + choice) & _MASK) >> 1


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
