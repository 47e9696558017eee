"""`cairn bench spec`: what drafts save where they are right, and cost where they are wrong."""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cairn.bench.engines import as_subclass, measured, random_prompt, step_to_first_tokens
from cairn.bench.report import show_rows
from cairn.cli_flags import collect
from cairn.config import EngineConfig
from cairn.engine.drafters.drafter import Drafter
from cairn.engine.request import Request
from cairn.engine.resolve import resolve_device
from cairn.engine.sampling_params import SamplingParams
from cairn.engine.speculation import Pace, Speculation
from cairn.errors import ConfigError
from cairn.eval.haystack import read_text
from cairn.llm import LLM

_QUOTED, _QUOTE = 500, 400  # tokens of a text, and tokens of it to be quoted
_BEGINNING = 40  # tokens of the quotation that the prompt has
_WRONG_PROMPT, _WRONG_TOKENS = 128, 512  # tokens of a prompt and its answer
_FORCED = 32  # tokens of the answer with wrong drafts
_LOOP = 8  # a text that repeats so many tokens has fallen into a loop
_LONGER = 8  # times as many tokens where the engine decides whether to draft


def command(arguments: argparse.Namespace) -> int:
    options = collect(arguments, EngineConfig)
    if "speculative" in options:
        raise ConfigError("bench spec sets speculative itself; leave it out")
    if "speculative_tokens" in options and "prose" in arguments.parts:
        raise ConfigError("speculative_tokens is for quote and wrong; give --tokens for prose")
    dense = {name: own for name, own in options.items() if not name.startswith("hsa_")}
    cuda = resolve_device(options.get("device", "auto")).type == "cuda"
    rows: list[dict[str, Any]] = []
    if {"quote", "wrong"} & set(arguments.parts):
        with measured(**dense, speculative="ngram") as llm:
            if "quote" in arguments.parts:
                rows.append(_quote(llm, arguments.text, arguments.repeat))
            if "wrong" in arguments.parts:
                rows += [
                    _wrong(llm, batch, arguments.repeat) for batch in ([1, 64] if cuda else [1])
                ]
    if "prose" in arguments.parts:
        rows += _prose(arguments, options)
    show_rows("spec", rows, arguments.output)
    return 0


# -- quoting, and drafts that fail: one engine, with drafts and without in turn -------------------


def _quote(llm: LLM, text: str | None, repeat: int) -> dict[str, Any]:
    """A text, and its beginning once more: the model goes on quoting."""
    tokens = llm.frontend.encode(read_text(text))[:_QUOTED]
    prompt = [*tokens, *llm.frontend.encode("\n\n"), *tokens[:_BEGINNING]]
    plain, drafted, requests = _in_turn(llm, [prompt], _QUOTE, repeat)
    return _row("quote", "ngram", llm, requests, plain, drafted)


def _wrong(llm: LLM, batch: int, repeat: int) -> dict[str, Any]:
    """Drafts that are all wrong, which the engine must make for the first tokens."""
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None
    stubborn = as_subclass(_Stubborn, speculation)
    stubborn.drafter = _Wrong()
    llm.engine.scheduler.speculation = stubborn
    try:
        prompts = [random_prompt(llm, _WRONG_PROMPT, seed) for seed in range(batch)]
        plain, drafted, requests = _in_turn(llm, prompts, _WRONG_TOKENS, repeat)
    finally:
        llm.engine.scheduler.speculation = speculation
    return _row("wrong", f"forced for {_FORCED}", llm, requests, plain, drafted)


class _Wrong(Drafter):
    def draft(self, token_ids: array[int], most: int) -> Sequence[int]:
        return [token_ids[-1] ^ 1] * most


class _Stubborn(Speculation):
    def wants(self, request: Request) -> bool:
        forced = request.params.speculation and request.num_output < _FORCED
        return forced or super().wants(request)


