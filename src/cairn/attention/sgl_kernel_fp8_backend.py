"""FlashAttention-3 in FP8, from SGLang's kernel package: it reads an FP8 cache as it is.

It takes one scale per layer, so the checkpoint must have scales for keys and values. It rounds more
than the cache does, so `auto` never takes it:

- Queries are rounded to e4m3, and the kernel rounds softmax weights to e4m3.
- The kernel adds up the values of a whole sequence in the accumulators of FP8 products, which have
  fewer bits than float32. The longer the sequence, the larger the error.

`kernels/references.py` has the same rounding in torch, without the accumulators.
"""

from __future__ import annotations

from math import lcm

import torch

from cairn.attention.backend import AttentionShape
from cairn.attention.sgl_kernel_backend import SglKernelBackend, SglMetadata
from cairn.errors import ConfigError
from cairn.kernels.fp8_rows import FP8, MOST
from cairn.memory.kv_pool import KVPool

_TILES = {64: 160, 128: 224}
"""Rows of a key tile, by head size. Large pages have a multiple of it (see `SglKernelBackend`)."""


class SglKernelFp8Backend(SglKernelBackend):
    name = "sgl_kernel_fp8"
    dtypes = (torch.bfloat16,)
    head_dims = tuple(_TILES)
    reads_8_bits = True
    reads_widened = False
    gather_from = 1000
    notes = (
        "sgl_kernel_fp8 adds up values in the few bits of FP8 products; the error grows with the "
        "context, to more than a tenth of the output at 8,192 tokens if values have a mean",
    )

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        super().__init__(shape, pool)
        for layer in sorted(pool.group_of):
            if not all(pool.scales.get(layer, (0.0, 0.0))):
                raise ConfigError(
                    f"attention_backend {self.name!r} reads keys and values by scales of the "
                    f"checkpoint, which has not both for layer {layer}; use sgl_kernel or auto"
                )
        self._tile = lcm(_TILES[shape.head_dim], shape.page_size)
        self._scales = {
            layer: torch.tensor(own).to(pool.device) for layer, own in pool.scales.items()
        }

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
            return "its kernels are for compute capability 9.0"
        return super().unavailable_reason(device)

    @classmethod
    def unsupported_reason(cls, shape: AttentionShape) -> str | None:
        if shape.cache_dtype != FP8:
            return "it reads a cache of FP8 (kv_cache_dtype)"
        return super().unsupported_reason(shape)

    def attend(self, layer: int, query: torch.Tensor, metadata: SglMetadata) -> torch.Tensor:
        return super().attend(layer, round_query(query), metadata)

    def _descales(self, layer: int, seqs: int) -> dict[str, torch.Tensor]:
        size = seqs, self._shape.num_kv_heads
        key, value = self._scales[layer]
        return {"k_descale": key.expand(size), "v_descale": value.expand(size)}


def round_query(query: torch.Tensor) -> torch.Tensor:
    """The query in e4m3. It has no scale: e4m3 is as precise for numbers of 0.02 as of 400, and a
    scale that depended on other rows would make a token depend on its batch."""
    most = MOST[FP8]
    return query.clamp(-most, most).to(FP8)
