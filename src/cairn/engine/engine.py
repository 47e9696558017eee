"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import itertools
import random
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cairn.attention.backend import AttentionBackend
from cairn.engine.logprobs import TokenLogprob
from cairn.engine.plan import PromptScores, StepPlan
from cairn.engine.request import Request
from cairn.engine.runner import Runner
from cairn.engine.sampler import derived_seed
from cairn.engine.sampling_params import MAX_SEED, SamplingParams
from cairn.engine.scheduler import Scheduler
from cairn.engine.step_result import InFlight, StepResult
from cairn.errors import QueueFullError, RequestError
from cairn.kernels.compilations import CompilationCounts
from cairn.memory.cache import GroupUsage
from cairn.memory.hisparse import TierStats
from cairn.memory.kv_pool import KVPool
from cairn.models.spec import ModelSpec
from cairn.sparsity.config import ALL_ROWS, SparseConfig


@dataclass(slots=True)
class EngineStats:
    """Running totals, in seconds and tokens."""

    steps: int = 0
    step_seconds: float = 0.0
    scheduler_seconds: float = 0.0  # planning and committing; part of step_seconds
    computed_tokens: int = 0
    generated_tokens: int = 0  # kept, or sampled for a request that had ended
    longest_prefill_step: float = 0.0
    """Seconds of the longest step with prefill: from the end of the step before it, or from its own
    launch if the device was idle, to its end."""


@dataclass(frozen=True, slots=True)
class TierReport:
    pages: dict[str, int]
    """Number of host pages by state: free, filling, backing (being copied to the host), clean (on
    the host and the device), host_only."""
    totals: TierStats

    def __str__(self) -> str:
        totals, pages = self.totals, self.pages
        hot = totals.hits + totals.misses
        rate = f"{totals.hits / hot:.1%}" if hot else "-"
        return (
            f"host tier: {pages['clean']} pages on both sides, {pages['host_only']} on the host "
            f"alone, {pages['filling']} filling, {pages['backing']} being copied, "
            f"{pages['free']} free; reads {totals.resident} resident, {hot} hot ({rate} hits); "
            f"{totals.bytes_in / 2**20:.1f} MiB in, {totals.bytes_out / 2**20:.1f} MiB out, "
            f"stalled {totals.stall_seconds:.2f} s"
        )


class Progress(NamedTuple):
    """What a step did for one request."""

    request: Request
    new_tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # of the new tokens, if requested


