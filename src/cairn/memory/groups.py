"""Layer groups: layers with the same window and the same cache layout.

They share page tables and a page pool. Full layers keep every page. Sliding-window layers keep the
pages that their window can still reach and free the rest, so each group is sized separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cairn.errors import ConfigError
from cairn.memory.geometry import PageGeometry
from cairn.memory.layout import NO_CACHE, CacheLayout, CachePart


@dataclass(frozen=True, slots=True)
class LayerGroup:
    name: str
    layers: tuple[int, ...]
    window: int | None = None
    """Rows that a query sees, including itself; None for all rows."""
    copy_of: int | None = None
    """With a host tier: the group whose pages this group holds device copies of. Such a group holds
    at least the pages in the window; pages that it released can be fetched again."""
    layout: CacheLayout = NO_CACHE
    """What each layer keeps."""
    lacking: frozenset[tuple[int, str]] = frozenset()
    """Layers and the names of parts that they do not keep, all of which never leave the device."""

    def layers_with(self, part: CachePart) -> tuple[int, ...]:
        return tuple(layer for layer in self.layers if (layer, part.name) not in self.lacking)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page in all layers. A group of copies counts only parts that may leave."""
        layout = self.layout if self.copy_of is None else self.layout.leaving
        return self._bytes(layout, page_size)

    def staying_bytes(self, page_size: int) -> int:
        """Bytes of the parts of a page that never leave the device, in all layers."""
        return self._bytes(self.layout.staying, page_size)

    def _bytes(self, layout: CacheLayout, page_size: int) -> int:
        return sum(
            len(self.layers_with(part)) * part.page_bytes(page_size) for part in layout.parts
        )

    def first_reachable_page(self, row: int, page_size: int) -> int:
        """The earliest page that a query at `row` or later can read."""
        if self.window is None:
            return 0
        return max(0, row - self.window + 1) // page_size

    def row_beyond(self, page: int, page_size: int) -> int:
        """The first row from which on no query can read `page`. Only for groups with a window."""
        assert self.window is not None
        return (page + 1) * page_size + self.window - 1

    def peak_pages(self, tokens: int, chunk_tokens: int, geometry: PageGeometry) -> int:
        """Most pages held at once while a request grows to `tokens` by `chunk_tokens` at a time."""
        pages = geometry.pages(tokens)
        if self.window is None:
            return pages
        # Window and chunk may each touch one page more than they fill.
        reach = -(-(self.window - 1) // geometry.page_size) + 1
        return min(pages, reach + geometry.pages(chunk_tokens) + 1)

    def pages_of_all(
        self, running: int, tokens: int, chunk_tokens: int, geometry: PageGeometry
    ) -> int:
        """Most pages that running requests of `tokens` tokens hold at once, if one of them prefills
        a chunk and the others decode."""
        return running * self.peak_pages(tokens, 1, geometry) + geometry.pages(chunk_tokens)


def group_layers(
    windows: Sequence[int | None], layouts: Sequence[CacheLayout] | None = None
) -> tuple[LayerGroup, ...]:
    """Group layers by window and layout, full layers first.

    windows[i] and layouts[i] belong to layer i. Without layouts the layers keep nothing.
    """
    layouts = layouts or [NO_CACHE] * len(windows)
    members: dict[tuple[int | None, CacheLayout], list[int]] = {}
    for layer, key in enumerate(zip(windows, layouts, strict=True)):
        members.setdefault(key, []).append(layer)
    # Groups with the same window keep the order of their first layers.
    ordered = sorted(members, key=lambda key: (key[0] is not None, key[0] or 0))
    groups: list[LayerGroup] = []
    for window, layout in ordered:
        name = "full" if window is None else f"window-{window}"
        alike = sum(group.window == window for group in groups)
        name += f"-{alike + 1}" if alike else ""
        layers = tuple(members[window, layout])
        groups.append(LayerGroup(name, layers, window, layout=layout))
    return tuple(groups)


def max_tokens(
    groups: Sequence[LayerGroup], num_pages: Sequence[int], geometry: PageGeometry
) -> int:
    """Tokens of the longest request that fits if it runs alone."""
    capacity = [
        count for group, count in zip(groups, num_pages, strict=True) if group.window is None
    ]
    if not capacity:
        # Only window layers: the model limits the length, not memory.
        return 2**62
    return geometry.tokens(min(capacity))


def split_budget(
    budget_bytes: int,
    groups: Sequence[LayerGroup],
    page_bytes: Sequence[int],
    wanted_pages: Sequence[int],
    beside: str = "",
) -> list[int]:
    """Number of pages for each group; page_bytes[i] is the size of one page of groups[i]. The error
    that not one page fits adds `beside`.

    Window groups get the pages they can use (`wanted_pages`), and full groups share the rest. If a
    window group would then have more pages than the full group, both get the same number.
    """
    capped: dict[int, int] = {}
    while True:
        left = budget_bytes - sum(capped[i] * page_bytes[i] for i in capped)
        open_groups = [i for i in range(len(groups)) if i not in capped]
        if not open_groups:
            return [capped[i] for i in range(len(groups))]
        equal = left // sum(page_bytes[i] for i in open_groups)
        newly = {
            i: wanted_pages[i]
            for i in open_groups
            if groups[i].window is not None and wanted_pages[i] < equal
        }
        if not newly:
            if equal < 1:
                raise ConfigError(
                    f"the KV cache budget of {budget_bytes / 2**30:.3f} GiB holds no page; a page "
                    f"of all layers takes {sum(page_bytes) / 2**30:.3f} GiB{beside}: raise "
                    "kv_cache_gib or mem_fraction_static, or lower page_size"
                )
            return [capped.get(i, equal) for i in range(len(groups))]
        capped.update(newly)
