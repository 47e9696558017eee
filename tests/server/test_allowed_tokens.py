"""The engine's side of grammars: tokens a request may take, step by step."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn import LLM, SamplingParams

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

    def rule() -> bytes | None:
        """Not known in every third step: then the request is left out, and others go on."""
        length = bound[0].num_output
        seen.append(length)
        return only(length + 3, 200) if turn % 3 else None

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