class Engine:
    def __init__(
        self,
        spec: ModelSpec,
        scheduler: Scheduler,
        runner: Runner,
        *,
        context_length: int,
        eos_token_ids: frozenset[int],
        seed: int,
        sparse: SparseConfig | None = None,
        overlap: bool = False,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.spec = spec
        self.scheduler = scheduler
        self.stats = EngineStats()
        self.sparse = sparse
        """How sparse layers attend; None if there are none."""
        units = 1 if sparse is None else sparse.units
        self.selected = scheduler.cache.geometry.cut(units)
        """Geometry of what queries select: pages, or their units."""
        self.notes = notes
        """Messages for the user about the loaded model."""
        self.context_length = context_length
        self.max_tokens = min(context_length, scheduler.cache.max_tokens)
        """Most tokens of a request, prompt and output together."""
        self.runner = runner
        self.eos_token_ids = eos_token_ids
        self._random = random.Random(seed)
        self._ids = itertools.count()
        self.overlap = overlap
        """Launch each step before the tokens of the previous step are known."""
        self.stalled = False
        """The last step had nothing to do: all work waits to be told which tokens are allowed."""
        self._in_flight: InFlight | None = None
        self._last_finish = 0.0
        self._busy = False  # there was work when the last step ended
        self._progress: list[Progress] = []  # not returned yet

    @property
    def compilations(self) -> CompilationCounts:
        """Number of kernels that all ranks compiled or loaded, before and after the engine was
        ready."""
        return self.runner.compilations()

    @property
    def can_trace(self) -> bool:
        """Attention is sparse and its backend reports which pages it reads."""
        return self.sparse is not None and self.runner.traces

    @property
    def can_read_densely(self) -> bool:
        """Whether a request may read every page for each of its tokens."""
        if self.sparse is None:
            return True
        return self.sparse.dense_prompt_below == ALL_ROWS and self.runner.tier_stats() is None

    # -- requests -----------------------------------------------------------------------------

    def make_requests(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        returns: PromptScores = "none",
        traced: bool = False,
        dense: bool = False,
        first_id: int | None = None,
    ) -> list[Request]:
        """Check a prompt and make one request for each of its `n` choices.

        Raises RequestError. Does not queue anything. With `first_id` the choices get the ids
        `first_id`, `first_id + 1` and so on. `returns` is for requests that generate nothing.
        """
        if returns in ("mean", "last") and not self.runner.gives_hidden:
            raise RequestError(
                "embeddings need the model's hidden states, which this implementation does not "
                "give; start the engine with model_impl=cairn"
            )
        tokens = self._check_prompt(prompt_ids, scored=returns != "none")
        for name, named in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", [token for token, _ in params.bias]),
        ):
            self._check_tokens(name, named, self.spec.vocab_size)
        if traced and not self.can_trace:
            raise RequestError(
                "trace shows which pages sparse attention reads; start the engine with "
                "attention_backend=hsa"
            )
        if dense and not self.can_read_densely:
            raise RequestError(
                "dense reads every page for each token, and this engine cannot: it needs a model "
                "that was not trained with sparse attention, hsa_prefill=dense and no host tier"
            )
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        seed = self._random.randint(0, MAX_SEED) if params.seed is None else params.seed
        if params.prompt_logprobs is not None and returns == "none":
            returns = "top"
        ids = self._ids if first_id is None else itertools.count(first_id)
        return [
            Request(
                id=str(next(ids)),
                token_ids=tokens,
                shares_tokens=params.n > 1,
                params=params,
                seed=derived_seed(seed, choice),
                max_total_tokens=self.max_tokens,
                stop_token_ids=eos | frozenset(params.stop_token_ids),
                namespace=(cache_salt, self._rope_length(len(prompt_ids)), dense),
                prompt_scores=returns,
                traced=traced,
                dense=dense,
                choice=choice,
            )
            for choice in range(params.n)
        ]

    def submit(self, request: Request) -> None:
        self.scheduler.add(request)

    def submit_all(self, requests: Sequence[Request]) -> None:
        """Queue all choices of a prompt, or none. Raises QueueFullError."""
        if len(requests) > self.free_places:
            raise QueueFullError(
                f"{len(requests)} choices are asked for and the queue has {self.free_places} "
                "places left of max_queued_requests; send it again later or raise the limit"
            )
        for request in requests:
            self.submit(request)

    @property
    def free_places(self) -> int:
        """Number of requests that the queue has room for. Retracted ones may overfill it."""
        return max(0, self.scheduler.limits.max_queued_requests - self.scheduler.num_waiting)

    def abort(self, request_id: str) -> Request | None:
        """End a request now and return it with its tokens so far; None if it has already ended."""
        return self.scheduler.finish(request_id, "abort")

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def usage(self) -> list[GroupUsage]:
        self.scheduler.cache.poll()
        return self.scheduler.cache.usage()

    def tier(self) -> TierReport | None:
        """Page counts by state and copy totals of the host tier; None without a host tier."""
        totals = self.runner.tier_stats()
        if totals is None:
            return None
        self.scheduler.cache.poll()
        return TierReport(
            {state.value: count for state, count in self.scheduler.cache.page_states().items()},
            totals,
        )

    def watch(self) -> None:
        """Raise if one of the engine's processes has ended."""
        self.runner.watch()

    def close(self) -> None:
        """Wait for the step in flight, free host memory and end the engine's processes."""
        step, self._in_flight = self._in_flight, None
        try:
            if step is not None:
                self.runner.finish(step)
        finally:
            self.runner.close()

    def wrap_attention(self, wrap: Callable[[AttentionBackend, KVPool], AttentionBackend]) -> None:
        """Replace the attention backend by one that wraps it."""
        self.runner.wrap_attention(wrap)

    # -- a step -------------------------------------------------------------------------------

    def step(self) -> list[Progress]:
        """Plan and launch a step, then finish one step and return its progress.

        With overlap that is the previous step, otherwise the one just launched. If the previous
        step checks drafts that will probably come true, it is finished before the next is planned.
        The result is empty if no step was finished.
        """
        begin = time.perf_counter()
        if not self._busy or self.stalled:
            self._last_finish = begin
        finished = self._in_flight
        if finished is not None and finished.plan.awaited:
            self._in_flight = None
            self._progress += self._take(finished, begin)
            finished = None
        planning = time.perf_counter()
        plan = self._plan()
        planned = time.perf_counter()
        self.stats.scheduler_seconds += planned - planning
        launched = self._launch(plan) if plan else None
        self._in_flight = launched
        if not self.overlap and finished is None:
            finished, self._in_flight = launched, None
        if finished is not None:
            self._progress += self._take(finished, planned)
        elif launched is None and not (self._progress or self.stalled):
            self.scheduler.check()
            self.runner.check()
        self._busy = self.scheduler.has_work
        self.stats.step_seconds += time.perf_counter() - begin
        progress, self._progress = self._progress, []
        return progress

    def _take(self, step: InFlight, planned: float) -> list[Progress]:
        """Finish a step and record what it brought."""
        result, plan = self._finish(step), step.plan
        ran = time.perf_counter()
        if self.scheduler.limits.max_step_seconds is not None and not plan.only_decodes:
            # Steps that only decode may run from graphs, at a different cost.
            since_planned = ran - max(planned, self._last_finish)
            self.scheduler.step_time.observe(plan.rows, plan.pairs, since_planned)
        self._take_scores(plan, result)
        dropped = sum(
            own.samples > 0 and self.scheduler.get(own.request_id) is None for own in plan.advances
        )
        kept = self.scheduler.commit(plan, result.sampled, result.guesses)
        if result.selections or result.logprobs:
            progress = [self._report(*each, result) for each in kept.items()]
        else:
            progress = [Progress(request, tuple(tokens)) for request, tokens in kept.items()]
        tokens = sum(map(len, kept.values()))
        seconds = ran - self._last_finish
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.pace.observe(plan, tokens, seconds)
        if seconds > self.stats.longest_prefill_step and plan.has_prefill:
            self.stats.longest_prefill_step = seconds
        self._last_finish = ran
        self.stats.steps += 1
        self.stats.scheduler_seconds += time.perf_counter() - ran
        self.stats.computed_tokens += plan.num_tokens
        self.stats.generated_tokens += tokens + dropped
        return progress

    def _plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        self.stalled = False
        if not plan and self.scheduler.has_work and self._in_flight is None:
            plan = self.scheduler.plan()  # pages that the first call retracted are free now
            self.stalled = not plan
            if self.stalled and not self.scheduler.waits_for_masks:
                raise RuntimeError("the scheduler has work but plans nothing; this is a bug")
        return plan

    def _launch(self, plan: StepPlan) -> InFlight:
        try:
            launched = self.runner.launch(plan)
        except BaseException:  # Ctrl-C too: pages and slots must not be lost
            self.scheduler.undo(plan)
            raise
        try:
            self.scheduler.launched(plan)
        except BaseException:
            self.scheduler.undo(plan, launched=True)
            raise
        return launched

    def _finish(self, step: InFlight) -> StepResult:
        try:
            result = self.runner.finish(step)
            self.runner.draft_ahead(step.plan, result)
            return result
        except BaseException:
            self.scheduler.undo(step.plan, launched=True)
            if self._in_flight is not None:  # it builds on the step that failed
                self.scheduler.undo(self._in_flight.plan, launched=True)
                self._in_flight = None
            raise

    def _take_scores(self, plan: StepPlan, result: StepResult) -> None:
        scored = result.prompt_logprobs or result.distributions or result.hidden_sums
        for advance in plan.advances if scored else ():
            request = self.scheduler.get(advance.request_id)
            if request is None or request.retractions != advance.attempt:
                continue
            request.prompt_logprobs += result.prompt_logprobs.get(request.id, ())
            if request.id in result.distributions:
                request.distributions.append(result.distributions[request.id])
            if request.id in result.hidden_sums:
                request.hidden_sums.append(result.hidden_sums[request.id])

    def _report(self, request: Request, tokens: Sequence[int], result: StepResult) -> Progress:
        request.selections += result.selections.get(request.id, ())[: len(tokens)]
        scores = result.logprobs.get(request.id, ())[: len(tokens)]
        request.logprobs += scores
        return Progress(request, tuple(tokens), tuple(scores))

    # -- checks -------------------------------------------------------------------------------

    def _check_prompt(self, prompt_ids: Sequence[int], *, scored: bool) -> array[int]:
        if len(prompt_ids) == 0:
            raise RequestError("the prompt is empty; give at least one token")
        rows = self.spec.embedding_rows if scored else None
        tokens = self._check_tokens("prompt", prompt_ids, rows or self.spec.vocab_size)
        # A prompt that is only scored needs no room for output.
        most = self.max_tokens if scored else self.max_tokens - 1
        if len(prompt_ids) > most:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens, at most {most} are possible: the "
                f"context length is {self.context_length} tokens, the KV cache holds "
                f"{self.scheduler.cache.max_tokens}; shorten it, or raise context_length, "
                "kv_cache_gib or mem_fraction_static"
            )
        return tokens

    def _check_tokens(self, name: str, tokens: Sequence[int], count: int) -> array[int]:
        last = count - 1
        with suppress(TypeError, OverflowError):
            found = array("q", tokens)
            ids = np.frombuffer(found, dtype=np.int64)
            whole = set(map(type, tokens)) <= {int}
            if whole and (not len(ids) or (ids.min() >= 0 and ids.max() <= last)):
                return found
        for token in tokens:  # find the invalid token for the message
            if type(token) is not int:
                raise RequestError(f"{name} holds {token!r}; token ids are whole numbers")
            if not 0 <= token <= last:
                raise RequestError(
                    f"{name} holds token id {token}; ids of this model run from 0 to {last}"
                )
        raise AssertionError("unreachable: all tokens are valid")

    def _rope_length(self, prompt_len: int) -> int:
        """Prompt length that the keys depend on; 0 if they do not depend on it.

        With dynamic rope the keys of a long prompt depend on its length, so only prompts of the
        same length share pages.
        """
        limit = self.spec.dynamic_rope_context
        return 0 if limit is None or prompt_len <= limit else prompt_len
