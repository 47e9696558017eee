"""Which pages generated tokens were read from.

`Trace` is what `LLM` returns: pages and weights of every head, with the text of the pages.
`TokenReads` is what the server sends with each token: the same, averaged over the heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cairn.memory.geometry import PageGeometry

if TYPE_CHECKING:  # the API process uses TokenReads before torch is loaded
    from cairn.sparsity.selection import Selection

_LEAST_SHARE = 5e-4  # smaller ones cannot be seen, and would be most of the bytes
_DIGITS = 4


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Pages that one token read in one layer, averaged over the heads."""

    layer: int
    pages: list[int]
    weights: list[float]
    """Share of each page in the output. With the window's they add up to 1."""
    window: float


@dataclass(frozen=True, slots=True)
class TokenReads:
    window_page: int
    """First page of the window, which every layer reads to its end."""
    layers: list[LayerPages]


@dataclass(frozen=True, slots=True)
class LayerRead:
    """Pages that one token read in one layer, by head."""

    layer: int
    pages: list[list[int]]  # [kv_heads][k] positions in the sequence, ascending
    weights: list[list[list[float]]]  # [kv_heads][heads of the group][k] share in the output
    window_weight: list[float]  # [heads] share of the local window

    @classmethod
    def of(cls, layer: int, selection: Selection) -> LayerRead:
        index = selection.page_index[0]  # [kv_heads, k]
        kv_heads = index.shape[0]
        group = selection.weights.shape[1] // kv_heads
        weights = selection.weights[0].view(kv_heads, group, index.shape[1])
        pages, shares = [], []
        for head in range(kv_heads):
            count = int((index[head] >= 0).sum())
            pages.append(index[head, :count].tolist())
            shares.append(weights[head, :, :count].tolist())
        return cls(layer, pages, shares, selection.window_weight[0].tolist())

    def shares(self) -> Iterator[tuple[int, float]]:
        """Each selected page with its share, for each head."""
        for pages, group in zip(self.pages, self.weights, strict=True):
            for head in group:
                yield from zip(pages, head, strict=True)

    def page_sums(self) -> dict[int, float]:
        """Share of each page, summed over the heads. Kv heads may have chosen different pages."""
        sums: dict[int, float] = {}
        for page, weight in self.shares():
            sums[page] = sums.get(page, 0.0) + weight
        return sums

    def averaged(self) -> LayerPages:
        heads = len(self.window_weight)
        means = {page: total / heads for page, total in sorted(self.page_sums().items())}
        kept = {page: round(s, _DIGITS) for page, s in means.items() if s >= _LEAST_SHARE}
        window = round(sum(self.window_weight) / heads, _DIGITS)
        return LayerPages(self.layer, list(kept), list(kept.values()), window)


@dataclass(frozen=True, slots=True)
class TracedPage:
    index: int  # position in the sequence
    first_token: int
    num_tokens: int
    text: str | None  # None without a tokenizer


@dataclass(frozen=True, slots=True)
class TracedToken:
    token_id: int
    text: str | None
    layers: list[LayerRead]
    """Of the sparse layers. A row that was read densely has all of it in its window."""

    def page_weights(self) -> dict[int, float]:
        """Mean share of each page over all sparse layers and heads."""
        heads = sum(len(read.window_weight) for read in self.layers)
        return _means([read.page_sums() for read in self.layers], heads)


@dataclass(frozen=True, slots=True)
class Trace:
    page_size: int
    pages: list[TracedPage]
    tokens: list[TracedToken]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def page_weights(self) -> dict[int, float]:
        """Mean share of each page over all traced tokens."""
        return _means([token.page_weights() for token in self.tokens], len(self.tokens))


def _means(parts: Sequence[dict[int, float]], count: int) -> dict[int, float]:
    total: dict[int, float] = {}
    for part in parts:
        for page, weight in part.items():
            total[page] = total.get(page, 0.0) + weight / count
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
        TracedToken(token, text([token]), [LayerRead.of(*item) for item in read.items()])
        for token, read in zip(token_ids[prompt_len:], selections, strict=True)
    ]
    return Trace(geometry.page_size, pages, tokens)
