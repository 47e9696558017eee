"""The inputs of a step: the flat rows of a plan, one request after the other, and page tables.

Host arrays are packed and sent to the device in one copy. All values are int32. Per-row arrays come
first, then per-sequence arrays. Page tables are sent separately. A recorded step keeps one buffer
of the same layout, which each replay overwrites.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch

from cairn.attention.batch import AttentionBatch, GroupTables, to_device
from cairn.engine.plan import UNKNOWN, Advance, StepPlan
from cairn.kernels.packing import pack, unpack
from cairn.memory.geometry import PageGeometry
from cairn.sparsity.config import ALL_ROWS

Array = TypeVar("Array", np.ndarray, torch.Tensor)


@dataclass(frozen=True, slots=True)
class Draws(Generic[Array]):
    """How each sampled token is drawn, for sampling without filters."""

    places: Array  # [samples] where each token is stored, see `StepInputs.sources`
    seeds: Array  # [samples] int64, mixed from the request's seed and the position
    temperatures: Array  # [samples] float32, 0 for the most likely token

    @staticmethod
    def none(count: int, spare: int) -> Draws[np.ndarray]:
        """Draws for rows whose tokens are not used."""
        seeds, temperatures = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.float32)
        return Draws(np.full(count, spare), seeds, temperatures)

    def arrays(self: Draws[np.ndarray]) -> tuple[np.ndarray, ...]:
        return self.seeds.view(np.int32), self.temperatures.view(np.int32), self.places

    @staticmethod
    def on_device(arrays: Sequence[torch.Tensor]) -> Draws[torch.Tensor]:
        """Draws from device copies of what the method `arrays` returned."""
        seeds, temperatures, places = arrays
        return Draws(places, seeds.view(torch.int64), temperatures.view(torch.float32))


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Host arrays over the rows of a step, and its batch; sequence s is plan.advances[s]."""

    batch: AttentionBatch
    token_ids: np.ndarray  # [rows]
    sources: np.ndarray
    """[rows] place of the token among those that the device keeps, -1 to use token_ids. A slot has
    `per_slot` places: for its newest token, and for the drafts that the model makes."""
    positions: np.ndarray  # [rows] for rope; a landmark row has the next token's position
    lengths: np.ndarray  # [rows] sequence length that rope assumes, see Rotary
    cache_rows: np.ndarray  # [rows] index in the sequence's cache
    seq: np.ndarray  # [rows] sequence of each row
    is_token: np.ndarray  # [rows] False for landmark rows
    sampled_rows: np.ndarray  # [samples] rows after which tokens are sampled, see Advance.samples
    sent: Sequence[torch.Tensor] = ()
    """token_ids, sources, positions and lengths on the device, once the step is sent."""

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        geometry: PageGeometry,
        tables: np.ndarray,  # [groups, seqs, pages] int32
        generations: np.ndarray,  # [groups, seqs, pages] int32
        landmark_id: int | None = None,
        per_slot: int = 1,
    ) -> StepInputs:
        """The rows of a plan. If the model has landmark rows, a page's landmark row is computed in
        the same step as the page's last token."""
        size, per_page = geometry.page_size, geometry.tokens_per_page
        slots, starts, stops, prompts, samples, dense, traced, guess = columns_of(
            plan.advances,
            *("slot", "start", "stop", "prompt_len", "samples", "dense", "traced", "guess"),
        )
        first_rows, kv_lens = geometry.rows(starts), geometry.rows(stops)
        query_lens = kv_lens - first_rows
        cu_query = np.concatenate(([0], np.cumsum(query_lens)))
        num_rows = cu_query[-1]
        seq = np.repeat(np.arange(len(plan.advances)), query_lens)
        cache_rows = np.arange(num_rows) + np.repeat(first_rows - cu_query[:-1], query_lens)
        known = b"".join([advance.token_ids for advance in plan.advances])
        token_ids, positions = np.frombuffer(known, np.int64), cache_rows
        is_token = np.ones(num_rows, dtype=bool)
        if geometry.has_landmark_row:
            assert landmark_id is not None
            pages = cache_rows // size
            positions = cache_rows - pages * (size - per_page)
            is_token = cache_rows - pages * size < per_page
            with_landmarks = np.full(num_rows, landmark_id)
            with_landmarks[is_token] = token_ids
            token_ids = with_landmarks
        sources = np.full(num_rows, -1)
        unknown = token_ids == UNKNOWN
        if unknown.any():
            newest = stops - np.maximum(samples, 1) - np.maximum(guess - 1, 0)
            places = slots[seq] * per_slot + np.maximum(positions - newest[seq], 0)
            sources = np.where(unknown, places, -1)
            token_ids = np.maximum(token_ids, 0)
        owner, tokens = sampled_tokens(stops, samples)
        sampled_rows = cu_query[owner] + geometry.rows(tokens) - first_rows[owner]
        batch = AttentionBatch(
            page_size=size,
            query_lens=query_lens,
            kv_lens=kv_lens,
            cu_query=cu_query,
            groups=tuple(
                GroupTables(host_pages=pages, host_generations=lives)
                for pages, lives in zip(tables, generations, strict=True)
            ),
            prompt_rows=np.where(dense > 0, ALL_ROWS, geometry.rows(prompts)),
            traced_rows=sampled_rows[traced[owner] > 0],
        )
        return cls(
            batch=batch,
            token_ids=token_ids,
            sources=sources,
            positions=positions,
            lengths=np.maximum(np.repeat(prompts, query_lens), positions + 1),
            cache_rows=cache_rows,
            seq=seq,
            is_token=is_token,
            sampled_rows=sampled_rows,
        )

    @classmethod
    def single_rows(
        cls,
        geometry: PageGeometry,
        starts: np.ndarray,  # [seqs] token to compute
        prompts: np.ndarray,  # [seqs] tokens of the prompt
        token_ids: np.ndarray,  # [seqs] UNKNOWN for a token that is at `places` on the device
        places: np.ndarray,  # [seqs]
        tables: np.ndarray,  # [groups, seqs, pages] int32
        generations: np.ndarray,  # [groups, seqs, pages] int32
    ) -> StepInputs:
        """A step that computes one token of each sequence, of a model without landmark rows."""
        count = len(starts)
        unknown, every = token_ids == UNKNOWN, np.arange(count)
        batch = AttentionBatch(
            page_size=geometry.page_size,
            query_lens=np.ones(count, dtype=np.int64),
            kv_lens=starts + 1,
            cu_query=np.arange(count + 1),
            groups=tuple(
                GroupTables(host_pages=pages, host_generations=lives)
                for pages, lives in zip(tables, generations, strict=True)
            ),
            prompt_rows=prompts,
            traced_rows=np.empty(0, dtype=np.int64),
        )
        return cls(
            batch=batch,
            token_ids=np.where(unknown, 0, token_ids),
            sources=np.where(unknown, places, -1),
            positions=starts,
            lengths=np.maximum(prompts, starts + 1),
            cache_rows=starts,
            seq=every,
            is_token=np.ones(count, dtype=bool),
            sampled_rows=every,
        )

    @classmethod
    def made_up(
        cls,
        page_size: int,
        new: Sequence[int] | np.ndarray,  # [seqs] rows to compute
        total: Sequence[int] | np.ndarray,  # [seqs] rows in the cache, the new ones included
        tables: Sequence[np.ndarray],  # [groups, seqs, pages]
        *,
        prompt_rows: np.ndarray | None = None,
        traced_rows: Sequence[int] = (),
        resident: bool = False,
        generation: int = 1,
    ) -> StepInputs:
        """A step without requests, whose pages are all in one generation.

        All rows belong to prompts unless `prompt_rows` is given.
        """
        prompts = total if prompt_rows is None else prompt_rows
        advances = [
            Advance("", 0, stop - count, stop, array("q", bytes(8 * count)), prompt, samples=True)
            for count, stop, prompt in zip(
                map(int, new), map(int, total), map(int, prompts), strict=True
            )
        ]
        pages = np.stack(tables).astype(np.int32)
        lives = np.full_like(pages, generation)
        geometry = PageGeometry(page_size, page_size)
        step = cls.of(StepPlan(tuple(advances)), geometry, pages, lives)
        traced = np.asarray(traced_rows, dtype=np.int64)
        return replace(step, batch=replace(step.batch, traced_rows=traced, resident=resident))

    @property
    def only_decodes(self) -> bool:
        """A token is sampled after every row, except for landmark rows, which are never first."""
        firsts = self.is_token[self.batch.cu_query[:-1]]
        return bool(self.is_token.sum() == len(self.sampled_rows) and firsts.all())

    def arrays(self) -> tuple[np.ndarray, ...]:
        """All arrays to send, except the tables."""
        batch = self.batch
        pages = self.cache_rows // batch.page_size
        offsets = self.cache_rows - pages * batch.page_size
        return (
            self.token_ids,
            self.sources,
            self.positions,
            self.lengths,
            offsets,
            *(self._pages_of(group, pages) for group in batch.groups),
            batch.kv_lens,
            batch.cu_query,
            batch.prompt_rows,
        )

    def _pages_of(self, group: GroupTables, places: np.ndarray) -> np.ndarray:
        """The page of each row, at these places [rows] of its sequence's table."""
        pages: np.ndarray
        if self.batch.num_seqs == 1:
            pages = group.host_pages[0, places]
        else:
            pages = group.host_pages[self.seq, places]
        return pages

    def pack_tables(self, generations: bool, num_seqs: int | None = None) -> np.ndarray:
        """Page tables [groups, num_seqs, pages], padded with the null page. With `generations`
        those follow, as more groups."""
        groups = self.batch.groups
        given = [group.host_pages for group in groups]
        if generations:
            given += [group.host_generations for group in groups]
        _, width = given[0].shape
        tables = np.zeros((len(given), num_seqs or self.batch.num_seqs, width), dtype=np.int32)
        for table, own in zip(tables, given, strict=True):
            table[: len(own)] = own
        return tables

    def send(self, device: torch.device, generations: bool) -> StepInputs:
        """The same step with its tensors on the device."""
        arrays = self.arrays()
        packed = to_device(pack(arrays), device)
        tables = to_device(self.pack_tables(generations), device)
        return self.on_device(unpack(packed, [len(array) for array in arrays]), tables)

    def on_device(self, arrays: Sequence[torch.Tensor], tables: torch.Tensor) -> StepInputs:
        """The same step with its tensors taken from device `arrays` and packed `tables`."""
        count = len(self.batch.groups)
        *sent, offsets = arrays[:5]
        *pages, kv_lens, cu_query, prompt_rows = arrays[5:]
        batch = replace(
            self.batch,
            groups=tuple(
                replace(
                    group,
                    page_table=tables[g],
                    row_pages=pages[g],
                    generations=tables[count + g] if len(tables) > count else None,
                )
                for g, group in enumerate(self.batch.groups)
            ),
            device=tables.device,
            row_offsets=offsets,
            device_kv_lens=kv_lens,
            device_cu_query=cu_query,
            device_prompt_rows=prompt_rows,
        )
        return replace(self, batch=batch, sent=sent)

    def as_sequences(self) -> StepInputs:
        """The same step with each row as its own sequence, which sees the rows before it."""
        batch, seq = self.batch, self.seq
        count = len(seq)
        if count == batch.num_seqs:
            return self
        batch = replace(
            batch,
            query_lens=np.ones(count, dtype=np.int64),
            kv_lens=self.cache_rows + 1,
            cu_query=np.arange(count + 1),
            prompt_rows=batch.prompt_rows[seq],
            groups=tuple(
                GroupTables(
                    host_pages=group.host_pages[seq], host_generations=group.host_generations[seq]
                )
                for group in batch.groups
            ),
        )
        return replace(self, batch=batch, seq=np.arange(count))

    def drafting(self, places: np.ndarray, later: int) -> StepInputs:
        """The step that follows this one so much later if the model drafts, for the first
        sequences. Each has one row, whose token is stored at `places` [seqs] of the device."""
        count = len(places)
        batch = self.batch
        cut = replace(
            batch,
            query_lens=batch.query_lens[:count],
            kv_lens=batch.kv_lens[:count] + later,
            cu_query=batch.cu_query[: count + 1],
            prompt_rows=batch.prompt_rows[:count],
            groups=tuple(
                GroupTables(
                    host_pages=group.host_pages[:count],
                    host_generations=group.host_generations[:count],
                )
                for group in batch.groups
            ),
        )
        positions = self.positions[:count] + later
        return replace(
            self,
            batch=cut,
            token_ids=np.zeros(count, dtype=np.int64),
            sources=places,
            positions=positions,
            lengths=np.maximum(self.lengths[:count], positions + 1),
            cache_rows=self.cache_rows[:count] + later,
            seq=self.seq[:count],
            is_token=self.is_token[:count],
            sampled_rows=self.sampled_rows[:count],
        )

    def padded_arrays(self, num_rows: int, num_seqs: int, *, mixed: bool) -> list[np.ndarray]:
        """All arrays to send for a recorded step of this size, padded with rows on the null page.

        In a mixed step the first added sequence has all added rows and the others are empty. In a
        decode step each added sequence has one row. If sequences have few rows, added rows belong
        to no sequence.
        """
        arrays = self.arrays()
        none = np.zeros(num_rows - self.batch.num_rows, dtype=np.int64)
        lens = np.zeros(num_seqs - self.batch.num_seqs, dtype=np.int64)
        if mixed:
            lens[0] = len(none)
        elif num_rows == num_seqs:
            lens[:] = 1
        # token_ids, sources, positions, lengths, offsets and pages
        of_rows = (none, none - 1, none, none + 1, *[none] * (len(arrays) - 7))
        of_seqs = (lens, self.batch.num_rows + np.cumsum(lens), lens)
        return [
            np.concatenate((own, more)) if len(more) else own
            for own, more in zip(arrays, (*of_rows, *of_seqs), strict=True)
        ]


def columns_of(advances: Sequence[Advance], *names: str) -> list[np.ndarray]:
    """Each of these fields as an int64 array over the advances."""
    # Without advances there are no columns.
    columns = dict(zip(Advance._fields, zip(*advances, strict=True), strict=False))
    return [np.array(columns.get(name, ()), dtype=np.int64) for name in names]


def sampled_tokens(stops: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each sampled token, the index of its advance and the index of the token before it.

    stops [n] and samples [n] are those of the advances.
    """
    owner = np.repeat(np.arange(len(samples)), samples)
    return owner, stops[owner] - (np.cumsum(samples)[owner] - np.arange(len(owner)))
