"""Cairn's sparse attention over pages that SGLang allocates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from cairn.attention.attend import Attend
from cairn.attention.backend import Graph, SparseParts, dense_class, resolve_backends
from cairn.attention.hsa.backend import HSABackend
from cairn.attention.widened import dense_backend
from cairn.engine.attention_options import AttentionPlan
from cairn.engine.resolve import attention_shape, landmark_shape
from cairn.errors import ConfigError
from cairn.memory.geometry import PageGeometry
from cairn.memory.kv_pool import KVPool
from cairn.memory.landmarks import LandmarkPool
from cairn.models.spec import ModelSpec
from cairn.sglang.recorded import RecordedSteps
from cairn.sglang.step import PageLives, Step, read_step


def make_pool(
    spec: ModelSpec,
    geometry: PageGeometry,
    num_pages: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVPool:
    """All layers have the same page ids, those with a window too."""
    groups = spec.groups(dtype)
    return KVPool(groups, [num_pages] * len(groups), geometry.page_size, device)


class SparseAttention:
    def __init__(
        self,
        spec: ModelSpec,
        plan: AttentionPlan,
        geometry: PageGeometry,
        pool: KVPool,
        *,
        max_seqs: int,
        max_tokens: int,
        interpreted: bool = False,
    ) -> None:
        """Steps have at most `max_seqs` sequences, sequences at most `max_tokens` tokens.

        `interpreted` runs the kernels in Triton's interpreter, for tests.
        """
        assert plan.sparse is not None
        self.notes = (*plan.notes, *plan.warnings)
        self._dense_below = plan.sparse.dense_below
        self._geometry = geometry
        self.pool = pool
        some = pool.part(0)
        num_pages, dtype, device = len(some) - 1, some.dtype, some.device
        self._lives = PageLives(num_pages, device)
        self._groups = spec.groups(dtype)
        self._max_seqs = max_seqs
        self._max_pages = geometry.pages(max_tokens)
        shape = attention_shape(spec, plan.sparse, geometry, self._groups, dtype, device)
        # In a recorded step the landmark row of a sequence counts as another sequence.
        shape = replace(shape, max_seqs=max_seqs * (2 if geometry.has_landmark_row else 1))
        landmarks = landmark_shape(plan.sparse, dtype)
        assert landmarks is not None
        self.landmarks = LandmarkPool(landmarks, num_pages, device)
        kinds = [dense_class("triton")]
        if not interpreted:
            kinds, _ = resolve_backends(plan.dense, shape)
        self.kernel_refusal = HSABackend.kernel_refusal(plan.sparse, shape)
        parts = SparseParts(
            shape=shape,
            pool=pool,
            config=plan.sparse,
            max_pages=self._max_pages,
            dense=dense_backend(kinds, shape, pool),
            landmarks=self.landmarks,
        )
        self._hsa = HSABackend(parts, kernels=True if interpreted else None)
        if self._hsa.kernels is not None:
            self.notes += self._hsa.notes
        self.step: Step | None = None
        self._metadata: Any = None
        self._recorded: RecordedSteps | None = None
        self._kept: list[Any] = []

    @property
    def attend(self) -> Attend:
        """Attention of the step that began last."""
        assert self.step is not None
        return Attend(self.pool, self._hsa, self.step.batch, self._metadata)

    def begin(self, forward_batch: Any, req_to_token: torch.Tensor) -> None:
        """The host's part of an unrecorded step, and what all its layers share."""
        step = read_step(
            forward_batch, req_to_token, self._geometry, self._lives, len(self._groups)
        )
        self._hsa.launching(step.batch, None)
        self._metadata = self._hsa.prepare(step.batch)
        self._hsa.begin(self._metadata)
        self.step = step

    def prepare_recording(self, max_seqs: int) -> None:
        """Buffers that recorded steps of up to `max_seqs` sequences share."""
        if Graph("sparse", mixed=False) not in self._hsa.graphs:
            raise ConfigError(
                "decode steps cannot be recorded as CUDA graphs here: "
                f"{self.kernel_refusal or 'the dense layers cannot'}; give --disable-cuda-graph"
            )
        if self._dense_below:
            raise ConfigError(
                f"dense_below is {self._dense_below}, and every row of a decode step that is "
                "recorded as a CUDA graph selects pages; leave it out, or give --disable-cuda-graph"
            )
        if max_seqs > self._max_seqs:
            raise ConfigError(
                f"CUDA graphs of {max_seqs} sequences are asked for, and at most {self._max_seqs} "
                "can run; lower --cuda-graph-max-bs"
            )
        self._recorded = RecordedSteps(
            self._geometry,
            self._lives,
            len(self._groups),
            max_seqs=max_seqs,
            max_pages=self._max_pages,
        )

    def begin_recording(self, num_seqs: int) -> None:
        """The host's part of a step that is about to be recorded."""
        assert self._recorded is not None
        self.step = self._recorded.step(num_seqs)
        self._metadata = self._hsa.prepare(self.step.batch)
        # A graph that is replayed reads the tensors it was recorded with.
        self._kept.append(self._metadata)

    def begin_recorded(self, forward_batch: Any, req_to_token: torch.Tensor) -> None:
        """The device's part, as it is recorded."""
        assert self._recorded is not None
        self._recorded.refresh(forward_batch, req_to_token)
        self._hsa.begin(self._metadata)
