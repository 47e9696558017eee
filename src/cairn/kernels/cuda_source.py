"""Compiles and launches kernels written in CUDA C++.

They are compiled when an engine starts, with the NVRTC that torch ships. Cubins are kept in the
user's cache folder, so the next start only loads them. No CUDA toolkit is needed, because the
sources include no headers.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from cairn.config import cache_folder
from cairn.errors import CairnError

MOST_SHARED = 232448  # most bytes of shared memory per block with compute capability 9.0
ALL_SHARED = 233472  # bytes per multiprocessor; CUDA reserves 1,024 of them per block

_SHARED_SIZE, _SHARED_SHARE = 8, 9  # values of CUfunction_attribute
_CLUSTER, _PDL = 4, 6  # values of CUlaunchAttributeID
_BFLOAT16, _FLOAT16 = 9, 6  # values of CUtensorMapDataType
_SWIZZLE_128B, _PROMOTE_256B = 3, 3


class KernelUnavailableError(CairnError):
    """CUDA C++ kernels cannot be compiled or loaded here; the message says why."""


def device_refusal(device: torch.device) -> str | None:
    """Why kernels for compute capability 9.0 do not run on this device; None if they do."""
    if device.type != "cuda":
        return f"it is for CUDA devices, this is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return "compute capability is {}.{}; it has 9.0".format(*capability)
    return None


def compile_source(source: str, constants: Mapping[str, int], architecture: str) -> bytes:
    """Return the cubin from the cache folder, or compile it and store it there."""
    nvrtc = _load_nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    _expect(nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "--use_fast_math"]
    options += [f"-D{name}={value}" for name, value in constants.items()]
    described = "\n".join([source, *options, f"{major.value}.{minor.value}"])
    name = f"{hashlib.sha256(described.encode()).hexdigest()[:32]}.cubin"
    kept = cache_folder() / "kernels" / name
    if kept.exists():
        return kept.read_bytes()
    cubin = _compile(nvrtc, source, options)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as part:
            part.write(cubin)
        Path(part.name).replace(kept)  # atomic, even when two processes compile at once
    except OSError:
        pass  # the folder is not writable: the next start compiles again, in about a second
    return cubin


def _compile(nvrtc: ctypes.CDLL, source: str, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    made = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
    )
    _expect(made, "nvrtcCreateProgram")
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    size = ctypes.c_size_t()
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            _expect(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "log size")
            log = ctypes.create_string_buffer(size.value)
            _expect(nvrtc.nvrtcGetProgramLog(program, log), "log")
            raise KernelUnavailableError(f"NVRTC cannot compile it: {log.value.decode()[:2000]}")
        _expect(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        cubin = ctypes.create_string_buffer(size.value)
        _expect(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


def _load_nvrtc() -> ctypes.CDLL:
    """Load the NVRTC of torch's CUDA version, from the nvidia packages or from a CUDA toolkit."""
    major = (torch.version.cuda or "13").split(".")[0]
    name = f"libnvrtc.so.{major}"
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    found = [str(path) for folder in folders for path in sorted(folder.glob(f"*/lib/{name}"))]
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    tried = [*found, name, str(toolkit / "lib64" / name)]
    for path in tried:
        try:
            # NVRTC opens this library by bare name, which works only if it is already loaded.
            for builtins in Path(path).parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise KernelUnavailableError(
        f"NVRTC is not installed (tried {', '.join(tried)}); pip install nvidia-cuda-nvrtc"
    )


def _expect(status: int, what: str) -> None:
    if status:
        raise KernelUnavailableError(f"{what} failed with status {status}")


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class CudaKernel:
    """A kernel from a cubin, loaded on one device. Its one argument is a struct, given as bytes."""

    def __init__(
        self,
        cubin: bytes,
        name: str,
        threads: int,
        shared_bytes: int,
        device: torch.device,
        *,
        copies: bool = False,
    ) -> None:
        """`copies`: it loads almost everything by copies to shared memory, so the L1 cache can be
        small. Then blocks of the next such kernel find room beside its own."""
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise KernelUnavailableError(
                f"the driver's library cannot be loaded: {error}"
            ) from error
        torch.cuda.synchronize(device)  # creates the device's context if there is none yet
        self._device = device
        self.threads = threads
        self.shared_bytes = shared_bytes
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            with torch.cuda.device(device):
                self.call("cuModuleLoadData", ctypes.byref(module), cubin)
                self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
                self.call("cuFuncSetAttribute", function, _SHARED_SIZE, shared_bytes)
                if copies:
                    self.call("cuFuncSetAttribute", function, _SHARED_SHARE, 100)
        except RuntimeError as error:
            raise KernelUnavailableError(
                f"{error}; is the driver older than NVRTC, or a file in {cache_folder()} damaged?"
            ) from error
        self.function = function

    def call(self, function: str, *arguments: object) -> None:
        status = getattr(self._driver, function)(*arguments)
        if status:
            raise RuntimeError(f"{function} failed with CUDA error {status}")

    def launch(
        self,
        grid: tuple[int, ...],
        structure: bytes,
        *,
        cluster: int = 1,
        shared_bytes: int | None = None,
        pdl: bool = False,
    ) -> None:
        """Launch on torch's current stream. `cluster` blocks, consecutive in the grid's first
        dimension, form a cluster. `pdl` is for kernels that wait for their predecessor (see
        `pdl`)."""
        held = ctypes.create_string_buffer(structure, len(structure))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(held))
        shared = self.shared_bytes if shared_bytes is None else shared_bytes
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream().cuda_stream
            config = self._config(grid, cluster, shared, pdl, stream)
            self.call("cuLaunchKernelEx", ctypes.byref(config), self.function, pointers, None)

    def most_clusters(self, size: int) -> int:
        """Clusters of `size` blocks that run at once."""
        count = ctypes.c_int()
        with torch.cuda.device(self._device):
            config = self._config((size,), size, self.shared_bytes, False, 0)
            name = "cuOccupancyMaxActiveClusters"
            self.call(name, ctypes.byref(count), self.function, ctypes.byref(config))
        return count.value

    def _config(
        self, grid: tuple[int, ...], cluster: int, shared: int, pdl: bool, stream: int
    ) -> _Config:
        attributes = (_Attribute * 2)(
            _Attribute(_CLUSTER, 0, (cluster, 1, 1)), _Attribute(_PDL, 0, (int(pdl),))
        )
        return _Config((*grid, 1, 1)[:3], (self.threads, 1, 1), shared, stream, attributes, 2)

    def describe(self, matrix: torch.Tensor, box_rows: int) -> bytes:
        """Tensor map of a matrix in half precision, for swizzled copies of [box_rows, 64] boxes."""
        rows, columns = matrix.shape
        held = ctypes.create_string_buffer(128 + 64)
        target = (ctypes.addressof(held) + 63) // 64 * 64
        self.call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(target),
            _FLOAT16 if matrix.dtype == torch.float16 else _BFLOAT16,
            2,
            ctypes.c_void_p(matrix.data_ptr()),
            (ctypes.c_uint64 * 2)(columns, rows),
            (ctypes.c_uint64 * 1)(columns * matrix.element_size()),
            (ctypes.c_uint32 * 2)(64, box_rows),
            (ctypes.c_uint32 * 2)(1, 1),
            0,
            _SWIZZLE_128B,
            _PROMOTE_256B,
            0,
        )
        return ctypes.string_at(target, 128)
