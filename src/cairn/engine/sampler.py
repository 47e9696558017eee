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

from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch

from cairn.attention.batch import to_device
from cairn.engine.inputs import Draws, columns_of, sampled_tokens
from cairn.engine.plan import UNKNOWN, Admission, Advance

_LEAST_TEMPERATURE = 1e-5  # below it sampling is greedy
_STEP = 0x9E3779B97F4A7C15  # of splitmix64

# Columns of the parameter table `_numbers`.
_TOP_P, _MIN_P, _REPETITION, _PRESENCE, _FREQUENCY = range(5)


class _Samples(NamedTuple):
    """What a step samples: one entry for each sampled token of each advance."""

    owner: np.ndarray  # [samples] index of the advance
    slots: np.ndarray  # [samples]
    positions: np.ndarray  # [samples] of the sampled token
    guess: np.ndarray  # [samples] number of the draft, 0 for others; -1 behind an advance's first

    @classmethod
    def of(cls, advances: Sequence[Advance]) -> _Samples:
        slots, stops, samples, guess = columns_of(advances, "slot", "stop", "samples", "guess")
        owner, before = sampled_tokens(stops, samples)
        first = np.diff(owner, prepend=-1) > 0
        return cls(owner, slots[owner], before + 1, np.where(first, guess[owner], -1))


def has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


