"""Options of sparse attention: bad ones are refused by name, good ones change what is computed."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn import LLM, EngineConfig
from cairn.cli_flags import add_flags, collect
from cairn.engine.attention_options import plan_attention
from cairn.engine.sampling_params import MAX_LOGPROBS
from cairn.errors import ConfigError
from cairn.models.config_reader import ConfigReader
from cairn.models.registry import read_spec
from cairn.outputs import Generation
from cairn.sparsity.config import ALL_ROWS
from tests.helpers import GOLDENS, TINY, TINY_LLAMA, TINY_OLMO3, tokens_of, write_model

PAGE, LENGTH, ANSWER = 16, 200, 8
VOCAB = MAX_LOGPROBS  # so that whole distributions come in float64
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**TINY_LLAMA, "vocab_size": VOCAB},
    "qwen3": {
        **TINY,
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 12,
        "vocab_size": VOCAB,
    },
    "olmo3": {**TINY_OLMO3, "vocab_size": VOCAB},
    "windows-only": {
        **TINY_OLMO3,
        "vocab_size": VOCAB,
        "layer_types": ["sliding_attention"] * 3,
    },
}
HILS = GOLDENS / "qwen_hope_qcal_gqa"  # chunks of 16, top-4, policy hils
KEYED = GOLDENS / "qwen_hope_wo_prior_gqa"  # the same with policy landmark-key
PROMPT = tokens_of(LENGTH, vocab=VOCAB)
SPARSE: dict[str, Any] = {"attention_backend": "hsa", "hsa_topk": 2, "hsa_window": PAGE}
SPARSE |= {"hsa_unit_size": PAGE, "hsa_prefill": "sparse"}
FLAGS = ["--attention-backend", "hsa", "--hsa-topk", "2", "--hsa-window", str(PAGE)]
FLAGS += ["--hsa-unit-size", str(PAGE), "--hsa-prefill", "sparse"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    own = {
        name: write_model(tmp_path_factory.mktemp("models") / name, config)
        for name, config in CONFIGS.items()
    }
    return {**own, "hils": HILS, "keyed": KEYED}


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders["llama"]


def load(folder: Path, **options: Any) -> LLM:
    page_size = {} if "page_size" in options or folder.parent == GOLDENS else {"page_size": PAGE}
    return LLM(folder, device="cpu", dtype="float64", **page_size, **options)


def logprobs(folder: Path, **options: Any) -> torch.Tensor:
    return _logprobs(folder, tuple(options.items()))


@cache
def _logprobs(folder: Path, options: tuple[tuple[str, Any], ...]) -> torch.Tensor:
    with load(folder, **dict(options)) as llm:
        found = llm.logprobs(PROMPT)
    assert torch.isfinite(found).all()
    return found


def generated(folder: Path, *, trace: bool = False, **options: Any) -> Generation:
    return _generated(folder, trace, tuple(options.items()))


@cache
def _generated(folder: Path, trace: bool, options: tuple[tuple[str, Any], ...]) -> Generation:
    with load(folder, **dict(options)) as llm:
        return llm.generate(
            PROMPT,
            trace=trace,
            max_tokens=ANSWER,
            ignore_eos=True,
            logprobs=VOCAB,
            prompt_logprobs=VOCAB,
        )


def distributions(result: Generation) -> torch.Tensor:
    """float64 [tokens after the first, vocab], of the prompt and of the answer."""
    assert result.prompt_logprobs is not None and result.logprobs is not None
    scores = [score for score in result.prompt_logprobs if score is not None] + result.logprobs
    rows = [[logprob for _, logprob in sorted(score.top)] for score in scores]
    return torch.tensor(rows, dtype=torch.float64)


def parsed(*flags: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, EngineConfig)
    return collect(parser.parse_args(flags), EngineConfig)


def traced_pages(result: Generation) -> list[list[int]]:
    """Pages of every token, sparse layer and kv head."""
    assert result.trace is not None
    return [pages for token in result.trace.tokens for read in token.layers for pages in read.pages]


# -- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"hsa_topk": 0}, "hsa_topk is 0"),
        ({"hsa_topk": -3}, "hsa_topk is -3"),
        ({"hsa_topk": 1.5}, "hsa_topk is 1.5"),
        ({"hsa_topk": True}, "hsa_topk is True"),
        ({"hsa_topk": "4"}, "hsa_topk is '4'"),
        ({"hsa_window": 0}, "hsa_window is 0"),
        ({"hsa_window": 2**31}, "hsa_window is 2147483648"),
        ({"hsa_sinks": -1}, "hsa_sinks is -1"),
        ({"hsa_dense_below": -1}, "hsa_dense_below is -1"),
        ({"hsa_dense_layers": -1}, "hsa_dense_layers is -1"),
        ({"hsa_top_p": 0}, "hsa_top_p is 0"),
        ({"hsa_top_p": 1.5}, "hsa_top_p is 1.5"),
        ({"hsa_selection_strategy": "best"}, "hsa_selection_strategy is 'best'; choose one of"),
        ({"hsa_selection_strategy": ""}, "hsa_selection_strategy is ''"),
        ({"hsa_fusion": "sum"}, "hsa_fusion is 'sum'; choose one of landmark, lse"),
        ({"hsa_policy": 3}, "hsa_policy is 3; it must be a string"),
        ({"hsa_layers": 1}, "hsa_layers is 1; it must be a string"),
        ({"hsa_layers": [0, 1]}, r"hsa_layers is \[0, 1\]; it must be a string"),
        ({"attention_backend": 5}, "attention_backend is 5"),
        ({"attention_backend": 3}, "attention_backend is 3"),
        ({"page_size": 0}, "page_size is 0"),
    ],
)
def test_bad_values_are_refused_by_name(folder: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(folder, **{"attention_backend": "hsa", **options})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"hsa_policy": "qest"}, "hsa_policy is 'qest'; choose one of hils, landmark-key, quest"),
        ({"hsa_policy": "no_such:Policy"}, "hsa_policy 'no_such:Policy' cannot be imported"),
        ({"hsa_policy": "json:JSONDecoder"}, "hsa_policy 'json:JSONDecoder' is not a subclass"),
        ({"hsa_unit_size": 5}, "hsa_unit_size is 5 and page_size 16.*use a divisor of 16"),
        ({"hsa_unit_size": 32}, "hsa_unit_size is 32 and page_size 16"),
        (
            {"hsa_unit_size": 8, "enable_hisparse": True},
            "hsa_unit_size is 8 and page_size 16; enable_hisparse moves.*use page_size=8",
        ),
        ({"hsa_sinks": 3, "hsa_topk": 2}, "hsa_sinks is 3 and hsa_topk 2"),
        ({"hsa_sinks": 112}, "hsa_sinks is 112 and hsa_topk 111"),
        ({"hsa_sinks": 33, "hsa_policy": "quest"}, "hsa_sinks is 33 and hsa_topk 32"),
        ({"hsa_layers": "2"}, "hsa_layers is '2'; the model has layers 0-1"),
        ({"hsa_layers": "0-2"}, "hsa_layers is '0-2'; the model has layers 0-1"),
        ({"hsa_layers": "1-0"}, "hsa_layers is '1-0';.*ranges ascend"),
        ({"hsa_layers": ""}, "hsa_layers is ''; write layers and ranges such as 0-3,7"),
        ({"hsa_layers": "-1"}, "hsa_layers is '-1'; write"),
        ({"hsa_layers": "0-"}, "hsa_layers is '0-'; write"),
        ({"hsa_layers": "0,"}, "hsa_layers is '0,'; write"),
        ({"hsa_layers": "0-1-1"}, "hsa_layers is '0-1-1'; write"),
        ({"hsa_layers": "first"}, "hsa_layers is 'first'; write"),
        ({"hsa_layers": "0.5"}, "hsa_layers is '0.5'; write"),
        ({"hsa_dense_layers": 2}, "hsa_dense_layers is 2; .* use at most 1"),
        ({"hsa_dense_layers": 1, "hsa_layers": "1"}, "hsa_dense_layers is 1 and hsa_layers '1'"),
        ({"hsa_policy": "streaming", "hsa_topk": 4}, "hsa_topk is given.*leave hsa_topk out"),
        ({"hsa_policy": "streaming", "hsa_top_p": 0.5}, "hsa_top_p is given"),
        ({"hsa_policy": "streaming", "hsa_sinks": 0}, "hsa_sinks is 0"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused_by_name(
    folder: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        load(folder, attention_backend="hsa", **options)


@pytest.mark.parametrize("layers", ["0", "0-1", "1,2"])
def test_layers_with_a_sliding_window_are_refused(folders: dict[str, Path], layers: str) -> None:
    with pytest.raises(ConfigError, match=rf"hsa_layers is '{layers}', but layer \d has a sliding"):
        load(folders["olmo3"], attention_backend="hsa", hsa_layers=layers)


def test_a_model_of_windows_only_has_nothing_for_sparse_attention(
    folders: dict[str, Path],
) -> None:
    assert logprobs(folders["windows-only"]).shape == (LENGTH, VOCAB)
    with pytest.raises(ConfigError, match="no full-attention layer for hsa"):
        load(folders["windows-only"], attention_backend="hsa")


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hsa_policy", "quest"),
        ("hsa_topk", 4),
        ("hsa_selection_strategy", "head"),
        ("hsa_layers", "0"),
        ("hsa_window", 64),
        ("hsa_sinks", 0),
        ("hsa_fusion", "lse"),
        ("hsa_dense_below", 0),
        ("hsa_dense_layers", 1),
        ("hsa_top_p", 0.5),
        ("hsa_prefill", "sparse"),
    ],
)
def test_options_of_sparse_attention_are_refused_without_it(
    folder: Path, backend: str, name: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is given but attention_backend is '{backend}'"):
        load(folder, attention_backend=backend, **{name: value})


@pytest.mark.parametrize("backend", ["hsa,torch", "hsa,hsa", "torch,hsa,hsa", "hsa,"])
def test_bad_pairs_are_refused(folder: Path, backend: str) -> None:
    with pytest.raises(ConfigError, match=rf"attention_backend is '{backend}'; .* hsa"):
        load(folder, attention_backend=backend)


@pytest.mark.parametrize(
    ("backend", "unknown"), [("magic", "magic"), ("magic,hsa", "magic"), (",hsa", ""), ("", "")]
)
def test_unknown_backends_are_refused(folder: Path, backend: str, unknown: str) -> None:
    with pytest.raises(ConfigError, match=rf"attention_backend is '{unknown}'; choose one of"):
        load(folder, attention_backend=backend)


@pytest.mark.parametrize(
    ("model", "policy", "named"),
    [
        (
            "llama",
            "hils",
            "'hils' needs a model trained with landmark rows.*Llama.*spread or quest",
        ),
        ("olmo3", "landmark-key", "'landmark-key' needs a model trained with landmark rows"),
        ("hils", "quest", "is 'quest', but HiLSForCausalLM was trained with 'hils'"),
        ("hils", "mean", "is 'mean', but HiLSForCausalLM was trained with 'hils'"),
        ("hils", "landmark-key", "is 'landmark-key'.* trained with 'hils'"),
        ("keyed", "hils", "is 'hils'.* trained with 'landmark-key'"),
        ("hils", "tests.sparsity.test_policies:ToyPolicy", "is 'tests.* trained with 'hils'"),
    ],
)
def test_policies_and_models_that_do_not_go_together_are_refused(
    folders: dict[str, Path], model: str, policy: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=f"hsa_policy {named}"):
        load(folders[model], attention_backend="hsa", hsa_policy=policy)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"attention_backend": "torch"}, "attention_backend is 'torch'; HiLSForCausalLM was"),
        ({"attention_backend": "torch,hsa"}, "attention_backend is 'torch,hsa'; HiLSForCausalLM"),
        ({"attention_backend": "auto,hsa"}, "attention_backend is 'auto,hsa'"),
        ({"attention_backend": "hsa,hsa"}, "attention_backend is 'hsa,hsa'"),
        ({"attention_backend": "magic"}, "attention_backend is 'magic'"),
        ({"page_size": 64}, "page_size is 64 and the model's chunk_size 16.*use page_size=16"),
        ({"page_size": 15}, "page_size is 15 and the model's chunk_size 16"),
        ({"hsa_layers": "0"}, "hsa_layers is '0', but HiLSForCausalLM was trained with its own"),
        ({"hsa_window": 32}, "hsa_window is 32, but"),
        ({"hsa_sinks": 0}, "hsa_sinks is 0, but"),
        ({"hsa_fusion": "landmark"}, "hsa_fusion is 'landmark', but"),
        ({"hsa_dense_below": 0}, "hsa_dense_below is 0, but"),
        ({"hsa_dense_layers": 1}, "hsa_dense_layers is 1, but"),
        ({"hsa_unit_size": 8}, "hsa_unit_size is 8, but"),
        ({"hsa_top_p": 0.5}, "hsa_top_p is 0.5, but"),
        ({"hsa_prefill": "dense"}, "hsa_prefill is 'dense', but"),
        ({"hsa_topk": 0}, "hsa_topk is 0"),
        ({"hsa_selection_strategy": "best"}, "hsa_selection_strategy is 'best'"),
    ],
)
def test_what_a_model_was_trained_with_is_not_changed(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(HILS, **options)


def test_the_default_keeps_facts_where_no_kernel_is_slowed_down() -> None:
    config = EngineConfig(attention_backend="hsa")
    spec = read_spec(ConfigReader({**TINY_LLAMA, "vocab_size": VOCAB}, "config.json"))
    plans = {device: plan_attention(config, spec, device) for device in ("cpu", "cuda")}
    units = "top-111 units of 8 rows in pages of 64 rows"
    assert f"spread, 2 of 2 layers, {units}, window 128" in plans["cpu"].notes[0]
    assert "quest, 2 of 2 layers, top-32 pages of 64 rows, window 512" in plans["cuda"].notes[0]
    sparse = plans["cpu"].sparse
    assert sparse is not None
    # A token at 4,095 reads at most a quarter of the rows: its window, and the selected pages.
    rows = 4096 - 8 * sparse.window_start(4095, 8) + 8 * sparse.topk
    assert rows <= 1024


# -- effects ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ["--hsa-policy", "mean"],
        ["--hsa-policy", "quest"],
        ["--hsa-dense-layers", "1"],
        ["--hsa-top-p", "0.5", "--hsa-dense-below", "0"],
        ["--hsa-topk", "3"],
        ["--hsa-selection-strategy", "group"],
        ["--hsa-selection-strategy", "head"],
        ["--hsa-layers", "1"],
        ["--hsa-window", "17"],
        ["--hsa-sinks", "0"],
        ["--hsa-sinks", "2"],
        ["--hsa-fusion", "landmark"],
        ["--hsa-dense-below", "100"],
        ["--hsa-prefill", "dense"],
        ["--hsa-unit-size", "8"],
    ],
    ids=" ".join,
)
def test_every_flag_changes_the_output(folder: Path, flags: list[str]) -> None:
    before, after = parsed(*FLAGS), parsed(*FLAGS, *flags)
    assert before != after
    change = logprobs(folder, **after) - logprobs(folder, **before)
    assert change.abs().max() > 0.01


@pytest.mark.parametrize(
    "flags",
    [
        ["--hsa-policy", "spread"],
        ["--hsa-selection-strategy", "softmax_head"],
        ["--hsa-layers", "0-1"],
        ["--hsa-sinks", "1"],
        ["--hsa-fusion", "lse"],
        ["--page-size", "32"],
    ],
    ids=" ".join,
)
def test_naming_a_default_or_another_page_size_changes_nothing(
    folder: Path, flags: list[str]
) -> None:
    before, after = parsed(*FLAGS), parsed(*FLAGS, *flags)
    change = logprobs(folder, **after) - logprobs(folder, **before)
    assert change.abs().max() < 1e-12


def test_streaming_reads_the_sinks_and_the_window(folder: Path) -> None:
    own = {"attention_backend": "hsa", "hsa_policy": "streaming", "hsa_prefill": "sparse"}
    result = generated(folder, trace=True, hsa_sinks=2, hsa_window=PAGE, **own)
    pages = traced_pages(result)
    assert pages and all(each == [0, 1] for each in pages)


def test_top_p_reads_fewer_pages_of_the_same_order(folder: Path) -> None:
    own = {**SPARSE, "hsa_topk": 6, "hsa_dense_below": 0}
    every, some = (
        traced_pages(generated(folder, trace=True, **own, **more))
        for more in ({}, {"hsa_top_p": 0.5})
    )
    assert set(some[0]) < set(every[0])
    assert sum(map(len, some)) < sum(map(len, every))


def test_the_first_layers_can_stay_dense(folder: Path) -> None:
    result = generated(folder, trace=True, hsa_dense_layers=1, **SPARSE)
    assert result.trace is not None
    assert {read.layer for token in result.trace.tokens for read in token.layers} == {1}


@pytest.mark.parametrize("below", [{}, {"hsa_dense_below": 0}], ids=["dense", "selected"])
@pytest.mark.parametrize(("topk", "window"), [(1, 16), (2, 16), (2, 17), (3, 40)])
def test_a_row_is_dense_until_more_pages_than_top_k_lie_before_its_window(
    folder: Path, topk: int, window: int, below: dict[str, int]
) -> None:
    """Such rows go to the dense backend, unless every row is to select: the result is the same."""
    options: dict[str, Any] = {**SPARSE, "hsa_topk": topk, "hsa_window": window, **below}
    gap = distributions(generated(folder, **options)) - distributions(generated(folder))
    first = (topk + 1) * PAGE + window - 1
    assert gap[:first].abs().max() < 1e-9
    assert gap[first].abs().max() > 1e-6


@pytest.mark.parametrize("model", ["llama", "qwen3", "olmo3"])
@pytest.mark.parametrize("policy", ["quest", "mean", "spread"])
def test_with_every_page_selected_attention_is_dense(
    folders: dict[str, Path], model: str, policy: str
) -> None:
    dense = generated(folders[model])
    options = {**SPARSE, "hsa_policy": policy, "hsa_topk": 32, "chunked_prefill_size": 90}
    options["hsa_dense_below"] = 0
    sparse = generated(folders[model], trace=True, **options)
    assert any(traced_pages(sparse))
    assert sparse.token_ids == dense.token_ids
    gap = distributions(sparse) - distributions(dense)
    assert gap.shape == (LENGTH - 1 + ANSWER, VOCAB)
    assert gap.abs().max() < 1e-9


@pytest.mark.parametrize("model", ["llama", "qwen3", "olmo3"])
def test_dense_below_the_whole_length_is_dense(folders: dict[str, Path], model: str) -> None:
    dense = generated(folders[model])
    below = LENGTH + ANSWER
    all_dense = generated(folders[model], trace=True, **SPARSE, hsa_dense_below=below)
    assert not any(traced_pages(all_dense))
    assert all_dense.token_ids == dense.token_ids
    assert (distributions(all_dense) - distributions(dense)).abs().max() < 1e-9


@pytest.mark.parametrize("below", [96, 100, 150])
def test_rows_below_dense_below_see_everything_and_later_ones_do_not(
    folder: Path, below: int
) -> None:
    sparse = generated(folder, **SPARSE, hsa_dense_below=below)
    gap = distributions(sparse) - distributions(generated(folder))
    assert gap[:below].abs().max() < 1e-9
    assert gap[below].abs().max() > 1e-6


@pytest.mark.parametrize("prefill", [None, "dense"])
@pytest.mark.parametrize("model", ["llama", "olmo3"])
@pytest.mark.parametrize("backend", ["hsa", "torch,hsa", "auto,hsa", " torch , hsa "])
def test_prompts_are_read_densely_and_answers_sparsely(
    folders: dict[str, Path], model: str, backend: str, prefill: str | None
) -> None:
    options = {**SPARSE, "attention_backend": backend, "hsa_prefill": prefill}
    pair, dense = generated(folders[model], **options), generated(folders[model])
    gap = distributions(pair) - distributions(dense)
    assert pair.token_ids[0] == dense.token_ids[0]
    assert gap[:LENGTH].abs().max() < 1e-9
    assert gap[LENGTH].abs().max() > 1e-6  # the first row behind the prompt


@pytest.mark.parametrize(
    ("given", "layers"),
    [("0", {0}), ("1", {1}), ("0-1", {0, 1}), ("1, 0", {0, 1}), ("1-1,0-1", {0, 1})],
)
def test_layers_are_the_ones_that_are_named(folder: Path, given: str, layers: set[int]) -> None:
    result = generated(folder, trace=True, **SPARSE, hsa_layers=given)
    assert result.trace is not None
    for token in result.trace.tokens:
        assert {read.layer for read in token.layers} == layers
    with load(folder, **SPARSE, hsa_layers=given) as llm:
        assert f"{len(layers)} of 2 layers" in llm.engine.notes[-1]


def test_all_full_attention_layers_are_sparse_by_default(folders: dict[str, Path]) -> None:
    result = generated(folders["olmo3"], trace=True, **SPARSE)
    assert result.trace is not None
    assert [[read.layer for read in token.layers] for token in result.trace.tokens] == [
        [1]
    ] * ANSWER


@pytest.mark.parametrize("topk", [1, 3, 5])
def test_top_k_pages_are_read(folder: Path, topk: int) -> None:
    pages = traced_pages(generated(folder, trace=True, **{**SPARSE, "hsa_topk": topk}))
    assert {len(each) for each in pages} == {topk}


@pytest.mark.parametrize("sinks", [0, 1, 2])
def test_sinks_are_always_read_and_other_pages_are_not(folder: Path, sinks: int) -> None:
    options = {**SPARSE, "hsa_topk": 3, "hsa_sinks": sinks}
    pages = traced_pages(generated(folder, trace=True, **options))
    assert all(set(range(sinks)) <= set(each) for each in pages)
    assert not all(sinks in each for each in pages)


def test_sinks_count_towards_top_k(folder: Path) -> None:
    pages = traced_pages(generated(folder, trace=True, **SPARSE, hsa_sinks=2))
    assert all(each == [0, 1] for each in pages)


def test_sizes_of_pages_and_units_are_those_of_the_policy_or_model_unless_given(
    folder: Path,
) -> None:
    options: dict[str, Any]
    for options, path, size, unit in (
        ({}, folder, 64, 8),
        ({"page_size": 4}, folder, 4, 4),
        ({"page_size": 20}, folder, 20, 20),
        ({"page_size": 32}, folder, 32, 8),
        ({"page_size": 32, "hsa_unit_size": 16}, folder, 32, 16),
        ({"hsa_policy": "quest"}, folder, 64, 64),
        ({"hsa_policy": "quest", "hsa_unit_size": 32}, folder, 64, 32),
        ({"enable_hisparse": True}, folder, 64, 64),
        ({"enable_hisparse": True, "hsa_policy": "spread"}, folder, 8, 8),
        ({}, HILS, 16, 16),
        ({"page_size": 16}, HILS, 16, 16),
        ({}, GOLDENS / "qwen_swamix_chunk64", 64, 64),
    ):
        with LLM(path, device="cpu", attention_backend="hsa", **options) as llm:
            assert llm.engine.scheduler.cache.geometry.page_size == size
            assert llm.engine.selected.page_size == unit
            assert f"pages of {size} rows" in llm.engine.notes[0]


def test_kernels_read_whole_pages() -> None:
    """On CUDA small units are small pages, also for drafts."""
    spec = read_spec(ConfigReader({**TINY_LLAMA, "vocab_size": VOCAB}, "config.json"))
    config = EngineConfig(hsa_policy="spread")
    for own, drafts in (
        (replace(config, attention_backend="hsa"), False),
        (replace(config, speculative="sparse"), True),
    ):
        plan = plan_attention(own, spec, "cuda", drafts=drafts)
        assert plan.sparse is not None
        assert (plan.page_size, plan.sparse.units) == (8, 1)


def test_a_pair_and_a_sparse_prefill_contradict_each_other(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"'torch,hsa'.* with torch, and hsa_prefill is 'sparse'"):
        load(folder, **{**SPARSE, "attention_backend": "torch,hsa"})


def test_where_dense_attention_is_not_slower_a_row_is_dense() -> None:
    """By its position, the device and the options; never where a model was trained otherwise."""
    spec = read_spec(ConfigReader({**TINY_LLAMA, "vocab_size": VOCAB}, "config.json"))

    def bounds(device: str, **options: Any) -> tuple[int, int]:
        config = EngineConfig(attention_backend="hsa", hsa_topk=4, hsa_window=100, **options)
        sparse = plan_attention(config, spec, device).sparse
        assert sparse is not None
        return sparse.dense_below, sparse.dense_prompt_below

    all_selected = 5 * 8 + 99
    assert bounds("cpu") == (all_selected, ALL_ROWS)
    assert bounds("cpu", hsa_prefill="sparse") == (all_selected, all_selected)
    assert bounds("cuda") == (16384, ALL_ROWS)
    assert bounds("cuda", hsa_prefill="sparse") == (16384, 24576)
    assert bounds("cuda", hsa_prefill="sparse", hsa_dense_below=0) == (0, 0)
    assert bounds("cuda", hsa_dense_below=100) == (100, ALL_ROWS)
    # A page that weighs as much as its landmark says is not what dense attention makes of it.
    assert bounds("cuda", hsa_prefill="sparse", hsa_fusion="landmark") == (0, 0)
    assert bounds("cuda", enable_hisparse=True) == (0, ALL_ROWS)


def test_notes_tell_what_was_chosen(folder: Path) -> None:
    options = parsed(
        "--attention-backend", "torch,hsa", "--hsa-policy", "mean", "--hsa-topk", "5",
        "--hsa-selection-strategy", "group", "--hsa-layers", "1", "--hsa-window", "33",
        "--hsa-sinks", "2", "--hsa-fusion", "landmark",
    )  # fmt: skip
    with load(folder, **options) as llm:
        assert llm.engine.notes == (
            "hsa: mean, 1 of 2 layers, top-5 pages of 16 rows, window 33, sinks 2, group, "
            "landmark weights, dense prompts",
        )
    with load(folder, **SPARSE) as llm:
        assert llm.engine.notes[0].endswith("lse weights, dense below row 63")
    with load(folder) as llm:
        assert llm.engine.notes == ()


# -- models trained with sparse attention -----------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_backend": "hsa"},
        {"page_size": 16},
        {"hsa_policy": "hils"},
        {"hsa_topk": 4},
        {"hsa_selection_strategy": "softmax_head"},
    ],
)
def test_what_a_model_was_trained_with_may_be_named(options: dict[str, Any]) -> None:
    with load(HILS, **options) as llm:
        (note,) = llm.engine.notes
        assert note.startswith("hsa: hils, 2 of 2 layers, top-4 pages of 16 rows, window 32")
    assert torch.equal(logprobs(HILS, **options), logprobs(HILS))


@pytest.mark.parametrize(
    ("name", "value", "trained"),
    [
        ("hsa_topk", 2, "4"),
        ("hsa_topk", 7, "4"),
        ("hsa_selection_strategy", "group", "softmax_head"),
        ("hsa_selection_strategy", "head", "softmax_head"),
    ],
)
@pytest.mark.parametrize("model", [HILS, KEYED], ids=["hils", "keyed"])
def test_other_selection_than_the_trained_one_is_noted_as_an_approximation(
    model: Path, name: str, value: object, trained: str
) -> None:
    with load(model, **{name: value}) as llm:
        _, *others = llm.engine.notes
        assert others == [f"{name} {value} where the model has {trained}: an approximation"]
    change = logprobs(model, **{name: value}) - logprobs(model)
    assert change.abs().max() > 0.01


@pytest.mark.parametrize("name", ["disable_cuda_graph", "disable_overlap_schedule"])
def test_switches_of_the_gpu_are_refused_without_one(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is for CUDA and the device is cpu"):
        load(folder, **{name: True})
