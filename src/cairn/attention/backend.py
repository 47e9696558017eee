"""What backends have in common, and the registry that finds one by name.

A backend computes attention for a batch over the paged KV cache. It is imported only when it is
asked for, and says itself whether it can run here.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from cairn.attention.batch import AttentionBatch, GraphKind, Scoring
from cairn.errors import ConfigError
from cairn.memory.groups import LayerGroup
from cairn.memory.hisparse import HiSparseCoordinator
from cairn.memory.kv_pool import KVPool
from cairn.memory.landmarks import LandmarkPool
from cairn.memory.layout import KV
from cairn.sparsity.config import SparseConfig
from cairn.sparsity.registry import import_class
from cairn.sparsity.selection import Selection


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a backend must know of the model before the first step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    page_size: int
    dtype: torch.dtype
    device: torch.device
    groups: tuple[LayerGroup, ...]
    max_seqs: int = 1
    """Most sequences of a step; in a recorded decode step every row counts as one."""
    hides_landmark_rows: bool = False
    """The last row of a page is a landmark row that dense layers do not see."""
    scales: tuple[float, ...] = ()
    """By layer, where layers differ in heads, head size or scale; the numbers above are then those
    of one kind of layer."""


class Graph(NamedTuple):
    """A kind of step that is recorded as CUDA graphs."""

    kind: GraphKind
    mixed: bool
    """Sequences have any number of new rows; else one each."""


DENSE_GRAPHS = (Graph("dense", mixed=False), Graph("dense", mixed=True))


class AttentionBackend(Protocol):
    """What every backend has; `DenseBackend` and `SparseBackend` give most of it."""

    @property
    def name(self) -> str: ...

    @property
    def graphs(self) -> Collection[Graph]:
        """Kinds of steps whose `prepare`, `begin` and `forward` can be recorded and replayed."""
        ...

    def graph_for(self, batch: AttentionBatch, *, mixed: bool) -> Graph | None:
        """The kind that a step can be replayed from, of decode steps or of mixed ones; None if its
        kernels must be launched one by one."""
        ...

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> Any:
        """Host work of a step, shared by all its layers. The result goes to `forward`.

        `groups` names the layer groups that `forward` will be called for, all if None.
        """
        ...

    def begin(self, metadata: Any) -> None:
        """Device work that all layers of a step share; part of a recorded graph."""
        ...

    def forward(
        self, layer: int, query: torch.Tensor, metadata: Any, scoring: Scoring | None = None
    ) -> torch.Tensor:
        """query [rows, heads, head_dim] -> [rows, heads, head_dim].

        The new rows' keys and values are in the pool already. `scoring` comes from layers that
        bring landmarks of their own.
        """
        ...


class Backend:
    """What dense and sparse backends have in common; derive from one of these."""

    name: ClassVar[str]
    graphs: Collection[Graph] = ()

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        """Why this backend cannot run on the device; None if it can."""
        return None

    def graph_for(self, batch: AttentionBatch, *, mixed: bool) -> Graph | None:
        graph = Graph("dense", mixed)
        return graph if graph in self.graphs else None

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> Any:
        raise NotImplementedError

    def begin(self, metadata: Any) -> None:
        pass


class DenseBackend(Backend):
    """A backend that reads the whole past, or a window of it."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    head_dims: ClassVar[tuple[int, ...] | None] = None  # None for any
    keeps_one_plan: ClassVar[bool] = False
    """A second `prepare` for a layer group makes the first one's metadata invalid."""
    serves_mixed_layers: ClassVar[bool] = False
    """Layers may differ in heads, head size and scale."""
    hides_rows: ClassVar[bool] = False
    """Can leave landmark rows out."""
    reads: ClassVar[tuple[str, ...]] = (KV,)
    """Parts of the cache that it needs in every layer."""

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        self._shape = shape
        self._pool = pool

    @classmethod
    def unsupported_reason(cls, shape: AttentionShape) -> str | None:
        """Why it cannot serve this model; None if it can."""
        if shape.dtype not in cls.dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in cls.dtypes)
            return f"the type is {str(shape.dtype).removeprefix('torch.')}; it has {names}"
        if shape.scales and not cls.serves_mixed_layers:
            return "layers differ in heads, head size or scale, and it serves one kind"
        for group in shape.groups:
            kept = [part.name for part in group.layout.parts]
            if group.layers and not set(cls.reads) <= set(kept):
                return f"layers keep {', '.join(kept)}; it reads {', '.join(cls.reads)}"
        if cls.head_dims is not None and shape.head_dim not in cls.head_dims:
            sizes = ", ".join(map(str, cls.head_dims))
            return f"heads have size {shape.head_dim}; it has {sizes}"
        if shape.hides_landmark_rows and not cls.hides_rows:
            return "the model hides landmark rows from its window layers, and it cannot"
        return None

    def forward(
        self, layer: int, query: torch.Tensor, metadata: Any, scoring: Scoring | None = None
    ) -> torch.Tensor:
        assert scoring is None, "dense attention scores no landmarks"
        return self.attend(layer, query, metadata)

    def attend(self, layer: int, query: torch.Tensor, metadata: Any) -> torch.Tensor:
        """`forward`, for layers without landmarks."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseParts:
    """What an engine builds a sparse backend from."""

    shape: AttentionShape
    pool: KVPool
    config: SparseConfig
    max_pages: int
    """Pages of the longest sequence."""
    dense: AttentionBackend
    """For layers that are not sparse, and for rows that read everything."""
    landmarks: LandmarkPool | None = None
    tier: HiSparseCoordinator | None = None
    in_stage: AttentionBackend | None = None
    """A dense backend over the tier's stage, where prompts are read densely."""


