"""The last layer computes only the rows whose tokens are sampled, and stores keys of all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cairn import LLM
from cairn.attention.attend import Attend
from cairn.attention.sgl_kernel_backend import SglKernelBackend, SglMetadata
from cairn.attention.torch_backend import TorchBackend
from cairn.models import decoder
from tests.helpers import TINY_HILS, TINY_LLAMA, TINY_OLMO3, tokens_of, write_model

_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (TINY_LLAMA, {}),
    "olmo": (TINY_OLMO3, {}),
    "hils": (TINY_HILS, {}),
    "hsa": (TINY_LLAMA, {"attention_backend": "hsa", "page_size": 16, "hsa_topk": 1}),
}


@pytest.mark.parametrize("case", _CASES)
def test_tokens_are_those_of_whole_layers(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several chunks: only the last one's outputs are read."""
    config, options = _CASES[case]
    write_model(tmp_path, config)
    prompts = [tokens_of(150, 0), tokens_of(153, 1)]
    answers = []
    left_out: list[int] = []  # layers
    forward = Attend.forward

    def note(self: Attend, layer: int, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = forward(self, layer, query, *rest)
        if out is query:
            left_out.append(layer)
        return out

    monkeypatch.setattr(Attend, "forward", note)
    for least in (8, 10**9):
        monkeypatch.setattr(decoder, "CUT_ROWS", least)
        with LLM(tmp_path, device="cpu", chunked_prefill_size=64, threads=1, **options) as llm:
            results = [llm.generate(one, max_tokens=12, ignore_eos=True) for one in prompts]
        answers.append([result.token_ids for result in results])
    assert answers[0] == answers[1]
    assert left_out == [config["num_hidden_layers"] - 1] * 4  # two chunks of each prompt


def test_a_dense_backend_computes_sampled_rows_for_hsa(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all rows of a step are dense; the landmarks of its pages are saved all the same."""
    write_model(tmp_path, TINY_LLAMA)
    prompts = [tokens_of(150, 0), tokens_of(40, 1)]
    asked: list[int] = []  # rows

    def some(
        self: TorchBackend, layer: int, query: torch.Tensor, rows: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        asked.append(len(rows))
        return self.forward(layer, query, *rest)[rows] if len(rows) else query[:0]

    monkeypatch.setattr(TorchBackend, "forward_rows", some)
    answers = []
    for least in (8, 10**9):
        monkeypatch.setattr(decoder, "CUT_ROWS", least)
        with LLM(
            tmp_path,
            **{"device": "cpu", "chunked_prefill_size": 64, "threads": 1, "page_size": 16},
            **{"attention_backend": "hsa", "hsa_topk": 1, "hsa_window": 16, "hsa_dense_below": 0},
        ) as llm:
            results = llm.generate(prompts, max_tokens=24, ignore_eos=True)
        answers.append([result.token_ids for result in results])
    assert answers[0] == answers[1]
    assert asked == [2]  # both prompts end in one step


def test_rows_are_sequences_of_their_own_to_flash_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three sequences of 4, 1 and 3 new rows, and one without any; rows in any order."""
    seen: list[SglMetadata] = []

    def attend(_: object, layer: int, query: torch.Tensor, metadata: SglMetadata) -> torch.Tensor:
        seen.append(metadata)
        return query

    monkeypatch.setattr(SglKernelBackend, "attend", attend)
    table = torch.arange(8).view(4, 2)
    cu_query = torch.tensor([0, 4, 5, 8, 8], dtype=torch.int32)
    step = SglMetadata(torch.tensor([20, 7, 30, 0], dtype=torch.int32), cu_query, 4, (table,), {})
    query, rows = torch.randn(8, 2, 4), torch.tensor([7, 3, 4, 0, 0, 5])
    backend = SglKernelBackend.__new__(SglKernelBackend)
    out = backend.forward_rows(0, query, rows, step)
    assert out is not None and torch.equal(out, query[rows])
    (own,) = seen
    assert own.kv_lens.tolist() == [30, 20, 7, 17, 17, 28]
    assert own.tables[0].tolist() == table[[2, 0, 1, 0, 0, 2]].tolist()
    assert own.cu_query.tolist() == list(range(7)) and own.max_query == 1
    assert own.kv_lens.dtype == own.cu_query.dtype == torch.int32
