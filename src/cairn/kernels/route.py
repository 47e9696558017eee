"""Chooses the experts of each row from the router's logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.interface import Routing
from cairn.kernels.launch import direct
from cairn.kernels.pdl import pdl_options
from cairn.kernels.sizes import power_of_two


@triton.jit
def _group_scores(choice, group, SIZE: tl.constexpr, GROUPS: tl.constexpr, PAIRS: tl.constexpr):
    """-> [experts] score of each expert's group: its best `choice`, or the sum of its best two"""
    offs = tl.arange(0, choice.shape[0])
    scores = tl.full(choice.shape, float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        members = tl.where(group == g, choice, float("-inf"))
        best, at = tl.max(members, 0, return_indices=True)
        if PAIRS and SIZE > 1:
            best += tl.max(tl.where(offs == at, float("-inf"), members), 0)
        scores = tl.where(group == g, best, scores)
    return scores


@direct
@triton.jit
def _route_kernel(
    logits,  # [rows, EXPERTS]
    bias,  # [EXPERTS], if BIAS
    weights,  # [rows, TOP]
    ids,  # [rows, TOP]
    scale,
    stride,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least EXPERTS
    TOP: tl.constexpr,
    SIGMOID: tl.constexpr,  # else softmax
    BIAS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    there = offs < EXPERTS
    if PDL:
        gdc_launch_dependents()
    if BIAS:
        correction = tl.load(bias + offs, mask=there, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    logit = tl.load(logits + row * stride + offs, mask=there, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        share = 1.0 / (1.0 + tl.exp(-logit))
    else:
        share = tl.exp(logit - tl.max(logit, 0))
        share = share / tl.sum(share, 0)
    choice = share
    if BIAS:
        choice += correction
    # NaN compares with nothing. It must not make an id that is no expert.
    choice = tl.where(there & (choice == choice), choice, float("-inf"))
    if GROUPS > 1:
        SIZE: tl.constexpr = EXPERTS // GROUPS
        group = offs // SIZE
        scores = _group_scores(choice, group, SIZE, GROUPS, SIGMOID)
        allowed = tl.full((BLOCK,), float("-inf"), tl.float32)
        for _ in tl.static_range(KEPT):
            _, at = tl.max(scores, 0, return_indices=True)
            inside = group == at // SIZE
            allowed = tl.where(inside, choice, allowed)
            scores = tl.where(inside, float("-inf"), scores)
        choice = allowed
    slot = tl.arange(0, triton.next_power_of_2(TOP))
    chosen = tl.zeros(slot.shape, tl.int32)
    weight = tl.zeros(slot.shape, tl.float32)
    for j in tl.static_range(TOP):
        _, at = tl.max(choice, 0, return_indices=True)  # the lowest of equal ones
        own = tl.sum(tl.where(offs == at, share, 0.0), 0)
        chosen = tl.where(slot == j, at.to(tl.int32), chosen)
        weight = tl.where(slot == j, own, weight)
        choice = tl.where(offs == at, float("-inf"), choice)
    if NORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    place = row * TOP + slot
    tl.store(weights + place, (weight * scale).to(weights.dtype.element_ty), mask=slot < TOP)
    tl.store(ids + place, chosen, mask=slot < TOP)


def route(
    logits: torch.Tensor,  # [rows, experts]
    bias: torch.Tensor | None,  # [experts]
    options: Routing,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> weights [rows, per_token] of the given type and ids [rows, per_token] int32, best first"""
    rows, experts = logits.shape
    weights = torch.empty(rows, options.per_token, dtype=dtype, device=logits.device)
    ids = torch.empty(rows, options.per_token, dtype=torch.int32, device=logits.device)
    _route_kernel[(rows,)](
        logits,
        logits if bias is None else bias,
        weights,
        ids,
        options.scale,
        logits.stride(0),
        EXPERTS=experts,
        BLOCK=power_of_two(experts),
        TOP=options.per_token,
        SIGMOID=options.scoring == "sigmoid",
        BIAS=bias is not None,
        NORMALIZE=options.normalize,
        GROUPS=options.groups,
        KEPT=options.kept_groups,
        num_warps=1,
        **pdl_options(logits),
    )
    return weights, ids