def _in_turn(
    llm: LLM, prompts: list[list[int]], tokens: int, repeat: int
) -> tuple[float, float, list[Request]]:
    """Tokens per second without drafts and with them, each the best of `repeat` runs in turn, and
    the requests of the last run with drafts."""
    best = {False: 0.0, True: 0.0}
    requests: dict[bool, list[Request]] = {}
    for _ in range(repeat):
        for drafts in (False, True):
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, speculation=drafts)
            requests[drafts] = _start(llm, prompts, params)
            begin = _now()
            while llm.engine.has_work:
                llm.frontend.step()
            made = sum(own.num_output - 1 for own in requests[drafts])
            best[drafts] = max(best[drafts], made / (_now() - begin))
    return best[False], best[True], requests[True]


# -- prose at long contexts, drafted with sparse attention ----------------------------------------


def _prose(arguments: argparse.Namespace, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Continue long prose greedily, in several batches, without drafts and with several numbers of
    them: first drafts are forced, then the engine decides."""
    rows = []
    most = max(arguments.batches)
    sparse = {"speculative": "sparse", "speculative_tokens": max(arguments.tokens)}
    with measured(**{"max_running_requests": most, **options, **sparse}) as llm:
        needed = arguments.context + 1 + _LONGER * arguments.output_len + max(arguments.tokens)
        if needed > llm.engine.max_tokens:
            raise ConfigError(
                f"context {arguments.context} and {_LONGER} times output_len {arguments.output_len}"
                f" need {needed} tokens, at most {llm.engine.max_tokens} are possible; lower one of"
                " them, or raise context_length or kv_cache_gib"
            )
        prompts = _windows(llm, arguments, most)
        # Cached prompts let all requests begin at the same time.
        _start(llm, prompts, SamplingParams(max_tokens=1))
        speculation = llm.engine.scheduler.speculation
        assert speculation is not None
        watched = llm.engine.scheduler.speculation = as_subclass(_Watched, speculation)
        for batch in arguments.batches:
            given, tokens = (llm, prompts[:batch]), arguments.output_len
            plain = _continue(*given, tokens, drafts=False)
            long_plain = _continue(*given, _LONGER * tokens, drafts=False)
            for watched.most in arguments.tokens:
                watched.pace, watched.checks = _Forced(), []
                forced = _continue(*given, tokens, drafts=True)
                acceptance = watched.acceptance()
                watched.pace = Pace(hasty=True)
                decided = _continue(*given, _LONGER * tokens, drafts=True)
                row = _row("prose", "sparse", llm, forced.requests, plain.rate, forced.rate)
                pairs = zip(forced.requests, plain.requests, strict=True)
                same = sum(_equal(own.output_ids, other.output_ids) for own, other in pairs)
                rows.append(
                    {
                        **row,
                        **acceptance,
                        "loops": sum(loops(own.output_ids) for own in forced.requests),
                        "same text": f"{same}/{batch}",
                        "longer": _LONGER * tokens,
                        "decided tok/s": round(decided.whole_rate, 1),
                        "decided ratio": round(decided.whole_rate / long_plain.whole_rate, 3),
                    }
                )
    return rows


class _Forced(Pace):
    """Drafts, whether it pays or not."""

    def drafts(self, requests: int) -> bool:
        return True


class _Watched(Speculation):
    """Notes what became of drafts."""

    checks: list[tuple[Request, int, int, int]]
    """Request, tokens of its output before the check, number of drafts, and of right ones."""

    def checked(self, request: Request, drafted: int, right: int) -> None:
        self.checks.append((request, request.num_output, drafted, right))
        super().checked(request, drafted, right)

    def acceptance(self) -> dict[str, Any]:
        """Right drafts of all, and the share of first, second... drafts that were right. Texts
        count until they repeat themselves."""
        until = {own.id: fresh(own.output_ids) for own, *_ in self.checks}
        found = [(n, right) for own, made, n, right in self.checks if made < until[own.id]]
        drafted, accepted = (sum(column) for column in zip((0, 0), *found, strict=True))
        places = []
        for place in range(1, 1 + max((n for n, _ in found), default=0)):
            tried = [right >= place for n, right in found if n >= place]
            places.append(f"{sum(tried) / len(tried):.2f}")
        return {
            "accepted": f"{accepted}/{drafted}",
            "share": round(accepted / drafted, 3) if drafted else None,
            "by place": " ".join(places),
        }


def _windows(llm: LLM, arguments: argparse.Namespace, count: int) -> list[list[int]]:
    """Pieces of a text that begin at different places."""
    tokens = llm.frontend.encode(read_text(arguments.text))
    length = arguments.context
    if len(tokens) < length + count:
        raise ConfigError(f"the text has {len(tokens)} tokens, {length + count} are needed")
    apart = (len(tokens) - length) // count
    return [tokens[i * apart : i * apart + length] for i in range(count)]


class _Run(NamedTuple):
    requests: list[Request]
    made: np.ndarray  # [steps + 1, requests] tokens after each step
    times: np.ndarray  # [steps + 1]

    @property
    def rate(self) -> float:
        """Tokens per second as if all requests went on like those that do not repeat themselves
        yet."""
        return len(self.requests) * _rate(self.made, self.times, self.requests)

    @property
    def whole_rate(self) -> float:
        """Tokens per second of all requests, to the end."""
        made, times = self.made, self.times
        return float((made[-1] - made[0]).sum() / (times[-1] - times[0]))


def _continue(llm: LLM, prompts: list[list[int]], tokens: int, *, drafts: bool) -> _Run:
    """Let requests get this many more tokens on average; then they are ended."""
    room = llm.engine.max_tokens - len(prompts[0])
    params = SamplingParams(max_tokens=room, ignore_eos=True, speculation=drafts)
    requests = _start(llm, prompts, params)
    # The device goes on meanwhile, with the next step or with its drafts. Waiting here would leave
    # these out of the time.
    made, times = [[own.num_output for own in requests]], [time.perf_counter()]
    while llm.engine.has_work and sum(made[-1]) - sum(made[0]) < tokens * len(requests):
        llm.frontend.step()
        made.append([own.num_output for own in requests])
        times.append(time.perf_counter())
    llm.frontend.abort_all()
    while llm.engine.has_work:
        llm.frontend.step()
    return _Run(requests, np.array(made), np.array(times))


def _rate(made: np.ndarray, times: np.ndarray, requests: list[Request]) -> float:
    """Tokens per second of a request, from the number of tokens [steps + 1, requests] and the time
    [steps + 1] after each step. A request counts until it repeats itself, and steps count while a
    quarter of the requests do."""
    until = np.array([fresh(own.output_ids) for own in requests])
    counted = made[:-1] < until  # [steps, requests]
    steps = max(1, int((4 * counted.sum(1) >= len(requests)).sum()))
    counted[0] |= not counted[0].any()
    new = (np.diff(made, axis=0) * counted)[:steps].sum(1) / counted[:steps].sum(1)
    return float(new.sum() / (times[steps] - times[0]))


def fresh(tokens: Sequence[int]) -> int:
    """Number of tokens before a run of `_LOOP` tokens that came before."""
    runs: set[tuple[int, ...]] = set()
    for i in range(len(tokens) - _LOOP + 1):
        run = tuple(tokens[i : i + _LOOP])
        if run in runs:
            return i
        runs.add(run)
    return len(tokens)


def loops(tokens: Sequence[int]) -> bool:
    """Whether a run of `_LOOP` tokens comes more than once."""
    return fresh(tokens) < len(tokens)


def _equal(left: Sequence[int], right: Sequence[int]) -> bool:
    count = min(len(left), len(right))
    return list(left[:count]) == list(right[:count])


# -- both -----------------------------------------------------------------------------------------


def _start(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Request]:
    """Requests that have their first token."""
    requests = [own for prompt in prompts for own in llm.frontend.prepare(prompt, params)]
    llm.frontend.submit(requests)
    step_to_first_tokens(llm, requests)
    return requests


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _row(
    part: str, drafts: str, llm: LLM, requests: list[Request], plain: float, speed: float
) -> dict[str, Any]:
    drafted = sum(own.drafted_tokens for own in requests)
    accepted = sum(own.accepted_tokens for own in requests)
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None
    return {
        "part": part,
        "drafts": drafts,
        "K": speculation.most,
        "requests": len(requests),
        "context": requests[0].prompt_len,
        "plain tok/s": round(plain, 1),
        "tok/s": round(speed, 1),
        "ratio": round(speed / plain, 3),
        "accepted": f"{accepted}/{drafted}",
        "share": round(accepted / drafted, 3) if drafted else None,
        "the engine": speculation.pace.told(len(requests)),
    }
