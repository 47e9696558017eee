"""Compiles every kernel for compute capability 9.0, without a GPU: each in few forms and as far as
PTX, which LLVM does not optimise, or in all of them with the argument `all`. Run by
test_kernels.py."""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from cairn.bench import drift
from cairn.kernels import (
    activation,
    draft_rows,
    experts,
    fp8,
    fp8_experts,
    fp8_many,
    gemv,
    index_scan,
    kept_pages,
    landmark,
    latent,
    latent_prompt,
    list_rows,
    newest,
    norm,
    packed,
    paged_decode,
    paged_extend,
    rope_angles,
    rope_kv,
    rope_latent,
    route,
    row_attention,
    sampling,
    sparse_extend,
    sparse_few,
    sparse_pages,
    sparse_score,
    sparse_scratch,
    sparse_select,
    sparse_survey,
    stage,
    store_rows,
    swap_in,
    swap_rows,
    top_rows,
    widen_pages,
)
from cairn.kernels.interface import BLOCK_OUTPUTS, HOT_AGES, LISTED_ROWS, MOST_HOT_SLOTS

BF16, FP32, I32, I64, FP8, I8 = "*bf16", "*fp32", "*i32", "*i64", "*fp8e4nv", "*i8"
ATTENTION = {"query": BF16, "pool": BF16, "page_table": I32, "kv_lens": I32, "out": BF16}
ATTENTION |= {"lse_out": FP32, "scale": "fp32", "query_stride": "i32", "table_stride": "i32"}
SHARED_MEMORY = 232448  # bytes a program can have
HEADS = {"HEADS": 16, "KV_HEADS": 8, "DIM": 128}
EVERY = "all" in sys.argv
if not EVERY:
    os.environ["DISABLE_LLVM_OPT"] = "1"  # it takes a quarter of the time, ptxas another third
    CUDABackend.make_cubin = lambda *_: b""
SOME: dict[tuple[str, bool, bool], Any] = {}
"""What was compiled: the first form of a kernel, the first that reads 8 bits, and the first of
landmarks with two halves."""


def compile_kernel(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any
) -> Any:
    kernel = kernel.jit
    form = kernel.__name__, not {FP8, I8}.isdisjoint(types.values()), bool(constants.get("REACH"))
    if EVERY or form not in SOME:
        SOME[form] = _compile(kernel, types, constants, **options)
    return SOME[form]


