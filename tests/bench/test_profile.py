"""Times of kernels, and how they are added up."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import cairn
from cairn.bench.hsa import LocalSelection
from cairn.bench.profile import kind_of, per_step, share_out
from cairn.cli.main import main
from cairn.engine.inputs import StepInputs


def test_profiles_need_a_gpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "profile", "--model", str(folder), "--device", "cpu"]) == 2
    assert "it needs a CUDA device" in capsys.readouterr().err


def test_made_up_selections_have_the_published_locality() -> None:
    rows, pages, topk = 512, 2200, 32
    batches = [
        StepInputs.made_up(64, [rows], [pages * 64], [np.ones((1, pages))]).batch for _ in range(2)
    ]
    made_up = LocalSelection(SimpleNamespace(topk=topk))  # type: ignore[arg-type]
    select = partial(made_up, torch.zeros(rows, 2, topk, dtype=torch.int32))
    selected, again, later = (
        select(SimpleNamespace(batch=batch))  # type: ignore[arg-type]
        for batch in (batches[0], batches[0], batches[1])
    )
    assert again is selected and later is not selected  # once for all layers of a step
    assert (selected.diff(dim=-1) > 0).all()
    assert selected.min() >= 0 and selected.max() < pages - rows // 64 - 8
    for together, published in ((4, 2.5), (8, 3.4)):
        unions = selected.view(-1, together, 2, topk).transpose(1, 2).flatten(2)
        read = sum(len(own.unique()) for own in unions.flatten(0, 1))
        assert selected.numel() / read == pytest.approx(published, rel=0.04)


def test_kernels_that_overlap_are_not_counted_twice() -> None:
    assert share_out([]) == ({}, {})
    spans = [(0, 4, "a"), (3, 6, "b"), (1, 2, "c"), (10, 11, "a"), (11, 12, "b"), (15, 16, "a")]
    spent, idle = share_out(spans)
    assert spent == {"a": 6, "b": 3, "c": 0}
    assert idle == {"a": 7}


def test_kernels_of_one_shortened_name_are_added_up() -> None:
    long = 60 * "k"
    assert per_step({f"{long}1": 90.0, "a": 50.0, f"{long}2": 10.0}, 2, 1) == {48 * "k": 50.0}


OF_MODULES = {
    "sparse attention": "index_scan top_rows choose_rows row_attention attend_rows sparse_select "
    "sparse_extend union_attention",
    "attention": "latent latent_decode latent_prompt paged_decode paged_extend",
    "matrix products": "gemv fp8 packed few_rows",
    "experts": "experts route",
    "sampling": "sampling",
    "host memory": "swap_in swap_rows",
}


@pytest.mark.parametrize("kind", OF_MODULES)
def test_kernels_count_for_what_they_compute(kind: str) -> None:
    folder = Path(cairn.__file__).parent / "kernels"
    for module in OF_MODULES[kind].split():
        names = re.findall(r"def (_\w+_kernel)\(", (folder / f"{module}.py").read_text())
        if (folder / f"{module}.cu").exists():
            names.append(module)
        assert names and {kind_of(name) for name in names} == {kind}, (module, names)
