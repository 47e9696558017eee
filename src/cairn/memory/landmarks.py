"""Landmarks beside pages: what a policy keeps of every complete page, under the page's id.

A landmark belongs to one life of a page. It is written once per generation, by the step that
completes the page, and read with the generation the reader's page table expects; on a mismatch it
counts as absent, so that a recycled page can never be mistaken for the one it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cairn.errors import PageError
from cairn.memory.layout import CacheLayout, CachePart
from cairn.memory.pages import NULL_PAGE


@dataclass(frozen=True, slots=True)
class LandmarkShape:
    layers: tuple[int, ...]
    heads: int
    width: int
    has_bias: bool
    dtype: torch.dtype

    @property
    def vector(self) -> CachePart:
        return CachePart("landmark", (self.heads, self.width), self.dtype, "page", may_leave=False)

    @property
    def bias(self) -> CachePart:
        wide = torch.promote_types(self.dtype, torch.float32)
        return CachePart("landmark_bias", (self.heads,), wide, "page", may_leave=False)

    @property
    def page_bytes(self) -> int:
        """What a page's landmarks and its generation cost, over all layers."""
        layout = CacheLayout((self.vector, self.bias) if self.has_bias else (self.vector,))
        return len(self.layers) * layout.page_bytes(1) + 4


class LandmarkPool:
    def __init__(self, shape: LandmarkShape, num_pages: int, device: torch.device) -> None:
        """For page ids 0..num_pages, 0 being the null page."""
        self.shape = shape

        def empty(part: CachePart) -> torch.Tensor:
            return torch.empty(num_pages + 1, *part.shape, dtype=part.dtype, device=device)

        self.vectors = {layer: empty(shape.vector) for layer in shape.layers}
        self.biases = {
            layer: empty(shape.bias) for layer in (shape.layers if shape.has_bias else ())
        }
        # Generation each page was sealed in, 0 for never; on the device and, for checks, here.
        self.sealed = torch.zeros(num_pages + 1, dtype=torch.int32, device=device)
        self._host_sealed = np.zeros(num_pages + 1, dtype=np.int32)
        self.sealed[NULL_PAGE] = -1  # the null page has no generation that could match
        self.num_sealed = 0
        """Pages whose landmarks were computed, ever; prefix hits do not add to it."""

    @property
    def nbytes(self) -> int:
        tensors = (*self.vectors.values(), *self.biases.values(), self.sealed)
        return sum(tensor.nbytes for tensor in tensors)

    def generation(self, page: int) -> int:
        """The life of the page that its landmarks belong to; 0 if it has none."""
        return int(self._host_sealed[page])

    def seal(self, pages: np.ndarray, generations: np.ndarray, *, on_device: bool = True) -> None:
        """This step completes `pages` and will save their landmarks in every layer.

        A step whose kernels write `sealed` themselves does so without `on_device`.
        """
        twice = pages[self._host_sealed[pages] == generations]
        if len(twice):
            raise PageError(f"page {twice[0]} already has its landmark in this generation")
        self._host_sealed[pages] = generations
        self.num_sealed += len(pages)
        if not on_device:
            return
        self.sealed[self._sent(pages.astype(np.int64))] = self._sent(generations.astype(np.int32))

    def save(
        self, layer: int, pages: torch.Tensor, vectors: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """pages [n], sealed before; vectors [n, heads, width]; bias [n, heads]."""
        self.vectors[layer][pages] = vectors
        if bias is not None:
            self.biases[layer][pages] = bias.to(self.shape.bias.known_dtype)

    def of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All vectors [pages, heads, width] of a layer, and all biases."""
        return self.vectors[layer], self.biases.get(layer)

    def get(
        self, layer: int, pages: torch.Tensor, generations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """vectors, bias and whether they are those of the expected generation, by page id.

        pages and generations of any one shape; scores of pages that are not valid must be masked.
        """
        bias = self.biases[layer][pages] if self.shape.has_bias else None
        return self.vectors[layer][pages], bias, self.sealed[pages] == generations

    def invalidate(self, pages: Sequence[int] | np.ndarray) -> None:
        """Forget the landmarks of pages whose step failed."""
        index = np.asarray(pages, dtype=np.int64)
        index = index[index != NULL_PAGE]
        self._host_sealed[index] = 0
        self.sealed[self._sent(index)] = 0

    def _sent(self, array: np.ndarray) -> torch.Tensor:
        """A copy on the device, sent without synchronizing: CUDA buffers up to 64 KiB."""
        return torch.from_numpy(array).to(self.sealed.device, non_blocking=True)
