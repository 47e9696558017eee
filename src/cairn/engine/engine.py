"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cairn.engine.request import Request
from cairn.engine.runner import Runner
from cairn.engine.sampling_params import MAX_SEED, SamplingParams
from cairn.engine.scheduler import Scheduler, attention_pairs
from cairn.errors import RequestError
from cairn.memory.cache import GroupUsage
from cairn.models.spec import DecoderSpec


@dataclass(slots=True)
class EngineStats:
    """Running totals, in seconds and tokens."""

    steps: int = 0
    step_seconds: float = 0.0
    scheduler_seconds: float = 0.0  # planning and committing; part of step_seconds
    computed_tokens: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step did for one request."""

    request: Request
    new_tokens: tuple[int, ...] = ()
    scores: torch.Tensor | None = None  # [len(prompt), vocab] when a scored prompt is complete

    @property
    def finished(self) -> bool:
        return self.request.finish_reason is not None


class Engine:
    def __init__(
        self,
        spec: DecoderSpec,
        scheduler: Scheduler,
        runner: Runner,
        *,
        context_length: int,
        eos_token_ids: frozenset[int],
        seed: int,
    ) -> None:
        self.spec = spec
        self.scheduler = scheduler
        self.stats = EngineStats()
        self.context_length = context_length
        self.max_tokens = min(context_length, scheduler.cache.max_tokens)
        """Tokens of the longest request, prompt and output."""
        self._runner = runner
        self._eos_token_ids = eos_token_ids
        self._random = random.Random(seed)
        self._ids = itertools.count()
        self._scores: dict[str, list[torch.Tensor]] = {}

    # -- requests -----------------------------------------------------------------------------

    def make_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        score_prompt: bool = False,
    ) -> Request:
        """Check a prompt and wrap it. Raises RequestError; nothing is queued yet."""
        self._check_prompt(prompt_ids, scored=score_prompt)
        for token in params.stop_token_ids:
            self._check_token("stop_token_ids", token)
        eos = frozenset() if params.ignore_eos else self._eos_token_ids
        return Request(
            id=str(next(self._ids)),
            token_ids=list(prompt_ids),
            params=params,
            seed=self._random.randint(0, MAX_SEED) if params.seed is None else params.seed,
            max_total_tokens=self.max_tokens,
            stop_token_ids=eos | frozenset(params.stop_token_ids),
            namespace=(cache_salt, self._rope_length(len(prompt_ids))),
            score_prompt=score_prompt,
        )

    def submit(self, request: Request) -> None:
        self.scheduler.add(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request at once; its tokens so far remain. None if it is not there any more."""
        self._scores.pop(request_id, None)
        return self.scheduler.finish(request_id, "abort")

    def stop(self, request_id: str) -> Request | None:
        """End a request whose text is complete."""
        return self.scheduler.finish(request_id, "stop")

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def usage(self) -> list[GroupUsage]:
        return self.scheduler.cache.usage()

    # -- a step -------------------------------------------------------------------------------

    def step(self) -> list[Progress]:
        """Plan, compute, commit. Empty when there is nothing to do."""
        begin = time.perf_counter()
        plan = self.scheduler.plan()
        if not plan and self.scheduler.has_work:
            plan = self.scheduler.plan()  # pages given up by the first are free now
            if not plan:
                raise RuntimeError("the scheduler has work but plans nothing; this is a bug")
        if not plan:
            self.scheduler.check()
            return []
        planned = time.perf_counter()
        result = self._runner.run(plan)
        ran = time.perf_counter()
        geometry = self.scheduler.cache.geometry
        rows = pairs = 0
        for advance in plan.advances:
            context = geometry.rows(advance.start)
            new = geometry.rows(advance.stop) - context
            rows, pairs = rows + new, pairs + attention_pairs(new, context)
        self.scheduler.step_time.observe(rows, pairs, ran - planned)
        for request_id, scores in result.scores.items():
            self._scores.setdefault(request_id, []).append(scores)
        progress = [
            self._progress(request, result.sampled.get(request.id))
            for request in self.scheduler.commit(plan, result.sampled)
        ]
        end = time.perf_counter()
        self.stats.steps += 1
        self.stats.step_seconds += end - begin
        self.stats.scheduler_seconds += (planned - begin) + (end - ran)
        self.stats.computed_tokens += plan.num_tokens
        self.stats.generated_tokens += len(result.sampled)
        return progress

    def _progress(self, request: Request, token: int | None) -> Progress:
        if request.score_prompt:
            return Progress(request, scores=torch.cat(self._scores.pop(request.id)))
        assert token is not None
        return Progress(request, (token,))

    # -- checks -------------------------------------------------------------------------------

    def _check_prompt(self, prompt_ids: Sequence[int], *, scored: bool) -> None:
        if len(prompt_ids) == 0:
            raise RequestError("the prompt is empty; give at least one token")
        for token in prompt_ids:
            self._check_token("prompt", token)
        # A prompt that is only scored needs no room for an answer.
        most = self.max_tokens if scored else self.max_tokens - 1
        if len(prompt_ids) > most:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens, at most {most} are possible: the "
                f"context length is {self.context_length} tokens, the KV cache holds "
                f"{self.scheduler.cache.max_tokens}; shorten it, or raise context_length, "
                "kv_cache_gib or mem_fraction_static"
            )

    def _check_token(self, name: str, token: object) -> None:
        if not isinstance(token, int) or isinstance(token, bool):
            raise RequestError(f"{name} holds {token!r}; token ids are whole numbers")
        if not 0 <= token < self.spec.vocab_size:
            raise RequestError(
                f"{name} holds token id {token}; ids of this model run from 0 to "
                f"{self.spec.vocab_size - 1}"
            )

    def _rope_length(self, prompt_len: int) -> int:
        """With dynamic rope a long prompt's length enters its keys: it shares only with equals."""
        limit = self.spec.dynamic_rope_context
        return 0 if limit is None or prompt_len <= limit else prompt_len
