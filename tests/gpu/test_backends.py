"""Every attention backend against the torch reference, on shapes that do not fit tiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cairn.attention.backend import AttentionShape, backend_names, dense_class, refusal
from cairn.attention.batch import to_device
from cairn.attention.widened import dense_backend
from cairn.engine.inputs import StepInputs
from cairn.errors import ConfigError
from cairn.kernels.fp8_rows import FP8, widen
from cairn.kernels.references import latent_attention, paged_attention
from cairn.memory.groups import group_layers
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import CacheLayout

pytestmark = pytest.mark.gpu

# (new rows, length): decode, prefill from nothing, prefill on a prefix, all in one batch
BATCHES = {
    "decode": [(1, n) for n in (1, 63, 64, 65, 2000)],
    "prefill": [(n, n) for n in (1, 63, 64, 65, 2000)],
    "extend": [(5, 64), (64, 2000), (65, 66), (200, 1000)],
    "mixed": [(1, 1), (63, 63), (1, 2000), (65, 500), (1, 64), (2, 130)],
}
HEADS = [(16, 8, 128), (16, 2, 64), (4, 4, 128)]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("page_size", [16, 64, 512])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("backend", backend_names())
@pytest.mark.parametrize("cache", [torch.bfloat16, FP8, torch.int8], ids=str)
def test_backends_agree_with_the_reference(
    backend: str, batch: str, page_size: int, heads: tuple[int, int, int], cache: torch.dtype
) -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    num_heads, kv_heads, dim = heads
    lengths = BATCHES[batch]
    layout = CacheLayout.of_heads(kv_heads, dim, cache)
    groups = group_layers([None, 100], [layout] * 2)
    new, total = (np.array(values) for values in zip(*lengths, strict=True))
    shape = AttentionShape(
        *(num_heads, kv_heads, dim, dim**-0.5, page_size, torch.bfloat16, device, groups, len(new)),
        longest=int(total.max()),
    )
    reason = refusal(backend, shape)
    if reason is not None:
        pytest.skip(reason)
    counts = -(-total // page_size)
    pages = int(counts.sum()) + 3
    pool = KVPool(groups, [pages] * 2, page_size, device)
    rounds = backend == "sgl_kernel_fp8"  # queries and softmax weights
    if rounds:
        pool.use_scales({0: (0.013, 0.03), 1: (0.02, 0.04)})
    order = 1 + np.random.default_rng(0).permutation(pages)
    table = np.zeros((len(new), int(counts.max())), dtype=np.int32)
    used = 0
    for s, count in enumerate(counts):
        table[s, :count] = order[used : used + count]
        used += count
    places = torch.arange(pages + 1, device=device).repeat_interleave(page_size)
    offsets = torch.arange(page_size, device=device).repeat(pages + 1)
    sizes = torch.tensor([1e-5, 0.1, 1.0, 3.0], device=device)
    for layer in pool.group_of:
        rows = torch.randn(len(places), 2 * kv_heads, dim, device=device)
        rows[:, kv_heads:] *= sizes[torch.randint(4, (len(rows), kv_heads, 1), device=device)]
        pool.write(layer, places, offsets, rows)
    inputs = StepInputs.made_up(page_size, new, total, [table] * len(groups))
    step = inputs.send(device, True).batch
    query = torch.randn(int(new.sum()), num_heads, dim, device=device).bfloat16()
    attention = dense_backend([dense_class(backend)], shape, pool)
    metadata = attention.prepare(step)
    attention.begin(metadata)
    for layer, window in enumerate((None, 100)):
        try:
            out = attention.forward(layer, query, metadata).float()
        except RuntimeError as error:
            if "does not support FP8" in str(error):
                pytest.skip(f"sglang-kernel has no FP8 kernels: {error}")
            raise
        expected, _ = paged_attention(
            query,
            widen(pool.part(layer), torch.bfloat16),
            to_device(table, device),
            total.tolist(),
            new.tolist(),
            scale=dim**-0.5,
            window=window,
            fp8=rounds,
        )
        ratio = (out - expected).norm() / expected.norm()
        # The kernel rounds weights relative to the largest score so far, the reference to that of
        # all: both are rounded to four bits, but to other numbers.
        most = 4e-2 if rounds else 1e-2
        assert ratio < most, f"layer {layer}: error ratio {ratio:.1e}"


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("page_size", [16, 64, 512])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("backend", backend_names())
def test_backends_agree_over_latent_rows(
    backend: str, batch: str, page_size: int, num_heads: int
) -> None:
    device, dtype, width, latent = torch.device("cuda"), torch.bfloat16, 576, 512
    torch.manual_seed(0)
    new, total = (np.array(values) for values in zip(*BATCHES[batch], strict=True))
    groups = group_layers([None], [CacheLayout.of_latents(width).of_type(dtype)])
    size = (num_heads, 1, width, 0.1, page_size, dtype, device, groups, len(new))
    shape = AttentionShape(*size, value_dim=latent)
    reason = refusal(backend, shape)
    if reason is not None:
        pytest.skip(reason)
    counts = -(-total // page_size)
    pool = KVPool(groups, [int(counts.sum())], page_size, device)
    pages = np.split(1 + np.random.default_rng(0).permutation(counts.sum()), np.cumsum(counts)[:-1])
    table = np.zeros((len(new), int(counts.max()) + 1), dtype=np.int32)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = own
    step = StepInputs.made_up(page_size, new, total, [table]).send(device, True).batch
    query = torch.randn(int(new.sum()), num_heads, width, device=device).to(dtype)
    attention = dense_class(backend)(shape, pool)
    metadata = attention.prepare(step)
    attention.begin(metadata)
    rows = pool.part(0, "latent").normal_()
    out = attention.forward(0, query, metadata).float()
    on_device = to_device(table, device)
    expected = latent_attention(
        query, rows, on_device, total.tolist(), new.tolist(), latent=latent, scale=0.1
    )
    ratio = (out - expected).norm() / expected.norm()
    assert ratio < 1e-2, f"error ratio {ratio:.1e}"


def test_flashinfer_refuses_a_step_with_too_many_tiles_of_latent_rows() -> None:
    device, dtype, rows = torch.device("cuda"), torch.bfloat16, 20_000
    groups = group_layers([None], [CacheLayout.of_latents(576).of_type(dtype)])
    shape = AttentionShape(128, 1, 576, 0.1, 64, dtype, device, groups, value_dim=512)
    reason = refusal("flashinfer", shape)
    if reason is not None:
        pytest.skip(reason)
    pages = -(-rows // 64)
    attention = dense_class("flashinfer")(shape, KVPool(groups, [pages], 64, device))
    table = 1 + np.arange(pages, dtype=np.int32)[None]
    inputs = StepInputs.made_up(64, np.array([rows]), np.array([rows]), [table])
    with pytest.raises(ConfigError, match=r"step of 20000 rows.*lower chunked_prefill_size"):
        attention.prepare(inputs.send(device, True).batch)
