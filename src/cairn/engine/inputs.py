"""A step's host arrays, packed into one copy to the device.

Everything is int32. Rows come first, then sequences; page tables travel beside them. A recorded
step can keep one buffer of the same layout and have it overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cairn.attention.batch import (
    AttentionBatch,
    GraphKind,
    GroupTables,
    HostBatch,
    HostTables,
    to_device,
)
from cairn.engine.rows import StepRows
from cairn.kernels.packing import pack, unpack


@dataclass(frozen=True, slots=True)
class HostDraws:
    """What each sequence's next token is drawn with, where that needs no filters."""

    slots: np.ndarray  # [seqs]
    seeds: np.ndarray  # [seqs] int64, of request and position together
    temperatures: np.ndarray  # [seqs] float32, 0 for the most likely token

    @classmethod
    def none(cls, count: int, spare_slot: int) -> HostDraws:
        """For rows whose token nobody wants."""
        return cls(
            np.full(count, spare_slot),
            np.zeros(count, dtype=np.int64),
            np.zeros(count, dtype=np.float32),
        )

    def at(self, rows: np.ndarray, total: int, spare_slot: int) -> HostDraws:
        """The draws of `rows` among `total`; nobody wants the tokens of the others."""
        spread = HostDraws.none(total, spare_slot)
        spread.slots[rows] = self.slots
        spread.seeds[rows] = self.seeds
        spread.temperatures[rows] = self.temperatures
        return spread

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.seeds.view(np.int32), self.temperatures.view(np.int32), self.slots


@dataclass(frozen=True, slots=True)
class DeviceDraws:
    slots: torch.Tensor  # [seqs] int32
    seeds: torch.Tensor  # [seqs] int64
    temperatures: torch.Tensor  # [seqs] float32

    @classmethod
    def view(cls, arrays: Sequence[torch.Tensor]) -> DeviceDraws:
        """`arrays` are those of HostDraws, on the device."""
        seeds, temperatures, slots = arrays
        return cls(slots, seeds.view(torch.int64), temperatures.view(torch.float32))


@dataclass(frozen=True, slots=True)
class StepInputs:
    token_ids: torch.Tensor  # [rows]
    sources: torch.Tensor  # [rows] slot whose newest token the row is, -1 if token_ids has it
    positions: torch.Tensor  # [rows]
    lengths: torch.Tensor  # [rows]
    batch: AttentionBatch


