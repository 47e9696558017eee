"""Drives an engine. `Frontend` adds text: prompts to tokens, and tokens to chunks of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

from cairn.config import EngineConfig
from cairn.engine.budgets import choose_budgets
from cairn.engine.build import build_engine
from cairn.engine.engine import Engine, Progress
from cairn.engine.locate import locate
from cairn.engine.plan import PromptScores
from cairn.engine.request import FinishReason, Request
from cairn.engine.sampling_params import SamplingParams
from cairn.engine.training_free import AUTO
from cairn.errors import ConfigError, RequestError
from cairn.interrupts import interrupts_held_back
from cairn.models.source import Confirm, ModelSource
from cairn.outputs import Chunk, Generation, summarize
from cairn.progress import loading_bar
from cairn.text.detokenizer import Detokenizer
from cairn.text.load import load_tokenizer
from cairn.text.prose import bundled_prose
from cairn.text.stop_strings import StopStrings
from cairn.text.tokenizer import Message, Tokenizer
from cairn.trace import make_trace

T = TypeVar("T")
Prompt = str | Sequence[int]
Sink = Callable[[Chunk | Exception], None]
"""Takes a request's chunks as they come, or the error that ends it."""


def load(config: EngineConfig, confirm: Confirm | None = None) -> tuple[Engine, Tokenizer | None]:
    """The engine, and the model's tokenizer if it has one."""
    with loading_bar("Fetching") as progress:
        source = locate(config, confirm, progress)
    tokenizer = load_tokenizer(source)
    if config.hsa_budget == AUTO:
        config = _with_budgets(config, source, tokenizer)
    with (
        loading_bar(f"Loading {config.model}") as progress,
        loading_bar("Compiling kernels", counted=True) as compiling,
    ):
        return build_engine(config, source, progress, compiling), tokenizer


def _with_budgets(
    config: EngineConfig, source: ModelSource, tokenizer: Tokenizer | None
) -> EngineConfig:
    """The config with pages for each layer in place of `auto`. An engine without budgets, which
    reads the bundled prose, chooses them."""
    if config.tp > 1:
        raise ConfigError(
            "hsa_budget is 'auto', which measures on one rank, and tp is "
            f"{config.tp}; choose the list without tp, then give it"
        )
    if tokenizer is None:
        raise ConfigError(
            f"hsa_budget is 'auto', which reads a text, and {config.model} has no tokenizer.json; "
            "add one, or list the pages of each layer"
        )
    if config.enable_hisparse:
        raise ConfigError(
            "hsa_budget is 'auto', which looks at all pages on the device, and enable_hisparse "
            "moves pages to the host; list the pages of each layer instead (without "
            "enable_hisparse, and with the same hsa_policy, the engine chooses and logs them)"
        )
    engine = build_engine(replace(config, hsa_budget=None), source)
    try:
        sparse, trained = engine.sparse, engine.spec.sparsity is not None
        if sparse is None or sparse.policy is None or trained or config.speculative:
            return config  # which is refused
        budgets = choose_budgets(engine, tokenizer.encode(bundled_prose()))
    finally:
        engine.close()
    return replace(config, hsa_budget=",".join(map(str, budgets)), hsa_topk=None)


class Driver(Generic[T]):
    """Submits requests to an engine, steps it, delivers what a step brings, and ends requests.

    For each open request a subclass keeps an object of type T: `Frontend` the output under
    construction, the server's engine process the number of the choice.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._open: dict[str, T] = {}  # by request id

    def add(self, requests: Sequence[Request], owners: Sequence[T]) -> None:
        """Queue all of these requests, or none. Raises QueueFullError."""
        self.engine.submit_all(requests)
        self._open.update(zip((request.id for request in requests), owners, strict=True))

    def is_open(self, request_id: str) -> bool:
        return request_id in self._open

    def end(self, request_id: str, reason: FinishReason) -> T | None:
        """End a request now. Returns the object kept for it, None if it has ended already."""
        owner = self._open.pop(request_id, None)
        if owner is not None:
            self.engine.scheduler.finish(request_id, reason)
        return owner

    def step(self) -> None:
        # Half a plan would lose pages, and a step without delivery would lose tokens.
        with interrupts_held_back():
            self.deliver(self.engine.step())

    def deliver(self, progress: Sequence[Progress]) -> None:
        """Pass on what a step brought; called with nothing, now and then, while idle."""
        raise NotImplementedError

    def run(self, receive: Callable[[], bool]) -> None:
        """Step until `receive` returns False.

        `receive` takes in what callers ask for. While the engine has no work, it may wait.
        """
        while receive():
            if self.engine.has_work:
                self.step()
            else:
                self.engine.watch()
                self.deliver([])
        self.close()

    def close(self) -> None:
        """Free what the engine holds besides its tensors."""
        self.engine.close()


class Output:
    """Turns the tokens of one request into chunks of text, and at last into a result."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        sink: Sink | None,
        summary: Callable[[Request, str | None, FinishReason], Generation],
    ) -> None:
        self.request = request
        self.result: Generation | None = None
        self.failure: Exception | None = None
        """Why there will be no result."""
        self._sink = sink
        self._summary = summary
        self._detokenizer = None
        if tokenizer is not None:
            stop = StopStrings(request.params.stop_strings)
            self._detokenizer = Detokenizer(tokenizer, stop, request.token_ids)

    @property
    def ended(self) -> bool:
        return self.result is not None or self.failure is not None

    def fail(self, error: Exception) -> None:
        """End without a result."""
        self.failure = error
        if self._sink is not None:
            self._sink(error)

    def take(self, progress: Progress) -> None:
        """Add new tokens. Sets the result if they end the request or complete a stop string."""
        text, reason = "", self.request.finish_reason
        if self._detokenizer is not None:
            tokens = progress.new_tokens
            shown = tokens[:-1] if self.request.stopped_by_token else tokens
            for i, token in enumerate(shown):
                text += self._detokenizer.push((token,))
                if self._detokenizer.stopped:
                    progress = self._cut(progress, i + 1)
                    break
            if reason is not None:
                text += self._detokenizer.finish()
            if self._detokenizer.stopped:
                reason = "stop"
        self._emit(text, progress, reason)

    def _cut(self, progress: Progress, count: int) -> Progress:
        """Drop the new tokens behind the first `count`, which completed a stop string."""
        request, tokens, scores = progress
        if (more := len(tokens) - count) > 0:
            for kept in (request.token_ids, request.logprobs, request.selections):
                del kept[max(0, len(kept) - more) :]
        return Progress(request, tokens[:count], scores[:count])

    def abort(self) -> None:
        text = "" if self._detokenizer is None else self._detokenizer.finish()
        self._emit(text, Progress(self.request), "abort")

    def _emit(self, text: str, progress: Progress, reason: FinishReason | None) -> None:
        if reason is not None:
            whole = None if self._detokenizer is None else self._detokenizer.text
            self.result = self._summary(self.request, whole, reason)
        if self._sink is not None:
            request, tokens, scores = progress
            # By position, which is faster: every new token passes here.
            chunk = Chunk(
                request.id, text, list(tokens), scores, request.choice, reason, self.result
            )
            self._sink(chunk)


