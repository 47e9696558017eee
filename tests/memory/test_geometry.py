from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.errors import ConfigError
from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import LayerGroup, group_layers, split_budget

geometries = st.builds(
    lambda size, landmark: PageGeometry(size, size - landmark),
    st.integers(2, 70),
    st.integers(0, 1),
)


@given(geometries, st.integers(0, 1000))
def test_rows_and_tokens_agree_with_counting(geometry: PageGeometry, tokens: int) -> None:
    row, seen = 0, 0
    while seen < tokens:
        if row % geometry.page_size < geometry.tokens_per_page:
            assert geometry.rows(seen) == row
            seen += 1
        row += 1
    # A page that is full of tokens includes its landmark row.
    if tokens and row % geometry.page_size == geometry.tokens_per_page:
        row += geometry.page_size - geometry.tokens_per_page
    assert geometry.rows(tokens) == row
    assert geometry.pages(tokens) == -(-row // geometry.page_size)
    assert geometry.complete_pages(tokens) == row // geometry.page_size
    assert geometry.tokens_in(row) == tokens
    assert geometry.tokens_in(geometry.rows(tokens + 1) - 1) == tokens


@pytest.mark.parametrize(("size", "per_page"), [(0, 0), (64, 62), (64, 65), (1, 0)])
def test_impossible_geometries_are_refused(size: int, per_page: int) -> None:
    with pytest.raises(ConfigError, match=r"page_size|tokens_per_page"):
        PageGeometry(size, per_page)


@given(st.integers(1, 100), st.integers(1, 300), geometries)
def test_first_reachable_page_is_the_page_of_the_first_key(
    window: int, row: int, geometry: PageGeometry
) -> None:
    group = LayerGroup("w", (0,), window)
    keys = [key for key in range(row + 1) if key > row - window]
    assert group.first_reachable_page(row, geometry.page_size) == keys[0] // geometry.page_size


def test_layers_are_grouped_by_window_full_first() -> None:
    groups = group_layers([32, None, 32, None, 8])
    assert [(g.name, g.layers) for g in groups] == [
        ("full", (1, 3)),
        ("window-8", (4,)),
        ("window-32", (0, 2)),
    ]


@given(
    st.integers(1, 10**6),
    st.integers(1, 1000),
    st.integers(1, 1000),
    st.integers(1, 500),
)
def test_budget_is_never_exceeded_and_windows_get_at_most_what_they_want(
    budget: int, full_bytes: int, window_bytes: int, wanted: int
) -> None:
    groups = group_layers([None, 16])
    if budget < full_bytes + window_bytes:
        return
    full, window = split_budget(budget, groups, [full_bytes, window_bytes], [10**9, wanted])
    used = full * full_bytes + window * window_bytes
    assert used <= budget
    assert full >= window >= 1
    assert window == min(wanted, full)
    # Nothing is left over that would make another page of the full group.
    assert used + full_bytes + window_bytes > budget


def test_a_budget_below_one_page_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"holds no page.*raise kv_cache_gib"):
        split_budget(10, group_layers([None]), [100], [5])
