from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn import LLM
from cairn.cli.main import main
from cairn.errors import RequestError
from cairn.outputs import Generation
from cairn.trace import Trace
from tests.helpers import GOLDENS, TINY_LLAMA, byte_tokenizer, tokens_of, write_model
from tests.test_chat import TEMPLATE, talk

PAGE, TOPK, WINDOW, HEADS, KV_HEADS = 16, 2, 20, 4, 2
SPARSE: dict[str, Any] = {
    "attention_backend": "hsa", "page_size": 2 * PAGE, "hsa_topk": TOPK, "hsa_window": WINDOW,
    "hsa_unit_size": PAGE, "hsa_prefill": "sparse", "hsa_dense_below": 0,
}  # fmt: skip
TEXT = "A cairn is a pile of stones that marks a path where none is to be seen, so that whoever "
TEXT += "comes later finds the way over moors and mountains, even in fog or under snow."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traced-model")
    write_model(path, {**TINY_LLAMA, "vocab_size": 256, "eos_token_id": None})
    byte_tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", **SPARSE) as llm:
        yield llm


@pytest.fixture(scope="module")
def dense(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", page_size=PAGE) as llm:
        yield llm


def trace_of(result: Generation | None) -> Trace:
    assert result is not None and result.trace is not None
    return result.trace


def candidates(prompt_tokens: int, index: int, window: int = WINDOW) -> int:
    """Pages wholly before the window of the row that the index-th new token comes from."""
    row = prompt_tokens + index - 1
    return max(0, (row - window + 1) // PAGE)


def test_every_generated_token_has_an_entry(llm: LLM) -> None:
    result = llm.generate(TEXT, max_tokens=20, trace=True)
    trace = trace_of(result)
    assert trace.page_size == PAGE
    assert [token.token_id for token in trace.tokens] == result.token_ids
    assert len(trace.tokens) == 20
    assert llm.tokenizer is not None
    for token in trace.tokens:
        assert token.text == llm.tokenizer.decode([token.token_id])
        assert [read.layer for read in token.layers] == [0, 1]


def test_tracing_does_not_change_the_answer(llm: LLM) -> None:
    traced = llm.generate(TEXT, max_tokens=20, temperature=1.0, seed=3, trace=True)
    plain = llm.generate(TEXT, max_tokens=20, temperature=1.0, seed=3)
    assert traced.token_ids == plain.token_ids
    assert plain.trace is None


@pytest.mark.parametrize("options", [{}, {"hsa_topk": 30}, {"hsa_window": 1}, {"hsa_window": 90}])
def test_pages_are_ascending_complete_and_before_the_window(
    folder: Path, options: dict[str, int]
) -> None:
    with LLM(folder, device="cpu", **{**SPARSE, **options}) as llm:
        trace = trace_of(llm.generate(TEXT, max_tokens=40, trace=True))
    topk, window = options.get("hsa_topk", TOPK), options.get("hsa_window", WINDOW)
    for index, token in enumerate(trace.tokens):
        limit = candidates(len(TEXT), index, window)
        for read in token.layers:
            assert len(read.pages) == KV_HEADS
            for pages in read.pages:
                assert pages == sorted(set(pages))
                assert set(pages) <= set(range(limit))
                assert len(pages) == min(topk, limit)
    grown = candidates(len(TEXT), 39, window) - candidates(len(TEXT), 0, window)
    assert grown > 0  # pages of the answer, complete by then, were candidates as well


def test_different_heads_and_layers_choose_for_themselves(llm: LLM) -> None:
    trace = trace_of(llm.generate(TEXT, max_tokens=20, trace=True))
    reads = [read for token in trace.tokens for read in token.layers]
    assert len({tuple(pages) for read in reads for pages in read.pages}) > 2
    assert any(read.pages[0] != read.pages[1] for read in reads)


def test_weights_of_pages_and_window_sum_to_one_in_every_head(llm: LLM) -> None:
    trace = trace_of(llm.generate(TEXT, max_tokens=20, trace=True))
    for token in trace.tokens:
        for read in token.layers:
            assert len(read.window_weight) == HEADS
            shares = [head for group in read.weights for head in group]
            assert len(shares) == HEADS
            for head, (of_pages, of_window) in enumerate(
                zip(shares, read.window_weight, strict=True)
            ):
                assert len(of_pages) == len(read.pages[head // (HEADS // KV_HEADS)])
                assert min(*of_pages, of_window) > 0
                assert sum(of_pages) + of_window == pytest.approx(1, abs=1e-5)


def test_page_shares_are_means_over_heads_layers_and_tokens(llm: LLM) -> None:
    trace = trace_of(llm.generate(TEXT, max_tokens=20, trace=True))
    expected = dict.fromkeys(range(len(trace.pages)), 0.0)
    for token in trace.tokens:
        own = dict.fromkeys(range(len(trace.pages)), 0.0)
        for read in token.layers:
            for kv_head, pages in enumerate(read.pages):
                for page, *of_heads in zip(pages, *read.weights[kv_head], strict=True):
                    own[page] += sum(of_heads) / (2 * HEADS)
        assert token.page_weights() == pytest.approx({p: w for p, w in own.items() if w})
        for page, weight in own.items():
            expected[page] += weight / 20
    shares = trace.page_weights()
    assert list(shares) == sorted(shares)
    assert shares == pytest.approx({page: weight for page, weight in expected.items() if weight})
    windows = [w for token in trace.tokens for read in token.layers for w in read.window_weight]
    assert sum(shares.values()) == pytest.approx(1 - sum(windows) / len(windows), abs=1e-5)


def test_pages_carry_the_text_of_their_tokens(llm: LLM) -> None:
    result = llm.generate(TEXT, max_tokens=20, trace=True)
    trace = trace_of(result)
    count = len(TEXT) + 20
    assert [page.index for page in trace.pages] == list(range(-(-count // PAGE)))
    for page in trace.pages:
        assert page.first_token == PAGE * page.index
        assert page.num_tokens == min(PAGE, count - page.first_token)
        if page.first_token + PAGE <= len(TEXT):
            assert page.text == TEXT[page.first_token :][:PAGE]
    assert llm.tokenizer is not None
    whole = llm.tokenizer.encode(TEXT) + result.token_ids
    last = trace.pages[-1]
    assert last.text == llm.tokenizer.decode(whole[last.first_token :])


def test_without_a_tokenizer_there_are_pages_but_no_text(tmp_path: Path) -> None:
    write_model(tmp_path, TINY_LLAMA)
    with LLM(tmp_path, device="cpu", **SPARSE) as llm:
        trace = trace_of(llm.generate(tokens_of(60), max_tokens=3, ignore_eos=True, trace=True))
    assert [page.first_token for page in trace.pages] == [0, 16, 32, 48]
    assert all(page.text is None for page in trace.pages)
    assert all(token.text is None for token in trace.tokens)
    assert trace.tokens[0].layers[0].pages == [[0, 1], [0, 1]]


def test_pages_of_a_model_with_landmark_rows_hold_a_token_less() -> None:
    with LLM(GOLDENS / "qwen_hope_qcal_gqa", device="cpu") as llm:
        trace = trace_of(llm.generate(tokens_of(200), max_tokens=30, ignore_eos=True, trace=True))
    assert [page.first_token for page in trace.pages] == list(range(0, 230, 15))
    assert sum(page.num_tokens for page in trace.pages) == 230
    for index, token in enumerate(trace.tokens):
        pages, offset = divmod(200 + index - 1, 15)
        limit = (16 * pages + offset - 32 + 1) // 16
        for read in token.layers:
            for kv_head, chosen in enumerate(read.pages):
                assert chosen == sorted(set(chosen)) and len(chosen) == 4
                assert chosen[-1] < limit
                for of_pages, of_window in zip(
                    read.weights[kv_head], read.window_weight[2 * kv_head :], strict=False
                ):
                    assert 0 < sum(of_pages) + of_window < 1  # softmax1 leaves a rest


def test_a_trace_is_json(llm: LLM) -> None:
    trace = trace_of(llm.generate(TEXT, max_tokens=4, trace=True))
    found = json.loads(json.dumps(trace.as_dict(), allow_nan=False))
    assert found == trace.as_dict()
    assert set(found) == {"page_size", "pages", "tokens"}
    assert set(found["pages"][0]) == {"index", "first_token", "num_tokens", "text"}
    assert set(found["tokens"][0]) == {"token_id", "text", "layers"}
    assert found["tokens"][3]["layers"][1]["pages"] == trace.tokens[3].layers[1].pages
    assert found["tokens"][3]["layers"][1]["weights"] == trace.tokens[3].layers[1].weights


def test_without_trace_there_is_none(llm: LLM, dense: LLM) -> None:
    for each in (llm, dense):
        assert each.generate(TEXT, max_tokens=2).trace is None
        (*_, last) = each.stream(TEXT, max_tokens=2)
        assert last.result is not None and last.result.trace is None


def test_dense_attention_has_no_trace_and_says_what_has(dense: LLM) -> None:
    for call in (dense.generate, dense.stream):
        with pytest.raises(RequestError, match=r"trace.*attention_backend=hsa"):
            call(TEXT, max_tokens=2, trace=True)
    with pytest.raises(RequestError, match="attention_backend=hsa"):
        dense.chat([{"role": "user", "content": "hello"}], trace=True)
    assert not dense.engine.has_work


def test_a_prompt_within_the_window_reads_no_page(llm: LLM) -> None:
    trace = trace_of(llm.generate("short", max_tokens=3, trace=True))
    for token in trace.tokens:
        for read in token.layers:
            assert read.pages == [[], []]
            assert read.weights == [[[], []], [[], []]]
            assert read.window_weight == [1.0] * HEADS
    assert trace.page_weights() == {}


def test_with_a_dense_prompt_the_first_token_has_everything_in_its_window(folder: Path) -> None:
    options = {**SPARSE, "hsa_prefill": "dense"}
    with LLM(folder, device="cpu", **options) as llm:
        trace = trace_of(llm.generate(TEXT, max_tokens=4, trace=True))
    first, *others = trace.tokens
    assert [read.layer for read in first.layers] == [0, 1]
    assert all(read.pages == [[], []] for read in first.layers)
    assert all(read.window_weight == [1.0] * HEADS for read in first.layers)
    assert first.page_weights() == {}
    assert [[read.layer for read in token.layers] for token in others] == [[0, 1]] * 3
    assert all(read.pages[0] for token in others for read in token.layers)


def test_a_trace_does_not_depend_on_company_chunks_or_the_cache(folder: Path) -> None:
    """Traced and other requests, of different lengths, side by side, cold and warm."""
    texts = [TEXT, TEXT[:70], TEXT[40:], TEXT[:100]]
    options = {**SPARSE, "dtype": "float64", "device": "cpu"}
    alone = []
    for text in texts:
        with LLM(folder, **options, disable_radix_cache=True) as llm:
            alone.append(trace_of(llm.generate(text, max_tokens=12, trace=True)))
    with LLM(folder, **options, chunked_prefill_size=50) as llm:
        for _ in range(2):
            streams = [
                llm.stream(text, max_tokens=12, trace=traced)
                for text in texts
                for traced in (False, True)
            ]
            results = [chunk.result for stream in streams for chunk in stream if chunk.result]
            assert [result.trace is not None for result in results] == [False, True] * 4
            for result, expected in zip(results[1::2], alone, strict=True):
                assert_same(trace_of(result), expected)


def test_a_retracted_request_is_traced_as_if_it_had_not_been(folder: Path) -> None:
    options = {**SPARSE, "dtype": "float64", "device": "cpu", "hsa_topk": 1, "hsa_window": 8}
    texts = [TEXT[i : 20 + 2 * i] for i in range(4)]
    with LLM(folder, **options, disable_radix_cache=True) as llm:
        alone = [llm.generate(text, max_tokens=60, trace=True) for text in texts]
    page_bytes = 2 * 2 * PAGE * KV_HEADS * 8 * 8  # keys and values of two layers
    with LLM(folder, **options, kv_cache_gib=17 * page_bytes / 2**30) as llm:
        together = llm.generate(texts, max_tokens=60, trace=True)
        assert llm.engine.scheduler.stats.retractions > 0
    for result, expected in zip(together, alone, strict=True):
        assert_same(trace_of(result), trace_of(expected))


def assert_same(left: Trace, right: Trace) -> None:
    assert left.pages == right.pages
    assert len(left.tokens) == len(right.tokens)
    for mine, other in zip(left.tokens, right.tokens, strict=True):
        assert (mine.token_id, mine.text) == (other.token_id, other.text)
        for read, expected in zip(mine.layers, other.layers, strict=True):
            assert (read.layer, read.pages) == (expected.layer, expected.pages)
            assert read.window_weight == pytest.approx(expected.window_weight, abs=1e-9)
            for group, own in zip(read.weights, expected.weights, strict=True):
                for head, weights in zip(group, own, strict=True):
                    assert head == pytest.approx(weights, abs=1e-9)


def test_every_choice_has_its_own_trace(llm: LLM) -> None:
    result = llm.generate(TEXT, max_tokens=6, temperature=1.5, seed=1, n=3, trace=True)
    for choice in (result, *result.alternatives):
        assert [token.token_id for token in trace_of(choice).tokens] == choice.token_ids
    assert len({tuple(choice.token_ids) for choice in (result, *result.alternatives)}) == 3


def test_a_text_that_was_stopped_is_traced_as_far_as_it_went(llm: LLM) -> None:
    free = llm.generate(TEXT, max_tokens=12, temperature=1.0, seed=5)
    stop = free.token_ids[6]
    stopped = llm.generate(
        TEXT, max_tokens=12, temperature=1.0, seed=5, stop_token_ids=[stop], trace=True
    )
    assert stopped.finish_reason == "stop"
    count = free.token_ids.index(stop) + 1
    tokens = trace_of(stopped).tokens
    assert [token.token_id for token in tokens] == free.token_ids[:count]


def test_an_aborted_stream_is_traced_as_far_as_it_went(llm: LLM) -> None:
    stream = llm.stream(TEXT, max_tokens=12, trace=True)
    first = next(stream)
    assert llm.abort(stream.request_id)
    (*_, last) = stream
    assert last.result is not None and last.finish_reason == "abort"
    tokens = trace_of(last.result).tokens
    assert [token.token_id for token in tokens] == first.token_ids == last.result.token_ids


# -- the command line -------------------------------------------------------------------------


def test_generate_writes_the_trace_as_json(
    folder: Path, llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    code = main(
        ["generate", TEXT, "--model", str(folder), "--device", "cpu", "--max-tokens", "6",
         "--trace", str(file), "--attention-backend", "hsa", "--hsa-unit-size", str(PAGE),
         "--hsa-topk", str(TOPK), "--hsa-window", str(WINDOW), "--hsa-prefill", "sparse",
         "--hsa-dense-below", "0"]
    )  # fmt: skip
    assert code == 0
    result = llm.generate(TEXT, max_tokens=6, trace=True)
    printed = capsys.readouterr()
    assert printed.out == f"{result.text}\n"
    assert "hsa: spread" in printed.err
    found = json.loads(file.read_text(encoding="utf-8"))
    expected = trace_of(result).as_dict()
    assert found["pages"] == expected["pages"]
    assert len(found["tokens"]) == 6
    for token, other in zip(found["tokens"], expected["tokens"], strict=True):
        assert token["text"] == other["text"]
        for read, own in zip(token["layers"], other["layers"], strict=True):
            assert read["pages"] == own["pages"]
            assert read["window_weight"] == pytest.approx(own["window_weight"], abs=1e-5)


def test_generate_without_sparse_attention_refuses_a_trace_and_writes_none(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    options = ["--model", str(folder), "--device", "cpu", "--trace", str(file)]
    assert main(["generate", TEXT, *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "cairn: error: trace" in printed.err and "attention_backend=hsa" in printed.err
    assert not file.exists()


def test_a_trace_that_cannot_be_written_is_an_error_and_no_traceback(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "missing" / "trace.json"
    options = ["--model", str(folder), "--device", "cpu", "--max-tokens", "2"]
    assert main(["generate", TEXT, *options, "--attention-backend", "hsa", "--trace", str(file)])
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("cairn: error: ") and str(file) in message


# -- chat -------------------------------------------------------------------------------------


def test_chat_shows_the_most_read_pages_first(llm: LLM) -> None:
    chat, printed = talk(llm, TEXT, "/trace")
    trace = trace_of(chat._last)
    shares = trace.page_weights()
    assert f"{len(shares)} of {len(trace.pages)} pages were read" in printed
    lines = [line for line in printed.splitlines() if " %  page " in line]
    assert len(lines) == min(8, len(shares))
    shown = [float(line.partition("%")[0]) for line in lines]
    assert shown == sorted(shown, reverse=True)
    best = max(shares, key=lambda page: shares[page])
    assert shown[0] == pytest.approx(100 * shares[best], abs=0.051)
    conversation = f"[user]{TEXT}[assistant]"
    text = conversation[PAGE * best : PAGE * (best + 1)]
    assert lines[0].split()[3] == str(best)
    assert lines[0].endswith(" ".join(text.split()))


def test_chat_has_no_trace_before_the_first_answer(llm: LLM) -> None:
    _, printed = talk(llm, "/trace")
    assert "No answer yet" in printed


def test_chat_says_when_no_page_was_selected(llm: LLM) -> None:
    _, printed = talk(llm, "hi", "/trace")
    assert "no page was selected" in printed


def test_chat_with_dense_attention_says_what_selects_pages(dense: LLM) -> None:
    _, printed = talk(dense, TEXT, "/trace")
    assert "--attention-backend hsa" in printed


def test_chat_shows_no_control_characters_of_a_page(llm: LLM) -> None:
    """A terminal would obey them."""
    _, printed = talk(llm, "\x1b[31m\x07red \x9b2J" * 12, "/trace")
    assert "pages were read" in printed
    assert not [c for c in printed if c != "\n" and not c.isprintable()]
