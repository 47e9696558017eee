"""Which replica has the prefix of a prompt in its cache.

A prompt is a chain of blocks. Each hash covers a block and all blocks before it, so equal hashes
mean equal prefixes. The owner of a block is the replica that got the first prompt with it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

BLOCK = 256  # characters, about a page of tokens
_MOST_BLOCKS = 4096  # of one prompt: a million characters
_REMEMBERED = 1_000_000  # blocks of all prompts, some 150 MB
_WORTH = 0.25  # share of a prompt that must be known for its owner to be preferred


def blocks_of(text: str) -> tuple[bytes, ...]:
    """One hash per complete block."""
    chain, found = b"", []
    for end in range(BLOCK, min(len(text), BLOCK * _MOST_BLOCKS) + 1, BLOCK):
        block = text[end - BLOCK : end].encode("utf-8", "surrogatepass")
        chain = hashlib.blake2b(chain + block, digest_size=16).digest()
        found.append(chain)
    return tuple(found)


class Affinity:
    def __init__(self, imbalance: int, remembered: int = _REMEMBERED) -> None:
        self._imbalance = imbalance  # open requests an owner may have more than the least busy
        self._remembered = remembered
        self._owners: OrderedDict[bytes, str] = OrderedDict()  # least recently used first
        self._turns = 0
        self._last_turn: dict[str, int] = {}

    def choose(self, blocks: Sequence[bytes], loads: Mapping[str, int]) -> str:
        """Choose one of the replicas in `loads`, which has the open requests of each."""
        known, owner = self._match(blocks, loads)
        # Equally busy replicas take turns: loads lag behind, they count requests that were sent.
        calm = min(loads, key=lambda name: (loads[name], self._last_turn.get(name, 0), name))
        chosen = calm
        if owner is not None and known >= _WORTH * len(blocks):
            chosen = owner if loads[owner] - loads[calm] <= self._imbalance else calm
        self._turns += 1
        self._last_turn[chosen] = self._turns
        self._claim(blocks, known, chosen)
        return chosen

    def _match(self, blocks: Sequence[bytes], alive: Mapping[str, int]) -> tuple[int, str | None]:
        """Number of known blocks from the start, and the owner of the last of them."""
        known, owner = 0, None
        for block in blocks:
            found = self._owners.get(block)
            if found is None or found not in alive:
                break
            known, owner = known + 1, found
        return known, owner

    def _claim(self, blocks: Sequence[bytes], known: int, chosen: str) -> None:
        for block in blocks[known:]:
            self._owners[block] = chosen
        for block in reversed(blocks):  # so that a prefix is forgotten from its end
            self._owners.move_to_end(block)
        while len(self._owners) > self._remembered:
            self._owners.popitem(last=False)
