"""The backend protocol, and the registry that finds one by name.

A backend computes attention for a batch over the paged KV cache. It is imported only when it is
asked for, and says itself whether it can run here.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from cairn.attention.batch import AttentionBatch, GraphKind, HostBatch, Scoring
from cairn.errors import ConfigError
from cairn.memory.groups import LayerGroup
from cairn.memory.kv_pool import KVPool
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
    """Most sequences of a step, rows that are recorded apart counted as such."""
    hides_landmark_rows: bool = False
    """The last row of a page is a landmark row that dense layers do not see."""


class Graph(NamedTuple):
    """A recorded step, as backends know it."""

    kind: GraphKind
    mixed: bool
    """Sequences have any number of new rows; else one each."""


class AttentionBackend(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def graph_kinds(self) -> tuple[GraphKind, ...]:
        """Kinds of decode steps whose `prepare`, `begin` and `forward` can be recorded in a CUDA
        graph and replayed; empty if none can."""
        ...

    @property
    def mixed_kinds(self) -> tuple[GraphKind, ...]:
        """The same for steps that prefill, or prefill and decode."""
        ...

    @property
    def reads_generations(self) -> bool:
        """Wants the generations of pages on the device."""
        ...

    def graph_kind(self, batch: HostBatch, *, mixed: bool) -> GraphKind | None:
        """The kind of graph that a step can be replayed from, one of decode steps or a mixed one;
        None if it must be launched."""
        ...

    def launching(self, batch: HostBatch, graph: Graph | None) -> None:
        """Keeps the host's books of a step that is about to be launched, or replayed."""
        ...

    def replayed(self, batch: HostBatch, graph: Graph) -> None:
        """Launches what the graph of a step leaves out."""
        ...

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> Any:
        """Host work of a step, shared by all its layers. The result goes to `forward`.

        `groups` names the layer groups it will be asked for, all if None.
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

    def selections(self, metadata: Any, row: int) -> dict[int, Selection]:
        """Pages that a traced row of the step read, by layer."""
        ...

    def abandon(self, batch: HostBatch) -> None:
        """The step was launched and did not come to its end."""
        ...


class DenseBackend:
    """A backend that is found by name and reads the whole past, or a window of it."""

    name: ClassVar[str]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    head_dims: ClassVar[tuple[int, ...] | None] = None  # None for any
    keeps_one_plan: ClassVar[bool] = False
    """A second `prepare` for a layer group makes the first one's metadata invalid."""
    hides_rows: ClassVar[bool] = False
    """Can leave landmark rows out."""
    graph_kinds: ClassVar[tuple[GraphKind, ...]] = ()
    mixed_kinds: ClassVar[tuple[GraphKind, ...]] = ()
    reads_generations: ClassVar[bool] = False

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        self._shape = shape
        self._pool = pool

    @staticmethod
    def unavailable_reason(device: torch.device) -> str | None:
        """Why this backend cannot run on the device; None if it can."""
        raise NotImplementedError

    @classmethod
    def unsupported_reason(cls, shape: AttentionShape) -> str | None:
        """Why it cannot serve this model; None if it can."""
        if shape.dtype not in cls.dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in cls.dtypes)
            return f"the type is {str(shape.dtype).removeprefix('torch.')}; it has {names}"
        if cls.head_dims is not None and shape.head_dim not in cls.head_dims:
            sizes = ", ".join(map(str, cls.head_dims))
            return f"heads have size {shape.head_dim}; it has {sizes}"
        if shape.hides_landmark_rows and not cls.hides_rows:
            return "the model hides landmark rows from its window layers, and it cannot"
        return None

    def graph_kind(self, batch: HostBatch, *, mixed: bool) -> GraphKind | None:
        return "dense" if (self.mixed_kinds if mixed else self.graph_kinds) else None

    def launching(self, batch: HostBatch, graph: Graph | None) -> None:
        pass

    def replayed(self, batch: HostBatch, graph: Graph) -> None:
        pass

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> Any:
        raise NotImplementedError

    def begin(self, metadata: Any) -> None:
        """Device work that all layers of a step share; part of a recorded graph."""

    def forward(
        self, layer: int, query: torch.Tensor, metadata: Any, scoring: Scoring | None = None
    ) -> torch.Tensor:
        assert scoring is None, "dense attention scores no landmarks"
        return self.attend(layer, query, metadata)

    def attend(self, layer: int, query: torch.Tensor, metadata: Any) -> torch.Tensor:
        """`forward`, for layers without landmarks."""
        raise NotImplementedError

    def selections(self, metadata: Any, row: int) -> dict[int, Selection]:
        return {}

    def abandon(self, batch: HostBatch) -> None:
        pass


