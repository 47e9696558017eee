"""Dense attention by page, against transformers' own attention weights on the same model."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cairn import LLM
from cairn.attention.backend import AttentionShape
from cairn.attention.dense_pages import DensePages
from cairn.attention.torch_backend import TorchBackend
from cairn.engine.budgets import query_places, watch
from cairn.engine.inputs import StepInputs
from cairn.errors import ConfigError
from cairn.eval.recall import keep, measure
from cairn.eval.settings import Setting, make_settings, measure_settings
from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import LayerGroup
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import CacheLayout
from cairn.trace import LayerRead
from tests.helpers import TINY_HILS, byte_tokenizer, tokens_of, write_model

SIZE = 16
HSA: dict[str, Any] = {
    "device": "cpu",
    "kv_cache_gib": 0.05,
    "page_size": 2 * SIZE,
    "hsa_unit_size": SIZE,
    "attention_backend": "hsa",
    "hsa_window": SIZE,
    "hsa_prefill": "sparse",
    "hsa_dense_below": 0,
}


def attention_weights(folder: Path, ids: list[int]) -> torch.Tensor:
    """[layers, heads, pages] of the last token, from transformers."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        layers = model(torch.tensor([ids]), output_attentions=True).attentions
    weights = torch.stack([layer[0, :, -1] for layer in layers])
    padded = torch.nn.functional.pad(weights, (0, -len(ids) % SIZE))
    return padded.view(*weights.shape[:2], -1, SIZE).sum(-1)


@pytest.mark.parametrize("length", [40, 160, 203])
def test_shares_of_pages_are_those_of_dense_attention(folder: Path, length: int) -> None:
    ids = tokens_of(length, vocab=256)
    expected = attention_weights(folder, ids)
    with LLM(folder, **HSA, hsa_topk=100) as llm:
        watcher = watch(llm.engine)
        plain = llm.generate(ids, max_tokens=4, ignore_eos=True, trace=True)
        first = watcher.take()[0]
        assert first.cache_row == length - 1
        for layer, shares in first.shares.items():
            torch.testing.assert_close(shares, expected[layer], rtol=1e-4, atol=1e-6)
    with LLM(folder, **HSA, hsa_topk=100) as llm:
        assert llm.generate(ids, max_tokens=4, ignore_eos=True).token_ids == plain.token_ids


