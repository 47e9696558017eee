"""Kernels for a CPU, written in C++: products with quantised matrices.

They are compiled for this machine's CPU when they are first needed, which takes a few seconds, and
kept in the user's cache folder. What they compute is defined in `models/blocks.py`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from cairn.config import cache_folder
from cairn.errors import CairnError

_SOURCE = Path(__file__).with_name("cpu_products.cpp")
# Sums must not depend on what a compiler merges into one instruction.
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


class CpuKernels:
    def __init__(self, library: Path) -> None:
        try:
            # torch has loaded OpenMP already, so that both share one set of threads.
            product = ctypes.CDLL(str(library)).cairn_product
        except (OSError, AttributeError) as error:
            raise CpuKernelsUnavailableError(f"{library} cannot be loaded: {error}") from error
        product.argtypes = (
            *(_POINTER, _POINTER, _LONG, _INT, _POINTER, _FLOAT, _INT),
            *(_POINTER, _LONG, _INT, _INT),
        )
        product.restype = None
        self._product = product

    @classmethod
    def load(cls, march: str = "native") -> CpuKernels:
        """The kernels for an instruction set, by default this CPU's own. Compiles them if they are
        not in the cache folder."""
        compiler = _compiler()
        target = f"-march={march}"
        # All macros of the target: its instruction set and the compiler's version.
        macros = _run([compiler, target, "-dM", "-E", "-x", "c++", os.devnull])
        described = "\n".join([_SOURCE.read_text(encoding="utf-8"), *_FLAGS, macros])
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
        try:
            _run([compiler, *_FLAGS, target, str(_SOURCE), "-o", str(part)])
            part.replace(kept)  # atomic, even when two processes compile at once
        finally:
            shutil.rmtree(folder)
        return cls(kept)

    def product(
        self,
        matrix: MatrixPlace,
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
        self._product(
            ctypes.byref(matrix),
            *(x.data_ptr(), x.stride(0), x.shape[0], weight, eps, silu),
            *(out.data_ptr(), out.stride(0), add, torch.get_num_threads()),
        )


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else ("c++", "g++", "clang++"):
        if (found := shutil.which(name)) is not None:
            return found
    raise CpuKernelsUnavailableError(
        f"there is no C++ compiler ({named or 'c++, g++ or clang++'}); install one, such as g++"
    )


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
