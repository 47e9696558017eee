"""Kernels over latent rows and index keys of 8 bits, in Triton's interpreter (see
`interpreted`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cairn import LLM
from cairn.attention.dsa_backend import DSABackend
from cairn.attention.dsa_kernels import RowKernels
from cairn.attention.triton_backend import TritonBackend
from cairn.kernels.fp8_rows import FP8
from tests.helpers import poison_free_memory, tokens_of
from tests.kernels import latent_case, row_case
from tests.kernels.interpreted_rows import indexed_model

CPU = torch.device("cpu")
TYPES = pytest.mark.parametrize("narrow", [FP8, torch.int8], ids=["fp8", "int8"])


@TYPES
@pytest.mark.parametrize("width", [576, 48])
def test_rows_are_stored_as_in_torch(width: int, narrow: torch.dtype) -> None:
    # The interpreter rounds 1.97 to 1.0 instead of 2.0, and so on.
    row_case.check_store(width, CPU, narrow)


@TYPES
@pytest.mark.parametrize(
    ("lengths", "new", "sizes"),
    [
        ([1, 17, 70], [1, 1, 1], latent_case.Sizes(4, 32, 16, 16)),
        ([70, 33, 5], [9, 1, 5], latent_case.Sizes(3, 128, 64, 16)),
        ([40], [1], latent_case.Sizes(2, 256, 32, 64)),
    ],
)
def test_latent_attention(
    lengths: list[int], new: list[int], sizes: latent_case.Sizes, narrow: torch.dtype
) -> None:
    latent_case.check(lengths, new, sizes, CPU, torch.float32, tolerance=1e-5, narrow=narrow)


def test_forms_of_latent_attention() -> None:
    latent_case.check_forms(CPU, torch.float32, tolerance=1e-5, narrow=FP8)


@TYPES
@pytest.mark.parametrize("sizes", [(4, 32, 16, 16), (2, 256, 64, 64)])
def test_row_attention(sizes: tuple[int, int, int, int], narrow: torch.dtype) -> None:
    own = latent_case.Sizes(*sizes)
    row_case.check_attention([1, 0, 50], 50, own, CPU, torch.float32, tolerance=1e-5, narrow=narrow)


@TYPES
@pytest.mark.parametrize("described", [False, True])
def test_index_scan(narrow: torch.dtype, described: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.kernels.index_scan.can_describe", lambda *_: described)
    for lengths, new, sizes, dtype in (
        ([90, 70, 5, 1], [9, 1, 5, 1], row_case.Sizes(2, 16, 16), torch.float32),
        ([70, 130], [1, 1], row_case.Sizes(5, 128, 128), torch.float32),
        ([70, 130], [3, 1], row_case.Sizes(5, 128, 64), torch.float16),
    ):
        tolerance = 1e-6 if dtype == torch.float32 else 1e-3
        row_case.check_scan(
            lengths, new, sizes, CPU, dtype, tolerance=tolerance, per_item=4, narrow=narrow
        )


def test_a_whole_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of prompts and decode over shared selections, by kernels and in torch."""
    monkeypatch.setattr(TritonBackend, "unavailable_reason", staticmethod(lambda _: None))
    folder, answers = indexed_model(tmp_path), []
    prompt = tokens_of(18, seed=1, vocab=64)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.02}
    options |= {"page_size": 16, "max_running_requests": 1, "kv_cache_dtype": "fp8"}
    for kernels in (False, True):
        if kernels:
            monkeypatch.setattr(RowKernels, "refusal", staticmethod(lambda *_: None))
        with LLM(folder, **options) as llm:
            poison_free_memory(llm.engine)
            result = llm.generate(prompt, max_tokens=2, ignore_eos=True)
            backend = llm.engine.runner.stepper.backend
            assert isinstance(backend, DSABackend) and (backend._kernels is not None) == kernels
        answers.append(result.token_ids)
    assert answers[0] == answers[1]
