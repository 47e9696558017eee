"""Heads that read latent rows: one row of the cache serves all heads as key and as value.

A latent row is [latent | rope]. Head h has the key [K_h latent | rope] and the value V_h latent.
Absorbed form: K_h moves to the query and V_h behind attention, so heads attend to the rows as they
are. Expanded form: keys and values of all heads are made first. Both give the same result. The
first does less for a few new rows, the second for many.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class LatentHeads(NamedTuple):
    """The weights of one layer's heads."""

    key: torch.Tensor  # [heads, nope, latent]
    value: torch.Tensor  # [heads, latent, value]

    @property
    def latent(self) -> int:
        return self.key.shape[2]

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """query [rows, heads, nope + rope] -> [rows, heads, latent + rope]"""
        nope, rope = query.tensor_split((self.key.shape[1],), -1)
        out = query.new_empty(*query.shape[:2], self.latent + rope.shape[2])
        torch.bmm(nope.transpose(0, 1), self.key, out=out[..., : self.latent].transpose(0, 1))
        out[..., self.latent :] = rope
        return out

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """What heads read, [rows, heads, latent] -> [rows, heads, value]"""
        out = attended.new_empty(*attended.shape[:2], self.value.shape[2])
        torch.bmm(attended.transpose(0, 1), self.value, out=out.transpose(0, 1))
        return out

    def expand(self, rows: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [heads, rows, nope + rope] and values [heads, rows, value] of some heads, from
        latent rows [rows, latent + rope]."""
        latent, rope = rows.tensor_split((self.latent,), -1)
        key, value = self.key[heads], self.value[heads]
        nope = torch.matmul(latent, key.transpose(1, 2))
        return torch.cat((nope, rope.expand(len(key), -1, -1)), -1), torch.matmul(latent, value)

    def expand_rows(self, rows: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by row, without the rotated part of keys, which heads share: keys [rows, heads,
        nope] and values [rows, heads, value], both contiguous."""
        key, value = self.key[heads].flatten(0, 1), self.value[heads].transpose(1, 2).flatten(0, 1)
        latent = rows[:, : self.latent]
        made = (F.linear(latent, matrix) for matrix in (key, value))
        keys, values = (x.view(len(rows), self.key[heads].shape[0], -1) for x in made)
        return keys, values

    def expanding_pays(self, query: torch.Tensor) -> bool:
        """Whether the expanded form multiplies less for a sequence's new rows [rows, heads, dim].

        Expanding costs the same for every row of the past. Then each pair of a new row and a row
        that it sees costs less.
        """
        _, nope, latent = self.key.shape
        rope, value = query.shape[2] - nope, self.value.shape[2]
        saved = (latent + rope + latent) - (nope + rope + value)
        return len(query) * saved > latent * (nope + value)