class Sampler:
    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device, per_slot: int = 1
    ) -> None:
        """`per_slot` is as in `StepInputs.sources`."""
        self._vocab = vocab_size
        self._per_slot = per_slot
        self._device = device
        self.fused = has_kernels(device)
        """Tokens are looked up and sampled by Triton kernels."""
        self._shape = (num_slots, vocab_size)
        self._numbers = np.zeros((num_slots, 5), dtype=np.float32)
        self._top_k = np.full(num_slots, vocab_size, dtype=np.int64)
        self._seeds = np.zeros(num_slots, dtype=np.uint64)
        self._temperatures = np.zeros(num_slots, dtype=np.float32)  # 0 for the most likely token
        self._filtered = np.zeros(num_slots, dtype=bool)
        self._penalized = np.zeros(num_slots, dtype=bool)
        self._biased = np.zeros(num_slots, dtype=bool)
        self._min_tokens = np.zeros(num_slots, dtype=np.int64)
        self._special = np.zeros(num_slots, dtype=bool)  # any of these, or log-probabilities

    # -- tables [slots, vocab] on the device ---------------------------------------------------

    @cached_property
    def _counts(self) -> torch.Tensor:
        """Occurrences in the output."""
        return torch.zeros(self._shape, dtype=torch.int32, device=self._device)

    @cached_property
    def _in_prompt(self) -> torch.Tensor:
        return torch.zeros(self._shape, dtype=torch.bool, device=self._device)

    @cached_property
    def _bias(self) -> torch.Tensor:
        return torch.zeros(self._shape, device=self._device)

    @cached_property
    def _ends(self) -> torch.Tensor:
        """Tokens that min_tokens forbids."""
        return torch.zeros(self._shape, dtype=torch.bool, device=self._device)

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
            or params.logprobs is not None
        )
        # To assign a number to indexed elements, torch would copy it to the device and wait for all
        # work there.
        if params.has_penalties:
            self._in_prompt[slot].zero_().index_fill_(0, self._ids(admission.prompt_ids), True)
            made = self._ids(admission.output_ids)
            self._counts[slot].zero_().index_add_(0, made, torch.ones_like(made, dtype=torch.int32))
        if params.bias:
            ids, values = zip(*params.bias, strict=True)
            self._bias[slot] = 0
            self._bias[slot, self._ids(ids)] = self._sent(np.array(values, dtype=np.float32))
        if self._min_tokens[slot]:
            ends = self._ids(sorted(admission.stop_token_ids))
            self._ends[slot].zero_().index_fill_(0, ends, True)

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        return self._sent(np.array(ids, dtype=np.int64))

    # -- every step ---------------------------------------------------------------------------

    def plain_draws(self, advances: Sequence[Advance]) -> Draws[np.ndarray] | None:
        """How these requests draw tokens; None if one needs filters, penalties, bias, min_tokens,
        a mask or log-probabilities."""
        if any(advance.allowed for advance in advances):
            return None
        samples = _Samples.of(advances)
        return self._plain_draws(samples.slots, samples.positions, self._places(samples))

    def draft_draws(
        self, slots: np.ndarray, positions: np.ndarray, draft: int
    ) -> Draws[np.ndarray] | None:
        """Likewise for this draft, from 1, that slots [n] make of the tokens at `positions`."""
        return self._plain_draws(slots, positions, slots * self._per_slot + draft)

    def request_seeds(self, slots: np.ndarray) -> np.ndarray:
        """The seeds [n] of the requests in these slots, from which those of their tokens are
        made."""
        seeds: np.ndarray = self._seeds[slots]
        return seeds

    def _plain_draws(
        self, slots: np.ndarray, positions: np.ndarray, places: np.ndarray
    ) -> Draws[np.ndarray] | None:
        if self._special[slots].any():
            return None
        seeds = _seeds(self._seeds[slots], positions)
        return Draws(places, seeds, self._temperatures[slots])

    def places(self, advances: Sequence[Advance]) -> np.ndarray:
        """Where each sampled token [samples] is stored: the first one of an advance as the newest
        of its slot or as a draft, others at the spare place, behind those of all slots."""
        return self._places(_Samples.of(advances))

    def _places(self, samples: _Samples) -> np.ndarray:
        spare = len(self._seeds) * self._per_slot
        own = samples.slots * self._per_slot + samples.guess
        return np.where(samples.guess < 0, spare, own)

    def sample(
        self, logits: torch.Tensor, advances: Sequence[Advance], newest: torch.Tensor | None = None
    ) -> torch.Tensor:
        """logits [samples, vocab] -> token ids [samples]

        `newest` [places] are the tokens that the device keeps, for drafts that only it knows.
        """
        samples = _Samples.of(advances)
        _, slots, positions, _ = samples
        drafts = self._drafts(advances, newest) if self._penalized[slots].any() else None
        logits = self._adjusted(logits, advances, samples, drafts)
        random, filtered = self._temperatures[slots] > 0, self._filtered[slots]
        if self.fused:  # one kernel samples greedy and unfiltered rows
            from cairn.kernels.sampling import sample

            seeds = self._sent(_seeds(self._seeds[slots], positions))
            tokens = sample(logits, self._sent(self._temperatures[slots]), seeds)
            random = filtered
        else:
            tokens = logits.argmax(-1)
        for flags, filters in ((random & ~filtered, False), (filtered, True)):
            rows = np.flatnonzero(flags)
            if len(rows):
                index = self._sent(rows)
                tokens[index] = self._draw(logits[index], slots[rows], positions[rows], filters)
        if drafts is not None:
            self._count(tokens, advances, samples, drafts)
        return tokens

    def _adjusted(
        self,
        logits: torch.Tensor,
        advances: Sequence[Advance],
        samples: _Samples,
        drafts: torch.Tensor | None,
    ) -> torch.Tensor:
        """Logits after bias, penalties, min_tokens and token masks; unchanged if none applies."""
        owner, slots, positions, _ = samples
        num_output = positions - np.array([advance.prompt_len for advance in advances])[owner]
        masked = np.array([bool(advance.allowed) for advance in advances])[owner]
        bias, ends = self._biased[slots], num_output < self._min_tokens[slots]
        if drafts is None and not (masked.any() or bias.any() or ends.any()):
            return logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        if len(rows := np.flatnonzero(bias)):
            wide[self._sent(rows)] += self._bias[self._sent(slots[rows])]
        if drafts is not None:
            self._penalize(wide, advances, samples, drafts)
        if len(rows := np.flatnonzero(ends)):
            held_back = self._ends[self._sent(slots[rows])]
            index = self._sent(rows)
            wide[index] = wide[index].masked_fill(held_back, float("-inf"))
        if len(rows := np.flatnonzero(masked)):
            forbidden = self._forbidden([mask for own in advances for mask in own.allowed])
            index = self._sent(rows)
            wide[index] = wide[index].masked_fill(forbidden, float("-inf"))
        return wide

    def _forbidden(self, masks: Sequence[bytes]) -> torch.Tensor:
        """The forbidden tokens, bool [rows, vocab]."""
        bits = np.zeros((len(masks), -(-self._vocab // 8)), dtype=np.uint8)
        for row, mask in enumerate(masks):
            given = np.frombuffer(mask, dtype=np.uint8)[: bits.shape[1]]
            bits[row, : len(given)] = given
        allowed = np.unpackbits(bits, axis=1, count=self._vocab, bitorder="little")
        return self._sent(allowed == 0)

    # -- penalties ----------------------------------------------------------------------------

    def _drafts(self, advances: Sequence[Advance], newest: torch.Tensor | None) -> torch.Tensor:
        """The drafted tokens of all advances, one after the other."""
        ids = [
            token for own in advances for token in own.token_ids[len(own.token_ids) - own.drafted :]
        ]
        drafts = self._ids(ids)
        if UNKNOWN not in ids:
            return drafts
        assert newest is not None
        places = [
            own.slot * self._per_slot + (number if own.guesses else 0)
            for own in advances
            for number in range(1, 1 + own.drafted)
        ]
        return torch.where(drafts == UNKNOWN, newest[self._ids(places)], drafts)

    def _penalize(
        self,
        logits: torch.Tensor,  # [samples, vocab], changed in place
        advances: Sequence[Advance],
        samples: _Samples,
        drafts: torch.Tensor,
    ) -> None:
        """Apply penalties. A token is sampled as if the drafts before it came true."""
        rows = np.flatnonzero(self._penalized[samples.slots])
        slots = samples.slots[rows]
        index, places = self._sent(rows), self._sent(slots)
        counts = self._counts[places]
        # Entry (row, draft) for each draft before a sampled token.
        pairs = [
            (row, draft) for row, draft in _before(advances) if self._penalized[samples.slots[row]]
        ]
        if pairs:
            at, which = np.array(pairs).T
            counted = self._sent(np.searchsorted(rows, at)), drafts[self._sent(which)]
            one = torch.ones((), dtype=torch.int32, device=self._device)
            counts.index_put_(counted, one, accumulate=True)
        own = logits[index]
        numbers = self._sent(self._numbers[slots]).to(logits.dtype)
        seen = self._in_prompt[places] | (counts > 0)
        repetition = numbers[:, _REPETITION, None]
        repeated = torch.where(own > 0, own / repetition, own * repetition)
        own = torch.where(seen, repeated, own)
        own = own - counts * numbers[:, _FREQUENCY, None]
        logits[index] = own - (counts > 0) * numbers[:, _PRESENCE, None]

    def _count(
        self,
        tokens: torch.Tensor,  # [samples]
        advances: Sequence[Advance],
        samples: _Samples,
        drafts: torch.Tensor,
    ) -> None:
        """Count the sampled tokens that are kept: up to the first that is not the draft."""
        kept = torch.ones(len(tokens), dtype=torch.int32, device=self._device)
        row = draft = 0
        for advance in advances:
            if advance.guess:
                kept[row] = 0
            elif count := advance.drafted:
                right = tokens[row : row + count] == drafts[draft : draft + count]
                kept[row + 1 : row + 1 + count] = right.int().cumprod(0)
            row, draft = row + advance.samples, draft + advance.drafted
        index = self._sent(np.flatnonzero(self._penalized[samples.slots]))
        where = self._sent(samples.slots)[index], tokens[index]
        self._counts.index_put_(where, kept[index], accumulate=True)

    def _draw(
        self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, filters: bool
    ) -> torch.Tensor:
        """Draw random tokens. With `filters` apply top_k, then top_p, then min_p."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        temperatures = self._sent(self._temperatures[slots]).to(wide.dtype)
        uniform = self._sent(uniform_numbers(self._seeds[slots], positions)).to(wide.dtype)
        # Subtracting the maximum first keeps tiny temperatures finite.
        tempered = (wide - wide.amax(-1, keepdim=True)) / temperatures[:, None]
        if not filters:
            return _invert(tempered.softmax(-1), uniform)
        tempered, order = tempered.sort(dim=-1, descending=True, stable=True)
        numbers = self._sent(self._numbers[slots]).to(tempered.dtype)
        ranks = torch.arange(self._vocab, device=self._device)[None, :]
        beyond = ranks >= self._sent(self._top_k[slots])[:, None]
        probabilities = tempered.masked_fill(beyond, float("-inf")).softmax(-1)
        # Keep a token if the more likely tokens together do not reach top_p.
        before = probabilities.cumsum(-1) - probabilities
        outside = (before >= numbers[:, _TOP_P, None]) & (ranks > 0)
        outside |= probabilities < numbers[:, _MIN_P, None] * probabilities[:, :1]
        choice = _invert(probabilities.masked_fill(outside, 0), uniform)
        return order.gather(-1, choice[:, None]).squeeze(-1)

    def _sent(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self._device)


def _before(advances: Sequence[Advance]) -> Iterator[tuple[int, int]]:
    """Pairs of a sampled token and a draft before it, both counted over all advances."""
    row = draft = 0
    for advance in advances:
        for sample in range(1, advance.samples):
            yield from ((row + sample, draft + earlier) for earlier in range(sample))
        row, draft = row + advance.samples, draft + advance.drafted


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw an index of each row in proportion to its weight: the first index whose cumulative
    weight exceeds the share `uniform` [rows] of the total. Never draws an index of weight zero."""
    cumulative = weights.cumsum(-1)
    target = uniform[:, None] * cumulative[:, -1:]
    index = (cumulative <= target).sum(-1)
    # If rounding makes the target equal the total, take the last index with weight.
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).to(torch.uint8).argmax(-1)
    return torch.minimum(index, last)


def _seeds(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One seed per draw, mixed from the request's seed and the position."""
    return _mix(seeds + positions.astype(np.uint64) * _STEP).astype(np.int64)


def uniform_numbers(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) from pairs (seed, index). Their 24 bits are exact in float32."""
    mixed = _mix(_mix(seeds + _STEP) + indices.astype(np.uint64) * _STEP + _STEP)
    return ((mixed >> 40) / 2**24).astype(np.float32)


def derived_seed(seed: int, choice: int) -> int:
    """The seed of choice number `choice` of a request; the first keeps the seed itself."""
    mixed = _mix(_mix(np.array([seed], dtype=np.uint64) + _STEP) + choice + _STEP)
    return seed if choice == 0 else int(mixed[0] >> 1)


def _mix(x: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 numbers, as splitmix64 does."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    mixed: np.ndarray = x ^ (x >> 31)
    return mixed
