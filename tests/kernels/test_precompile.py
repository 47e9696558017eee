"""Kernels compiled before they are needed: in other processes, once, and counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from cairn.errors import CairnError
from cairn.kernels import precompile
from cairn.kernels.compilations import CompilationCounts, Compilations
from cairn.kernels.norm import rms_norm
from cairn.kernels.paged_extend import ExtendBlocks, paged_extend
from cairn.kernels.precompile import collecting, compile_all
from cairn.kernels.rope_angles import rope_angles
from tests.kernels.absent_gpu import use_absent_gpu
from tests.kernels.broken_kernel import broken_kernel

KERNELS = ["_norm_kernel", "_angles_kernel", "_extend_kernel"]


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every kernel that came, whether it was in Triton's cache, which is empty at first."""
    heard: list[bool] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda cache_hit=False, **_: heard.append(cache_hit)
    )
    return heard


@pytest.fixture
def compilations(on_disk: list[bool]) -> Iterator[Compilations]:
    before = knobs.compilation.listener
    counter = Compilations(torch.device("cuda"))
    yield counter
    counter.close()
    assert knobs.compilation.listener is before


def launch() -> None:
    """The last of the three takes a descriptor."""
    half, whole = torch.bfloat16, torch.int32
    rms_norm(torch.zeros(3, 48, dtype=half), torch.zeros(48, dtype=half), 1e-6)
    rope_angles(torch.zeros(4, dtype=whole), torch.zeros(24), 1.0, half)
    query = torch.zeros(8, 4, 16, dtype=half)
    paged_extend(
        query,
        torch.zeros(2, 4, 64, 16, dtype=half),
        torch.zeros(1, 16, dtype=whole),
        torch.zeros(1, dtype=whole),
        torch.zeros(2, dtype=whole),
        ExtendBlocks.of(np.array([8]), np.array([0]), torch.device("cpu")),
        torch.zeros_like(query),
        scale=1.0,
    )


def names(forms: list[precompile.KernelForm]) -> list[str]:
    return [form.name.partition(":")[2] for form in forms]


def test_kernels_are_compiled_elsewhere_and_once(
    compilations: Compilations, on_disk: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_absent_gpu(monkeypatch, number=91)
    with collecting() as forms:
        launch()
        launch()
    assert names(forms) == KERNELS
    assert "tensordesc" in forms[2].data
    steps: list[tuple[int, int]] = []
    compile_all(forms, lambda done, total: steps.append((done, total)))
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert compilations.counts == CompilationCounts(start=3, serving=0)
    assert on_disk == [True] * 3  # another process has put them there

    # Launches find them, and so does who collects.
    compilations.mark_ready()
    launch()
    with collecting() as forms:
        launch()
    assert forms == [] and compilations.counts == CompilationCounts(3, 0)
    # What nobody thought of is compiled when it is launched.
    rms_norm(torch.zeros(3, 40), torch.zeros(40), 1e-6)
    assert compilations.counts == CompilationCounts(3, 1)

    # Another GPU of the same kind has nothing loaded, and finds all of it on disk.
    use_absent_gpu(monkeypatch, number=92)
    monkeypatch.setattr(precompile, "_Worker", None)
    with collecting() as forms:
        launch()
    assert names(forms) == KERNELS
    compile_all(forms)
    launch()
    assert compilations.counts == CompilationCounts(3, 4)


def test_a_kernel_that_cannot_be_compiled_is_named(
    compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_absent_gpu(monkeypatch, number=93)
    with collecting() as forms:
        broken_kernel[(1,)](torch.zeros(1), SIZE=3)
    with pytest.raises(CairnError, match=r"broken_kernel:broken_kernel cannot(.|\n)*should be"):
        compile_all(forms)
    assert compilations.counts == CompilationCounts(0, 0)


def test_nothing_is_launched_while_forms_are_collected(
    compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_absent_gpu(monkeypatch, number=94)
    launched: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        "tests.kernels.absent_gpu.Launcher.__call__", lambda _, *grid: launched.append(grid[:3])
    )
    rms_norm(torch.zeros(3, 48), torch.zeros(48), 1e-6)
    assert launched == [(3, 1, 1)]
    with collecting() as forms:
        rms_norm(torch.zeros(3, 48), torch.zeros(48), 1e-6)
    assert launched == [(3, 1, 1)] and forms == []


def test_counters_stand_behind_each_other(compilations: Compilations) -> None:
    second = Compilations(torch.device("cuda"))
    knobs.compilation.listener(src=None)
    assert compilations.counts == second.counts == CompilationCounts(1, 0)
    second.close()
    assert knobs.compilation.listener is compilations
    Compilations(torch.device("cpu"))
    assert knobs.compilation.listener is compilations