class SparseBackend(Backend):
    """A backend that leaves out most of the past in the layers `SparseConfig.layers`.

    Besides `name`, `prepare` and `forward` everything has a default. The members below are for
    sparse backends alone.
    """

    needs_landmarks: ClassVar[bool] = False
    """The engine keeps a landmark of every complete page, made by the policy of `SparseConfig`."""
    options: ClassVar[frozenset[str]] = frozenset({"layers", "window"})
    """Options `hsa_*` that it honours; the others are refused. Without "prefill" it reads prompts
    sparsely, without "dense_below" no row reads everything."""
    serves_trained: ClassVar[bool] = False
    """Also runs models that were trained with sparse attention."""
    serves_tier: ClassVar[bool] = False
    """Also runs where pages live in host memory."""
    reads_generations: bool = False
    """Wants the generations of pages on the device."""
    notes: tuple[str, ...] = ()
    """What a user should know of how it runs."""

    def __init__(self, parts: SparseParts) -> None:
        self._parts = parts

    @classmethod
    def kernel_refusal(cls, config: SparseConfig, shape: AttentionShape) -> str | None:
        """Why its kernels cannot serve this model, so that it runs in torch; None if they can."""
        return f"{cls.name} has none"

    def rungs(
        self, max_seqs: int, max_pages: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Numbers of sequences, and of pages of the longest one, from which on a step needs other
        compiled forms of the kernels; None if it has no Triton kernels."""
        return None

    def launching(self, batch: AttentionBatch, graph: Graph | None) -> None:
        """A step is about to be launched, or replayed from a graph: keep the host's books."""

    def replayed(self, batch: AttentionBatch, graph: Graph) -> None:
        """A graph was replayed: launch what it leaves out."""

    def abandon(self, batch: AttentionBatch) -> None:
        """A step that `launching` was called for has failed."""

    def selections(self, metadata: Any, row: int) -> dict[int, Selection]:
        """Pages that a traced row of the step read, by layer."""
        return {}

    def forward(
        self, layer: int, query: torch.Tensor, metadata: Any, scoring: Scoring | None = None
    ) -> torch.Tensor:
        raise NotImplementedError


_BACKENDS: Mapping[str, str] = {
    "sgl_kernel": "cairn.attention.sgl_kernel_backend:SglKernelBackend",
    "flashinfer": "cairn.attention.flashinfer_backend:FlashInferBackend",
    "triton": "cairn.attention.triton_backend:TritonBackend",
    "torch": "cairn.attention.torch_backend:TorchBackend",
    "hsa": "cairn.attention.hsa.backend:HSABackend",
}
"""name -> "module:class"."""

_AUTO_PREFILL = ("sgl_kernel", "triton", "torch")
_AUTO_DECODE = ("triton", "sgl_kernel", "torch")
"""What `auto` tries, fastest first, as `cairn bench attention` measures it."""
AUTO_SPARSE = "hsa"
"""What `auto` takes for models that were trained with sparse attention, and for a host tier."""


def backend_names() -> tuple[str, ...]:
    """Dense backends that come with Cairn."""
    return tuple(name for name in _BACKENDS if issubclass(backend_class(name), DenseBackend))


def backend_class(name: str) -> type[Backend]:
    """A backend that comes with Cairn, or one of the user's as `module:Class`."""
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
    """One backend, or two for prefill and decode, and a line about the choice. Raises ConfigError
    if a named backend cannot run.

    `auto` takes the first of its candidates that can run; the line says why not the others.
    """
    dimensions = (
        f"{shape.num_heads} query and {shape.num_kv_heads} kv heads of {shape.head_dim}, "
        f"{str(shape.dtype).removeprefix('torch.')}, pages of {shape.page_size}"
    )
    passed: dict[str, str] = {}
    chosen = []
    pairs = zip((*names, *names)[:2], (_AUTO_PREFILL, _AUTO_DECODE), strict=True)
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
