"""Kernels for a CPU, written in C++: products with quantised or float matrices as they are in the
file, and the operations between products.

They are compiled for this machine's CPU when they are first needed, which takes a few seconds, and
kept in the user's cache folder. Products are defined in `models/blocks.py` and `models/narrow.py`,
rotation in `models/rope.py`, attention in `attention/torch_backend.py`, and sparse attention in
`attention/hsa/torch_sparse.py`.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cairn.config import cache_folder
from cairn.errors import CairnError
from cairn.kernels.cpu_tape import StrideOf, Tape, Watch

HEAD_DIMS = (32, 64, 96, 128, 256)
"""Sizes of heads that can be rotated and attended to."""

_HEADERS, _SOURCES = (
    tuple(Path(__file__).with_name(name) for name in names)
    for names in (
        ("cpu_vectors.h", "cpu_rows.h", "cpu_cache.h"),
        (
            *("cpu_products.cpp", "cpu_floats.cpp", "cpu_attention.cpp"),
            *("cpu_sparse.cpp", "cpu_replay.cpp"),
        ),
    )
)
# Sums must not depend on which operations a compiler fuses.
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=off", "-w")
_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class CpuKernelsUnavailableError(CairnError):
    """The kernels cannot be compiled or loaded here; the message says why."""


class MatrixPlace(ctypes.Structure):
    """Where a quantised matrix is, and its form: `Matrix` in the C++ source."""

    _fields_ = (
        ("codes", _POINTER),
        ("scale", _POINTER),
        ("minimum", _POINTER),
        ("sub_scale", _POINTER),
        ("sub_minimum", _POINTER),
        ("outputs", _INT),
        ("blocks", _INT),
        ("bits", _INT),
        ("subs", _INT),
        ("super", _INT),
        ("offset", _INT),
    )


class FloatsPlace(ctypes.Structure):
    """Where a matrix of floats or of int8 is, and its form: `Floats` in the C++ source."""

    _fields_ = (
        ("values", _POINTER),
        ("scale", _POINTER),
        ("outputs", _INT),
        ("columns", _INT),
        ("span", _INT),
        ("kind", _INT),
    )


FLOAT_KINDS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8)
"""Types of a `FloatsPlace`, by number."""


class SparseStep(ctypes.Structure):
    """Rows that select units, and where everything is that they read: `Step` in the C++ source,
    which describes each field. All numbers are float32, int64 or, for generations, int32."""

    _fields_ = (
        *((name, _POINTER) for name in ("query", "mapped", "rows")),
        *((name, _INT) for name in ("count", "heads")),
        *((name, _POINTER) for name in ("positions", "limits", "window")),
        ("window_stride", _LONG),
        *((name, _POINTER) for name in ("table", "generations")),
        ("candidates", _LONG),
        *((name, _POINTER) for name in ("landmarks", "bias", "sealed")),
        *((name, _INT) for name in ("landmark_heads", "width")),
        *((name, _FLOAT) for name in ("scale", "score_scale", "reach")),
        *((name, _INT) for name in ("strategy", "sinks", "topk")),
        *((name, _POINTER) for name in ("out", "index")),
    )


STRATEGIES = ("group", "head", "softmax_head")
"""Strategies of a `SparseStep`, by number."""


class CpuKernels:
    def __init__(self, library: Path) -> None:
        try:
            # torch has already loaded OpenMP, so both share its threads.
            loaded = ctypes.CDLL(str(library))
            self._product = loaded.cairn_product
            self._float_product = loaded.cairn_float_product
            self._experts = loaded.cairn_experts
            self._rotate_and_store = loaded.cairn_rotate_and_store
            self._attend = loaded.cairn_attend
            self._attend_sparse = loaded.cairn_attend_sparse
            self._replay = loaded.cairn_replay
        except (OSError, AttributeError) as error:
            raise CpuKernelsUnavailableError(f"{library} cannot be loaded: {error}") from error
        self._product.argtypes = self._float_product.argtypes = (
            *(_POINTER, _POINTER, _LONG, _INT, _POINTER, _FLOAT, _INT),
            *(_POINTER, _LONG, _INT, _INT),
        )
        self._experts.argtypes = (
            *(_POINTER, _POINTER, _INT, _POINTER, _LONG, _INT),
            *(_POINTER, _POINTER, _INT, _POINTER, _LONG, _INT),
        )
        self._rotate_and_store.argtypes = (
            *(_POINTER, _LONG, _INT, _INT, _POINTER, _POINTER, _POINTER, _POINTER, _FLOAT),
            *(_POINTER, _INT, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT),
        )
        self._attend.argtypes = (
            *(_POINTER, _INT, _INT, _POINTER, _INT, _INT, _INT),
            *(_POINTER, _LONG, _POINTER, _POINTER, _FLOAT, _POINTER, _INT),
        )
        self._attend_sparse.argtypes = (_POINTER, _POINTER, _INT, _INT, _INT, _INT, _INT)
        self._replay.argtypes = (_POINTER, _INT, _POINTER, _POINTER)
        # Those that can be recorded, by their numbers in the C++ source.
        self._kinds = [self._product, self._float_product, self._rotate_and_store, self._attend]
        for function in (*self._kinds, self._experts, self._attend_sparse, self._replay):
            function.restype = None
        self._tape: Tape | None = None  # of the run that is being recorded

    @classmethod
    def load(cls, march: str = "native") -> CpuKernels:
        """The kernels for an instruction set, by default this CPU's own. Compiles them if they are
        not in the cache folder."""
        compiler = find_compiler()
        target = f"-march={march}"
        sources = [path.read_text(encoding="utf-8") for path in (*_HEADERS, *_SOURCES)]
        described = "\n".join([*sources, *_FLAGS, _macros(compiler, target)])
        name = f"{hashlib.sha256(described.encode()).hexdigest()[:32]}.so"
        kept = cache_folder() / "kernels" / name
        if kept.exists():
            return cls(kept)
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            folder = tempfile.mkdtemp(dir=kept.parent)
        except OSError as error:
            raise CpuKernelsUnavailableError(f"{kept.parent} cannot be written: {error}") from error
        part = Path(folder) / name
        logging.getLogger("cairn").warning(
            "compiling kernels for this CPU, which takes seconds; later starts find them in %s",
            kept.parent,
        )
        try:
            _run([compiler, *_FLAGS, target, *map(str, _SOURCES), "-o", str(part)])
            part.replace(kept)  # atomic, even when two processes compile at once
        finally:
            shutil.rmtree(folder)
        return cls(kept)

    def product(
        self,
        matrix: MatrixPlace | FloatsPlace,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        norm: tuple[torch.Tensor, float] | None,
        silu: bool,
        add: bool,
    ) -> None:
        """Write or `add` the product of float32 rows x with a matrix to the rows of `out`.

        `norm` is the weight and epsilon of an RMS norm that x goes through first. With `silu`, x is
        twice as wide, and silu(first half) * second half is multiplied.
        """
        weight, eps = (None, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
        product = self._product if isinstance(matrix, MatrixPlace) else self._float_product
        self._call(
            product,
            (x, out),
            *(ctypes.addressof(matrix), x.data_ptr(), x.stride(0), x.shape[0], weight, eps, silu),
            *(out.data_ptr(), out.stride(0), add, torch.get_num_threads()),
        )

    def experts(
        self,
        gate_up: ctypes.Array[FloatsPlace],  # one for each expert, as `down`
        down: ctypes.Array[FloatsPlace],
        x: torch.Tensor,  # [rows, hidden] float32
        ids: torch.Tensor,  # [rows, k] int32; -1 for none
        weights: torch.Tensor,  # [rows, k] float32
    ) -> torch.Tensor:
        """The weighted sum of the chosen experts' outputs, [rows, hidden]."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        ids, weights, out = ids.contiguous(), weights.contiguous(), torch.empty_like(x)
        assert ids.dtype == torch.int32 and x.dtype == weights.dtype == torch.float32
        if self._tape is not None:
            self._tape.whole = False  # which experts run differs from run to run
        self._experts(
            *(gate_up, down, len(down), x.data_ptr(), x.stride(0), len(x)),
            *(ids.data_ptr(), weights.data_ptr(), ids.shape[1]),
            *(out.data_ptr(), out.stride(0), torch.get_num_threads()),
        )
        return out

    def rotate_and_store(
        self,
        qkv: torch.Tensor,  # [rows, (heads + 2 * kv_heads) * dim], float32 as all others
        heads: int,
        cos_sin: tuple[torch.Tensor, torch.Tensor],  # [rows, 1, dim] each
        norm: tuple[torch.Tensor, torch.Tensor, float] | None,  # q and k weights per head, eps
        cache: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim]
        pages: torch.Tensor,  # [rows] int32
        offsets: torch.Tensor,  # [rows] int32
    ) -> torch.Tensor:
        """Norm and rotate the heads, and store keys and values. Returns queries
        [rows, heads, dim]."""
        assert pages.dtype == offsets.dtype == torch.int32 and cache.dtype == torch.float32
        _, kv, size, dim = cache.shape
        rows = qkv.shape[0]
        query = qkv.new_empty(rows, heads, dim)
        q_weight, k_weight, eps = (None, None, 0.0) if norm is None else norm
        self._call(
            self._rotate_and_store,
            (qkv, query),
            *(qkv.data_ptr(), qkv.stride(0), rows, heads, *map(self._given, cos_sin)),
            None if q_weight is None else q_weight.data_ptr(),
            None if k_weight is None else k_weight.data_ptr(),
            *(eps, cache.data_ptr(), kv // 2, size, dim, *map(self._given, (pages, offsets))),
            *(query.data_ptr(), torch.get_num_threads()),
        )
        return query

    def attend(
        self,
        query: torch.Tensor,  # [seqs, heads, dim] float32
        cache: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim] float32
        table: torch.Tensor,  # [seqs, max_pages] int32
        first: torch.Tensor,  # [seqs] int64
        last: torch.Tensor,  # [seqs] int64
        scale: float,
    ) -> torch.Tensor:
        """Attention of one row per sequence over rows [first, last) of its pages."""
        query = query.contiguous()
        out = torch.empty_like(query)
        seqs, heads, dim = query.shape
        self._call(
            self._attend,
            (query, out),
            *(query.data_ptr(), seqs, heads),
            *(cache.data_ptr(), cache.shape[1] // 2, cache.shape[2], dim),
            *(self._given(table), StrideOf(table), *map(self._given, (first, last)), scale),
            *(out.data_ptr(), torch.get_num_threads()),
        )
        return out

    def attend_sparse(self, step: SparseStep, cache: torch.Tensor, units: int) -> None:
        """Write the attention of the rows of a step over their window and the units they select,
        and the places of these. `units` is the number of units of a page of the cache."""
        if self._tape is not None:
            self._tape.whole = False  # how far rows see differs from run to run
        _, kv, size, dim = cache.shape
        threads = torch.get_num_threads()
        self._attend_sparse(
            ctypes.addressof(step), cache.data_ptr(), kv // 2, size, dim, units, threads
        )

    def _call(
        self,
        kernel: Any,
        tensors: tuple[torch.Tensor, ...],
        *arguments: int | float | None,
    ) -> None:
        """Run a kernel. `tensors` are those of its arguments that this step made."""
        kernel(*arguments)
        if self._tape is not None:
            self._tape.add(self._kinds.index(kernel), tensors, arguments)

    def record(
        self, run: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Tape | None]:
        """The result of `run`, and a tape that repeats it with other `inputs` of the same shapes.
        No tape if anything but these kernels computes."""
        self._tape = tape = Tape(inputs)
        try:
            with Watch(tape):
                result = run()
        finally:
            self._tape = None
        tape.end(result)
        return result, tape if tape.whole else None

    def replay(self, tape: Tape, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Repeat a recorded run. The next one overwrites the result."""
        kinds, words = tape.compiled
        self._replay(kinds, len(kinds), words, tape.values(inputs))
        return inputs[tape.result] if isinstance(tape.result, int) else tape.result

    def _given(self, tensor: torch.Tensor) -> int:
        """The pointer to a tensor that the step's inputs decide."""
        if self._tape is not None:
            self._tape.expect(tensor)
        return tensor.data_ptr()


class Replays:
    """Runs that are recorded once for each form of their inputs, and then replayed."""

    def __init__(self, kernels: CpuKernels, most_bytes: int = 2**26) -> None:
        """`most_bytes` bounds the memory that recordings keep; later forms run without them."""
        self._kernels = kernels
        self._left = most_bytes
        self._tapes: dict[Hashable, Tape | None] = {}

    def __call__(
        self, run: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The result of `run`, which depends on `inputs` and on nothing else that changes. The next
        call overwrites it."""
        form = torch.get_num_threads(), *(x.shape[0] for x in inputs)
        if form not in self._tapes:
            result, tape = self._kernels.record(run, inputs)
            if tape is not None and tape.nbytes > self._left:
                tape = None
            self._left -= 0 if tape is None else tape.nbytes
            self._tapes[form] = tape
            return result
        tape = self._tapes[form]
        return run() if tape is None else self._kernels.replay(tape, inputs)


def find_compiler() -> str:
    """$CXX, or the first usual one. Raises CpuKernelsUnavailableError."""
    named = os.environ.get("CXX")
    for name in (named,) if named else ("c++", "g++", "clang++"):
        if (found := shutil.which(name)) is not None:
            return found
    raise CpuKernelsUnavailableError(
        f"there is no C++ compiler ({named or 'c++, g++ or clang++'}); install one, such as g++"
    )


@cache
def _macros(compiler: str, target: str) -> str:
    """All macros of a target, which tell its instruction set and the compiler's version."""
    return _run([compiler, target, "-dM", "-E", "-x", "c++", os.devnull])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError as error:
        raise CpuKernelsUnavailableError(f"{command[0]} cannot be run: {error}") from error
    except subprocess.CalledProcessError as error:
        raise CpuKernelsUnavailableError(
            f"{command[0]} failed: {error.stderr.strip()[:500]}"
        ) from error
    return done.stdout
