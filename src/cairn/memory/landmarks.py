"""The landmarks that a policy keeps for every complete page, stored by page id; or for every
complete unit of a page, by the unit's id.

A landmark belongs to one generation of a page. The step that completes the page writes it, once.
A reader passes the generation that its page table expects. If it differs, the landmark counts as
absent, so that a recycled page is never taken for the old one.
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
    units: int = 1
    """Landmarks of a page, see `SparseConfig.units`."""

    @property
    def vector(self) -> CachePart:
        return CachePart("landmark", (self.heads, self.width), self.dtype, "page", may_leave=False)

    @property
    def bias(self) -> CachePart:
        wide = torch.promote_types(self.dtype, torch.float32)
        return CachePart("landmark_bias", (self.heads,), wide, "page", may_leave=False)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page's landmarks in all layers, and of their generations."""
        layout = CacheLayout((self.vector, self.bias) if self.has_bias else (self.vector,))
        return self.units * (len(self.layers) * layout.page_bytes(1) + 4)


class LandmarkPool:
    def __init__(self, shape: LandmarkShape, num_pages: int, device: torch.device) -> None:
        """Room for page ids 0..num_pages, where 0 is the null page. Methods take ids of units."""
        self.shape = shape
        count = (num_pages + 1) * shape.units

        def empty(part: CachePart) -> torch.Tensor:
            return torch.empty(count, *part.shape, dtype=part.dtype, device=device)

        self.vectors = {layer: empty(shape.vector) for layer in shape.layers}
        self.biases = {
            layer: empty(shape.bias) for layer in (shape.layers if shape.has_bias else ())
        }
        # Generation that each page was sealed in, 0 for never; on the device and, for checks, on
        # the host.
        self.sealed = torch.zeros(count, dtype=torch.int32, device=device)
        self._host_sealed = np.zeros(count, dtype=np.int32)
        self.sealed[: shape.units] = -1  # no generation matches the null page
        self.num_sealed = 0
        """Total number of pages whose landmarks were computed. Prefix hits do not count."""

    def generation(self, page: int) -> int:
        """The generation that the page's landmarks belong to; 0 if it has none."""
        return int(self._host_sealed[page])

    def seal(self, pages: np.ndarray, generations: np.ndarray, *, on_device: bool = True) -> None:
        """Record that this step completes `pages` and saves their landmarks in every layer.

        `on_device` is False if the step's own kernels write `sealed`.
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
        """Save the landmarks of sealed pages [n]: vectors [n, heads, width] and bias [n, heads]."""
        self.vectors[layer][pages] = vectors
        if bias is not None:
            self.biases[layer][pages] = bias.to(self.shape.bias.known_dtype)

    def of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All vectors [pages, heads, width] and all biases of a layer."""
        return self.vectors[layer], self.biases.get(layer)

    def get(
        self, layer: int, pages: torch.Tensor, generations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """The vectors and bias of pages, and whether each has the expected generation.

        pages and generations have the same shape. The caller must mask the scores of pages whose
        generation does not match.
        """
        bias = self.biases[layer][pages] if self.shape.has_bias else None
        return self.vectors[layer][pages], bias, self.sealed[pages] == generations

    def invalidate(self, pages: Sequence[int] | np.ndarray) -> None:
        """Forget the landmarks of pages whose step failed."""
        index = np.asarray(pages, dtype=np.int64)
        index = index[index // self.shape.units != NULL_PAGE]
        self._host_sealed[index] = 0
        # For `sealed[...] = 0` torch would copy the 0 to the device and wait for all work there.
        self.sealed.index_fill_(0, self._sent(index), 0)

    def _sent(self, array: np.ndarray) -> torch.Tensor:
        """A copy on the device, sent without synchronizing. CUDA buffers up to 64 KiB."""
        return torch.from_numpy(array).to(self.sealed.device, non_blocking=True)