_BACKENDS: Mapping[str, str] = {
    "sgl_kernel": "cairn.attention.sgl_kernel_backend:SglKernelBackend",
    "flashinfer": "cairn.attention.flashinfer_backend:FlashInferBackend",
    "triton": "cairn.attention.triton_backend:TritonBackend",
    "torch": "cairn.attention.torch_backend:TorchBackend",
}
"""name -> "module:class"."""

_AUTO_PREFILL = ("sgl_kernel", "triton", "torch")
_AUTO_DECODE = ("triton", "sgl_kernel", "torch")
"""What `auto` tries, fastest first, as `cairn bench attention` measures it."""


def backend_names() -> tuple[str, ...]:
    return tuple(_BACKENDS)


def backend_class(name: str) -> type[DenseBackend]:
    if name not in _BACKENDS:
        raise ConfigError(
            f"attention_backend is {name!r}; choose one of auto, hsa, {', '.join(_BACKENDS)}"
        )
    module, _, attribute = _BACKENDS[name].partition(":")
    found: type[DenseBackend] = getattr(importlib.import_module(module), attribute)
    return found


def refusal(name: str, shape: AttentionShape) -> str | None:
    """Why a backend cannot serve this model here; None if it can."""
    cls = backend_class(name)
    return cls.unavailable_reason(shape.device) or cls.unsupported_reason(shape)


def resolve_backends(
    names: Sequence[str], shape: AttentionShape
) -> tuple[list[type[DenseBackend]], str]:
    """One backend, or two for prefill and decode, or an error that says why one cannot run; and a
    line about the choice.

    `auto` takes the first of its candidates that can, and the line says why not the others.
    """
    dimensions = (
        f"{shape.num_heads} query and {shape.num_kv_heads} kv heads of {shape.head_dim}, "
        f"{str(shape.dtype).removeprefix('torch.')}, pages of {shape.page_size}"
    )
    passed: dict[str, str] = {}
    chosen = []
    pairs = zip((*names, *names)[:2], (_AUTO_PREFILL, _AUTO_DECODE), strict=True)
    for name, candidates in pairs:
        if name != "auto":
            reason = refusal(name, shape)
            if reason is not None:
                raise ConfigError(
                    f"attention_backend {name!r} cannot run here: {reason}; use auto, or see "
                    "`cairn doctor`"
                )
            chosen.append(name)
            continue
        for candidate in candidates:
            reason = refusal(candidate, shape)
            if reason is None:
                chosen.append(candidate)
                break
            passed[candidate] = reason
        else:
            raise ConfigError(f"no attention backend can run here: {passed}")
    what = chosen[0]
    if chosen[0] != chosen[1]:
        what = f"{chosen[0]} for prefill and {chosen[1]} for decode"
    how = "auto took " if "auto" in names else ""
    why = "".join(f"; not {name}: {reason}" for name, reason in passed.items())
    distinct = chosen[:1] if chosen[0] == chosen[1] else chosen
    return [backend_class(name) for name in distinct], f"attention: {how}{what}{why}; {dimensions}"


def missing_module(module: str, package: str) -> str | None:
    """Why a package cannot be imported; None if it can."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        return f"{package} cannot be imported ({error}); pip install {package}"
    return None
