"""The offline API: a model in this process.

    with LLM("path/to/model") as llm:
        print(llm.generate("The capital of France is", max_tokens=8).text)

Requests of several streams share every step. Threads take turns: one that generates waits for the
others' calls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast, overload

import torch

from cairn.config import EngineConfig
from cairn.engine.engine import Engine
from cairn.engine.plan import PromptScores
from cairn.engine.request import Request
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import CairnError, RequestError
from cairn.frontend import Frontend, Output, Prompt, make_params
from cairn.outputs import Chunk, Generation
from cairn.text.tokenizer import Message, Tokenizer


class Stream(Iterator[Chunk]):
    """Chunks of one prompt's choices as they are generated. Closing it early aborts them."""

    def __init__(self, llm: LLM, requests: list[Request]) -> None:
        self._llm = llm
        self._chunks: deque[Chunk | Exception] = deque()
        self._ids = [request.id for request in requests]
        self._open = len(requests)
        with llm.lock:
            llm.frontend.submit(requests, self._chunks.append)

    @property
    def request_id(self) -> str:
        """Of the first choice; chunks carry their own."""
        return self._ids[0]

    def __next__(self) -> Chunk:
        if not self._open:
            raise StopIteration
        try:
            with self._llm.lock:
                while not self._chunks:
                    self._llm.frontend.step()
            chunk = self._chunks.popleft()
            if isinstance(chunk, Exception):
                raise chunk
        except BaseException:
            self.close()
            raise
        self._open -= chunk.finish_reason is not None
        return chunk

    def close(self) -> None:
        self._open = 0
        for request_id in self._ids:
            self._llm.abort(request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", 0):
            self.close()


class LLM:
    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        """`options` are the fields of EngineConfig, the CLI's flags with underscores.

        Without a model, the default one is fetched on first use.
        """
        self._frontend: Frontend | None = None
        self.lock = threading.RLock()
        if model is not None:
            options["model"] = str(model)
        self._frontend = Frontend(EngineConfig.from_kwargs(options))

    @classmethod
    def from_frontend(cls, frontend: Frontend) -> Self:
        llm = cls.__new__(cls)
        llm.lock = threading.RLock()
        llm._frontend = frontend
        return llm

    @property
    def frontend(self) -> Frontend:
        """For callers that drive the engine step by step."""
        if self._frontend is None:
            raise CairnError("this LLM is closed")
        return self._frontend

    @property
    def config(self) -> EngineConfig:
        return self.frontend.config

    @property
    def engine(self) -> Engine:
        return self.frontend.engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.frontend.tokenizer

    # -- generating ---------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        trace: bool = False,
        **sampling: Any,
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        trace: bool = False,
        **sampling: Any,
    ) -> list[Generation]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        trace: bool = False,
        **sampling: Any,
    ) -> Generation | list[Generation]:
        """Complete one prompt or many, given as text or token ids.

        Sampling comes as SamplingParams (one, or one per prompt) or as its fields by keyword. If
        any prompt is refused, none is run. With `trace`, and sparse attention, each result says
        which pages its tokens were read from.
        """
        one = _is_one(prompts)
        many = [cast(Prompt, prompts)] if one else cast(Sequence[Prompt], prompts)
        prepared = self._prepare(many, sampling_params, sampling, cache_salt, trace)
        with self.lock:
            results = [_result(outputs) for outputs in self._run(prepared)]
        return results[0] if one else results

    def generate_each(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        trace: bool = False,
        **sampling: Any,
    ) -> Generator[Generation, None, None]:
        """Like `generate` of several prompts, but gives each result as soon as it and those before
        it are there. Closing it early aborts the rest."""
        if len(prompts):
            _check_many(prompts, ", or use generate")
        return self._each(self._prepare(prompts, sampling_params, sampling, cache_salt, trace))

    def _each(self, prepared: list[list[Request]]) -> Generator[Generation, None, None]:
        running = self._run(prepared)
        try:
            while True:
                with self.lock:
                    outputs = next(running, None)
                if outputs is None:
                    return
                yield _result(outputs)
        finally:
            with self.lock:
                running.close()

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        trace: bool = False,
        **sampling: Any,
    ) -> Stream:
        """Complete one prompt, a chunk at a time."""
        params = make_params(sampling_params, sampling)
        requests = self.frontend.prepare(prompt, params, cache_salt, trace=trace)
        return Stream(self, requests)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        trace: bool = False,
        **sampling: Any,
    ) -> Generation:
        """Answer a conversation: messages with a role and a content, in the model's own format."""
        ids = self.frontend.encode_chat(messages)
        return self.generate(ids, sampling_params, cache_salt=cache_salt, trace=trace, **sampling)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        trace: bool = False,
        **sampling: Any,
    ) -> Stream:
        ids = self.frontend.encode_chat(messages)
        return self.stream(ids, sampling_params, cache_salt=cache_salt, trace=trace, **sampling)

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """float32 [len(token_ids), vocab_size]; row i is the log-softmax after token i."""
        requests = self.frontend.prepare(token_ids, SamplingParams(), returns="whole")
        with self.lock:
            (outputs,) = self._run([requests])
        return torch.cat(outputs[0].request.distributions)

    def embed(
        self, prompts: Sequence[Prompt], pooling: Literal["mean", "last"] = "mean"
    ) -> torch.Tensor:
        """float32 [len(prompts), hidden size], of length 1: the mean of the last layer's hidden
        states over a prompt's tokens, or that of its last token."""
        if pooling not in ("mean", "last"):
            raise RequestError(f"pooling is {pooling!r}; choose mean or last")
        if not len(prompts):
            raise RequestError("prompts is empty; give at least one prompt")
        _check_many(prompts)
        prepared = self._prepare(prompts, None, {}, None, trace=False, returns=pooling)
        with self.lock:
            finished = list(self._run(prepared))
        return torch.stack([outputs[0].request.embedding() for outputs in finished])

    def abort(self, request_id: str) -> bool:
        """End a request now; its stream closes with reason "abort". False if it had ended."""
        with self.lock:
            return self._frontend is not None and self._frontend.abort(request_id)

    # -- closing ------------------------------------------------------------------------------

    def close(self) -> None:
        """Abort what runs and free the model and its memory."""
        with self.lock:
            if self._frontend is not None:
                self._frontend.close()
                self._frontend = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------------

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        sampling: dict[str, Any],
        cache_salt: str | None,
        trace: bool,
        returns: PromptScores = "none",
    ) -> list[list[Request]]:
        if isinstance(sampling_params, Sequence):
            params = [make_params(each, sampling) for each in sampling_params]
        else:
            params = [make_params(sampling_params, sampling)] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(
                f"sampling_params has {len(params)} entries for {len(prompts)} prompts"
            )
        prepared = []
        for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            try:
                prepared.append(
                    self.frontend.prepare(prompt, each, cache_salt, trace=trace, returns=returns)
                )
            except RequestError as error:
                where = f"prompts[{index}]: " if len(prompts) > 1 else ""
                raise RequestError(f"{where}{error}") from error
        return prepared

    def _run(self, prepared: Sequence[list[Request]]) -> Generator[list[Output], None, None]:
        """Submit requests as the queue has room for them, and step until each has ended, in
        order."""
        frontend = self.frontend
        outputs: list[list[Output]] = []
        try:
            for requests in prepared:
                outputs.append([])
                for request in requests:
                    while not frontend.engine.free_places:
                        frontend.step()
                    outputs[-1] += frontend.submit([request])
            for choices in outputs:
                while not all(output.ended for output in choices):
                    frontend.step()
                for output in choices:
                    if output.failure is not None:
                        raise output.failure
                yield choices
        except BaseException:  # Ctrl-C and `close` too: end the requests, then raise it again
            for requests in prepared:
                for request in requests:
                    frontend.abort(request.id)
            raise


def _result(outputs: Sequence[Output]) -> Generation:
    first, *others = (cast(Generation, output.result) for output in outputs)
    return first.with_alternatives(others)


def _check_many(prompts: object, instead: str = "") -> None:
    if _is_one(prompts):
        raise RequestError(f"prompts is one prompt; give a list{instead}")


def _is_one(prompts: object) -> bool:
    """A text, or a list of ids."""
    if isinstance(prompts, str):
        return True
    if hasattr(prompts, "tolist"):  # a tensor or an array: one row, or several
        return getattr(prompts, "ndim", 1) == 1
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(f"prompts is a {type(prompts).__name__}; give text or token ids")
    return not prompts or not (
        isinstance(prompts[0], str | Sequence) or hasattr(prompts[0], "tolist")
    )