@dataclass(frozen=True, slots=True)
class HostInputs:
    """Of `rows` and `seqs`; the tables are [groups, seqs, pages].

    On the device the tables of page ids may be followed by as many of generations.
    """

    rows: StepRows
    page_size: int
    tables: np.ndarray
    generations: np.ndarray
    prompt_rows: np.ndarray
    traced_rows: np.ndarray
    resident: bool = False
    recorded: GraphKind | None = None
    """The kind of step this is recorded as."""

    def arrays(self) -> tuple[np.ndarray, ...]:
        """All but the tables."""
        rows = self.rows
        row_pages = self.tables[:, rows.seq, rows.cache_rows // self.page_size]  # [groups, rows]
        return (
            rows.token_ids,
            rows.sources,
            rows.positions,
            rows.lengths,
            rows.cache_rows % self.page_size,
            *row_pages,
            rows.kv_lens,
            rows.cu_query,
            self.prompt_rows,
        )

    def pack_tables(self, generations: bool) -> np.ndarray:
        """[groups, seqs, pages], or twice as many groups with generations"""
        return np.concatenate((self.tables, self.generations)) if generations else self.tables

    def to_device(self, device: torch.device, generations: bool) -> StepInputs:
        arrays = self.arrays()
        packed = to_device(pack(arrays), device)
        tables = to_device(self.pack_tables(generations), device)
        return self.view(unpack(packed, [len(array) for array in arrays]), tables, device)

    def apart(self) -> HostInputs:
        """Every row as a sequence of its own."""
        if len(self.rows.token_ids) == len(self.rows.kv_lens):
            return self
        seq = self.rows.seq
        return replace(
            self,
            rows=self.rows.apart(),
            tables=self.tables[:, seq],
            generations=self.generations[:, seq],
            prompt_rows=self.prompt_rows[seq],
        )

    def padded(self, num_rows: int, num_seqs: int, *, mixed: bool) -> HostInputs:
        """The same step with more rows and sequences, all on the null page.

        In a mixed step the first added sequence has all added rows, and the others are empty. In a
        decode step every added sequence has one row.
        """
        rows = self.rows
        more, others = num_rows - len(rows.token_ids), num_seqs - len(rows.kv_lens)
        if not (more or others):
            return self
        lens = np.zeros(others, dtype=np.int64)
        if not mixed:
            lens[:] = 1
        elif more:
            lens[0] = more
        zeros, ones = np.zeros(more, dtype=np.int64), np.ones(more, dtype=np.int64)
        query_lens = np.concatenate((rows.query_lens, lens))
        cu_query = np.concatenate(([0], np.cumsum(query_lens)))
        seq = np.repeat(np.arange(len(rows.kv_lens), num_seqs), lens)
        padded = StepRows(
            token_ids=np.concatenate((rows.token_ids, zeros)),
            sources=np.concatenate((rows.sources, -ones)),
            positions=np.concatenate((rows.positions, zeros)),
            lengths=np.concatenate((rows.lengths, ones)),
            cache_rows=np.concatenate((rows.cache_rows, zeros)),
            seq=np.concatenate((rows.seq, seq)),
            query_lens=query_lens,
            kv_lens=np.concatenate((rows.kv_lens, lens)),
            cu_query=cu_query,
            is_token=np.concatenate((rows.is_token, ones.astype(bool))),
            last_token_rows=np.concatenate((rows.last_token_rows, cu_query[-others - 1 : -1])),
        )
        none = np.zeros((len(self.tables), others, self.tables.shape[2]), dtype=np.int32)
        return replace(
            self,
            rows=padded,
            tables=np.concatenate((self.tables, none), 1),
            generations=np.concatenate((self.generations, none), 1),
            prompt_rows=np.concatenate((self.prompt_rows, lens)),
        )

    def host_batch(self) -> HostBatch:
        return HostBatch(
            page_size=self.page_size,
            query_lens=self.rows.query_lens,
            kv_lens=self.rows.kv_lens,
            cu_query=self.rows.cu_query,
            groups=tuple(
                HostTables(host_pages=pages, host_generations=generations)
                for pages, generations in zip(self.tables, self.generations, strict=True)
            ),
            prompt_rows=self.prompt_rows,
            traced_rows=self.traced_rows,
            resident=self.resident,
        )

    def view(
        self, arrays: Sequence[torch.Tensor], tables: torch.Tensor, device: torch.device
    ) -> StepInputs:
        """Inputs that read from these arrays and tables on the device."""
        groups = len(self.tables)
        token_ids, sources, positions, lengths, offsets, *others = arrays
        *pages, kv_lens, cu_query, prompt_rows = others
        batch = AttentionBatch(
            page_size=self.page_size,
            query_lens=self.rows.query_lens,
            kv_lens=self.rows.kv_lens,
            cu_query=self.rows.cu_query,
            row_offsets=offsets,
            groups=tuple(
                GroupTables(
                    page_table=tables[g],
                    row_pages=pages[g],
                    host_pages=self.tables[g],
                    host_generations=self.generations[g],
                    generations=tables[groups + g] if len(tables) > groups else None,
                )
                for g in range(groups)
            ),
            device=device,
            prompt_rows=self.prompt_rows,
            traced_rows=self.traced_rows,
            resident=self.resident,
            recorded=self.recorded,
            device_kv_lens=kv_lens,
            device_cu_query=cu_query,
            device_prompt_rows=prompt_rows,
        )
        return StepInputs(token_ids, sources, positions, lengths, batch)
