"""Text on one side, the engine on the other. `LLM` and `AsyncLLM` are two ways to drive it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from cairn.config import EngineConfig
from cairn.engine.build import build_engine
from cairn.engine.engine import Engine
from cairn.engine.engine import Progress as StepProgress
from cairn.engine.locate import locate
from cairn.engine.request import FinishReason, Request
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import RequestError
from cairn.models.source import Confirm
from cairn.outputs import Chunk, Generation, summarize
from cairn.progress import loading_bar
from cairn.text.detokenizer import Detokenizer
from cairn.text.load import load_tokenizer
from cairn.text.tokenizer import Message, Tokenizer
from cairn.trace import Trace, make_trace

Prompt = str | Sequence[int]
Sink = Callable[[Chunk], None]


class Live:
    """A submitted request whose tokens become chunks of text."""

    def __init__(
        self,
        request: Request,
        choice: int,
        detokenizer: Detokenizer | None,
        sink: Sink | None,
        tracer: Callable[[Request], Trace],
    ) -> None:
        self.request = request
        self.result: Generation | None = None
        self._tracer = tracer
        self._choice = choice
        self._detokenizer = detokenizer
        self._sink = sink

    def take(self, progress: StepProgress) -> bool:
        """New tokens. True if they complete a stop string, so that the request has to end."""
        shown = () if self.request.stopped_by_token else progress.new_tokens
        text = self._detokenizer.push(shown) if self._detokenizer else ""
        stopped = self._detokenizer is not None and self._detokenizer.stopped
        reason = self.request.finish_reason
        if reason is None and not stopped:
            self._emit(text, progress, None)
            return False
        if self._detokenizer is not None:
            text += self._detokenizer.finish()
            stopped = self._detokenizer.stopped
        self._finish("stop" if stopped or reason is None else reason)
        self._emit(text, progress, self.result)
        return stopped

    def abort(self) -> None:
        text = self._detokenizer.finish() if self._detokenizer else ""
        self._finish("abort")
        self._emit(text, StepProgress(self.request), self.result)

    def _finish(self, reason: FinishReason) -> None:
        text = self._detokenizer.text if self._detokenizer else None
        trace = self._tracer(self.request) if self.request.traced else None
        self.result = summarize(self.request, text, reason, trace)

    def _emit(self, text: str, progress: StepProgress, result: Generation | None) -> None:
        if self._sink is not None:
            self._sink(
                Chunk(
                    request_id=self.request.id,
                    choice=self._choice,
                    text=text,
                    token_ids=list(progress.new_tokens),
                    logprobs=progress.logprobs,
                    finish_reason=None if result is None else result.finish_reason,
                    result=result,
                )
            )


def load(config: EngineConfig, confirm: Confirm | None = None) -> tuple[Engine, Tokenizer | None]:
    """An engine, and its model's tokenizer if it has one."""
    with loading_bar("Fetching") as progress:
        source = locate(config, confirm, progress)
    tokenizer = load_tokenizer(source)
    with (
        loading_bar(f"Loading {config.model}") as progress,
        loading_bar("Compiling kernels", counted=True) as compiling,
    ):
        return build_engine(config, source, progress, compiling), tokenizer


class Frontend:
    def __init__(self, config: EngineConfig, confirm: Confirm | None = None) -> None:
        self.config = config
        self.engine, self.tokenizer = load(config, confirm)
        self._live: dict[str, Live] = {}

    # -- requests -----------------------------------------------------------------------------

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        cache_salt: str | None = None,
        *,
        trace: bool = False,
    ) -> list[Request]:
        """Checked requests, one for each choice. Raises RequestError."""
        if params.stop_strings:
            self._need_tokenizer("stop")
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt is {cache_salt!r}; it must be a string")
        ids = self.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        return self.engine.make_requests(ids, params, cache_salt=cache_salt, traced=trace)

    def submit(self, requests: Sequence[Request], sink: Sink | None = None) -> list[Live]:
        """Queue all choices of a prompt, or none; `sink` gets their chunks as they come."""
        self.engine.submit_all(requests)
        return [self._follow(request, i, sink) for i, request in enumerate(requests)]

    def submit_one(self, request: Request, choice: int = 0) -> Live:
        self.engine.submit(request)
        return self._follow(request, choice, None)

    def _follow(self, request: Request, choice: int, sink: Sink | None) -> Live:
        detokenizer = None
        if self.tokenizer is not None:
            stop, prompt = request.params.stop_strings, request.token_ids
            detokenizer = Detokenizer(self.tokenizer, stop, prompt)
        self._live[request.id] = live = Live(request, choice, detokenizer, sink, self._trace)
        return live

    def _trace(self, request: Request) -> Trace:
        decode = None if self.tokenizer is None else self.tokenizer.decode
        geometry = self.engine.scheduler.cache.geometry
        selections = request.selections
        return make_trace(request.token_ids, request.prompt_len, selections, geometry, decode)

    def is_live(self, request_id: str) -> bool:
        return request_id in self._live

    def abort(self, request_id: str) -> bool:
        """End a request now. False if it had ended."""
        live = self._live.pop(request_id, None)
        if live is None:
            return False
        self.engine.abort(request_id)
        live.abort()
        return True

    def abort_all(self) -> None:
        for request_id in list(self._live):
            self.abort(request_id)

    def close(self) -> None:
        """Abort what runs and free what the engine holds beside its tensors."""
        self.abort_all()
        self.engine.close()

    def step(self) -> None:
        """One engine step, and the text that comes of it.

        Should one request's text fail, it is aborted, the others go on, and the error is raised.
        """
        failure: Exception | None = None
        for progress in self.engine.step():
            live = self._live[progress.request.id]
            try:
                if live.take(progress) and not progress.finished:
                    self.engine.stop(progress.request.id)
            except Exception as error:
                failure = failure or error
                self.engine.abort(progress.request.id)
                del self._live[progress.request.id]
                continue
            if live.result is not None:
                del self._live[progress.request.id]
        if failure is not None:
            raise failure

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
    """Ids from a list, or anything that turns into one (a tensor, an array)."""
    if isinstance(prompt, torch.Tensor) or hasattr(prompt, "tolist"):
        prompt = cast(Any, prompt).tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise RequestError(f"a prompt is a {type(prompt).__name__}; give text or token ids")
    return list(prompt)
