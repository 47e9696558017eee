"""Routers and experts against their references, on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cairn.kernels import experts as kernels
from cairn.kernels.experts import experts
from cairn.kernels.fp8_experts import COLUMNS, ExpertScales, readable, row_columns
from cairn.kernels.interface import BLOCK_OUTPUTS, Routing
from cairn.kernels.references import rms_norm_reference
from cairn.kernels.route import route
from cairn.models import experts as in_torch
from cairn.models.fp8 import to_fp8
from cairn.models.narrow import Narrow

_ROUNDING = 5.5e-2  # error ratio of experts whose rows are rounded to FP8; 0.045 seen
ROUTERS = {
    "softmax": Routing(128, 8, normalize=True),
    "softmax-not-normalized": Routing(6, 2),
    "softmax-groups": Routing(20, 3, groups=4, kept_groups=2, scale=16.0),
    "sigmoid": Routing(9, 4, "sigmoid", normalize=True, scale=2.5),
    "sigmoid-groups": Routing(256, 8, "sigmoid", 8, 4, True, 2.5, has_bias=True),
    "sigmoid-all-groups": Routing(16, 5, "sigmoid", 16, 16, has_bias=True),
}


def check_router(name: str, device: torch.device, dtype: torch.dtype, rows: int) -> None:
    """Logits are coarse, so that many experts are equal; biases are negative."""
    options = ROUTERS[name]
    torch.manual_seed(0)
    logits = torch.randn(rows, options.experts, device=device).mul(4).round().div(4).to(dtype)
    bias = None
    if options.has_bias:
        bias = torch.randn(options.experts, device=device).mul(2).round().div(8) - 0.8
    weights, ids = route(logits, bias, options, torch.float32)
    expected_weights, expected = in_torch.route(logits.float(), bias, options)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


class Sizes(NamedTuple):
    experts: int
    per_token: int
    hidden: int
    inter: int


def check_experts(
    sizes: Sizes,
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    fused: bool = False,
    skewed: bool = False,
    fp8_group: int | None = None,
    rounds: bool = False,
    tolerance: float = 1e-5,
) -> None:
    """`fused`: with the norm before and the sum after, on a rank that has only the later experts.
    `skewed`: almost all rows choose the same expert. `fp8_group`: weights are FP8, with scales for
    blocks of outputs. `rounds`: rows are expected to be rounded, too. Then the result is compared
    with those that have rounded rows, and with exact ones."""
    torch.manual_seed(0)
    count, per_token, hidden, inter = sizes
    x = torch.randn(rows, hidden, device=device).to(dtype)
    gate_up = (torch.randn(count, 2 * inter, hidden, device=device) * hidden**-0.5).to(dtype)
    down = (torch.randn(count, hidden, inter, device=device) * inter**-0.5).to(dtype)
    scales, exact, given = None, [gate_up, down], []
    if fp8_group is not None:
        given = [to_fp8(matrix, fp8_group) for matrix in (gate_up, down)]
        gate_up, down = (matrix.values for matrix in given)
        assert given[0].scale is not None and given[1].scale is not None
        for scale in (given[0].scale, given[1].scale):
            scale.mul_(torch.rand_like(scale) + 0.5)
        if fp8_group:
            _share_scales(given[0].scale.unflatten(1, (2, -1)))
            _share_scales(given[1].scale[:, None])
        own = given[0].scale, fp8_group, given[1].scale, fp8_group
        scales = ExpertScales(*own, of_blocks=fp8_group > 0)
        assert rounds == _rounds(scales, rows * per_token / count)
        exact = [torch.stack([one.dense() for one in _each(matrix)]) for matrix in given]
    scores = torch.rand(rows, count, device=device)
    if skewed:
        scores[:, count // 2] += 0.9
    ids = scores.topk(per_token, -1).indices.int()
    weights = torch.rand(rows, per_token, device=device)
    norm = added = None
    if fused:
        ids = ids * 2 - count  # some are below, some above what this rank has
        norm = torch.rand(hidden, device=device).to(dtype), 1e-6
        added = torch.randn(rows, hidden, device=device).to(dtype)
    wide = torch.float64
    normed = x.to(wide)
    if norm is not None:
        normed = rms_norm_reference(normed, norm[0].to(wide), norm[1])
        if rounds:  # of what the kernel for norms returns
            normed = normed.to(dtype).to(wide)
    here = torch.where((ids >= 0) & (ids < count), ids, -1)
    routed = normed.cpu(), here.cpu(), weights.to(wide).cpu()
    exactly = in_torch.experts(*routed, *(matrix.to(wide).cpu() for matrix in exact))
    results = [(exactly, _ROUNDING if rounds else tolerance)]
    if rounds:
        assert scales is not None
        up, low = (stack.to(torch.device("cpu")) for stack in given)
        spans = row_columns(scales) or hidden, COLUMNS
        results.append((in_torch.fp8_experts(*routed, up, low, spans), tolerance))
    before = 0 if added is None else added.to(wide)
    found = experts(x, ids, weights, gate_up, down, scales, norm=norm, add_to=added)
    assert added is None or found is added
    for result, most in results:
        expected = result.to(device) + before
        error = (found.to(wide) - expected).norm() / expected.norm()
        assert error < most, f"error ratio {error:.1e}"


def _each(stack: Narrow) -> list[Narrow]:
    """The matrices of a stack [experts, outputs, columns]."""
    assert stack.scale is not None
    both = zip(stack.values, stack.scale, strict=True)
    return [Narrow(values, scale, stack.span) for values, scale in both]


def _share_scales(scale: torch.Tensor) -> None:
    """Give the outputs of each block the same scales [experts, matrices, outputs, groups]."""
    firsts = scale[:, :, ::BLOCK_OUTPUTS].repeat_interleave(BLOCK_OUTPUTS, 2)
    scale.copy_(firsts[:, :, : scale.shape[2]])


def _rounds(scales: ExpertScales, pairs: float) -> bool:
    """Whether rows are rounded with so many pairs of each expert."""
    return readable(scales) and pairs >= kernels.FP8_PAIRS
