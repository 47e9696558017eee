"""Layer groups: layers that keep the same rows of the past, and the same of each row.

They share page tables and a page pool. Full layers keep every page. Sliding-window layers keep the
pages their window can still reach and free the rest, so each group is sized and charged on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cairn.errors import ConfigError
from cairn.memory.geometry import PageGeometry
from cairn.memory.layout import NO_CACHE, CacheLayout


@dataclass(frozen=True, slots=True)
class LayerGroup:
    name: str
    layers: tuple[int, ...]
    window: int | None = None
    """Rows a query sees, itself included; None for all of them."""
    copy_of: int | None = None
    """The group whose pages these are device copies of, where it lives in host memory. Such a
    group holds at least what the window reaches; what it has given up can be fetched again."""
    layout: CacheLayout = NO_CACHE
    """What each of the layers keeps."""

    def page_bytes(self, page_size: int) -> int:
        """Of one page id, in all layers. Copies on the device are those of parts that may leave."""
        layout = self.layout if self.copy_of is None else self.layout.leaving
        return len(self.layers) * layout.page_bytes(page_size)

    def staying_bytes(self, page_size: int) -> int:
        """Of the parts of a page that never leave the device, in all layers."""
        return len(self.layers) * self.layout.staying.page_bytes(page_size)

    def first_reachable_page(self, row: int, page_size: int) -> int:
        """The earliest page that a query at `row` or later can read."""
        if self.window is None:
            return 0
        return max(0, row - self.window + 1) // page_size

    def row_beyond(self, page: int, page_size: int) -> int:
        """The first row of which no query, there or later, can read `page`; there is a window."""
        assert self.window is not None
        return (page + 1) * page_size + self.window - 1

    def peak_pages(self, tokens: int, chunk_tokens: int, geometry: PageGeometry) -> int:
        """Most pages held at once while a request grows to `tokens`, `chunk_tokens` at a time."""
        pages = geometry.pages(tokens)
        if self.window is None:
            return pages
        # The window may straddle one page more than it fills; so may the chunk.
        reach = -(-(self.window - 1) // geometry.page_size) + 1
        return min(pages, reach + geometry.pages(chunk_tokens) + 1)


def group_layers(
    windows: Sequence[int | None], layouts: Sequence[CacheLayout] | None = None
) -> tuple[LayerGroup, ...]:
    """Group layers by window and layout, full layers first.

    windows[i] and layouts[i] belong to layer i; without layouts the layers keep nothing.
    """
    layouts = layouts or [NO_CACHE] * len(windows)
    members: dict[tuple[int | None, CacheLayout], list[int]] = {}
    for layer, key in enumerate(zip(windows, layouts, strict=True)):
        members.setdefault(key, []).append(layer)
    # Groups of one window keep the order of their first layers.
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
    """The longest request the pools can hold when it has them to itself."""
    capacity = [
        count for group, count in zip(groups, num_pages, strict=True) if group.window is None
    ]
    if not capacity:
        # Window layers only: length is bounded by the model, not by memory.
        return 2**62
    return geometry.tokens(min(capacity))


def split_budget(
    budget_bytes: int,
    groups: Sequence[LayerGroup],
    page_bytes: Sequence[int],
    wanted_pages: Sequence[int],
) -> list[int]:
    """Pages for each group. page_bytes[i] is what one page of groups[i] costs.

    Window groups get the pages they can use (`wanted_pages`), full groups share the rest; where
    that would leave a window group with more pages than the full group, both get equally many.
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
                    f"of all layers takes {sum(page_bytes) / 2**30:.3f} GiB: raise kv_cache_gib or "
                    "mem_fraction_static, or lower page_size"
                )
            return [capped.get(i, equal) for i in range(len(groups))]
        capped.update(newly)
