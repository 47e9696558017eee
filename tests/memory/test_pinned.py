"""Memory that is registered with a device: all of it, once, and given back."""

from __future__ import annotations

import errno
import gc
import logging
import mmap
import re
from pathlib import Path

import pytest
import torch

from cairn.errors import ConfigError
from cairn.memory import pinned
from cairn.memory.pinned import CudaRegistry, PinnedMemory

SYSTEM_PAGE = 4096


class Books(CudaRegistry):
    """Stands for CUDA; holds `room` bytes."""

    def __init__(self, room: int = 2**30) -> None:
        self.room = room
        self.held: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> str | None:
        if sum(self.held.values()) + nbytes > self.room:
            return "out of memory"
        for other, size in self.held.items():
            assert address + nbytes <= other or other + size <= address
        self.held[address] = nbytes
        return None

    def unregister(self, address: int) -> None:
        assert is_mapped(address)
        del self.held[address]


def is_mapped(address: int) -> bool:
    """In memory that no child of this process gets, as only memory of ours is."""
    for block in re.split(r"^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text(), flags=re.M):
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+)", block)
        if span and int(span[1], 16) <= address < int(span[2], 16):
            return re.search(r"^VmFlags:.*\bdc\b", block, re.M) is not None
    return False


def test_tensors_are_registered_at_their_exact_size_and_given_back() -> None:
    books = Books()
    memory = PinnedMemory(books, [10_000, 1, 2**20 + 4])
    assert [tensor.nbytes for tensor in memory.tensors] == [10_000, 1, 2**20 + 4]
    assert books.held == {tensor.data_ptr(): tensor.nbytes for tensor in memory.tensors}
    for tensor in memory.tensors:
        assert tensor.data_ptr() % SYSTEM_PAGE == 0 and not tensor.any()
        tensor.fill_(7)
    assert int(memory.tensors[2].view(torch.int32)[-1]) == 0x07070707
    memory.close()
    assert not books.held and not memory.tensors
    memory.close()


def test_memory_that_nobody_closes_is_given_back_too() -> None:
    books = Books()
    memory = PinnedMemory(books, [5000])
    assert books.held
    del memory
    gc.collect()
    assert not books.held


def test_what_cannot_be_registered_is_named_and_nothing_is_kept() -> None:
    books = Books(room=9000)
    with pytest.raises(ConfigError, match=r"out of memory\); lower host_gib or host_to_device"):
        PinnedMemory(books, [5000, 5000])
    assert not books.held


def test_memory_that_the_system_does_not_give_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    books, given = Books(), mmap.mmap(-1, SYSTEM_PAGE)

    def scarce(_: int, nbytes: int, flags: int) -> mmap.mmap:
        if nbytes > SYSTEM_PAGE:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return given

    monkeypatch.setattr(mmap, "mmap", scarce)
    with pytest.raises(ConfigError, match=r"Cannot allocate memory\); lower host_gib"):
        PinnedMemory(books, [SYSTEM_PAGE, 2 * SYSTEM_PAGE])
    assert not books.held


def test_slow_registration_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "_TELL_EVERY", 0.0)
    with caplog.at_level(logging.INFO, "cairn.memory"):
        PinnedMemory(Books(), [2**20, 2**20]).close()
    assert [record.message.split(" after")[0] for record in caplog.records] == [
        "host memory: 0.0 of 0.0 GiB registered"
    ] * 2
