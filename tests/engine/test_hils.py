"""HiLS models through the paged engine: against golden logits and against the definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cairn import LLM, SamplingParams
from cairn.engine.inputs import StepInputs
from cairn.engine.plan import StepPlan
from cairn.errors import RequestError
from tests import hils_reference
from tests.helpers import GOLDENS, TINY_HILS, poison_free_memory, tokens_of, write_model

CASES = sorted(p.parent.name for p in GOLDENS.glob("[!h]*/layer_intermediates.safetensors"))
PROMPTS = ("a", "b", "short", "edge")


def golden(case: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    config = json.loads((GOLDENS / case / "config.json").read_text())
    return load_file(GOLDENS / case / "golden.safetensors"), config


def load(folder: Path, **options: Any) -> LLM:
    llm = LLM(folder, device="cpu", **{"dtype": "float32", "kv_cache_gib": 0.05, **options})
    poison_free_memory(llm.engine)
    return llm


def assert_golden(scores: torch.Tensor, logits: torch.Tensor, vocab: int) -> None:
    expected = logits[:, :vocab].log_softmax(-1)
    torch.testing.assert_close(scores, expected, rtol=0, atol=2e-4)


def test_all_golden_cases_are_here() -> None:
    assert len(CASES) == 9


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_golden_logits_in_one_piece_and_chunked(case: str, few: bool) -> None:
    tensors, config = golden(case)
    size = config["chunk_size"]
    for chunk in (7, size + 1, 4096) if few else (1, size - 1, size, 100):
        with load(GOLDENS / case, chunked_prefill_size=chunk) as llm:
            for name in PROMPTS:
                if chunk < size and name == "b":
                    continue  # many tiny steps; the others show the same
                ids = tensors[f"input_ids_{name}"].tolist()
                assert_golden(llm.logprobs(ids), tensors[f"logits_{name}"], config["vocab_size"])


@pytest.mark.parametrize("case", CASES)
def test_golden_greedy_text_then_teacher_forced(case: str) -> None:
    tensors, config = golden(case)
    vocab, prompt = config["vocab_size"], tensors["input_ids_a"].tolist()
    expected = tensors["greedy_ids"].tolist()
    real = next((i for i, token in enumerate(expected) if token >= vocab), len(expected))
    with load(GOLDENS / case) as llm:
        # Cold, warm, and beside others.
        alone = llm.generate(prompt, max_tokens=real, ignore_eos=True)
        warm = llm.generate(prompt, max_tokens=real, ignore_eos=True)
        others = [tensors[f"input_ids_{name}"].tolist() for name in ("b", "short", "edge")]
        batched = llm.generate([prompt, *others], max_tokens=real, ignore_eos=True)[0]
        assert alone.token_ids == warm.token_ids == batched.token_ids == expected[:real]
        assert warm.usage.cached_tokens > 0
        assert alone.usage.completion_tokens == real
        # The official greedy text may hold landmark or padding ids: it can be scored all the same.
        scores = llm.logprobs(prompt + expected[:-1])[len(prompt) - 1 :]
        assert_golden(scores, tensors["greedy_logits"], vocab)
        if real < len(expected):
            with pytest.raises(RequestError, match="prompt holds token id"):
                llm.generate(prompt + expected)


@pytest.mark.parametrize("case", CASES)
def test_golden_selection(case: str) -> None:
    """The pages of the first HiLS layer, for rows of prompt a at many places of a page."""
    tensors, config = golden(case)
    inside = load_file(GOLDENS / case / "layer_intermediates.safetensors")
    layer, size = int(inside["layer_idx"]), config["chunk_size"]
    prompt = tensors["input_ids_a"].tolist()
    with load(GOLDENS / case) as llm:
        for tokens in range(1, len(prompt) + 1, 4):
            result = llm.generate(prompt[:tokens], max_tokens=1, ignore_eos=True, trace=True)
            assert result.trace is not None
            read = next(r for r in result.trace.tokens[0].layers if r.layer == layer)
            row = (tokens - 1) + (tokens - 1) // (size - 1)
            expected = inside["sel_idx"][row]
            for head, pages in enumerate(read.pages):
                assert pages == [page for page in expected[head].tolist() if page >= 0]
            weights = torch.tensor([share for group in read.weights for share in group])
            count = len(read.pages[0])
            if count:
                official = inside["chunk_weights"][row]
                valid = (expected >= 0).repeat_interleave(len(read.weights[0]), 0)
                kept = torch.stack(
                    [w[v] for w, v in zip(official[:, : valid.shape[1]], valid, strict=True)]
                )
                torch.testing.assert_close(weights, kept, rtol=0, atol=2e-5)


# -- against the definition, in float64 ------------------------------------------------------

OLMO: dict[str, Any] = {
    "model_type": "olmo_hils",
    "num_hidden_layers": 4,
    "full_attn_interleave": 2,
    "layerwise_qk_norm": True,
    "layerwise_lmkq_norm": True,
    "enable_external_lmk_embed": True,
    "enable_softmax1": False,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "full-rank": {"lmk_q_lora_dim": 0},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "nope": {"apply_hils_rope": False},
    "rope": {"enable_inrange_rope": False},
    "partial-hope": {
        "enable_inrange_rope": False,
        "use_hope": True,
        "hope_partial_ratio": 0.3,
        "hope_context_length": 96,
    },
    "hope-theta": {"enable_inrange_rope": False, "use_hope": True, "hope_theta": 50.0},
    "no-calibration": {"enable_lmk_q_proj": False},
    "no-prior": {"enable_prior_query": False},
    "shared-prior": {"shared_q_c": True, "enable_lmk_q_proj": False},
    "eps": {"rms_norm_eps": 1e-2, "tie_word_embeddings": True},
    "swa-sees-landmarks": {"num_hidden_layers": 3, "num_swa_layers": 1, "sliding_window": 21},
    "swa-bias": {
        "num_hidden_layers": 3,
        "full_attn_interleave": 2,
        "attention_bias": True,
        "sliding_window": 13,
        "mask_lmk_token": True,
    },
    "swa-off": {
        "num_hidden_layers": 3,
        "full_attn_interleave": 2,
        "use_sliding_window": False,
        "hils_sliding_window": 24,
    },
    "olmo-gqa": {**OLMO, "sliding_window": 13, "hils_sliding_window": 37, "mask_lmk_token": True},
    "olmo-mha-sees": {**OLMO, "num_key_value_heads": 4, "sliding_window": 19},
    "olmo-hope": {**OLMO, "use_hope": True, "enable_inrange_rope": False},
    "olmo-inrange-without-hope": {**OLMO, "use_hope": False},
    "olmo-table-landmark": {**OLMO, "enable_external_lmk_embed": False, "use_hope": True},
    "window-of-one": {"hils_sliding_window": 1, "hils_topk": 3},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_equals_its_definition(variant: str, tmp_path: Path) -> None:
    config = {**TINY_HILS, **VARIANTS[variant]}
    folder = write_model(tmp_path / variant, config)
    weights = hils_reference.load_weights(folder)
    ids = tokens_of(190)
    expected = hils_reference.logprobs(config, weights, ids)
    for chunk in (37, 4096):
        with load(folder, dtype="float64", chunked_prefill_size=chunk) as llm:
            torch.testing.assert_close(llm.logprobs(ids).double(), expected, rtol=0, atol=1e-6)


LONG = {
    **TINY_HILS,
    "chunk_size": 64,
    "sliding_window": 96,
    "hils_topk": 4,
    "max_position_embeddings": 8192,
}


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hils") / "long", LONG)


def test_every_short_length_at_page_64(long_model: Path) -> None:
    """A row's scores do not depend on what follows, so prefixes of one prompt cover all lengths."""
    weights = hils_reference.load_weights(long_model)
    ids = tokens_of(640)
    expected = hils_reference.logprobs(LONG, weights, ids)
    with load(long_model, dtype="float64") as llm:
        for length in [*range(1, 131), *range(512, 641, 16), 567, 630]:
            scores = llm.logprobs(ids[:length]).double()
            torch.testing.assert_close(scores, expected[:length], rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", [2500, pytest.param(5000, marks=pytest.mark.slow)])
def test_long_prompts_at_page_64(long_model: Path, length: int) -> None:
    weights = hils_reference.load_weights(long_model)
    ids = tokens_of(length)
    expected = hils_reference.logprobs(LONG, weights, ids)
    with load(long_model, dtype="float64", chunked_prefill_size=1000) as llm:
        torch.testing.assert_close(llm.logprobs(ids).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "length",
    [62, 300, *(pytest.param(own, marks=pytest.mark.slow) for own in (61, 63, 64, 126))],
)
def test_decoding_beyond_window_and_page_equals_prefill(long_model: Path, length: int) -> None:
    """Batched with others, for more than a window and a page of generated tokens."""
    steps = 96 + 64 + 10
    params = SamplingParams(max_tokens=steps, ignore_eos=True)
    prompts = [tokens_of(length), tokens_of(63, seed=1), tokens_of(200, seed=2)]
    with load(long_model, dtype="float64") as llm:
        together = llm.generate(prompts, params)
    with load(long_model, dtype="float64", disable_radix_cache=True) as llm:
        alone = llm.generate(prompts[0], params)
        assert together[0].token_ids == alone.token_ids
        # What was decoded token by token is what a prefill of the same text predicts.
        whole = llm.logprobs(prompts[0] + alone.token_ids)[length - 1 : -1]
        assert whole.argmax(-1).tolist() == alone.token_ids


def test_landmarks_are_computed_once_per_page_and_shared(long_model: Path) -> None:
    shared = tokens_of(63 * 5)
    with load(long_model, chunked_prefill_size=512) as llm:
        landmarks = llm.engine.runner.stepper.backend._landmarks  # type: ignore[attr-defined]
        llm.generate([*shared, 7], max_tokens=1, ignore_eos=True)
        assert landmarks.num_sealed == 5
        prompts = [[*shared, i] for i in range(8, 14)]
        results = llm.generate(prompts, max_tokens=2, ignore_eos=True)
        assert all(result.usage.cached_tokens == len(shared) for result in results)
        assert landmarks.num_sealed == 5
        # A partial page never has a landmark: only sealed pages carry a generation.
        assert int((landmarks.sealed > 0).sum()) == 5


def test_generated_text_is_found_again(long_model: Path) -> None:
    prompt = tokens_of(100)
    with load(long_model) as llm:
        first = llm.generate(prompt, max_tokens=100, ignore_eos=True)
        turn = llm.generate([*prompt, *first.token_ids, 9, 9], max_tokens=4, ignore_eos=True)
        assert turn.usage.cached_tokens == 63 * 3
    with load(long_model, disable_radix_cache=True) as llm:
        cold = llm.generate([*prompt, *first.token_ids, 9, 9], max_tokens=4, ignore_eos=True)
        assert cold.token_ids == turn.token_ids


def test_a_failed_step_takes_its_landmarks_back(long_model: Path) -> None:
    with load(long_model, chunked_prefill_size=4096) as llm:
        runner = llm.engine.runner
        landmarks = runner.stepper.backend._landmarks  # type: ignore[attr-defined]
        model, runner.stepper.model = runner.stepper.model, _Failing(runner.stepper.model.spec)  # type: ignore[assignment]
        with pytest.raises(ZeroDivisionError):
            llm.generate(tokens_of(200), max_tokens=1)
        assert int((landmarks.sealed > 0).sum()) == 0
        runner.stepper.model = model
        assert len(llm.generate(tokens_of(200), max_tokens=3, ignore_eos=True).token_ids) == 3


class _Failing:
    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def __call__(self, *_: Any) -> torch.Tensor:
        raise ZeroDivisionError


def test_int8_weights_work_at_any_rank(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hils", TINY_HILS)
    ids = tokens_of(100)
    with load(folder) as llm:
        exact = llm.logprobs(ids)
    with load(folder, quantization="int8") as llm:
        rounded = llm.logprobs(ids)
    assert 0 < (exact.exp() * (exact - rounded)).sum(-1).mean() < 0.05


def test_what_a_user_sees_has_no_landmark_rows(long_model: Path) -> None:
    prompt = tokens_of(126)
    params = SamplingParams(
        max_tokens=70, ignore_eos=True, logprobs=2, prompt_logprobs=0, repetition_penalty=1.3
    )
    with load(long_model) as llm:
        result = llm.generate(prompt, params)
    assert result.usage.prompt_tokens == 126 and result.usage.completion_tokens == 70
    assert result.logprobs is not None and len(result.logprobs) == 70
    assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == 126
    assert max(result.token_ids) < LONG["vocab_size"]
    assert all(token < LONG["vocab_size"] for entry in result.logprobs for token, _ in entry.top)


def test_decode_rows_may_go_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As recorded steps do: the landmark row as a sequence beside that of its token."""
    folder = write_model(tmp_path, {**TINY_HILS, "full_attn_interleave": 2})
    prompts = [tokens_of(n, seed=n) for n in (1, 14, 15, 40, 133)]
    with load(folder) as llm:
        expected = [r.token_ids for r in llm.generate(prompts, max_tokens=50, ignore_eos=True)]
    split = 0
    with load(folder) as llm:
        runner = llm.engine.runner
        build = runner._inputs

        def apart(plan: StepPlan) -> StepInputs:
            nonlocal split
            host = build(plan)
            if not host.only_decodes:
                return host
            split += host.batch.num_rows > host.batch.num_seqs
            return host.as_sequences()

        monkeypatch.setattr(runner, "_inputs", apart)
        found = [r.token_ids for r in llm.generate(prompts, max_tokens=50, ignore_eos=True)]
    assert found == expected
    assert split > 5
