"""`cairn bench products`: products with quantised matrices beside read bandwidth and bfloat16."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from cairn.bench.attention import read_bandwidth, time_cuda
from cairn.bench.engines import need_cuda
from cairn.bench.report import show_rows, tell
from cairn.errors import ConfigError
from cairn.models.blocks import BLOCK, Codes
from cairn.models.fp8 import to_fp8
from cairn.models.gpu_matrix import gpu_matrix

CODE_FORMS = ("AWQ", "GPTQ", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0", "Q2_K")
"""Forms of `Codes`: AWQ and GPTQ with groups of 128, asymmetric and symmetric."""
Multiply = Callable[[torch.Tensor], torch.Tensor]
_READ = 2**28  # bytes of the matrices that are multiplied in turn: more than a GPU caches


def command(arguments: argparse.Namespace) -> int:
    need_cuda("products")
    for size in arguments.shapes:
        if not 0 < size < 2**16 or size % 256:
            raise ConfigError(f"shapes has {size}; sizes are multiples of 256 below 65536")
    if len(arguments.shapes) % 2:
        raise ConfigError("shapes is a list of outputs,inputs,outputs,inputs,...")
    with torch.inference_mode():
        show_rows("products", tell(_run(arguments)), arguments.output)
    return 0


def _run(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from cairn.kernels.precompile import collecting, compile_all

    device = torch.device("cuda")
    bandwidth = read_bandwidth(device)
    for at in range(0, len(arguments.shapes), 2):
        outputs, columns = arguments.shapes[at : at + 2]
        inputs = [torch.randn(n, columns, device=device).bfloat16() for n in arguments.rows]
        given = {
            form: _matrices(form, outputs, columns, device) for form in ("bf16", *arguments.forms)
        }
        with collecting() as kernels:
            for _, products in given.values():
                for x in inputs:
                    products[0](x)
        compile_all(kernels)
        of_bf16: dict[int, float] = {}
        for form, (nbytes, products) in given.items():
            for x in inputs:
                rows, seconds = len(x), _seconds(products, x)
                of_bf16.setdefault(rows, seconds)
                yield {
                    "form": form,
                    "matrix": f"{outputs} x {columns}",
                    "MB": round(nbytes / 1e6, 1),
                    "rows": rows,
                    "us": round(seconds * 1e6, 2),
                    "TB/s": round(nbytes / seconds / 1e12, 2),
                    "share_of_read": round(nbytes / seconds / bandwidth, 3),
                    "TFLOP/s": round(2e-12 * rows * outputs * columns / seconds, 1),
                    "of_bf16": round(of_bf16[rows] / seconds, 2),
                }
    yield {"form": "plain read of 2 GiB", "TB/s": round(bandwidth / 1e12, 2)}


def _seconds(products: Sequence[Multiply], x: torch.Tensor) -> float:
    """Of one product, where all are computed in turn."""
    return time_cuda(lambda: [multiply(x) for multiply in products]) / len(products)


def _matrices(
    form: str, outputs: int, columns: int, device: torch.device
) -> tuple[int, Sequence[Multiply]]:
    """Bytes of a matrix, and the products with so many copies of it that none is cached."""
    from cairn.kernels.gemv import gemv
    from cairn.kernels.interface import FEW_ROWS

    dense = torch.randn(outputs, columns, dtype=torch.bfloat16, device=device) * columns**-0.5
    if form == "bf16":
        copies = [dense.clone() for _ in range(-(-_READ // dense.nbytes) + 1)]

        def with_bf16(weight: torch.Tensor) -> Multiply:
            return lambda x: gemv(x, weight) if len(x) <= FEW_ROWS else F.linear(x, weight)

        return dense.nbytes, [with_bf16(weight) for weight in copies]
    if form.startswith("fp8"):
        given: Any = to_fp8(dense, 128 if form == "fp8-blocks" else None)
    else:
        given = random_codes(form, outputs, columns).to(device)
    matrix = gpu_matrix(given)
    # FP8 matrices also keep scales in another order, for many rows.
    nbytes = given.nbytes if form.startswith("fp8") else matrix.nbytes
    count = -(-_READ // nbytes) + 1
    return nbytes, [matrix.product, *(gpu_matrix(given.clone()).product for _ in range(count))]


def random_codes(form: str, outputs: int, columns: int) -> Codes:
    """A matrix as a format has it, with random codes and scales; columns are a multiple of 256."""
    draw = torch.Generator().manual_seed(0)
    bits = 8 if form in ("Q6_K", "Q8_0") else 4
    codes = {"Q6_K": 64, "Q2_K": 4}.get(form, 2**bits)
    per_scale = {"AWQ": 128, "GPTQ": 128, "Q4_0": 32, "Q4_1": 32, "Q8_0": 32}.get(form, 256)
    subs = 2 if form in ("Q6_K", "Q2_K") else 1

    def integers(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=draw, dtype=torch.int16).to(torch.int8)

    def halves(scale: float) -> torch.Tensor:
        drawn = torch.rand(outputs, columns // per_scale, generator=draw)
        return (drawn * scale + scale / 10).half()

    scale, minimum, sub_scale, sub_minimum = halves(0.1 / codes), None, None, None
    blocks = columns // BLOCK
    if form == "AWQ":
        zeros = integers(0, 16, outputs, columns // per_scale)
        zeros = zeros.repeat_interleave(per_scale // BLOCK, 1)
        minimum, sub_minimum = -scale, zeros[..., None]
    elif form in ("Q4_1", "Q4_K", "Q2_K"):
        minimum = -halves(0.03)
    if form.endswith("_K"):
        sub_scale = integers(-32 if form == "Q6_K" else 0, 32, outputs, blocks, subs)
        if minimum is not None:
            sub_minimum = integers(0, 16, outputs, blocks, subs)
    drawn = torch.randint(0, codes, (outputs, columns), generator=draw, dtype=torch.uint8)
    offset = {"GPTQ": 8, "Q4_0": 8, "Q6_K": 32, "Q8_0": 128}.get(form, 0)
    return Codes(drawn, scale, minimum, sub_scale, sub_minimum, offset, bits)
