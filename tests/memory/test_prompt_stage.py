"""The order in which a stage is filled ahead and read, on streams that run as late as they may."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.memory import prompt_stage
from cairn.memory.groups import LayerGroup
from cairn.memory.kv_pool import HostPool, KVPool
from cairn.memory.layout import CacheLayout
from cairn.memory.prompt_stage import PromptStage, StagedStep, consecutive

CPU = torch.device("cpu")
LAYERS, PAGES, FRAMES, ROOM = 5, 20, 6, 10


@given(st.lists(st.integers(1, 40), unique=True))
def test_runs_of_consecutive_pages(pages: list[int]) -> None:
    ascending = np.array(sorted(pages), dtype=np.int64)
    runs = consecutive(ascending)
    found = {place + i: first + i for place, first, count in runs for i in range(count)}
    assert found == dict(enumerate(ascending.tolist()))
    for run, following in pairwise(runs):
        assert following.first > run.first + run.pages


class Stream:
    """Work in its order; a wait is for the first `until` operations of another stream."""

    def __init__(self) -> None:
        self.work: list[Callable[[], Any] | tuple[Stream, int]] = []
        self.ran = 0

    def wait_stream(self, other: Stream) -> None:
        self.work.append((other, len(other.work)))

    def wait_event(self, event: Event) -> None:
        self.work.append(event.at)

    @property
    def can_go_on(self) -> bool:
        if self.ran == len(self.work):
            return False
        following = self.work[self.ran]
        return not isinstance(following, tuple) or following[0].ran >= following[1]

    def go_on(self) -> None:
        following = self.work[self.ran]
        if not isinstance(following, tuple):
            following()
        self.ran += 1


class Event:
    at: tuple[Stream, int]

    def record(self, stream: Stream) -> None:
        self.at = stream, len(stream.work)


class Device:
    """Stands for `torch` in the stage: two streams, and kernels that wait in them."""

    def __init__(self) -> None:
        self.steps, self.own = Stream(), Stream()
        self.current = self.steps
        self.cuda = self

    Event = Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def current_stream(self, _: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def launch(self, kernel: Callable[[], Any]) -> None:
        self.current.work.append(kernel)

    def index_select(self, *given: Any, out: torch.Tensor) -> None:
        self.launch(lambda: torch.index_select(*given, out=out))

    def run(self, prefers: float, draw: random.Random) -> None:
        """To the end, with the one stream or the other ahead."""
        while ready := [s for s in (self.steps, self.own) if s.can_go_on]:
            ahead = self.own if draw.random() < prefers else self.steps
            (ahead if ahead in ready else ready[0]).go_on()
        assert all(stream.ran == len(stream.work) for stream in (self.steps, self.own))


def read_layers(device: Device, prefers: float) -> bool:
    """Launch a step over all layers; whether attention found every page when it ran."""
    layers = tuple(range(LAYERS))
    layout = CacheLayout.of_heads(1, 2, torch.float64)
    groups = [LayerGroup("resident", layers, 16, 0, layout)]
    pool = KVPool(groups, [FRAMES], 4, CPU)
    host = HostPool(groups[0], PAGES, 4, device=CPU)
    for tensor in (*pool.tensors(), *host.tensors()):
        tensor.normal_()
    frames = np.zeros(PAGES + 1, dtype=np.int32)
    frames[[3, 7, 12]] = [4, 1, 6]
    buffers = [torch.zeros(ROOM, 2, 4, 2, dtype=torch.float64) for _ in range(2)]
    stage = PromptStage(pool, host, frames, ROOM, buffers)
    stage._stream = device.own  # type: ignore[assignment]
    copy_in = stage._copy_in
    stage._copy_in = lambda *given: device.launch(lambda: copy_in(*given))  # type: ignore[method-assign]
    found: list[bool] = []
    pages = np.array([7, 2, 3, 9, 10, 12, 2])
    staged, places = stage.arrange(pages)
    step: StagedStep = stage.step([(layer, staged) for layer in layers], ahead=True)
    stage.begin(step)
    for layer in layers:
        new = torch.randn_like(pool.part(layer)[6])  # the step writes page 12
        device.launch(partial(pool.part(layer)[6].copy_, new))
        stage.fill(step)
        here = [pool.part(layer)[f] if f else host.part(layer)[p] for p, f in _where(pages, frames)]
        buffer = stage.part(layer)

        def attend(buffer: torch.Tensor = buffer, here: list[torch.Tensor] = here) -> None:
            found.append(torch.equal(buffer[torch.from_numpy(places)], torch.stack(here)))

        device.launch(attend)
        stage.release(step)
    assert not stage._staged and step.read == LAYERS
    device.run(prefers, random.Random(1))
    assert len(found) == LAYERS
    assert stage.bytes_in == LAYERS * 3 * host.part(0)[0].nbytes
    return all(found)


def _where(pages: np.ndarray, frames: np.ndarray) -> list[tuple[int, int]]:
    return [(int(page), int(frames[page])) for page in pages]


@pytest.mark.parametrize("prefers", [0.0, 0.3, 0.7, 1.0])
def test_attention_reads_what_was_copied_for_it(
    prefers: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    monkeypatch.setattr(prompt_stage, "torch", device)
    assert read_layers(device, prefers)


@pytest.mark.parametrize(
    ("forgotten", "prefers"), [("wait_event", 0.0), ("wait_stream", 1.0)], ids=["fill", "start"]
)
def test_who_does_not_wait_is_noticed(
    forgotten: str, prefers: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    monkeypatch.setattr(prompt_stage, "torch", device)
    monkeypatch.setattr(Stream, forgotten, lambda *_: None)
    assert not read_layers(device, prefers)
