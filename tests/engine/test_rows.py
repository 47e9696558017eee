from __future__ import annotations

from array import array

import numpy as np

from cairn.engine.inputs import StepInputs
from cairn.engine.plan import Advance, StepPlan
from cairn.memory.geometry import PageGeometry


def advance(start: int, stop: int, prompt_len: int = 5) -> Advance:
    tokens = tuple(100 + t for t in range(start, stop))
    return Advance("r", 0, start, stop, array("q", tokens), prompt_len, samples=True)


TABLES = np.arange(1, 13, dtype=np.int32).reshape(1, 3, 4)


def build(plan: StepPlan, geometry: PageGeometry, landmark_id: int | None = None) -> StepInputs:
    tables = TABLES[:, : len(plan.advances)]
    return StepInputs.of(plan, geometry, tables, tables, landmark_id)


def test_rows_of_a_plain_model_are_its_tokens() -> None:
    rows = build(StepPlan((advance(3, 6), advance(9, 10))), PageGeometry(4, 4))
    assert rows.token_ids.tolist() == [103, 104, 105, 109]
    assert rows.positions.tolist() == rows.cache_rows.tolist() == [3, 4, 5, 9]
    assert rows.lengths.tolist() == [5, 5, 6, 10]
    assert rows.seq.tolist() == [0, 0, 0, 1]
    assert rows.batch.kv_lens.tolist() == [6, 10]
    assert rows.batch.cu_query.tolist() == [0, 3, 4]
    assert rows.sampled_rows.tolist() == [2, 3]
    assert rows.is_token.all()


def test_landmark_rows_ride_with_the_last_token_of_their_page() -> None:
    # Pages of 4 rows: three tokens and a landmark row.
    plan = StepPlan((advance(1, 5), advance(5, 6), advance(6, 7)))
    rows = build(plan, PageGeometry(4, 3), landmark_id=999)
    assert rows.token_ids.tolist() == [101, 102, 999, 103, 104, 105, 999, 106]
    assert rows.cache_rows.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    # A landmark row has the position of the token after it.
    assert rows.positions.tolist() == [1, 2, 3, 3, 4, 5, 6, 6]
    assert rows.batch.query_lens.tolist() == [5, 2, 1]
    assert rows.batch.kv_lens.tolist() == [6, 8, 9]
    # Logits come from the last token, not from the landmark row behind it.
    assert rows.sampled_rows.tolist() == [4, 5, 7]
    assert np.flatnonzero(~rows.is_token).tolist() == [2, 6]


def test_rows_apart_see_what_is_before_them() -> None:
    plan = StepPlan((advance(4, 5), advance(5, 6)))
    rows = build(plan, PageGeometry(4, 3), landmark_id=999)
    assert rows.only_decodes
    apart = rows.as_sequences()
    (group,) = apart.batch.groups
    assert group.host_pages.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [5, 6, 7, 8]]
    assert apart.token_ids.tolist() == [104, 105, 999]
    assert apart.batch.kv_lens.tolist() == [6, 7, 8]
    assert apart.batch.query_lens.tolist() == [1, 1, 1]
    assert apart.batch.cu_query.tolist() == [0, 1, 2, 3]
    longer = build(StepPlan((advance(4, 6),)), PageGeometry(4, 3), landmark_id=999)
    assert not longer.only_decodes