class Frontend(Driver[Output]):
    def __init__(self, config: EngineConfig, confirm: Confirm | None = None) -> None:
        self.config = config
        engine, self.tokenizer = load(config, confirm)
        super().__init__(engine)
        self._stepping = False
        self._unwanted: list[str] = []  # requests to abort after the step

    # -- requests -----------------------------------------------------------------------------

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        cache_salt: str | None = None,
        *,
        trace: bool = False,
        returns: PromptScores = "none",
    ) -> list[Request]:
        """Checked requests, one for each choice. Raises RequestError. `returns` is for requests
        that generate nothing."""
        if params.stop_strings:
            self._need_tokenizer("stop")
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt is {cache_salt!r}; it must be a string")
        ids = self.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        return self.engine.make_requests(
            ids, params, cache_salt=cache_salt, traced=trace, returns=returns
        )

    def submit(self, requests: Sequence[Request], sink: Sink | None = None) -> list[Output]:
        """Queue all of these requests, or none. `sink` gets their chunks as they come."""
        outputs = [Output(request, self.tokenizer, sink, self._summarize) for request in requests]
        self.add(requests, outputs)
        return outputs

    def _summarize(self, request: Request, text: str | None, reason: FinishReason) -> Generation:
        self.engine.scheduler.finish(request.id, reason)  # it goes on after a stop string
        trace = None
        if request.traced:
            trace = make_trace(
                request.token_ids,
                request.prompt_len,
                request.selections,
                self.engine.selected,
                None if self.tokenizer is None else self.tokenizer.decode,
            )
        return summarize(request, text, reason, trace)

    def step(self) -> None:
        self._stepping = True
        try:
            super().step()
        finally:
            self._stepping = False
            while self._unwanted:
                self.abort(self._unwanted.pop())

    def abort(self, request_id: str) -> bool:
        """End a request now. False if it has ended already.

        The garbage collector may find a stream that nobody wants in the middle of a step. Its
        requests end after the step.
        """
        if self._stepping:
            self._unwanted.append(request_id)
            return self.is_open(request_id)
        output = self.end(request_id, "abort")
        if output is not None:
            output.abort()
        return output is not None

    def abort_all(self) -> None:
        for request_id in list(self._open):
            self.abort(request_id)

    def close(self) -> None:
        self.abort_all()
        super().close()

    def deliver(self, progress: Sequence[Progress]) -> None:
        """Make text. A request whose text fails ends with the error; others go on."""
        for each in progress:
            request_id = each.request.id
            output = self._open.get(request_id)
            if output is None:
                continue  # aborted, because the step after the one that brought this failed
            try:
                output.take(each)
            except Exception as error:
                self.end(request_id, "abort")
                output.fail(error)
            if output.ended:
                self._open.pop(request_id, None)

    # -- text ---------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        return self._need_tokenizer("a text prompt").encode(text)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self._need_tokenizer("chat").apply_chat_template(messages)

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer and {self.config.model} has no tokenizer.json; "
                "add one, or pass token ids"
            )
        return self.tokenizer


def make_params(given: SamplingParams | None, fields: dict[str, Any]) -> SamplingParams:
    """SamplingParams, or its fields by keyword, but not both."""
    if given is None:
        return SamplingParams.from_kwargs(fields)
    if not isinstance(given, SamplingParams):
        raise RequestError(f"sampling_params is a {type(given).__name__}; give SamplingParams")
    if fields:
        raise RequestError(
            f"give sampling_params or single fields, not both (got {', '.join(sorted(fields))})"
        )
    return given


def _token_ids(prompt: object) -> list[int]:
    """Token ids from a list, or from a tensor or an array."""
    if hasattr(prompt, "tolist"):
        prompt = cast(Any, prompt).tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise RequestError(f"a prompt is a {type(prompt).__name__}; give text or token ids")
    return list(prompt)
