"""SGLang's KV pool, laid out so that Cairn's kernels can read it.

SGLang has a layout [pages, heads, rows, dim] (`use_hnd`), with one tensor for keys and one for
values. Cairn's layout has the heads of values behind those of keys, in one tensor. So SGLang's two
buffers become the two halves of Cairn's tensor, and SGLang still writes and moves slots in them.
"""

from __future__ import annotations

from typing import Any

import torch

from cairn.errors import ConfigError
from cairn.memory.geometry import PageGeometry
from cairn.memory.kv_pool import KVPool
from cairn.models.spec import ModelSpec
from cairn.sglang.sparse import make_pool


def adopt_pool(pool: Any, spec: ModelSpec, geometry: PageGeometry) -> KVPool:
    """Replaces the buffers of an MHATokenToKVPool before anything is written to them."""
    _refuse(pool, spec)
    # SGLang's own buffers go first: both together may not fit.
    pool.k_buffer.clear()
    pool.v_buffer.clear()
    device = torch.device(pool.device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    num_pages = pool.size // pool.page_size
    kv_pool = make_pool(spec, geometry, num_pages, pool.dtype, device)
    for layer in range(pool.layer_num):
        keys, values = kv_pool.part(layer).chunk(2, dim=1)
        pool.k_buffer.append(keys)
        pool.v_buffer.append(values)
    pool.use_hnd = True
    pool.kv_cache_layout = "hnd"
    pool.num_pages = num_pages + 1
    return kv_pool


def _refuse(pool: Any, spec: ModelSpec) -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    kind = type(pool).__name__
    if type(pool) is not MHATokenToKVPool:
        raise ConfigError(
            f"the KV pool is a {kind}; hsa works on MHATokenToKVPool, which models have whose "
            "layers are all plain attention"
        )
    if not hasattr(pool, "use_hnd"):
        raise ConfigError("this SGLang's KV pool has no layout by heads (use_hnd); use 0.5.15")
    if pool.store_dtype != pool.dtype:
        raise ConfigError(
            f"kv_cache_dtype is {pool.dtype}; landmarks are made of unquantized keys: leave "
            "--kv-cache-dtype out"
        )
    shape = (pool.layer_num, pool.head_num, pool.head_dim, pool.v_head_dim)
    first = spec.layers[0]
    expected = (len(spec.layers), first.num_kv_heads, first.head_dim, first.head_dim)
    if shape != expected or pool.start_layer:
        raise ConfigError(
            f"the KV pool has {shape} layers, kv heads, head size and value size and the model "
            f"{expected}; hsa does not work on a part of the layers"
        )
    if pool.size % pool.page_size:
        raise ConfigError(
            f"the KV pool has {pool.size} slots, which is not a multiple of page_size "
            f"{pool.page_size}"
        )
