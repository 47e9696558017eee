"""Which pages a request read: per generated token, layer and head, with weights and text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cairn.memory.geometry import PageGeometry
from cairn.sparsity.selection import Selection


@dataclass(frozen=True, slots=True)
class TracedPage:
    index: int  # place in the sequence
    first_token: int
    num_tokens: int
    text: str | None  # None without a tokenizer


@dataclass(frozen=True, slots=True)
class LayerRead:
    """What one token's row read in one layer."""

    layer: int
    pages: list[list[int]]  # [kv_heads][k] places in the sequence, ascending
    weights: list[list[list[float]]]  # [kv_heads][heads of the group][k] share in the output
    window_weight: list[float]  # [heads] share of the local window


@dataclass(frozen=True, slots=True)
class TracedToken:
    token_id: int
    text: str | None
    layers: list[LayerRead]
    """Of the sparse layers. A row that was read densely has all of it in its window."""

    def page_weights(self) -> dict[int, float]:
        """Mean share of each page over all sparse layers and heads."""
        total: dict[int, float] = {}
        heads = sum(len(read.window_weight) for read in self.layers)
        for read in self.layers:
            for pages, group in zip(read.pages, read.weights, strict=True):
                for head in group:
                    for page, weight in zip(pages, head, strict=True):
                        total[page] = total.get(page, 0.0) + weight / heads
        return dict(sorted(total.items()))


@dataclass(frozen=True, slots=True)
class Trace:
    page_size: int
    pages: list[TracedPage]
    tokens: list[TracedToken]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def page_weights(self) -> dict[int, float]:
        """Mean share of each page over all traced tokens."""
        total: dict[int, float] = {}
        for token in self.tokens:
            for page, weight in token.page_weights().items():
                total[page] = total.get(page, 0.0) + weight / len(self.tokens)
        return dict(sorted(total.items()))


def make_trace(
    token_ids: Sequence[int],
    prompt_len: int,
    selections: Sequence[dict[int, Selection]],
    geometry: PageGeometry,
    decode: Callable[[Sequence[int]], str] | None,
) -> Trace:
    """`selections` holds one entry, by layer, for each token after the prompt."""

    def text(ids: Sequence[int]) -> str | None:
        return None if decode is None else decode(ids)

    pages = []
    for index in range(geometry.pages(len(token_ids))):
        first = geometry.tokens(index)
        ids = token_ids[first : geometry.tokens(index + 1)]
        pages.append(TracedPage(index, first, len(ids), text(ids)))
    tokens = [
        TracedToken(token_id, text([token_id]), [_read(layer, own) for layer, own in read.items()])
        for token_id, read in zip(token_ids[prompt_len:], selections, strict=True)
    ]
    return Trace(geometry.page_size, pages, tokens)


def _read(layer: int, selection: Selection) -> LayerRead:
    index = selection.page_index[0]  # [kv_heads, k]
    kv_heads = index.shape[0]
    group = selection.weights.shape[1] // kv_heads
    weights = selection.weights[0].view(kv_heads, group, index.shape[1])
    pages, shares = [], []
    for head in range(kv_heads):
        count = int((index[head] >= 0).sum())
        pages.append(index[head, :count].tolist())
        shares.append(weights[head, :, :count].tolist())
    return LayerRead(layer, pages, shares, selection.window_weight[0].tolist())
