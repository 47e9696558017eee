"""A plan under construction."""

from __future__ import annotations

from cairn.engine.plan import Admission, Advance, TableEdit
from cairn.engine.request import Request
from cairn.memory.cache import SequencePages
from cairn.memory.pages import NULL_PAGE


def attention_pairs(rows: int, context: int) -> int:
    """Number of (row, key) pairs that `rows` new rows after `context` earlier ones score."""
    return rows * context + rows * (rows + 1) // 2


class Step:
    """What the plan has so far, and what is left for more."""

    def __init__(self) -> None:
        self.budget = 0  # rows left for prefill and drafts
        self.reserved = 0  # of them, for prefill
        self.drafted = 0
        self.hopeful = 0  # requests whose drafts probably come true
        self.rows = 0
        self.pairs = 0
        self.prefill_rows = 0
        self.advances: list[Advance] = []
        self.admissions: list[Admission] = []
        self.edits: list[TableEdit] = []
        self.retracted: list[str] = []

    def spend(self, rows: int, context: int, *, prefill: bool) -> None:
        self.rows += rows
        self.pairs += attention_pairs(rows, context)
        if prefill:
            self.prefill_rows += rows
            self.budget -= rows

    def collect_edits(self, request: Request, pages: SequencePages) -> None:
        """Add the edits that bring the runner's tables up to date with the request's tables."""
        for g, table in enumerate(pages.tables):
            before, now = request.planned_live[g], pages.live_from[g]
            dropped = min(now, request.planned_pages) - before
            if dropped > 0:
                none, zeros = (NULL_PAGE,) * dropped, (0,) * dropped
                self.edits.append(TableEdit(g, request.slot, before, none, zeros))
            request.planned_live[g] = now
            if len(table) > request.planned_pages:
                first = request.planned_pages
                own, generations = tuple(table[first:]), tuple(pages.generations[g][first:])
                self.edits.append(TableEdit(g, request.slot, first, own, generations))
        request.planned_pages = pages.num_pages
