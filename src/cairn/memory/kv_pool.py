"""The tensors that hold the pages of every layer, on the device and in host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch

from cairn.kernels.fp8_rows import FP8, read_units, store_rows, takes_hadamard
from cairn.memory.groups import LayerGroup
from cairn.memory.layout import KV
from cairn.memory.pinned import CudaRegistry, PinnedMemory


class PagePool:
    """A tensor [pages, *page shape] for each part of a layer's cache. Page 0 is the null page."""

    _parts: dict[int, dict[str, torch.Tensor]]  # by layer

    def part(self, layer: int, name: str = KV) -> torch.Tensor:
        """The tensor of a part, [pages, *page shape]."""
        return self._parts[layer][name]

    def tensors(self) -> list[torch.Tensor]:
        """All parts of all layers."""
        return [tensor for parts in self._parts.values() for tensor in parts.values()]


class KVPool(PagePool):
    """Pages on the device.

    Keys and values of heads are one part, [pages, 2 * kv_heads, page_size, head_dim], keys first.
    One kv head's slice of a page is contiguous, since selection reads and the tier moves such
    slices. A row's key and value are written together. With rows of 8 bits, each slice ends with
    the scales of its rows (`kernels/fp8_rows.py`).
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        num_pages: Sequence[int],
        page_size: int,
        device: torch.device,
        *,
        hot_pages: int = 0,
    ) -> None:
        """Each group g has a null page and `num_pages[g]` more pages.

        A group of device copies has another `hot_pages` pages at the end, for the hot slots, which
        no page table names. Its parts that never leave the device use the page ids of the group it
        copies.
        """
        self.page_size = page_size
        self.device = torch.empty(0, device=device).device  # with the device index
        self.group_of: dict[int, int] = {}
        """The group of each layer, whose page tables locate the layer's rows."""
        self.ids_of: dict[int, int] = {}
        """The group whose page ids name each layer's pages. With a host tier it differs from
        `group_of`, and locates the parts that never leave the device."""
        self.scales: dict[int, tuple[float, float]] = {}
        """By layer: a checkpoint's scales of keys and of values of 8 bits; 0 for a
        scale of each row. Layers that are not here have none."""
        self.hadamard: frozenset[int] = frozenset()
        """Layers whose keys are multiplied by a Hadamard matrix before they are stored, and whose
        queries must be, too (`attention/attend.py`)."""
        self._given: dict[int, torch.Tensor] = {}  # the same on the device, [2 * kv_heads]
        self._parts = {}
        self._by_group: list[list[torch.Tensor]] = [[] for _ in groups]
        # Third-party kernels multiply masked rows by zero, so those must not hold NaN.
        make = torch.zeros if device.type == "cuda" else torch.empty
        for g, group in enumerate(groups):
            for layer in group.layers:
                self.group_of[layer] = g
                self.ids_of[layer] = g if group.copy_of is None else group.copy_of
                self._parts[layer] = {}
            for part in group.layout.parts:
                home, extra = g, 0
                if group.copy_of is not None:
                    home, extra = (g, hot_pages) if part.may_leave else (group.copy_of, 0)
                shape = (num_pages[home] + 1 + extra, *part.page_shape(page_size))
                for layer in group.layers_with(part):
                    tensor = make(shape, dtype=part.known_dtype, device=device)
                    self._parts[layer][part.name] = tensor
                    self._by_group[home].append(tensor)

    def use_scales(self, scales: Mapping[int, tuple[float, float]]) -> None:
        """Set `scales`."""
        self.scales = dict(scales)
        for layer, own in scales.items():
            of_heads = torch.tensor(own).repeat_interleave(self.kv_heads(layer))
            self._given[layer] = of_heads.to(self.device)

    def use_hadamard(self, sparse: Collection[int]) -> list[str]:
        """Set `hadamard` to all layers that can have it; `sparse` layers cannot. Returns notes for
        the user about layers with keys of e4m3 that are left out."""
        left_out: Counter[str] = Counter()
        mixed = []
        for layer, parts in self._parts.items():
            if KV not in parts or parts[KV].dtype != FP8:
                continue
            dim = parts[KV].shape[-1]
            if layer in sparse:  # policies make landmarks of single columns
                left_out["they are sparse"] += 1
            elif self.scales.get(layer, (0, 0))[0] > 0:  # for keys as they are
                left_out["the checkpoint has scales of their keys"] += 1
            elif not takes_hadamard(dim):
                left_out[f"heads have {dim} columns, not a power of two"] += 1
            else:
                mixed.append(layer)
        self.hadamard = frozenset(mixed)
        return [
            f"kv_cache_dtype is fp8, and keys of {count} layers are less precise: {why}, so no "
            "Hadamard matrix is applied"
            for why, count in left_out.items()
        ]

    def kv_heads(self, layer: int) -> int:
        return self.part(layer).shape[1] // 2

    def keys(self, layer: int) -> torch.Tensor:
        """A view of the keys, [pages, page_size, kv_heads, head_dim]."""
        return self.part(layer).transpose(1, 2).chunk(2, dim=2)[0]

    def values(self, layer: int) -> torch.Tensor:
        """A view of the values, [pages, page_size, kv_heads, head_dim]."""
        return self.part(layer).transpose(1, 2).chunk(2, dim=2)[1]

    def write(
        self,
        layer: int,
        pages: torch.Tensor,  # [rows] page id of each row
        offsets: torch.Tensor,  # [rows] row within its page
        rows: torch.Tensor,  # [rows, *row shape], for keys and values keys first
        name: str | None = None,
        query: torch.Tensor | None = None,
    ) -> None:
        """Store new rows of a part, by default the first part of the layer's layout. `query` is for
        `store_rows`; without it scales of e4m3 suit the rows alone."""
        parts = self._parts[layer]
        tensor = next(iter(parts.values())) if name is None else parts[name]
        store_rows(tensor, pages, offsets, rows, self._given.get(layer), query)

    def slices(
        self, layer: int, ids: torch.Tensor, heads: torch.Tensor, units: int = 1
    ) -> torch.Tensor:
        """Numbers of slices: `ids` [...] of units, with `units` of them in a page, and `heads`
        [...] of 2 * kv_heads, keys first."""
        return (ids // units * self.part(layer).shape[1] + heads) * units + ids % units

    def read_slices(
        self, layer: int, slices: torch.Tensor, dtype: torch.dtype, units: int = 1
    ) -> torch.Tensor:
        """A copy of slices with these numbers [...], [..., rows of a unit, head_dim]."""
        of_heads = self.part(layer).flatten(0, 1)
        copied = read_units(of_heads, slices.flatten(), units, dtype)
        return copied.view(*slices.shape, *copied.shape[1:])

    def read_keys(
        self, layer: int, ids: torch.Tensor, dtype: torch.dtype, units: int = 1
    ) -> torch.Tensor:
        """A copy of the keys of pages or units [n], [n, rows, kv_heads, head_dim]."""
        heads = torch.arange(self.kv_heads(layer), device=ids.device)
        keys = self.slices(layer, ids[:, None], heads, units)
        return self.read_slices(layer, keys, dtype, units).transpose(1, 2)

    def clear(self, group: int, pages: torch.Tensor) -> None:
        """Zero pages, [n] ids, in all layers of a group."""
        for tensor in self._by_group[group]:
            tensor.view(torch.uint8).index_fill_(0, pages, 0)


class HostPool(PagePool):
    """Host memory for the parts of a group that may leave the device, laid out as on the device."""

    def __init__(
        self, group: LayerGroup, num_pages: int, page_size: int, *, device: torch.device
    ) -> None:
        """Room for page ids 0..num_pages, where 0 is the null page. `device` can access it."""
        self.layout = group.layout.leaving
        self.num_pages = num_pages
        self.page_bytes = len(group.layers) * self.layout.page_bytes(page_size)
        """Bytes of one page in all layers."""
        places = [(layer, part) for layer in group.layers for part in self.layout.parts]
        sizes = [(num_pages + 1) * part.page_bytes(page_size) for _, part in places]
        self._pinned: PinnedMemory | None = None
        if device.type == "cuda":
            self._pinned = PinnedMemory(CudaRegistry(device), sizes)
            memory = list(self._pinned.tensors)
        else:
            # The system commits memory of a plain tensor only when it is written.
            memory = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        self._parts = {layer: {} for layer in group.layers}
        for (layer, part), own in zip(places, memory, strict=True):
            shape = (num_pages + 1, *part.page_shape(page_size))
            self._parts[layer][part.name] = own.view(part.known_dtype).view(shape)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._parts)

    def close(self) -> None:
        """Free the memory. Nothing may use it any more."""
        self._parts.clear()
        if self._pinned is not None:
            self._pinned.close()
