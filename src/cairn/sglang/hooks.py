"""Replaces what stock SGLang does with Triton, where Triton cannot do it.

SGLang has a fixed list of the backends that work without Triton, and its page allocator has kernels
for page sizes that are powers of two. On a CPU, and for the 63 tokens of a HiLS page, torch does
the same.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

_CACHE = "sglang.srt.mem_cache"
_ALLOCATOR = f"{_CACHE}.allocator.paged.PagedTokenToKVPoolAllocator"


def _hooks() -> dict[str, Callable[..., Any]]:
    # Newer versions of SGLang have split `common` into several modules.
    newer = find_spec(f"{_CACHE}.allocation") is not None
    return {
        "sglang.srt.utils.common.support_triton": support_triton,
        f"{_CACHE}.{'allocation' if newer else 'common'}.get_last_loc": get_last_loc,
        f"{_ALLOCATOR}.alloc_extend": alloc_extend,
        f"{_ALLOCATOR}.alloc_decode": alloc_decode,
    }


def register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, function in _hooks().items():
        if not any(function is own for _, own, _ in HookRegistry._hooks.get(target, ())):
            HookRegistry.register(target, function, HookType.AROUND)


def missing_hooks() -> str | None:
    """SGLang logs a hook that it cannot apply and goes on."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [target for target in _hooks() if target not in HookRegistry._patched]
    return f"not applied to {', '.join(missing)}" if missing else None


def support_triton(original: Callable[[str], bool], backend: str) -> bool:
    return torch.cuda.is_available() if backend == "hsa" else original(backend)


def get_last_loc(
    original: Callable[..., torch.Tensor],
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
) -> torch.Tensor:
    """The slot of each prefix's last token, -1 without a prefix."""
    if req_to_token.device.type != "cpu":
        return original(req_to_token, req_pool_indices, prefix_lens)
    last = req_to_token[req_pool_indices, (prefix_lens - 1).clamp(min=0)]
    return torch.where(prefix_lens > 0, last.to(prefix_lens.dtype), -1)


def alloc_extend(
    original: Callable[..., torch.Tensor | None],
    allocator: Any,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    extend_num_tokens: int,
    *rest: Any,
    **named: Any,
) -> torch.Tensor | None:
    given = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens)
    if _has_kernels(allocator):
        return original(allocator, *given, *rest, **named)
    return _alloc(allocator, *given)


def alloc_decode(
    original: Callable[..., torch.Tensor | None],
    allocator: Any,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> torch.Tensor | None:
    if _has_kernels(allocator):
        return original(allocator, seq_lens, seq_lens_cpu, last_loc, *rest, **named)
    before, before_cpu = seq_lens - 1, seq_lens_cpu - 1
    return _alloc(allocator, before, before_cpu, seq_lens, seq_lens_cpu, last_loc, len(seq_lens))


def _alloc(
    allocator: Any,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    total: int,
) -> torch.Tensor | None:
    """Slots of the new tokens; None if there are too few free pages."""
    size = allocator.page_size
    needed = int((_pages(seq_lens_cpu, size) - _pages(prefix_lens_cpu, size)).sum())
    if needed > len(allocator.free_pages):
        allocator.merge_and_sort_free()
    if needed > len(allocator.free_pages):
        return None
    slots = extend_slots(prefix_lens, seq_lens, last_loc, allocator.free_pages, size, total)
    allocator.free_pages = allocator.free_pages[needed:]
    return slots


def extend_slots(
    prefix_lens: torch.Tensor,  # [seqs] tokens that have slots
    seq_lens: torch.Tensor,  # [seqs] tokens that shall have
    last_loc: torch.Tensor,  # [seqs] slot of the last token that has one
    free_pages: torch.Tensor,
    page_size: int,
    total: int,
) -> torch.Tensor:
    """Slots [total] of the new tokens of all sequences: first what is left of a sequence's last
    page, then pages from the front of `free_pages`, sequence after sequence."""
    counts = seq_lens - prefix_lens
    begun = _pages(prefix_lens, page_size)
    new_pages = _pages(seq_lens, page_size) - begun
    seq = torch.repeat_interleave(
        torch.arange(len(counts), device=counts.device), counts, output_size=total
    )
    token = torch.arange(total, device=counts.device) - (counts.cumsum(0) - counts)[seq]
    position = prefix_lens[seq] + token
    page = position // page_size - begun[seq]  # among the sequence's new ones; negative in its last
    first = (new_pages.cumsum(0) - new_pages)[seq]
    padded = torch.cat((free_pages, free_pages.new_zeros(1)))
    fresh = padded[(first + page).clamp(min=0, max=len(free_pages))] * page_size
    return torch.where(page < 0, last_loc[seq] + 1 + token, fresh + position % page_size).long()


def _pages(tokens: torch.Tensor, page_size: int) -> torch.Tensor:
    return (tokens + page_size - 1) // page_size


def _has_kernels(allocator: Any) -> bool:
    size = allocator.page_size
    return torch.device(allocator.device).type != "cpu" and size & (size - 1) == 0
