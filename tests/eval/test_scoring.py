from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.eval.needle import Answer, is_right, tally, wilson


@pytest.mark.parametrize(
    ("said", "answer", "right"),
    [
        (" The access code of Mira is 48213.", "48213", True),
        ("48213", "48213", True),
        ("It is **48,213**.", "48213", True),
        ("482130", "48213", False),
        ("48213, and not 7", "48213", True),
        ("7 or 48213", "48213", False),
        ("Mira = Kolu = 48213.", "48213", True),
        ("", "48213", False),
        ("unknown", "48213", False),
        (" The access code of Mira is unknown.", "unknown", True),
        ("Unknown", "unknown", True),
        ("unknown, perhaps 12", "unknown", False),
        ("", "unknown", False),
    ],
)
def test_answers(said: str, answer: str, right: bool) -> None:
    assert is_right(said, answer) == right


@given(asked=st.integers(1, 400), share=st.floats(0, 1), z=st.floats(0.5, 4))
def test_wilson_bounds_solve_its_equation(asked: int, share: float, z: float) -> None:
    """The bounds are the shares p from which the one seen is just z deviations away."""
    right = round(share * asked)
    low, high = wilson(right, asked, z)
    seen = right / asked
    assert 0 <= low <= seen <= high <= 1
    for bound in (low, high):
        if 0 < bound < 1:
            deviation = z * math.sqrt(bound * (1 - bound) / asked)
            assert abs(seen - bound) == pytest.approx(deviation, rel=1e-6, abs=1e-9)


def test_wilson_of_known_cases() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert list(wilson(10, 10)) == pytest.approx([0.7225, 1.0], abs=1e-4)
    assert list(wilson(5, 10)) == pytest.approx([0.2366, 0.7634], abs=1e-4)


def test_tally_counts_cells_and_whole_lengths() -> None:
    answers = [
        Answer("single", 100, depth, sample, "Mira", "1", "1", right, 0)
        for sample, (depth, right) in enumerate([(0.0, True), (0.5, True), (0.5, False)])
    ]
    cells = {row["depth"]: (row["right"], row["asked"]) for row in tally(answers)}
    assert cells == {0.0: (1, 1), 0.5: (1, 2), None: (2, 3)}
