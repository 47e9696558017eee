"""The offline API: a model in this process.

    with LLM("path/to/model") as llm:
        print(llm.generate("The capital of France is", max_tokens=8).text)

One thread drives the engine. Requests of several streams still share every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast, overload

import torch

from cairn.config import EngineConfig
from cairn.engine.build import build_engine
from cairn.engine.engine import Engine
from cairn.engine.engine import Progress as StepProgress
from cairn.engine.request import FinishReason, Request
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import CairnError, RequestError
from cairn.outputs import Chunk, Generation, summarize
from cairn.progress import loading_bar
from cairn.text.detokenizer import Detokenizer
from cairn.text.tokenizer import Message, Tokenizer

Prompt = str | Sequence[int]


class _Live:
    """A submitted request and what of it has not been handed out."""

    def __init__(self, request: Request, detokenizer: Detokenizer | None) -> None:
        self.request = request
        self.detokenizer = detokenizer
        self.chunks: deque[Chunk] = deque()
        self.result: Generation | None = None
        self.scores: torch.Tensor | None = None

    def take(self, progress: StepProgress) -> None:
        self.scores = progress.scores
        shown = progress.new_tokens
        if self.request.stopped_by_token:
            shown = ()
        text = self.detokenizer.push(shown) if self.detokenizer else ""
        reason = self.request.finish_reason
        if reason is None:
            self.chunks.append(Chunk(self.request.id, text, list(progress.new_tokens)))
        else:
            self.finish(reason, text, progress.new_tokens)

    @property
    def found_stop_string(self) -> bool:
        return self.detokenizer is not None and self.detokenizer.stopped

    def finish(self, reason: FinishReason, text: str = "", tokens: Sequence[int] = ()) -> None:
        whole = None
        if self.detokenizer is not None:
            text += self.detokenizer.finish()
            whole = self.detokenizer.text
        if self.found_stop_string:
            reason = "stop"
        self.result = summarize(self.request, whole, reason)
        self.chunks.append(Chunk(self.request.id, text, list(tokens), reason, self.result))


class Stream(Iterator[Chunk]):
    """Chunks of one request as they are generated. Closing it early aborts the request."""

    def __init__(self, llm: LLM, live: _Live) -> None:
        self._llm = llm
        self._live = live
        self._ended = False

    @property
    def request_id(self) -> str:
        return self._live.request.id

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        try:
            while not self._live.chunks:
                self._llm._step()
        except BaseException:
            self.close()
            raise
        chunk = self._live.chunks.popleft()
        self._ended = chunk.finish_reason is not None
        return chunk

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self._llm.abort(self.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class LLM:
    def __init__(self, model: str | Path, **options: Any) -> None:
        """`options` are the fields of EngineConfig, the CLI's flags with underscores."""
        self._live: dict[str, _Live] = {}
        self._engine: Engine | None = None
        self.config = EngineConfig.from_kwargs({"model": str(model), **options})
        folder = Path(self.config.model).expanduser()
        self.tokenizer = Tokenizer.from_folder(folder) if folder.is_dir() else None
        with loading_bar(f"Loading {self.config.model}") as progress:
            self._engine = build_engine(self.config, progress)

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise CairnError("this LLM is closed")
        return self._engine

    # -- generating ---------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> list[Generation]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> Generation | list[Generation]:
        """Complete one prompt or many, given as text or token ids.

        Sampling comes as SamplingParams (one, or one per prompt) or as its fields by keyword. If
        any prompt is refused, none is run.
        """
        if _is_one(prompts):
            return self._generate([cast(Prompt, prompts)], sampling_params, cache_salt, sampling)[0]
        return self._generate(
            cast(Sequence[Prompt], prompts), sampling_params, cache_salt, sampling
        )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> Stream:
        """Complete one prompt, a chunk at a time."""
        params = _params(sampling_params, sampling)
        request = self._request(prompt, params, cache_salt)
        return Stream(self, self._submit(request))

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> Generation:
        """Answer a conversation: messages with a role and a content, in the model's own format."""
        ids = self._need_tokenizer("chat").apply_chat_template(messages)
        return self.generate(ids, sampling_params, cache_salt=cache_salt, **sampling)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> Stream:
        ids = self._need_tokenizer("chat").apply_chat_template(messages)
        return self.stream(ids, sampling_params, cache_salt=cache_salt, **sampling)

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """float32 [len(token_ids), vocab_size]; row i is the log-softmax after token i."""
        request = self.engine.make_request(token_ids, SamplingParams(), score_prompt=True)
        live = self._submit(request)
        self._run([live])
        assert live.scores is not None
        return live.scores

    def abort(self, request_id: str) -> bool:
        """End a request now; its stream closes with reason "abort". False if it had ended."""
        live = self._live.pop(request_id, None)
        if live is None or self._engine is None:
            return False
        self._engine.abort(request_id)
        live.finish("abort")
        return True

    # -- closing ------------------------------------------------------------------------------

    def close(self) -> None:
        """Abort what runs and free the model and its memory."""
        for request_id in list(self._live):
            self.abort(request_id)
        self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------------

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        cache_salt: str | None,
        sampling: dict[str, Any],
    ) -> list[Generation]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [_params(sampling_params, sampling)] * len(prompts)
        else:
            params = [_params(each, sampling) for each in sampling_params]
            if len(params) != len(prompts):
                raise RequestError(
                    f"sampling_params has {len(params)} entries for {len(prompts)} prompts"
                )
        requests = []
        for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            try:
                requests.append(self._request(prompt, each, cache_salt))
            except RequestError as error:
                where = f"prompts[{index}]: " if len(prompts) > 1 else ""
                raise RequestError(f"{where}{error}") from error
        lives: list[_Live] = []
        try:
            for request in requests:
                while self._queue_is_full():
                    self._step()
                lives.append(self._submit(request))
            self._run(lives)
        except BaseException:  # Ctrl-C too: leave nothing behind, then let it pass
            for live in lives:
                self.abort(live.request.id)
            raise
        return [cast(Generation, live.result) for live in lives]

    def _request(self, prompt: Prompt, params: SamplingParams, cache_salt: str | None) -> Request:
        if params.stop_strings:
            self._need_tokenizer("stop")
        ids = (
            self._need_tokenizer("a text prompt").encode(prompt)
            if isinstance(prompt, str)
            else prompt
        )
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt is {cache_salt!r}; it must be a string")
        return self.engine.make_request(ids, params, cache_salt=cache_salt)

    def _submit(self, request: Request) -> _Live:
        detokenizer = None
        if self.tokenizer is not None and not request.score_prompt:
            detokenizer = Detokenizer(self.tokenizer, request.params.stop_strings)
        live = _Live(request, detokenizer)
        self.engine.submit(request)
        self._live[request.id] = live
        return live

    def _run(self, lives: Sequence[_Live]) -> None:
        while any(live.result is None for live in lives):
            self._step()

    def _step(self) -> None:
        for progress in self.engine.step():
            live = self._live[progress.request.id]
            live.take(progress)
            if live.result is None and live.found_stop_string:
                self.engine.stop(progress.request.id)
                last = live.chunks.pop()
                live.finish("stop", last.text, last.token_ids)
            if live.result is not None:
                del self._live[progress.request.id]

    def _queue_is_full(self) -> bool:
        scheduler = self.engine.scheduler
        return scheduler.num_waiting >= scheduler.limits.max_queued_requests

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer and {self.config.model} has no tokenizer.json; "
                "add one, or pass token ids"
            )
        return self.tokenizer


def _is_one(prompts: object) -> bool:
    """A text, or a list of ids."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts is a {type(prompts).__name__}; give text or token ids")
    return not prompts or not isinstance(prompts[0], str | Sequence)


def _params(given: SamplingParams | None, fields: dict[str, Any]) -> SamplingParams:
    if given is None:
        return SamplingParams.from_kwargs(fields)
    if fields:
        raise RequestError(
            f"give sampling_params or single fields, not both (got {', '.join(sorted(fields))})"
        )
    return given
