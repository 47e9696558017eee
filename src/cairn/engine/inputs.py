"""A step's host arrays, packed into one copy to the device.

Everything is int32. Rows come first, then sequences, then the page tables of every layer group, so
that a recorded step can keep one buffer of the same layout and have it overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from cairn.attention.batch import (
    AttentionBatch,
    GroupTables,
    HostBatch,
    HostTables,
    to_device,
)
from cairn.engine.rows import StepRows


@dataclass(frozen=True, slots=True)
class HostDraws:
    """What each sequence's next token is drawn with, where that needs no filters."""

    slots: np.ndarray  # [seqs]
    seeds: np.ndarray  # [seqs] int64, of request and position together
    temperatures: np.ndarray  # [seqs] float32, 0 for the most likely token

    def at(self, rows: np.ndarray, total: int, spare_slot: int) -> HostDraws:
        """The draws of `rows` among `total`; nobody wants the tokens of the others."""
        spread = HostDraws(
            np.full(total, spare_slot),
            np.zeros(total, dtype=np.int64),
            np.zeros(total, dtype=np.float32),
        )
        spread.slots[rows] = self.slots
        spread.seeds[rows] = self.seeds
        spread.temperatures[rows] = self.temperatures
        return spread

    def pack(self) -> np.ndarray:
        """int32; seeds first, so that they lie on eight bytes"""
        seeds, temperatures = self.seeds.view(np.int32), self.temperatures.view(np.int32)
        return np.concatenate((seeds, temperatures, self.slots.astype(np.int32)))


@dataclass(frozen=True, slots=True)
class DeviceDraws:
    slots: torch.Tensor  # [seqs] int32
    seeds: torch.Tensor  # [seqs] int64
    temperatures: torch.Tensor  # [seqs] float32

    @classmethod
    def view(cls, packed: torch.Tensor) -> DeviceDraws:
        seqs = len(packed) // 4
        seeds, temperatures, slots = torch.split(packed, [2 * seqs, seqs, seqs])
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

    def pack(self) -> np.ndarray:
        rows = self.rows
        row_pages = self.tables[:, rows.seq, rows.cache_rows // self.page_size]  # [groups, rows]
        parts = (
            rows.token_ids,
            rows.sources,
            rows.positions,
            rows.lengths,
            rows.cache_rows % self.page_size,
            row_pages.ravel(),
            rows.kv_lens,
            rows.cu_query,
        )
        return np.concatenate(parts).astype(np.int32)

    def pack_tables(self, generations: bool) -> np.ndarray:
        """[groups, seqs, pages], or twice as many groups with generations"""
        return np.concatenate((self.tables, self.generations)) if generations else self.tables

    def to_device(self, device: torch.device, generations: bool) -> StepInputs:
        packed = to_device(self.pack(), device)
        return self.view(packed, to_device(self.pack_tables(generations), device), device)

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

    def view(self, packed: torch.Tensor, tables: torch.Tensor, device: torch.device) -> StepInputs:
        """Inputs that read from buffers on the device: packed, and tables as packed."""
        rows, seqs = len(self.rows.token_ids), len(self.rows.kv_lens)
        groups = len(self.tables)
        token_ids, sources, positions, lengths, offsets, pages, kv_lens, cu_query = torch.split(
            packed, [rows] * 5 + [groups * rows, seqs, seqs + 1]
        )
        batch = AttentionBatch(
            page_size=self.page_size,
            query_lens=self.rows.query_lens,
            kv_lens=self.rows.kv_lens,
            cu_query=self.rows.cu_query,
            row_offsets=offsets,
            groups=tuple(
                GroupTables(
                    page_table=tables[g],
                    row_pages=pages[g * rows : (g + 1) * rows],
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
            device_kv_lens=kv_lens,
            device_cu_query=cu_query,
        )
        return StepInputs(token_ids, sources, positions, lengths, batch)
