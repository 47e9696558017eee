"""The engine's side of grammars: tokens a request may take, step by step."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from cairn import LLM, SamplingParams
from cairn.engine.plan import Allowed

VOCAB = 256


def only(*tokens: int) -> bytes:
    mask = bytearray(VOCAB // 8)
    for token in tokens:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_taken(
    model_folder: Path, overlap: bool, temperature: float
) -> None:
    """In a pool so small that requests are retracted, next to others that are free."""
    seen: list[int] = []

    turn = 0

    def rule(length: int) -> Allowed | None:
        """Not known in every third step: then the request is left out, and others go on."""
        seen.append(length)
        return Allowed((only(length + 3, 200),)) if turn % 3 else None

    params = SamplingParams(
        max_tokens=30, ignore_eos=True, temperature=temperature, seed=1, logprobs=2
    )
    with LLM(model_folder, device="cpu", dtype="float64", page_size=4, kv_cache_gib=6e-5) as llm:
        free = llm.generate("free", params).token_ids
        llm.engine.overlap = overlap
        frontend = llm.frontend
        bound = frontend.prepare("bound", params)
        others = [frontend.prepare("free", params)[0] for _ in range(3)]
        bound[0].allowed_tokens = rule
        bound[0].host_tokens = True
        outputs = frontend.submit([*others, *bound])
        while llm.engine.has_work:
            frontend.step()
            turn += 1
        llm.engine.step()
        results = [output.result for output in outputs]
        retractions = llm.engine.scheduler.stats.retractions
    assert all(result is not None and result.token_ids == free for result in results[:3])
    assert results[3] is not None
    taken = results[3].token_ids
    assert len(taken) == 30
    assert all(token in (place + 3, 200) for place, token in enumerate(taken))
    assert sorted(set(seen)) == list(range(30))
    assert retractions > 0
    # Scores stay the model's own: the most likely token is not always an allowed one.
    assert results[3].logprobs is not None
    assert any(score.top[0][0] != score.token_id for score in results[3].logprobs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_take_allowed_tokens_only(model_folder: Path, temperature: float) -> None:
    """A rule that tells drafts, right and wrong ones: the tokens are those without drafts."""
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=temperature, seed=1)
    truth: list[int] = []

    def rule(length: int) -> Allowed | None:
        random = Random(length)  # the same as long as the output is
        right = truth[length : length + random.randrange(5)]
        drafts = [token if random.random() < 0.9 else 200 for token in right]
        places = range(length, length + 1 + len(drafts))
        return Allowed(tuple(only(place + 3, place + 4, 200) for place in places), tuple(drafts))

    options = {"device": "cpu", "dtype": "float64", "page_size": 4, "kv_cache_gib": 6e-5}
    with LLM(model_folder, speculative="ngram", speculative_tokens=3, **options) as llm:
        for llm.engine.overlap in (False, True):
            before = llm.engine.scheduler.stats.accepted
            bound = llm.frontend.prepare("bound", params)
            others = [llm.frontend.prepare("free", params)[0] for _ in range(2)]
            bound[0].allowed_tokens, bound[0].host_tokens = rule, True
            llm.frontend.submit([*others, *bound])
            while llm.engine.has_work:
                llm.frontend.step()
                llm.engine.scheduler.check()
            taken = bound[0].output_ids
            assert all(token in (i + 3, i + 4, 200) for i, token in enumerate(taken))
            assert taken == (truth or taken)
            assert (bound[0].accepted_tokens > 10) == bool(truth)
            assert llm.engine.scheduler.stats.accepted - before >= bound[0].accepted_tokens
            truth = taken
