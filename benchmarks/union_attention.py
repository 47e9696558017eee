"""Attention over unions of pages on a Hopper GPU: CUDA C++ against Triton, by how blocks are cut.

    PYTHONPATH=src python benchmarks/union_attention.py

One layer of a chunk of 16,640 rows whose last is the 83,200th, with selections of published
locality (as `cairn bench hsa` makes them up) and with random ones. Of Triton's two kernels the time
is that of both; the one in CUDA C++ builds unions itself.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from cairn.kernels.cuda_source import CudaKernel
from cairn.kernels.paged_extend import ExtendBlocks
from cairn.kernels.sparse_extend import attend_selected, union_rows
from cairn.kernels.sparse_shape import SparseShape
from cairn.kernels.union_attention import Tuning, UnionAttention
from cairn.kernels.workspace import Workspace

CUDA = torch.device("cuda")
PAGE = 64
CHANGE = 0.195  # share of its pages that a row does not have from the row before
HILS = SparseShape(
    heads=16,
    kv_heads=2,
    head_dim=64,
    page_size=PAGE,
    landmark_heads=16,
    landmark_width=64,
    topk=32,
    window=512,
    scale=64**-0.5,
    strategy="softmax_head",
    by_lse=False,
    sinks=0,
    null_split=True,
    hide_last=True,
)
WIDE = replace(HILS, head_dim=128, landmark_width=128, scale=128**-0.5)
SHAPES = {
    "16 heads of 64, 2 kv heads": HILS,
    "16 heads of 128, 2 kv heads": WIDE,
    "8 heads of 64, 2 kv heads": replace(HILS, heads=8, landmark_heads=8),
    "16 heads of 128, 8 kv heads": replace(WIDE, kv_heads=8),
    "8 heads of 128, 8 kv heads": replace(WIDE, heads=8, kv_heads=8, landmark_heads=8),
}


@dataclass
class Layer:
    shape: SparseShape
    query: torch.Tensor
    scoring: torch.Tensor
    pool: torch.Tensor
    vectors: torch.Tensor
    bias: torch.Tensor
    table: torch.Tensor
    cu_query: torch.Tensor
    window_out: torch.Tensor
    window_lse: torch.Tensor
    normalizer: torch.Tensor | None

    @classmethod
    def random(cls, shape: SparseShape, rows: int, pages: int) -> Layer:
        torch.manual_seed(0)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(size, device=CUDA).bfloat16()

        sizes = (rows, shape.heads)
        scoring = draw(*sizes, shape.landmark_width)
        vectors = draw(pages + 1, shape.landmark_heads, shape.landmark_width)
        bias = torch.randn(pages + 1, shape.landmark_heads, device=CUDA)
        lse = torch.randn(sizes, device=CUDA)
        normalizer = None
        if shape.normalized:
            normalizer = torch.empty(sizes, device=CUDA)
            for head in range(shape.heads):
                scores = scoring[:, head].float() @ vectors[:, head].float().T * shape.scale
                scores = (scores + bias[:, head]).logsumexp(-1)
                normalizer[:, head] = torch.logaddexp(scores, lse[:, head])
        return cls(
            shape,
            draw(*sizes, shape.head_dim),
            scoring,
            draw(pages + 1, 2 * shape.kv_heads, PAGE, shape.head_dim),
            vectors,
            bias,
            (1 + torch.randperm(pages, device=CUDA)).int()[None],
            torch.tensor([0, rows], dtype=torch.int32, device=CUDA),
            draw(*sizes, shape.head_dim),
            lse,
            normalizer,
        )

    def blocks(self, rows: int) -> ExtendBlocks:
        return ExtendBlocks.of(np.array([len(self.query)]), np.array([0]), CUDA, rows)

    def by_triton(self, selected: torch.Tensor, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        blocks, workspace = self.blocks(union_rows(self.shape)), Workspace(CUDA)
        return lambda: attend_selected(
            self.shape,
            selected,
            self.query,
            self.scoring,
            self.pool,
            self.vectors,
            self.bias,
            self.table,
            self.cu_query,
            blocks,
            self.window_out,
            self.window_lse,
            out,
            workspace,
            normalizer=self.normalizer,
        )

    def by_cuda(
        self, kernel: UnionAttention, selected: torch.Tensor, out: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        blocks = self.blocks(kernel.rows)
        return lambda: kernel(
            selected,
            self.query,
            self.scoring,
            self.pool,
            self.vectors,
            self.bias,
            self.table,
            self.cu_query,
            blocks,
            self.window_out,
            self.window_lse,
            self.normalizer,
            out,
        )


def selections(shape: SparseShape, rows: int, candidates: int) -> dict[str, torch.Tensor]:
    """Candidates are cut into k equal parts, of which every row reads one page each: most of the
    time that of the row before, or always another one."""
    size = (rows, shape.kv_heads, shape.topk)
    generator = torch.Generator(CUDA).manual_seed(0)
    changes = torch.rand(size, device=CUDA, generator=generator) < CHANGE
    row = torch.arange(rows, device=CUDA)[:, None, None]
    last = torch.where(changes, row, 0).cummax(0).values
    drawn = torch.rand(size, device=CUDA, generator=generator)
    edges = torch.arange(shape.topk + 1, device=CUDA) * candidates // shape.topk
    return {
        name: (edges[:-1] + (places * edges.diff()).long()).int()
        for name, places in (("local", drawn.gather(0, last)), ("random", drawn))
    }


def microseconds(call: Callable[[], torch.Tensor], launches: int = 10, repeats: int = 5) -> float:
    call()
    times = []
    for _ in range(repeats):
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        begin.record()
        for _ in range(launches):
            call()
        end.record()
        end.synchronize()
        times.append(1e3 * float(begin.elapsed_time(end)) / launches)
    return statistics.median(times)


def resources(kernel: CudaKernel) -> str:
    """Registers, spilled bytes and blocks per multiprocessor of a loaded kernel."""
    registers, spilled, blocks = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    # 4 and 3 are values of CUfunction_attribute.
    kernel.call("cuFuncGetAttribute", ctypes.byref(registers), 4, kernel.function)
    kernel.call("cuFuncGetAttribute", ctypes.byref(spilled), 3, kernel.function)
    size = ctypes.c_size_t(kernel.shared_bytes)
    occupancy = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
    kernel.call(occupancy, ctypes.byref(blocks), kernel.function, kernel.threads, size)
    return f"{registers.value} registers, {spilled.value} bytes spilled, {blocks.value} blocks fit"


def compare(name: str, shape: SparseShape, rows: int, last: int, cuts: list[Tuning]) -> None:
    layer = Layer.random(shape, rows, last // PAGE)
    candidates = (last - rows) // PAGE - 9
    chosen = selections(shape, rows, candidates)
    expected = {}
    for kind, selected in chosen.items():
        expected[kind] = torch.empty_like(layer.query)
        call = layer.by_triton(selected, expected[kind])
        took = microseconds(call)
        reuse = selected.numel() / int(call().sum())
        print(f"{name}, {kind}: Triton {took:.0f} us, {reuse:.2f} selected a page read", flush=True)
    for cut in cuts:
        kernel = UnionAttention(shape, torch.bfloat16, CUDA, has_bias=True, tuning=cut)
        print(f"  {cut}: {cut.warps(shape)} warps, {resources(kernel.kernel)}")
        for kind, selected in chosen.items():
            out = torch.empty_like(layer.query)
            call = layer.by_cuda(kernel, selected, out)
            counts = call()
            error = (out.float() - expected[kind].float()).norm() / expected[kind].float().norm()
            worst = (out.float() - expected[kind].float()).abs().max()
            again = torch.empty_like(out)
            layer.by_cuda(kernel, selected, again)()
            same = torch.equal(out, again)
            reuse = selected.numel() / int(counts.sum())
            print(
                f"    {kind}: {microseconds(call):.0f} us, {reuse:.2f} selected a page read, "
                f"relative error {error:.1e}, largest {worst:.1e}, "
                f"{'the same' if same else 'NOT THE SAME'} again",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16640)
    parser.add_argument("--last", type=int, default=83200)
    parser.add_argument("--one", action="store_true", help="one shape and cut, for profilers")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for name, shape in list(SHAPES.items())[: 1 if options.one else None]:
        cuts = [Tuning.of(shape)]
        if shape == HILS:
            tried = ((16, 1), (8, 1), (32, 1), (16, 2), (32, 2))
            cuts = [Tuning.of(shape, rows, tiles) for rows, tiles in tried]
            cuts += [Tuning(16, 1, 4, 2), Tuning(16, 1, 12, 1), Tuning(8, 1, 2, 4)]
        rows = options.rows if shape.kv_heads == 2 else options.rows // 4
        cuts = cuts[:1] if options.one else cuts
        compare(name, shape, rows, options.last, [cut for cut in cuts if cut is not None])


if __name__ == "__main__":
    main()
