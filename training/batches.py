"""Batches of samples, made in worker processes. A batch depends on seed, phase and step alone, so
that a resumed run sees the same batches as an uninterrupted one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from training.curriculum import Phase
from training.samples import Kind, Sample
from training.tasks import World, make_sample


class Batch(NamedTuple):
    tokens: torch.Tensor  # [batch, length]
    places: torch.Tensor  # [targets], where hidden states flattened over batch and length predict
    targets: torch.Tensor  # [targets]
    kinds: torch.Tensor  # [targets]
    answers: torch.Tensor  # [targets], numbered through the batch; -1 for none

    def to(self, device: torch.device) -> Batch:
        return Batch(*(t.to(device, non_blocking=True) for t in self))


def collate(samples: list[Sample]) -> Batch:
    tokens = np.stack([sample.tokens for sample in samples])
    kinds = np.stack([sample.kinds for sample in samples])
    answers = np.stack([sample.answers for sample in samples]).astype(np.int64)
    counts = np.maximum(answers.max(1) + 1, 0)
    first = np.cumsum(counts) - counts  # the number of each sample's first answer
    answers = np.where(answers >= 0, answers + first[:, None], -1)
    length = tokens.shape[1]
    row, column = np.nonzero(kinds[:, 1:] != Kind.NONE)  # a target is predicted one place before
    return Batch(
        torch.from_numpy(tokens).long(),
        torch.from_numpy(row * length + column),
        torch.from_numpy(tokens[row, column + 1]).long(),
        torch.from_numpy(kinds[row, column + 1]).long(),
        torch.from_numpy(answers[row, column + 1]),
    )


class Batches(Dataset[Batch]):
    def __init__(self, world: World, phase: Phase, index: int, seed: int, chunk: int) -> None:
        self._world, self._phase, self._chunk = world, phase, chunk
        self._key = (seed, index)

    def __len__(self) -> int:
        return self._phase.steps

    def __getitem__(self, step: int) -> Batch:
        rng = np.random.default_rng((*self._key, step))
        shape = self._phase.shapes[step % len(self._phase.shapes)]
        length = shape.tokens(self._chunk)
        mixture = self._phase.mixture
        samples = [make_sample(rng, self._world, mixture, length) for _ in range(shape.batch)]
        return collate(samples)


def stream(batches: Batches, start: int, workers: int, pin: bool) -> Iterator[Batch]:
    """Batches from `start` on, in order, for any number of workers."""
    loader: DataLoader[Batch] = DataLoader(
        batches,
        batch_size=None,
        sampler=range(start, len(batches)),
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=pin,
        worker_init_fn=_one_thread,
    )
    return iter(loader)


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)
