"""The interfaces and base classes of attention backends, and the registry that finds one by name.

A backend computes attention for a batch over the paged KV cache. It is imported only when it is
requested, and reports itself whether it can run on this machine.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch

from cairn.attention.batch import AttentionBatch, GraphKind, IndexQuery, Scoring
from cairn.attention.latent import LatentHeads
from cairn.errors import ConfigError
from cairn.kernels.cpu import CpuKernels
from cairn.kernels.fp8_rows import is_narrow
from cairn.memory.groups import LayerGroup
from cairn.memory.hisparse import HiSparseCoordinator
from cairn.memory.kv_pool import KVPool
from cairn.memory.landmarks import LandmarkPool
from cairn.memory.layout import KV, LATENT
from cairn.sparsity.config import SparseConfig
from cairn.sparsity.registry import import_class
from cairn.sparsity.selection import Selection


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a backend must know about the model before the first step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    page_size: int
    dtype: torch.dtype
    device: torch.device
    groups: tuple[LayerGroup, ...]
    max_seqs: int = 1
    """Most sequences in a step. In a recorded decode step every row counts as a sequence."""
    most_rows: int = 1
    """Most rows of a sequence in a step that only decodes: its newest token, and drafts."""
    hides_landmark_rows: bool = False
    """The last row of each page is a landmark row, which dense layers must not see."""
    scales: tuple[float, ...] = ()
    """Scale of each layer, if layers differ in heads, head size or scale. The numbers above are
    then those of one kind of layer."""
    cpu: CpuKernels | None = None
    """Kernels for a CPU, where the model uses them."""
    longest: int = 0
    """Most rows of a sequence; 0 if that is not known."""
    value_dim: int | None = None
    """With latent rows: the columns that a head reads, the first ones of a row."""

    @property
    def cache_dtype(self) -> torch.dtype:
        """The type of cached keys and values; that of queries, or one of 8 bits."""
        kept = {part.known_dtype for group in self.groups for part in group.layout.parts}
        return next(filter(is_narrow, kept), self.dtype)


class Graph(NamedTuple):
    """A kind of step that is recorded as CUDA graphs."""

    kind: GraphKind
    mixed: bool
    """Sequences may have any number of new rows; otherwise each has one."""
    few: bool = False
    """Not mixed, and sequences may have up to `AttentionShape.most_rows` new rows, to verify
    drafts. The rows of a sequence share one read of its past."""


DENSE_GRAPHS = (Graph("dense", mixed=False), Graph("dense", mixed=True))


class Replayable(NamedTuple):
    """A step whose attention is a fixed series of CPU kernels."""

    inputs: Sequence[torch.Tensor]
    """All tensors of the metadata that they read."""
    metadata: Any
    """For `forward`, which then calls kernels alone."""
    finish: Callable[[], None]
    """What is left to do after the last layer."""


class AttentionBackend(Protocol):
    """The interface of every backend; `DenseBackend` and `SparseBackend` implement most of it."""

    @property
    def name(self) -> str: ...

    @property
    def graphs(self) -> Collection[Graph]:
        """Kinds of steps whose `prepare`, `begin` and `forward` can be recorded and replayed."""
        ...

    def graph_for(self, batch: AttentionBatch, *, mixed: bool) -> Graph | None:
        """The kind of graph, decode or mixed, that can replay a step; None if the step's kernels
        must be launched one by one. A decode step whose sequences have several rows needs a graph
        with `few`."""
        ...

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> Any:
        """Host work of a step, shared by all its layers. Returns metadata for `forward`.

        `groups` are the layer groups that `forward` will be called for; None for all.
        """
        ...

    def begin(self, metadata: Any) -> None:
        """Device work that all layers of a step share; part of a recorded graph."""
        ...

    def forward(
        self, layer: int, query: torch.Tensor, metadata: Any, scoring: Scoring | None = None
    ) -> torch.Tensor:
        """Attention output of query [rows, heads, head_dim], in the same shape.

        The keys and values of the new rows are already in the pool. Layers with their own
        landmarks pass `scoring`. With latent rows the query is absorbed, [rows, heads,
        latent + rope], and the output [rows, heads, latent].
        """
        ...

    def forward_latent(
        self, layer: int, query: torch.Tensor, heads: LatentHeads, metadata: Any
    ) -> torch.Tensor:
        """The values that heads read from latent rows, [rows, heads, value], for a query
        [rows, heads, nope + rope] that is not absorbed."""
        ...

    def forward_rows(
        self,
        layer: int,
        query: torch.Tensor,
        rows: torch.Tensor,
        metadata: Any,
        scoring: Scoring | None = None,
    ) -> torch.Tensor | None:
        """Attention output of some rows of the query, [n, heads, head_dim], and what later steps
        need of the others, such as landmarks. None if that takes the whole `forward`."""
        ...

    def replayable(self, metadata: Any) -> Replayable | None:
        """How to repeat recorded CPU kernels for this step; None if `forward` does more than to
        call them."""
        ...


class Backend:
    """What dense and sparse backends have in common. Derive from one of those, not from this."""

    name: ClassVar[str]
    graphs: Collection[Graph] = ()
    reads_8_bits: ClassVar[bool] = False
    """It reads keys and values of 8 bits (`kernels/fp8_rows.py`)."""
    notes: tuple[str, ...] = ()
    """Messages for the user about how it runs."""

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        """Why this backend cannot run on the device; None if it can."""
        return None

    def graph_for(self, batch: AttentionBatch, *, mixed: bool) -> Graph | None:
        graph = Graph("dense", mixed, few=not mixed and not batch.decodes)
        return graph if graph in self.graphs else None

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> Any:
        raise NotImplementedError

    def begin(self, metadata: Any) -> None:
        pass

    def forward(
        self, layer: int, query: torch.Tensor, metadata: Any, scoring: Scoring | None = None
    ) -> torch.Tensor:
        raise NotImplementedError

    def forward_latent(
        self, layer: int, query: torch.Tensor, heads: LatentHeads, metadata: Any
    ) -> torch.Tensor:
        return heads.values(self.forward(layer, heads.absorb(query), metadata))

    def forward_rows(
        self,
        layer: int,
        query: torch.Tensor,
        rows: torch.Tensor,
        metadata: Any,
        scoring: Scoring | None = None,
    ) -> torch.Tensor | None:
        return None

    def replayable(self, metadata: Any) -> Replayable | None:
        return None


class DenseBackend(Backend):
    """A backend that reads the whole past, or a window of it."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    head_dims: ClassVar[tuple[int, ...] | None] = None
    """Sizes of heads that it has, if they have their own keys and values; None for any."""
    keeps_one_plan: ClassVar[bool] = False
    """A second `prepare` for a layer group makes the first one's metadata invalid."""
    serves_mixed_layers: ClassVar[bool] = False
    """Layers may differ in heads, head size and scale."""
    hides_rows: ClassVar[bool] = False
    """It can hide landmark rows."""
    reads: ClassVar[tuple[str, ...]] = (KV,)
    """Parts of the cache that it needs in every layer."""
    reads_latents: ClassVar[bool] = False
    """It also serves layers that keep latent rows instead of these parts."""
    reads_widened: ClassVar[bool] = False
    """With keys and values of 8 bits, it reads pages that were widened (`attention/widened.py`)."""

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        self._shape = shape
        self._pool = pool

    @classmethod
    def unsupported_reason(cls, shape: AttentionShape) -> str | None:
        """Why this backend cannot serve the model; None if it can."""
        if shape.dtype not in cls.dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in cls.dtypes)
            return f"the type is {str(shape.dtype).removeprefix('torch.')}; it has {names}"
        if shape.scales and not cls.serves_mixed_layers:
            return "layers differ in heads, head size or scale, and it serves one kind"
        latent = cls.reads_latents and shape.value_dim is not None
        reads = (LATENT,) if latent else cls.reads
        for group in shape.groups:
            kept = [part.name for part in group.layout.parts]
            if group.layers and not set(reads) <= set(kept):
                return f"layers keep {', '.join(kept)}; it reads {', '.join(reads)}"
        if not latent and cls.head_dims is not None and shape.head_dim not in cls.head_dims:
            sizes = ", ".join(map(str, cls.head_dims))
            return f"heads have size {shape.head_dim}; it has {sizes}"
        if is_narrow(shape.cache_dtype) and not (cls.reads_8_bits or cls.reads_widened):
            own = "it sets neither reads_8_bits nor reads_widened"
            return f"it does not read a cache of 8 bits (kv_cache_dtype): {own}"
        if shape.hides_landmark_rows and not cls.hides_rows:
            return "the model hides landmark rows from its window layers, and it cannot"
        return None

    def forward(
        self, layer: int, query: torch.Tensor, metadata: Any, scoring: Scoring | None = None
    ) -> torch.Tensor:
        assert scoring is None, "dense attention scores no landmarks"
        return self.attend(layer, query, metadata)

    def forward_rows(
        self,
        layer: int,
        query: torch.Tensor,
        rows: torch.Tensor,
        metadata: Any,
        scoring: Scoring | None = None,
    ) -> torch.Tensor | None:
        return None if len(rows) else query[:0]

    def attend(self, layer: int, query: torch.Tensor, metadata: Any) -> torch.Tensor:
        """`forward`, for layers without landmarks."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseParts:
    """The constructor arguments of a sparse backend."""

    shape: AttentionShape
    pool: KVPool
    config: SparseConfig
    max_pages: int
    """Pages of the longest sequence."""
    dense: AttentionBackend
    """For layers that are not sparse, and for dense rows of sparse layers."""
    landmarks: LandmarkPool | None = None
    tier: HiSparseCoordinator | None = None
    in_stage: AttentionBackend | None = None
    """A dense backend over the tier's stage, if prompts are read densely."""
    drafts: bool = False
    """Sparse rows only draft."""