def _compile(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> Any:
    names = kernel.arg_names
    if "PDL" in names:
        constants = {**constants, "PDL": True}
        options["launch_pdl"] = True
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = [["tt.divisibility", 16]]
    attributes = {(i,): aligned for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> None:
    for page_size, window in [(64, 100), (64, 0), (16, 100), (512, 0)]:
        shape = {**HEADS, "PAGE_SIZE": page_size, "WINDOW": window, "HIDE_LAST": window > 0}
        shape |= {"WITH_LSE": True}
        splits = {"rows": I32, "item_seq": I32, "item_begin": I32, "item_count": I32}
        splits["head_stride"] = "i32"
        splits |= {"partial": FP32, "partial_lse": FP32, "arrivals": I32, "group_arrivals": I32}
        block_n = 16 if page_size == 16 else 64
        types = {**ATTENTION, **splits}
        for rows, pool in ((1, BF16), (5, BF16), (1, FP8), (5, FP8), (1, I8)):
            decode = {**shape, "ROWS": rows, "BLOCK_N": block_n}
            own = {**types, "pool": pool}
            warps = 2 if pool == FP8 and rows == 1 else 4
            compile_kernel(paged_decode._decode_kernel, own, decode, num_stages=5, num_warps=warps)
        blocks = {"cu_query": I32, "block_seq": I32, "block_begin": I32}
        blocks["dense_until"] = I32
        for tma in {False, page_size % 64 == 0}:
            blocks["tiles"] = "tensordesc<bf16[64,128]>" if tma else BF16
            extend = {**shape, "PAGED_WINDOW": window > 0, "BLOCK_M": 64, "BLOCK_N": 64, "TMA": tma}
            types = {**ATTENTION, **blocks}
            stages = 3 if tma and not window else 2
            compile_kernel(paged_extend._extend_kernel, types, extend, num_stages=stages)
            if not tma:
                types |= {"pool": FP8, "tiles": FP8}
                compile_kernel(paged_extend._extend_kernel, types, extend, num_stages=stages)
        types = {"pool": FP8, "page_table": I32, "ends": I32, "skipped": I32, "out": BF16}
        types |= {"num_seqs": "i32", "table_stride": "i32", "width": "i32"}
        widened = {"PARTS": 16, "DIM": 128, "PAGE_SIZE": page_size, "RATIO": 2, "BLOCK": 256}
        compile_kernel(widen_pages._widen_kernel, types, widened)
    for dim, page_size, landmark_heads, pooling in [
        (128, 64, 16, 0),
        (64, 64, 16, 0),
        (128, 64, 2, 2),
    ]:
        sparse(dim, page_size, landmark_heads, pooling)
    sparse(128, 64, 2, 2, FP8)
    for pool in (FP8, BF16):
        sparse(64, 8, 2, 4, pool)
    mixture()
    quantised()
    for pool in (BF16, FP8, I8):
        latents(pool)
        chosen_rows(pool)
    swapped_rows()
    types = {"kv_lens": I32, "item_seq": I32, "item_begin": I32, "item_count": I32}
    types |= {"num_seqs": "i32", "num_items": "i32", "target": "i32", "least": "i32"}
    plan = {"PAGE_SIZE": 64, "WINDOW": 100, "ROWS": 5, "BLOCK": 256, "BLOCK_ITEMS": 512}
    plan["COMPARED"] = 32
    compile_kernel(paged_decode._plan_kernel, types, plan)
    types = {"x": BF16, "residual": BF16, "weight": BF16, "out": BF16}
    types |= {"eps": "fp32", "x_stride": "i32", "part_stride": "i32"}
    for parts, x in ((1, BF16), (3, FP32)):
        constants = {"DIM": 1000, "BLOCK": 1024, "ADD": True, "PARTS": parts}
        compile_kernel(norm._norm_kernel, {**types, "x": x}, constants)
    types = {"gate_up": BF16, "out": BF16}
    compile_kernel(activation._silu_kernel, types, {"WIDTH": 3072, "BLOCK": 1024})
    types = {"x": BF16, "weight": BF16, "out": BF16, "rows": "i32", "out_features": "i32"}
    types |= {"norm_weight": BF16, "eps": "fp32"}
    for silu in (False, True):
        constants = {"IN": 3072, "ADD": True, "NORM": not silu, "BLOCK_N": 4, "BLOCK_K": 4096}
        compile_kernel(gemv._gemv_kernel, types, {**constants, "SILU": silu}, num_warps=8)
        constants |= {"BLOCK_M": 8, "BLOCK_N": 16, "PARTS": 4, "BLOCK_K": 256}
        compile_kernel(gemv._few_rows_kernel, types, constants, num_warps=4)
        compile_kernel(gemv._few_rows_kernel, types, {**constants, "PARTS": 8}, num_warps=8)
    own = {**types, "tiles": "tensordesc<bf16[64,128]>"}
    constants = {"IN": 7168, "ADD": True, "TMA": True}
    constants |= {"BLOCK_M": 8, "BLOCK_N": 64, "BLOCK_K": 128}
    compiled = compile_kernel(gemv._streamed_kernel, own, constants, num_stages=4)
    assert 2 * compiled.metadata.shared <= SHARED_MEMORY, "two programs share a multiprocessor"
    own = {**types, "weight": FP32, "out": FP32, "scale": "fp32"}
    constants = {"IN": 7168, "BLOCK_M": 4, "BLOCK_K": 8192}
    compile_kernel(gemv._narrow_kernel, own, constants, num_warps=8)
    types = {"positions": I32, "frequencies": FP32, "cos": BF16, "sin": BF16, "scale": "fp32"}
    compile_kernel(rope_angles._angles_kernel, types, {"HALF": 64})
    types = {"qkv": BF16, "cos": BF16, "sin": BF16, "q_weight": BF16, "k_weight": BF16}
    types |= {"eps": "fp32", "pool": BF16, "pages": I32, "offsets": I32, "out": BF16}
    types |= {"projected": BF16, "scoring_weight": BF16, "scoring_out": BF16}
    types |= {"stride": "i32", "projected_stride": "i32", "rows": "i32"}
    types |= {"key_scale": "fp32", "value_scale": "fp32"}
    constants = {**HEADS, "PAGE_SIZE": 64, "NORM": True, "BLOCK_H": 8, "SCORING": False}
    constants |= {"ADD_QUERY": False, "HADAMARD": True, "ROWS": 1}
    compile_kernel(rope_kv._rope_kv_kernel, {**types, "pool": FP8}, constants)
    constants["HADAMARD"] = False
    for scoring in (False, True):
        constants |= {"SCORING": scoring, "ADD_QUERY": scoring}
        compile_kernel(rope_kv._rope_kv_kernel, {**types, "pool": FP8}, constants)
        many = {**constants, "ROWS": 4 if scoring else 1}
        for pool in (BF16, I8):
            compile_kernel(rope_kv._rope_kv_kernel, {**types, "pool": pool}, many)
    types = {"logits": BF16, "temperatures": FP32, "best": FP32, "best_token": I32, "sums": FP32}
    types |= {"stride": "i32"}
    constants = {"VOCAB": 151936, "BLOCKS": 38, "BLOCK": 4096}
    compile_kernel(sampling._blocks_kernel, types, constants, num_warps=8)
    types |= {"seeds": I64, "tokens": I64, "newest": I64, "into": I32}
    compile_kernel(sampling._pick_kernel, types, {**constants, "KEEP": True}, num_warps=8)
    types = {"token_ids": I32, "sources": I32, "newest": I64, "out": I64, "rows": "i32"}
    compile_kernel(newest._known_kernel, types, {"BLOCK": 256})
    types = dict.fromkeys(("first", "checked", "places", "right"), I32)
    types |= {"tokens": I64, "newest": I64, "count": "i32", "most": "i32"}
    compile_kernel(draft_rows._newest_kernel, types, {"BLOCK": 128})
    moved = ("places", "sources", "positions", "lengths", "offsets", "pages", "kv_lens", "tables")
    types = {**dict.fromkeys((*moved, "room", "right"), I32), "seeds": I64, "request_seeds": I64}
    types |= dict.fromkeys(("count", "times", "further", "page_stride", "table_stride"), "i32")
    types["group_stride"] = "i64"
    constants = {"PAGE_SIZE": 64, "GROUPS": 2, "BLOCK": 128}
    compile_kernel(draft_rows._move_kernel, types, constants)
    types = dict.fromkeys(("kept", "kept_from", "page_table", "kv_lens", "tables", "lens"), I32)
    types |= {"kept_stride": "i64", "table_stride": "i32", "table_width": "i32"}
    constants = {"KV_HEADS": 3, "TOPK": 8, "PAGES": 16, "PAGE_SIZE": 64, "BLOCK": 16}
    compile_kernel(kept_pages._kept_kernel, types, constants)
    tables = ("selected", "page_table", "generations", "frame_of", "hot_pages", "hot_lives", "used")
    lists = ("clock", "slot_of", "arrived", "located", "claims", "missed", "counts", "host", "pool")
    types = {**dict.fromkeys((*tables, *lists), I32), "totals": I64}
    sizes = ("total", "room", "num_pages", "table_stride", "first_hot", "first", "slots")
    types |= dict.fromkeys(sizes, "i32")
    for slots in (1024, MOST_HOT_SLOTS):
        constants = {"KV_HEADS": 8, "TOPK": 32, "BLOCK": 1024, "ONE": slots == 1024}
        constants |= {"SLOTS": slots - 24, "BLOCK_SLOTS": slots, "WAYS": swap_in.plan_ways(slots)}
        constants["AGES"] = HOT_AGES
        warps = swap_in.plan_warps(slots)
        compile_kernel(swap_in._swap_plan_kernel, types, constants, num_warps=warps)
    constants = {"KV_HEADS": 8, "WORDS": 4096, "PIECE": 1024, "PROGRAMS": 264}
    constants["TELL"] = True
    compile_kernel(swap_in._swap_copy_kernel, types, constants)
    names = ("pages", "counts", "frame_of", "claims", "staged", "staged_counts", "found")
    types = {**dict.fromkeys(names, I32), "total": I64, "room": "i32", "num_pages": "i32"}
    constants = {"KV_HEADS": 8, "WIDTH": 512, "BLOCK": 512}
    for claim, staged in ((True, True), (False, False), (False, True)):
        passes = {"CLAIM": claim, "STAGED": staged}
        compile_kernel(stage._stage_kernel, types, {**constants, **passes})
    constants = {"KV_HEADS": 8, "PAGE_SIZE": 64, "WINDOW": 512}
    drifting = {"selected": I32, "kv_lens": I32, "clock": I32, "change": "fp32"}
    drifting["max_seqs"] = "i32"
    compile_kernel(drift._drift_kernel, drifting, {**constants, "TOPK": 32, "BLOCK_K": 32})
    types = {**dict.fromkeys(("source", "target"), I32), "count": "i32"}
    types |= dict.fromkeys(("from_pages", "into_pages", "source_shifts", "target_shifts"), I64)
    constants = {"LAYERS": 28, "WORDS": 65536, "PIECE": 1024, "PROGRAMS": 16}
    compile_kernel(swap_in._swap_pages_kernel, types, constants)
    types |= dict.fromkeys(("from_pages", "into_pages"), I32)
    constants |= {"LAYERS": 1, "PIECE": 8192, "PROGRAMS": 8}
    compile_kernel(swap_in._swap_pages_kernel, types, constants, num_warps=32)


def swapped_rows() -> None:
    """Latent rows of DeepSeek-V3.2, of 16 bits."""
    wide = ("tags", "used", "clock", "totals", "listed")
    lists = ("positions", "seqs", "page_table", "generations", "frame_of", "slot_of", "claims")
    more = ("missing", "places", "counts", "ends", "ages", "tasks", "num_tasks", "host", "pool")
    types = {**dict.fromkeys((*lists, *more), I32), **dict.fromkeys(wide, I64)}
    types |= dict.fromkeys(("total", "table_stride", "first_hot", "share", "slots", "room"), "i32")
    find: dict[str, Any] = {"K": 2048, "PAGE_SIZE": 64, "BLOCK": swap_rows._ENTRIES}
    compile_kernel(swap_rows._swap_find_kernel, types, find)
    slots = {"PROGRAMS": swap_rows._PROGRAMS, "BLOCK_SLOTS": swap_rows._SLOTS, "AGES": HOT_AGES}
    compile_kernel(
        swap_rows._swap_list_kernel, types, {**find, **slots, "BLOCK": swap_rows._LISTED}
    )
    compile_kernel(swap_rows._swap_give_kernel, types, slots, num_warps=8)
    copy = {"WORDS": 288, "BLOCK_WORDS": 512, "ROWS": 4, "PROGRAMS": 264, "BLOCK": find["BLOCK"]}
    for tell in (False, True):
        compile_kernel(swap_rows._swap_rows_kernel, types, {**copy, "TELL": tell})


def mixture() -> None:
    """The experts of Qwen3-30B-A3B, and the router of DeepSeek-V3."""
    names = ("ids", "order", "slots")
    types = {**dict.fromkeys(names, I32), **dict.fromkeys(("x", "weight", "out", "logits"), BF16)}
    types |= {"bias": FP32, "weights": FP32, "norm_weight": BF16, "scale": "fp32", "eps": "fp32"}
    types |= {"stride": "i32", "pairs": "i32", "num_slots": "i32"}
    for sigmoid, groups in ((False, 1), (True, 8)):
        constants: dict[str, Any] = {"EXPERTS": 256, "BLOCK": 256, "TOP": 8, "NORMALIZE": True}
        constants |= {"SIGMOID": sigmoid, "BIAS": sigmoid, "GROUPS": groups, "KEPT": groups // 2}
        compile_kernel(route._route_kernel, types, constants, num_warps=1)
    few = {"EXPERTS": 128, "TOP": 8}
    for group in (None, 0, 128):  # None: not FP8
        weight = BF16 if group is None else FP8
        own = {**types, "weight": weight, "scale": BF16 if group is None else FP32}
        scaled = {**few, "SCALED": group is not None, "GROUP": group or 0}
        columns = group or 2048
        tile = {"BLOCK_N": 4096 // columns, "BLOCK_K": columns}
        constants = {**scaled, "IN": 2048, "OUT": 768, "NORM": True, **tile}
        compile_kernel(experts._few_gate_up_kernel, own, constants)
        columns = group or 256
        tile = {"BLOCK_N": 1024 // columns, "BLOCK_K": columns}
        constants = {**scaled, "IN": 768, "OUT": 2048, "ADD": True, **tile}
        compile_kernel(experts._few_down_kernel, own, constants)
    constants = {**few, "WIDTH": 2048, "ADD": True, "BLOCK": 1024}
    compile_kernel(experts._combine_kernel, types, constants)
    for step, gated, tma, group in (
        (experts._LADDER[0], True, True, None),
        (experts._LADDER[1], False, False, None),
        (experts._LARGEST, True, True, None),
        (experts._LADDER[0], True, True, 0),
        (experts._LADDER[1], False, True, 128),
        (experts._LARGEST, True, True, 128),
    ):
        constants = {"BLOCK_M": step.pairs, "BLOCK": step.sorted_at_once}
        compile_kernel(experts._sort_kernel, types, constants, num_warps=8)
        block_n = step.outputs if gated else 2 * step.outputs
        weight = BF16 if group is None else FP8
        types |= {"weight": weight, "scale": BF16 if group is None else FP32}
        types["tiles"] = f"tensordesc<{weight[1:]}[{block_n},64]>" if tma else BF16
        constants = {"SCALED": group is not None, "GROUP": group or 0}
        constants |= {"IN": 2048, "OUT": 768} if gated else {"IN": 768, "OUT": 2048}
        constants |= {"TOP": 8, "GATED": gated, "TMA": tma}
        constants |= {"BLOCK_M": step.pairs, "BLOCK_N": block_n, "BLOCK_K": 64}
        compiled = compile_kernel(
            experts._product_kernel, types, constants, num_warps=step.warps, num_stages=4
        )
        assert compiled.metadata.shared <= SHARED_MEMORY
    types |= {"x": FP8, "weight": "tensordesc<fp8e4nv[128,128]>", "scale": FP32, "x_scale": FP32}
    types |= {"out_scale": FP32, "x_stride": "i32", "out_stride": "i32"}
    for gated, group in itertools.product((True, False), (0, 128)):
        constants = {"TOP": 8, "GATED": gated, "GROUP": group, "TMA": True}
        constants |= {"IN": 2048, "OUT": 768} if gated else {"IN": 768, "OUT": 2048}
        constants |= {"BLOCK_M": fp8_experts.PAIRS, "BLOCK": 128}
        own = {**types, "out": FP8 if gated else BF16}
        own["x"] = FP8 if gated else f"tensordesc<fp8e4nv[{fp8_experts.PAIRS},128]>"
        kernel = fp8_experts._fp8_product_kernel
        warps, stages = (8, 2) if gated else (4, 3)
        options = {"num_warps": warps, "num_stages": stages + (group > 0)}
        compiled = compile_kernel(kernel, own, constants, **options)
        assert compiled.metadata.shared <= SHARED_MEMORY


def quantised() -> None:
    """Products with FP8 and with codes of 4 and 8 bits."""
    types = {"x": BF16, "weight": FP8, "scale": FP32, "out": BF16, "norm_weight": BF16}
    types |= {"eps": "fp32", "out_features": "i32", "rows": "i32", "x_scale": FP32, "rounded": FP8}
    types["padded"] = "i32"
    for group in (0, 128):
        constants: dict[str, Any] = {"IN": 4096, "GROUP": group, "NORM": True, "ADD": True}
        tile = {"RUN": 16, "BLOCK_N": 4, "BLOCK_K": 4096, "SILU": False}
        compile_kernel(fp8._one_row_kernel, types, {**constants, **tile}, num_warps=4, maxnreg=168)
        tile = {"BLOCK_M": 32, "BLOCK_N": 16, "PARTS": 8, "BLOCK_K": 128}
        compile_kernel(fp8._few_rows_kernel, types, {**constants, **tile}, num_warps=8)
        own = {"IN": 4096, "GROUP": group or 4096, "BLOCK_G": 1, "BLOCK_K": group or 4096}
        compile_kernel(fp8_many._round_kernel, types, own)
        for tma in (True, False):
            own = {"IN": 4096, "GROUP": group, "BLOCKS": group > 0, "TMA": tma}
            sizes = {"x": fp8_many._BLOCK_ROWS, "weight": BLOCK_OUTPUTS}
            own |= {"BLOCK_M": sizes["x"], "BLOCK_N": sizes["weight"], "BLOCK_K": 128}
            operands = {
                name: f"tensordesc<fp8e4nv[{size},128]>" if tma else FP8
                for name, size in sizes.items()
            }
            kernel = fp8_many._many_rows_kernel
            given = {**types, **operands}
            compiled = compile_kernel(kernel, given, own, num_warps=4, num_stages=3)
            assert compiled.metadata.shared <= SHARED_MEMORY
    types |= {"words": I32, "scale": "*fp16", "inner": "*i8", "ids": I64, "count": "i32"}
    for bits, subs, has_sub in ((4, 1, False), (4, 1, True), (8, 2, True)):
        form: dict[str, Any] = {"IN": 4096, "BITS": bits, "OFFSET": 8, "SUPER": 4, "SUBS": subs}
        form |= {"MINIMUM": has_sub, "SUB_SCALE": has_sub, "SUB_MINIMUM": has_sub}
        tile = {"BLOCK_N": 4, "BLOCK_K": 4096, "GATED": False, "NORM": True, "ADD": True}
        compile_kernel(packed._one_row_kernel, types, {**form, **tile}, num_warps=bits, maxnreg=128)
        tile = {"BLOCK_M": 32, "BLOCK_N": 16, "PARTS": 8, "BLOCK_W": 32, "NORM": True, "ADD": True}
        compile_kernel(packed._few_rows_kernel, types, {**form, **tile}, num_warps=8)
        tile = {"BLOCK_N": 8, "BLOCK_W": 128, "CHOSEN": bits == 8}
        compile_kernel(packed._widen_kernel, types, {**form, **tile})


def latents(pool: str) -> None:
    """128 heads over latent rows. What a program needs fits into the memory of an H200."""
    types = {**ATTENTION, "pool": pool, "pages": I32, "rows": I32, "cu_query": I32, "partial": FP32}
    types |= {"partial_lse": FP32, "block_seq": I32, "block_begin": I32, "num_seqs": "i32"}
    stored = dict.fromkeys(("latent", "key", "cos", "sin", "weight", "bias"), BF16)
    stored |= {**ATTENTION, "pages": I32, "offsets": I32, "eps": "fp32", "stride": "i32"}
    constants = {"ROPE": 64, "PAGE_SIZE": 64, "BLOCK_H": 16, "BLOCK_R": 32}
    rows = {"HEADS": 128, "DIM": 192, "FIRST": 128, "WIDTH": 512, "KEYS": False, "BLOCK_W": 512}
    keys = {"HEADS": 64, "DIM": 128, "FIRST": 0, "WIDTH": 128, "KEYS": True, "BLOCK_W": 128}
    for own in (rows, keys):
        compile_kernel(rope_latent._rope_latent_kernel, stored, {**constants, **own})
    sizes = {"HEADS": 128, "LATENT": 512, "ROPE": 64, "HEAD_TILE": 64}
    sizes |= {"BLOCK_M": 64, "BLOCK_N": 64}
    decode = {**sizes, "MAX_SEQS": 256, "BLOCK_SEQS": 256}
    for kernel, page_size, own in (
        (latent._latent_decode_kernel, 64, decode),
        (latent._latent_extend_kernel, 16, sizes),
    ):
        tma = page_size == 64 and pool == BF16
        types["latents"] = "tensordesc<bf16[64,512]>" if tma else pool
        types["ropes"] = "tensordesc<bf16[64,64]>" if tma else pool
        constants = {**own, "PAGE_SIZE": page_size, "TMA": tma}
        compiled = compile_kernel(kernel, types, constants, num_warps=8, num_stages=2)
        assert compiled.metadata.shared <= SHARED_MEMORY
    if pool != BF16:
        types |= {"places": I32, "offsets": I32, "rows": BF16, "stride": "i32"}
        for width, packed in ((576, True), (128, False)):
            constants = {"WIDTH": width, "PAGE_SIZE": 64, "PACKED": packed}
            block = triton.next_power_of_2(width)
            compile_kernel(store_rows._store_kernel, types, {**constants, "BLOCK": block})
        return
    types |= dict.fromkeys(("keys", "ropes", "values"), BF16)
    types |= dict.fromkeys(("rows", "length", "query_stride", "rope_stride", "out_stride"), "i32")
    constants = {"NOPE": 128, "ROPE": 64, "VALUE": 128, "BLOCK_M": 128, "BLOCK_N": 64}
    compile_kernel(latent_prompt._latent_prompt_kernel, types, constants, num_warps=8, num_stages=3)
    types["rows"] = I32
    constants = {"MAX_SEQS": 256, "HEADS": 128, "LATENT": 512}
    compile_kernel(latent._latent_merge_kernel, types, constants)
    constants = {"MAX_SEQS": 256, "PROGRAMS": 66, "PAGE_SIZE": 64, "LEAST": 4, "BLOCK": 256}
    compile_kernel(latent._share_kernel, types, constants)


def chosen_rows(pool: str) -> None:
    """An index of 64 heads, and 128 heads over the 2048 rows that it chooses. Two programs of the
    scan, and one of attention, fit into the memory of a multiprocessor of an H200."""
    names = ("page_table", "rows", "seqs", "limits", "items", "tiles", "slots", "positions")
    types = {**dict.fromkeys((*names, "listed", "counts", "bounds"), I32), "scores": FP32}
    types |= {"query": BF16, "pool": pool, "out": BF16}
    types |= dict.fromkeys(("weights", "partial", "partial_lse"), FP32)
    sizes = ("num_items", "table_stride", "score_blocks", "blocks", "splits", "parts", "length")
    types |= {**dict.fromkeys(sizes, "i32"), "scale": "fp32"}
    constants = {"PROGRAMS": 264, "TILE": 64, "LEAST": 4, "BLOCK": 1024}
    compile_kernel(index_scan._scan_plan_kernel, types, constants)
    types |= dict.fromkeys(("cu_query", "kv_lens"), I32)
    numbers = ("num_rows", "num_seqs", "halvings", "at_once", "most_items", "item_stride")
    types |= dict.fromkeys(numbers, "i32")
    compile_kernel(list_rows._list_kernel, types, {"PER_ITEM": 4, "BLOCK": LISTED_ROWS})
    for rows, page_size in ((1, 64), (4, 64), (4, 16)):
        tma = page_size == 64
        pairs = pool != BF16 and rows == 1
        tile = "i16[64,64]" if pairs else f"{pool[1:]}[64,128]"
        types["keys"] = f"tensordesc<{tile}>" if tma else pool
        constants = {
            "HEADS": 64,
            "WIDTH": 128,
            "PAGE_SIZE": page_size,
            "ROWS": rows,
            "BLOCK_I": 256,
        }
        constants |= {"BLOCK_H": 64, "BLOCK_W": 128, "TILE": 64, "TMA": tma}
        stages = index_scan._stages(rows, torch.bfloat16)
        scan = compile_kernel(index_scan._scan_kernel, types, constants, num_stages=stages)
        assert 2 * scan.metadata.shared <= SHARED_MEMORY
    constants = {"K": 2048, "SAMPLE": 8192, "SLACK": 16}
    compile_kernel(top_rows._sample_kernel, types, constants, num_warps=16)
    constants = {"K": 2048, "BLOCK": 2048}
    compile_kernel(top_rows._collect_kernel, types, constants, num_warps=8)
    constants |= {"MOST_SPLITS": 64, "PAGE_SIZE": 64, "FEW": 4096, "MANY": 8192, "BLOCK_K": 2048}
    compile_kernel(top_rows._choose_kernel, types, constants, num_warps=16)
    constants = {"K": 2048, "PAGE_SIZE": 64, "BLOCK_K": 2048}
    compile_kernel(top_rows._slots_kernel, types, constants)
    constants = {"K": 2048, "HEADS": 128, "LATENT": 512, "ROPE": 64, "BLOCK_M": 64, "BLOCK_N": 64}
    attend = compile_kernel(
        row_attention._row_attention_kernel, types, constants, num_warps=8, num_stages=2
    )
    assert attend.metadata.shared <= SHARED_MEMORY
    constants = {"HEADS": 128, "LATENT": 512}
    compile_kernel(row_attention._row_merge_kernel, types, constants)


def sparse(dim: int, page_size: int, landmark_heads: int, pooling: int, pool: str = BF16) -> None:
    """Kernels of a model with 16 query heads: HiLS, or `quest` or `spread` where landmarks are of
    kv heads."""
    native = landmark_heads == 16
    small = page_size < 16
    width = dim if native else 2 * dim
    names = (
        "page_table",
        "kv_lens",
        "rows",
        "candidates",
        "best_index",
        "best_page",
        "selected",
        "chosen_page",
        "arrivals",
    )
    types = dict.fromkeys((*names, "cu_query", "dense_until", "block_seq", "block_begin"), I32)
    types |= dict.fromkeys(("pages", "readers", "counts", "limits", "last_rows", "offsets"), I32)
    types |= dict.fromkeys(("generations", "sealed", "selected"), I32)
    types |= dict.fromkeys(
        ("kv_table", "kv_pages", "located", "arrived", "frame_of", "frames"), I32
    )
    types |= {"reads": I64, "frames_stride": "i32"}
    types |= dict.fromkeys(("query", "scoring", "prior", "vectors", "flat", "window_out"), BF16)
    types["pool"] = pool
    types |= dict.fromkeys(("bias", "scores", "score_lse", "partial", "partial_lse"), FP32)
    types |= dict.fromkeys(
        ("best_rank", "flat_bias", "maxima", "thresholds", "window_lse", "normalizer"), FP32
    )
    types |= {"launches": I64, "kept": I64, "scale": "fp32", "seal": "i32", "stage_shift": "i64"}
    types |= dict.fromkeys(("query_stride", "scoring_stride", "prior_stride"), "i32")
    types |= dict.fromkeys(("table_stride", "candidate_stride", "best_stride"), "i32")
    types |= dict.fromkeys(("groups", "capacity", "count", "room", "slots", "strips"), "i32")
    types |= {"first_slot": "i32", "pool_shifts": I64, "vector_shifts": I64}
    constants = {
        **{"HEADS": 16, "KV_HEADS": 2, "DIM": dim, "PAGE_SIZE": page_size, "WIDTH": width},
        **{"LANDMARK_HEADS": landmark_heads, "WINDOW": 512},
        **{
            "HIDE_LAST": native,
            "HAS_BIAS": native,
            "SPLIT": 2 if small else int(not native),
            "REACH": 2.0 if small else 0.0,
            "TILE_PAGES": 8 if small else 1,
            "POOLING": pooling,
            "BY_LSE": not native,
        },
        **{"NULL_SPLIT": native, "SINKS": int(not native), "STRATEGY": 2, "TOPK": 32},
        **{"CHUNK": 1024, "BEST": 256, "MOST_STRIPS": 16, "WINDOW_PARTS": 3},
        **{"PARTS": 19, "PAGE_PARTS": 16, "BLOCK_P": 64 if native else 32},
        **{
            "UNION": 256,
            "ROWS": 4,
            "GROUP_PAD": 8,
            "LANDMARK_PAD": 16,
            "GROUP_PAGES": 8,
            "NORMALIZE": True,
            "SURVEYED": 8,
            "BLOCK_M": 64,
        },
        **{"BLOCK": 512, "SLACK": 4},
    }

    def build(kernel: Any, out: str = BF16, **options: Any) -> None:
        if pool == FP8 and ("pool" not in kernel.jit.arg_names or constants.get("TMA")):
            return
        own = {name: value for name, value in constants.items() if name in kernel.jit.arg_names}
        compile_kernel(kernel, {**types, "out": out}, own, **options)

    def tile_of(rows: int, columns: int) -> str:
        return f"tensordesc<bf16[{rows},{columns}]>"

    for shifted in {False, not native}:
        constants["SHIFTED"] = shifted
        build(landmark._pool_kernel)
    for at_home in (False, True):
        constants["IN_FRAMES"] = at_home
        build(sparse_scratch._begin_kernel)
    constants["WINDOW_STAGES"] = 2 if native else 3
    build(sparse_score.score_kernel, num_stages=3 if native else 5)
    build(sparse_pages.topk_kernel)
    build(sparse_pages.choose_kernel, num_warps=1)
    for located, counted in ((False, False), (True, False), (False, True)):
        chosen = located or small
        constants |= {"CHOSEN": chosen, "LOCATED": located, "COUNTED": counted, "PIECES": 8}
        build(sparse_pages.pages_kernel, num_stages=5 if located else 2)
    build(sparse_survey.lay_out_kernel)
    for tma in (False, True):
        for tile, collect in ((128, False), (32, True)):
            constants |= {"TILE": tile, "COLLECT": collect, "TMA": tma}
            half = width // 2 if small else width
            types |= {"flat": tile_of(tile, half) if tma else BF16}
            types |= {"queries": tile_of(64, half) if tma else BF16}
            build(sparse_select._rank_kernel, num_stages=3)
            if not collect:
                registers: dict[str, Any] = {"maxnreg": 128} if tma and width <= 64 else {}
                build(sparse_survey.survey_kernel, num_stages=2, **registers)
    for tile in (64, 128):
        constants["TILE"] = tile
        build(sparse_few.few_kernel, I32, num_stages=2)
    constants |= {"ROWS": 1, "BLOCK": 256}
    build(sparse_select._threshold_kernel, num_warps=1)
    for few in (False, True):
        constants |= {"ROWS": 4, "BLOCK": 32, "FEW": few}
        build(sparse_select._choose_kernel, I32, num_warps=1)
    constants["ROWS"] = 8
    for located, staged in ((False, False), (True, False), (True, True)):
        tma = not (staged or small)
        constants |= {"LOCATED": located, "STAGED": staged, "TMA": tma, "BOUNDED": native}
        types |= {"tiles": tile_of(page_size, dim) if tma else BF16}
        types |= {"landmarks": tile_of(16, width) if tma else BF16}
        if pool == FP8:
            constants["TMA"] = False
            types |= {"tiles": FP8, "landmarks": BF16}
        build(sparse_extend._attend_kernel, num_stages=2)
    constants["BLOCK_M"] = 8
    build(sparse_extend._union_kernel)


if __name__ == "__main__":
    main()
