"""`--speculative ngram`: what followed the last few tokens when they came before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from cairn.engine.drafters.drafter import Drafter

_LEAST, _LONGEST = 3, 8
"""Length of the run of tokens that must have come before, and the longest that is compared."""


class NgramDrafter(Drafter):
    """Looks for the last tokens in prompt and output, and copies what followed them there.

    The place with the longest run of equal tokens wins, and of several the latest.
    """

    def draft(self, token_ids: array[int], most: int) -> Sequence[int]:
        ids = np.frombuffer(token_ids, dtype=np.int64)
        count = len(ids)
        if count <= _LEAST:
            return ()
        ends = np.flatnonzero(ids[_LEAST - 1 : -1] == ids[-1]) + _LEAST - 1
        for back in range(1, _LONGEST):
            longer = ends[ends >= back]
            longer = longer[ids[longer - back] == ids[count - 1 - back]]
            if not len(longer):
                if back < _LEAST:
                    return ()
                break
            ends = longer
        found = int(ends[-1]) + 1
        drafts: list[int] = ids[found : found + most].tolist()
        # A run that reaches the end repeats itself.
        drafts += (drafts * most)[: most - len(drafts)]
        return drafts