class SparseBackend(Backend):
    """A backend that skips most of the past in the layers `SparseConfig.layers`.

    Everything but `name`, `prepare` and `forward` has a default. Only sparse backends have the
    members below.
    """

    needs_landmarks: ClassVar[bool] = False
    """The engine allocates landmarks for `SparseConfig.policy`; the backend seals and saves."""
    options: ClassVar[frozenset[str]] = frozenset({"layers", "window"})
    """The `hsa_*` options that it supports; others are refused. Without "prefill" it reads prompts
    sparsely; without "dense_below" no row is dense."""
    serves_trained: ClassVar[bool] = False
    """It supports models that were trained with sparse attention."""
    reads_index: ClassVar[bool] = False
    """It reads the rows that a layer's index selects, by `forward_indexed`."""
    serves_tier: ClassVar[bool] = False
    """It supports the host tier."""
    reads_generations: bool = False
    """It needs the page generations on the device."""
    units: int = 1
    """See `SparseConfig.units`."""
    selecting_rows: int | None = None
    """Most rows of recorded mixed steps that are not dense; None if there is no limit."""

    def __init__(self, parts: SparseParts) -> None:
        self._parts = parts

    @classmethod
    def kernel_refusal(cls, config: SparseConfig, shape: AttentionShape) -> str | None:
        """Why its kernels cannot serve this model and it must run in torch; None if they can."""
        return f"{cls.name} has none"

    @classmethod
    def buffer_bytes(cls, shape: AttentionShape) -> int:
        """Bytes that its kernels keep on the device beside the cache, at most."""
        return 0

    def rungs(
        self, max_seqs: int, max_pages: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Numbers of sequences, and of pages of the longest sequence, at which kernels switch to
        another compiled form; None if it has no Triton kernels."""
        return None

    def launching(self, batch: AttentionBatch, graph: Graph | None) -> None:
        """Called before a step is launched or replayed, to update the state on the host."""

    def replayed(self, batch: AttentionBatch, graph: Graph) -> None:
        """Called after a graph was replayed, to launch work that is not part of it."""

    def abandon(self, batch: AttentionBatch) -> None:
        """Called when a step fails after `launching`."""

    def forget(self, pages: np.ndarray) -> None:
        """Called before a step computes rows of these complete units [groups, n] again, because
        drafts in them were wrong."""

    def selections(self, metadata: Any, row: int) -> dict[int, Selection]:
        """The pages that a traced row of the step read, by layer."""
        return {}

    def forward_indexed(
        self,
        layer: int,
        query: torch.Tensor,
        heads: LatentHeads,
        metadata: Any,
        index: IndexQuery | None,
    ) -> torch.Tensor:
        """`forward_latent` over the rows that `index` selects. Without it, over those that the
        last call with one selected."""
        raise NotImplementedError


_BACKENDS: Mapping[str, str] = {
    "sgl_kernel": "cairn.attention.sgl_kernel_backend:SglKernelBackend",
    "sgl_kernel_fp8": "cairn.attention.sgl_kernel_fp8_backend:SglKernelFp8Backend",
    "flashinfer": "cairn.attention.flashinfer_backend:FlashInferBackend",
    "flash_mla": "cairn.attention.flash_mla_backend:FlashMLABackend",
    "triton": "cairn.attention.triton_backend:TritonBackend",
    "torch": "cairn.attention.torch_backend:TorchBackend",
    "dsa": "cairn.attention.dsa_backend:DSABackend",
    "hsa": "cairn.attention.hsa.backend:HSABackend",
}
"""name -> "module:class"."""

_AUTO = ("sgl_kernel", "triton", "torch"), ("triton", "sgl_kernel", "torch")
_AUTO_LATENT = ("triton", "torch"), ("flash_mla", "triton", "torch")
"""Candidates of `auto` for prefill and for decode, fastest first according to `cairn bench
attention`, over keys and values and over latent rows."""
AUTO_SPARSE = "hsa"
"""The backend that `auto` means for models trained with sparse attention and for a host tier."""
AUTO_INDEXED = "dsa"
"""The backend that `auto` means for models whose layers have an index."""


def backend_names() -> tuple[str, ...]:
    """Names of the dense backends that come with Cairn."""
    return tuple(name for name in _BACKENDS if issubclass(backend_class(name), DenseBackend))


def backend_class(name: str) -> type[Backend]:
    """The class of a backend that comes with Cairn, or of a user's backend `module:Class`."""
    return import_class("attention_backend", name, _BACKENDS, Backend, also="auto, ")


def dense_class(name: str) -> type[DenseBackend]:
    found = backend_class(name)
    if not issubclass(found, DenseBackend):
        raise ConfigError(f"attention_backend {name!r} is sparse; name a dense backend here")
    return found


def sparse_class(names: Iterable[str]) -> type[SparseBackend] | None:
    """The sparse backend among these, if any."""
    for name in names:
        found = None if name == "auto" else backend_class(name)
        if found is not None and issubclass(found, SparseBackend):
            return found
    return None


def refusal(name: str, shape: AttentionShape) -> str | None:
    """Why a dense backend cannot serve this model here; None if it can."""
    cls = dense_class(name)
    return cls.unavailable_reason(shape.device) or cls.unsupported_reason(shape)


def resolve_backends(
    names: Sequence[str], shape: AttentionShape
) -> tuple[list[type[DenseBackend]], str]:
    """One backend, or two for prefill and decode, and a line that explains the choice.

    `auto` takes the first candidate that can run; the line says why earlier ones cannot. Raises
    ConfigError if a named backend cannot run.
    """
    dimensions = (
        f"{shape.num_heads} query and {shape.num_kv_heads} kv heads of {shape.head_dim}, "
        f"{str(shape.dtype).removeprefix('torch.')}, pages of {shape.page_size}"
    )
    passed: dict[str, str] = {}
    chosen = []
    auto = _AUTO if shape.value_dim is None else _AUTO_LATENT
    pairs = zip((*names, *names)[:2], auto, strict=True)
    for name, candidates in pairs:
        reasons = {}
        for candidate in candidates if name == "auto" else (name,):
            reason = refusal(candidate, shape)
            if reason is None:
                chosen.append(candidate)
                break
            reasons[candidate] = reason
        else:
            told = "; ".join(f"{own!r}: {reason}" for own, reason in reasons.items())
            raise ConfigError(
                f"attention_backend {name!r} cannot run here: {told}; use auto, or see "
                "`cairn doctor`"
            )
        passed |= reasons
    what = chosen[0]
    if chosen[0] != chosen[1]:
        what = f"{chosen[0]} for prefill and {chosen[1]} for decode"
    how = "auto took " if "auto" in names else ""
    why = "".join(f"; not {name}: {reason}" for name, reason in passed.items())
    distinct = chosen[:1] if chosen[0] == chosen[1] else chosen
    return [dense_class(name) for name in distinct], f"attention: {how}{what}{why}; {dimensions}"


def missing_module(module: str, package: str) -> str | None:
    """Why a package cannot be imported; None if it can."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        return f"{package} cannot be imported ({error}); pip install {package}"
    return None
