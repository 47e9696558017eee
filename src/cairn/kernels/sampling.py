"""One token per row from its logits, without looking at any of them on the host.

Adding Gumbel noise and taking the largest draws from the softmax. The noise of a token is a hash of
the row's seed, the position drawn and the token, so a row draws the same whatever stands beside it.
A temperature of zero adds none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cairn.kernels.launch import direct
from cairn.kernels.sizes import blocks_of, power_of_two

_BLOCK = 4096


def noise_reference(seeds: torch.Tensor, vocab: int) -> torch.Tensor:
    """seeds [rows] int64 -> Gumbel noise [rows, vocab] float32"""
    token = torch.arange(vocab, dtype=torch.int64, device=seeds.device)
    x = (seeds[:, None] & 0xFFFFFFFF) ^ ((token[None] * 0x9E3779B1) & 0xFFFFFFFF)
    x = _mix(x)
    x = _mix((x + ((seeds[:, None] >> 32) & 0xFFFFFFFF)) & 0xFFFFFFFF)
    uniform = ((x >> 8).to(torch.float32) + 0.5) / 2**24
    return -(-uniform.log()).log()


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def sample_reference(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor
) -> torch.Tensor:
    """The same in torch; arguments as in `sample`."""
    wide = logits.float()
    noise = noise_reference(seeds, logits.shape[1]) * temperatures[:, None]
    return (wide + noise).argmax(-1)


@triton.jit
def _mix32(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@direct
@triton.jit
def _best_kernel(
    logits,
    temperatures,
    seeds,
    best,  # [rows, blocks]
    best_token,  # [rows, blocks]
    stride,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    mask = token < VOCAB
    value = tl.load(logits + row * stride + token, mask=mask, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        seed = tl.load(seeds + row)
        low = (seed & 0xFFFFFFFF).to(tl.uint32)
        high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
        x = _mix32(low ^ (token.to(tl.uint32) * 0x9E3779B1))
        x = _mix32(x + high)
        uniform = ((x >> 8).to(tl.float32) + 0.5) * (1.0 / 16777216.0)
        value += temperature * -tl.log(-tl.log(uniform))
    most = tl.max(value, 0)
    # The lowest token among equals.
    place = tl.min(tl.where(value == most, token, VOCAB), 0)
    tl.store(best + row * BLOCKS + block, most)
    tl.store(best_token + row * BLOCKS + block, place)


@direct
@triton.jit
def _pick_kernel(best, best_token, tokens, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    mask = block < BLOCKS
    value = tl.load(best + row * BLOCKS + block, mask=mask, other=float("-inf"))
    token = tl.load(best_token + row * BLOCKS + block, mask=mask, other=2147483647)
    most = tl.max(value, 0)
    tl.store(tokens + row, tl.min(tl.where(value == most, token, 2147483647), 0).to(tl.int64))


def sample(
    logits: torch.Tensor,  # [rows, vocab]
    temperatures: torch.Tensor,  # [rows] float32; 0 takes the most likely
    seeds: torch.Tensor,  # [rows] int64, of request and position together
) -> torch.Tensor:
    """-> token ids [rows] int64"""
    rows, vocab = logits.shape
    blocks = blocks_of(vocab, _BLOCK)
    best = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    best_token = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _best_kernel[(rows, blocks)](
        logits,
        temperatures,
        seeds,
        best,
        best_token,
        logits.stride(0),
        VOCAB=vocab,
        BLOCKS=blocks,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    _pick_kernel[(rows,)](
        best, best_token, tokens, BLOCKS=blocks, PADDED=power_of_two(blocks), num_warps=1
    )
    return tokens
