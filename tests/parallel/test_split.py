"""What each rank takes of a checkpoint: all of it together, and little of it twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cairn.engine.parallel.rank_process import Compiled
from cairn.errors import LoadError
from cairn.kernels.compilations import CompilationCounts
from cairn.models.config_reader import ConfigReader
from cairn.models.decoder import CausalLM
from cairn.models.layers import named_slots
from cairn.models.loader import build_model
from cairn.models.module import TensorSlot
from cairn.models.parallel import Alone
from tests.helpers import GOLDENS, TINY_HILS, TINY_LLAMA, TINY_OLMO3, tokens_of, write_model
from tests.models.test_gguf import write_gguf
from tests.parallel.ranks import SPARSE, lead, load


def model_of(config: dict[str, Any], rank: int, size: int) -> CausalLM:
    place = Alone(rank, size)
    model = build_model(ConfigReader(config, "test"), torch.float32, torch.device("cpu"), place)
    assert isinstance(model, CausalLM)
    return model


def numbers(model: CausalLM) -> int:
    return sum(tensor.numel() for _, tensor in model.named_tensors())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rows", [1, 5, 8, 61])
def test_shares_of_a_tensor_put_together(rows: int, size: int) -> None:
    whole = torch.arange(rows * 3.0).view(rows, 3)
    part = -(-rows // size)
    parts = []
    for rank in range(size):
        target = torch.full((part, 3), float("nan"))
        slot = TensorSlot((part, 3), target.copy_)
        shared = slot.share(0, Alone(rank, size), rows)
        assert shared.shape == (rows, 3)
        shared.write(whole)
        parts.append(target)
    together = torch.cat(parts)
    assert torch.equal(together[:rows], whole)
    assert (together[rows:] == 0).all()


@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_OLMO3, TINY_HILS])
def test_ranks_want_the_same_checkpoint_and_hold_half_of_it(config: dict[str, Any]) -> None:
    whole = model_of(config, 0, 1)
    expected = {name: slot.shape for name, slot in named_slots(whole).items()}
    for rank in range(2):
        part = model_of(config, rank, 2)
        assert {name: slot.shape for name, slot in named_slots(part).items()} == expected
        # Norms, the rows that pad the vocabulary and HiLS's narrow matrices are on both.
        assert numbers(part) < 0.53 * numbers(whole)


def test_a_tied_head_that_differs_is_refused_by_the_rank_that_has_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path, {**TINY_LLAMA, "tie_word_embeddings": True})
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors")
    model = model_of({**TINY_LLAMA, "tie_word_embeddings": True}, 1, 2)
    named_slots(model)["model.embed_tokens.weight"].write(tensors["model.embed_tokens.weight"])
    assert model.model.embed_tokens.agrees_with(head)
    head[-1] += 1  # row 60, of rank 1
    assert not model.model.embed_tokens.agrees_with(head)
    assert not model.model.embed_tokens.agrees_with(head[:-1])
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors")
    with pytest.raises(LoadError, match=r"lm_head\.weight differs"):
        load(folder, 1)


@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_HILS])
def test_dummy_weights_do_not_depend_on_ranks(config: dict[str, Any], tmp_path: Path) -> None:
    folder = write_model(tmp_path, config)
    (folder / "model.safetensors").unlink()
    scores = []
    for tp in (1, 2):
        with load(folder, tp, load_format="dummy", dtype="float64") as llm:
            scores.append(llm.logprobs(tokens_of(50)))
    torch.testing.assert_close(*scores, rtol=0, atol=1e-6)


def test_a_gguf_file(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "folder", TINY_LLAMA)
    path = write_gguf(tmp_path / "model.gguf", folder)
    scores = []
    for model, tp in ((folder, 1), (path, 2)):
        with load(model, tp) as llm:
            scores.append(llm.logprobs(tokens_of(50)))
    torch.testing.assert_close(*scores, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["hf_olmo3_mha_swa", "olmo_hope_qcal_mha"])
def test_four_ranks(case: str) -> None:
    """61 tokens of the vocabulary, 16 to a rank."""
    scores = []
    for tp in (1, 4):
        with load(GOLDENS / case, tp, page_size=None) as llm:
            scores.append(llm.logprobs(tokens_of(100)))
    torch.testing.assert_close(*scores, rtol=0, atol=1e-4)


def test_a_trace_has_the_heads_of_all_ranks(tmp_path: Path) -> None:
    folder = write_model(tmp_path, TINY_LLAMA)
    traces = []
    for tp in (1, 2):
        with load(folder, tp, dtype="float64", **SPARSE) as llm:
            traces.append(llm.generate(tokens_of(150), max_tokens=6, trace=True).trace)
    one, two = traces
    assert one is not None and two is not None
    for ours, theirs in zip(two.tokens, one.tokens, strict=True):
        for read, expected in zip(ours.layers, theirs.layers, strict=True):
            assert len(read.pages) == 2 and read.pages == expected.pages
            torch.testing.assert_close(
                torch.tensor(read.weights), torch.tensor(expected.weights), rtol=0, atol=1e-6
            )


def test_host_memory_is_shared_by_the_ranks_and_holds_as_many_pages(tmp_path: Path) -> None:
    """Half the heads of every page in half the memory."""
    folder = write_model(tmp_path, TINY_LLAMA)
    options = {**SPARSE, "enable_hisparse": True, "hisparse_config": '{"host_gib": 0.002}'}
    pages = []
    for tp in (1, 2):
        with load(folder, tp, **options) as llm:
            report = llm.engine.tier()
            assert report is not None
            pages.append(sum(report.pages.values()))
    assert pages[0] == pages[1] > 100


def test_compilations_of_all_ranks_are_counted(tmp_path: Path) -> None:
    """A CPU compiles nothing: what rank 1 would say is put in its mouth."""
    with load(write_model(tmp_path, TINY_LLAMA), 2) as llm:
        assert llm.engine.compilations == CompilationCounts(0, 0)
        ranks = lead(llm.engine).ranks
        for counts in (CompilationCounts(3, 0), CompilationCounts(3, 1)):
            ranks._take(1, Compiled(counts))
            assert llm.engine.compilations == counts