def test_recall_is_what_the_selected_pages_hold(folder: Path) -> None:
    """Few pages. Queries and keys of the first layer do not depend on what is selected."""
    ids = tokens_of(300, vocab=256)
    expected = attention_weights(folder, ids)[0]
    with LLM(folder, **HSA, hsa_topk=4, hsa_sinks=0) as llm:
        watcher = watch(llm.engine)
        trace = llm.generate(ids, max_tokens=1, trace=True).trace
        assert trace is not None
        (record,) = watcher.take()
        read = next(read for read in trace.tokens[0].layers if read.layer == 0)
        assert llm.engine.sparse is not None
        start = llm.engine.sparse.window_start(record.cache_row, SIZE)
        assert start == (299 - SIZE + 1) // SIZE
        kept = keep(record.shares[0], read, start)
    mass, far, best, top = [], [], [], []
    for head in range(4):
        selected = read.pages[head // 2]
        group = expected[head // 2 * 2 : head // 2 * 2 + 2, :start].sum(0)
        wanted = group.argsort(descending=True)[:4].tolist()
        mass.append(float(expected[head, selected].sum() + expected[head, start:].sum()))
        whole = float(expected[head, :start].sum())
        far.append(float(expected[head, selected].sum()) / whole)
        best.append(float(expected[head, wanted].sum()) / whole)
        top.append(len(set(selected) & set(wanted)) / 4)
    means = [sum(values) / 4 for values in (mass, far, best, top)]
    assert [kept.mass, kept.far, kept.best, kept.top] == pytest.approx(means, abs=1e-5)
    assert kept.far <= kept.best + 1e-9 < 1
    assert kept.read == pytest.approx((4 + 19 - start) / 19)


@pytest.mark.parametrize("backend", ["hsa", "torch,hsa"])
def test_all_pages_hold_everything(folder: Path, backend: str) -> None:
    options = {**HSA, "model": str(folder), "attention_backend": backend}
    options["hsa_prefill"] = "sparse" if backend == "hsa" else "dense"
    settings = make_settings(options, 400, ["quest", "mean"], [1.0], dense=False)
    rows = measure_settings(settings, "word of text. " * 50, 400, partial(measure, 3))
    assert [row["policy"] for row in rows] == ["quest", "mean"]
    for row in rows:
        assert [row[name] for name in ("mass", "far", "best", "top", "read")] == [1.0] * 5
        assert [layer["layer"] for layer in row["layers"]] == [0, 1]


def test_landmark_rows_do_not_count(tmp_path: Path) -> None:
    config = {**TINY_HILS, "vocab_size": 256, "max_position_embeddings": 4096}
    folder = write_model(tmp_path / "hils", config)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    options: dict[str, Any] = {"model": str(folder), "device": "cpu", "kv_cache_gib": 0.05}
    settings = make_settings(options, 300, None, [0.5, 1.0], dense=False)
    assert [s.name for s in settings] == ["as trained", "hils 50%", "hils 100%"]
    rows = measure_settings(settings, "word of text. " * 50, 300, partial(measure, 2))
    assert 0 < rows[0]["mass"] < rows[1]["mass"] < rows[2]["mass"] == 1.0
    with LLM(**options) as llm:
        watcher = watch(llm.engine)
        llm.generate(tokens_of(100, vocab=256), max_tokens=1, trace=True)
        (record,) = watcher.take()
        assert record.cache_row == 100 // 15 * 16 + 100 % 15 - 1
        for shares in record.shares.values():
            assert shares.shape == (4, 7)
            torch.testing.assert_close(shares.sum(-1), torch.ones(4))


def test_shares_of_a_batch_by_hand() -> None:
    """Two sequences on pages anywhere, landmark rows with keys that would take everything."""
    kv_heads, heads, dim, size, scale = 2, 4, 8, 4, 0.3
    generator = torch.Generator().manual_seed(0)
    groups = (LayerGroup("full", (0,), layout=CacheLayout.of_heads(kv_heads, dim, torch.float64)),)
    pool = KVPool(groups, [20], size, torch.device("cpu"))
    pool.part(0).copy_(torch.randn(pool.part(0).shape, generator=generator))
    pool.part(0)[:, :, size - 1] = 1e3
    shape = AttentionShape(
        heads, kv_heads, dim, scale, size, torch.float64, torch.device("cpu"), groups
    )
    tables = np.array([[7, 3, 12, 5], [9, 1, 0, 0]])
    inputs = StepInputs.made_up(size, [3, 1], [14, 6], [tables], traced_rows=[2, 3])
    batch = inputs.send(torch.device("cpu"), True).batch
    selected = PageGeometry(size, size - 1)
    watcher = DensePages(TorchBackend(shape, pool), pool, selected, layers=[0], scale=scale)
    query = torch.randn(4, heads, dim, generator=generator, dtype=torch.float64)
    metadata = watcher.prepare(batch)
    watcher.begin(metadata)
    out = watcher.forward(0, query, metadata)
    plain = TorchBackend(shape, pool)
    torch.testing.assert_close(out, plain.forward(0, query, plain.prepare(batch)))
    records = watcher.take()
    assert [record.cache_row for record in records] == [13, 5] and not watcher.take()
    for row, record, table in zip((2, 3), records, tables, strict=True):
        for head in range(heads):
            weights: dict[int, float] = {}
            for place in range(record.cache_row + 1):
                if place % size < size - 1:
                    key = pool.part(0)[int(table[place // size]), head // 2, place % size]
                    weight = math.exp(scale * float(query[row, head] @ key))
                    weights[place // size] = weights.get(place // size, 0.0) + weight
            expected = [weight / sum(weights.values()) for weight in weights.values()]
            assert record.shares[0][head].tolist() == pytest.approx(expected, rel=1e-5)


def test_nothing_far_away_is_nothing_lost() -> None:
    shares = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    read = LayerRead(0, [[]], [[[], []]], [1.0, 1.0])
    kept = keep(shares, read, 0)
    assert (kept.mass, kept.far, kept.best, kept.top, kept.read) == (1.0, 1.0, 1.0, 1.0, 1.0)


def test_query_places() -> None:
    assert query_places(50, 100, 4) == [62, 75, 87, 100]
    assert query_places(2, 5, 16) == [2, 3, 4, 5]


def test_budgets_become_pages(folder: Path) -> None:
    options: dict[str, Any] = {"model": str(folder), "hsa_sinks": 2}
    settings = make_settings(options, 6400, None, [0.12, 0.5, 1.0], dense=True)
    assert [s.topk for s in settings] == [None, 9, 47, 100]
    plain = {"model": str(folder), "page_size": 64, "attention_backend": "auto"}
    assert settings[0] == Setting("dense", plain)
    assert settings[1].options["hsa_window"] == 128 and settings[1].options["hsa_sinks"] == 2
    (given,) = make_settings({**options, "hsa_topk": 7}, 6400, ["mean"], [0.5], dense=False)
    assert (given.name, given.topk, given.budget) == ("mean top-7", 7, None)
    with pytest.raises(ConfigError, match="12%: of 10 pages that is 1, and the window"):
        make_settings(options, 640, None, [0.12], dense=False)
