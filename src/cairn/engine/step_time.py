"""Predicts how long a step with prefill takes, so that the scheduler can keep a time limit.

    seconds ~ a + b * rows + c * pairs         pairs = (row, key) pairs that attention scores

a, b and c are fitted while serving, by least squares with exponential forgetting. None may be
negative, since more work is never faster.
"""

from __future__ import annotations

import numpy as np

_FORGET = 0.97
_TRUSTED = 8  # observations after which outliers are clipped
_FIRST_ROWS = 512  # rows of a step before the first observation
_SAFETY = 0.75  # aim below the limit: steps vary


def round_rows(rows: int) -> int:
    """Round down to a power of two, or to one and a half times a power of two."""
    if rows < 2:
        return rows
    power = 1 << (rows.bit_length() - 1)
    return power * 3 // 2 if rows >= power * 3 // 2 else power


def step_sizes(most: int, least: int = 64) -> list[int]:
    """All values of `round_rows` for numbers from `least` to `most`, largest first."""
    sizes = [round_rows(most)]
    while sizes[-1] > least:
        sizes.append(round_rows(sizes[-1] - 1))
    return sizes


class StepTimeModel:
    def __init__(self) -> None:
        self._normal = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self._fitted: np.ndarray | None = None
        self._scale = np.ones(3)
        self.observations = 0

    def observe(self, rows: int, pairs: int, seconds: float) -> None:
        if self.observations >= _TRUSTED:
            # A step that compiled a kernel or waited for the system does not predict the next.
            seconds = min(seconds, 2 * self.predict(rows, pairs))
        x = np.array([1.0, rows, pairs])
        self._scale = np.maximum(self._scale, x)
        self._normal = _FORGET * self._normal + np.outer(x, x)
        self._moment = _FORGET * self._moment + x * seconds
        self.observations += 1
        self._fitted = None

    def predict(self, rows: int, pairs: int) -> float:
        return float(self._weights() @ np.array([1.0, rows, pairs]))

    def rows_within(self, limit: float, rows: int, pairs: int, context: int, most: int) -> int:
        """Most rows of a sequence, after `context` earlier rows, that still fit into the step.

        `rows` and `pairs` are already in the step. Before the first observation the result is a
        fixed small number.
        """
        if self.observations == 0:
            return min(most, _FIRST_ROWS)
        left = limit * _SAFETY - self.predict(rows, pairs)
        if left <= 0:
            return 0
        _, b, c = self._weights()
        # n rows cost b n + c (n context + n^2 / 2); solve for n.
        linear, quadratic = b + c * context, c / 2
        if quadratic > 0:
            fit = (-linear + np.sqrt(linear * linear + 4 * quadratic * left)) / (2 * quadratic)
        elif linear > 0:
            fit = left / linear
        else:
            return most
        return min(most, int(fit))

    def _weights(self) -> np.ndarray:
        """a, b and c, fitted on demand. Without a time limit nothing asks for them."""
        if self._fitted is None:
            self._fitted = self._fit()
        return self._fitted

    def _fit(self) -> np.ndarray:
        """Non-negative least squares: drop the most negative coefficient and refit."""
        active = [0, 1, 2]
        normal = self._normal / np.outer(self._scale, self._scale)
        moment = self._moment / self._scale
        while active:
            ridge = 1e-9 * np.eye(len(active)) * max(1.0, normal[0, 0])
            solution = np.linalg.solve(normal[np.ix_(active, active)] + ridge, moment[active])
            if solution.min() >= 0:
                weights = np.zeros(3)
                weights[active] = solution
                return weights / self._scale
            del active[int(solution.argmin())]
        return np.zeros(3)
