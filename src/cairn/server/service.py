"""Checks a request, tokenises it, submits it to the engine, and cleans up after it."""

from __future__ import annotations

import asyncio
import gc
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import msgspec

from cairn.config import EngineConfig
from cairn.engine.locate import locate, sampling_defaults
from cairn.engine.sampling_params import SamplingParams
from cairn.server import wire
from cairn.server.answer import Answer, Choice
from cairn.server.api_error import ApiError, bad_request
from cairn.server.chat_input import message_text
from cairn.server.embeddings_format import EmbeddingsFormat
from cairn.server.engine_client import EngineClient, Health
from cairn.server.formats import ChatFormat, CompletionFormat, Format, FormOptions
from cairn.server.generated import GeneratedResponse
from cairn.server.grammar import chat_grammar, completion_grammar
from cairn.server.metrics import Metrics
from cairn.server.middleware import Record
from cairn.server.model_text import ModelText
from cairn.server.options import ServeConfig
from cairn.server.sampling import chat_params, completion_params, scores_echo
from cairn.server.schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingsRequest,
    Prompts,
    Sampling,
    TokenizeRequest,
)
from cairn.text.detokenizer import Detokenizer
from cairn.text.load import load_tokenizer
from cairn.text.stop_strings import StopStrings

_LOGGED = ("user", "metadata", "safety_identifier", "prompt_cache_key")


class Service:
    def __init__(self, engine: EngineConfig, serve: ServeConfig) -> None:
        self.metrics = Metrics()
        self.client = EngineClient(engine, serve, self.metrics)
        self.names = serve.model_names or [engine.model.rstrip("/").rpartition("/")[2]]
        self.created = int(time.time())
        self._engine_config = engine
        self._serve = serve
        self._held = 0  # choices from when their request is read to when it is answered
        self._text: ModelText | None = None
        self._defaults: dict[str, Any] = {}

    # -- starting and stopping ----------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's process."""
        self.client.start()

    async def started(self) -> None:
        """Returns when the server is ready, raises if the engine cannot be started."""
        await self.client.loaded()
        # The engine's process has downloaded the model, if that was needed.
        source = await asyncio.to_thread(locate, self._engine_config)
        tokenizer = await asyncio.to_thread(load_tokenizer, source)
        self._defaults = sampling_defaults(source)
        # What exists now stays: the garbage collector need not visit it again.
        gc.freeze()
        ready = self.client.ready
        self._text = ModelText(
            tokenizer,
            ends=() if ready is None else ready.eos_token_ids,
            threads=self._serve.tokenizer_threads,
            reasoning=self._serve.reasoning_parser,
        )

    def drain(self) -> None:
        self.client.drain()

    def give_up(self) -> None:
        """End the answers that are not complete when the time to drain is over."""
        self.client.fail_all(
            ApiError(503, "the server is stopping; send it again later", code="stopping")
        )

    async def close(self) -> None:
        if self._text is not None:
            self._text.close()
        await self.client.close()

    @property
    def model(self) -> str:
        """The model's first name."""
        return self.names[0]

    @property
    def health(self) -> Health:
        health = self.client.health
        if health.state == "ok" and self._text is None:
            return Health("loading", "the tokenizer is being read")
        return health

    @property
    def max_tokens(self) -> int | None:
        """Of a request, prompt and output. None until the model is loaded."""
        return None if self.client.ready is None else self.client.ready.max_tokens

    def summary(self) -> dict[str, Any]:
        """The numbers that the web page shows."""
        ready, stats = self.client.ready, self.client.stats
        return {
            "status": self.health.state,
            "reason": self.health.reason,
            "model": self.model,
            "time": time.time(),
            "restarts": self.client.restarts,
            "open_requests": self.client.num_open,
            "engine": None if ready is None else msgspec.to_builtins(ready),
            "stats": None if stats is None else msgspec.to_builtins(stats),
        }

    def text(self) -> ModelText:
        self.client.check_running()
        if self._text is None:
            raise ApiError(503, "the server is loading the model", code="loading", retry_after=5)
        return self._text

    def check_model(self, name: str | None) -> str:
        """The name to answer with."""
        if name is None:
            return self.model
        if name not in self.names and not self._serve.any_model_name:
            had = ", ".join(ascii(each) for each in self.names)
            raise ApiError(
                404,
                f"model is {name[:100]!a}; this server has {had}",
                param="model",
                code="model_not_found",
            )
        return name

    @contextmanager
    def _hold(self, count: int = 1) -> Iterator[None]:
        """Count choices against max_concurrent_requests."""
        limit = self._serve.max_concurrent_requests
        if self._held + count > limit:
            raise ApiError(
                429,
                f"{self._held} choices are being answered or wait, {count} more are asked for and "
                f"max_concurrent_requests is {limit}; send it again later",
                code="too_many_requests",
                retry_after=1,
            )
        self._held += count
        try:
            yield
        finally:
            self._held -= count

    # -- generating ---------------------------------------------------------------------------

    def complete(self, body: CompletionRequest) -> GeneratedResponse:
        return GeneratedResponse(partial(self._complete, body), self._serve.request_timeout)

    def chat(
        self, body: ChatRequest, make_format: Callable[..., Format] | None = None
    ) -> GeneratedResponse:
        """The answer to a conversation, in OpenAI's format or another API's."""
        form = make_format or partial(ChatFormat, f"chatcmpl-{secrets.token_hex(12)}")
        return GeneratedResponse(partial(self._chat, body, form), self._serve.request_timeout)

    def embed(self, body: EmbeddingsRequest) -> GeneratedResponse:
        return GeneratedResponse(partial(self._embed, body), self._serve.request_timeout)

    @asynccontextmanager
    async def _complete(self, body: CompletionRequest, record: Record) -> AsyncIterator[Answer]:
        prompts = _prompts("prompt", body.prompt)
        text = self._begin(body, record)
        if body.traced and len(prompts) > 1:
            raise bad_request("cairn", "cairn.trace works with one prompt at a time")
        with self._hold((body.n or 1) * len(prompts)):
            grammar = completion_grammar(body)
            ids = await self._tokens(body, prompts)
            params = completion_params(body, self._room(ids), self._defaults)
            options = FormOptions()
            if body.echo:
                echo = [p if isinstance(p, str) else await text.threads.decode(p) for p in prompts]
                options = FormOptions(echo=echo, scores_echo=scores_echo(body))
            form = partial(CompletionFormat, f"cmpl-{secrets.token_hex(12)}")
            async with self._answer(body, record, ids, params, form, options, grammar) as answer:
                yield answer

    @asynccontextmanager
    async def _chat(
        self, body: ChatRequest, make_format: Callable[..., Format], record: Record
    ) -> AsyncIterator[Answer]:
        text = self._begin(body, record)
        with self._hold(body.n or 1):
            prompt = await text.chat_prompt(body, record.ignored)
            grammar = chat_grammar(body, text.forms, prompt.place)
            ids = [self._truncated(body, prompt.ids)]
            params = chat_params(body, self._room(ids), self._defaults)
            last = body.messages[-1]
            echo = [message_text(last) if last.role == "assistant" else ""] if body.echo else None
            parsers = text.parsers(body, prompt.place, params.n)
            options = FormOptions(echo=echo, parsers=parsers)
            async with self._answer(
                body, record, ids, params, make_format, options, grammar
            ) as answer:
                yield answer

    def _begin(self, body: Sampling | EmbeddingsRequest, record: Record) -> ModelText:
        for name in _LOGGED:
            if (value := getattr(body, name, None)) is not None:
                record.client_fields[name] = value
        self.check_model(body.model)
        return self.text()

    async def _tokens(
        self, body: CompletionRequest | EmbeddingsRequest, prompts: Sequence[str | list[int]]
    ) -> list[list[int]]:
        text, special = self.text(), body.add_special_tokens
        ids = [await text.encode(p, special=special) if isinstance(p, str) else p for p in prompts]
        return [self._truncated(body, each) for each in ids]

    def _truncated(self, body: Sampling | EmbeddingsRequest, ids: list[int]) -> list[int]:
        """The part of a prompt that truncate_prompt_tokens keeps."""
        keep = body.truncate_prompt_tokens
        if keep is None:
            return ids
        if keep < 0:
            wanted = getattr(body, "max_completion_tokens", None) or getattr(body, "max_tokens", 1)
            keep = max(1, self.client.check_running().max_tokens - (wanted or 1))
        return ids[:keep] if body.truncation_side == "right" else ids[max(0, len(ids) - keep) :]

    def _room(self, prompts: Sequence[list[int]]) -> int:
        """Number of tokens left for the answer. A prompt that leaves none is refused here."""
        limit, longest = self.client.check_running().max_tokens, max(map(len, prompts))
        if longest >= limit:
            raise ApiError(
                400,
                f"the prompt has {longest} tokens, at most {limit - 1} are possible: context and "
                f"KV cache hold {limit}; shorten it, or start the server with a larger "
                "--context-length, --kv-cache-gib or --mem-fraction-static",
                param="prompt",
                code="context_length_exceeded",
            )
        return limit - longest

    @asynccontextmanager
    async def _answer(
        self,
        body: Sampling,
        record: Record,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        make_format: Callable[..., Format],
        options: FormOptions,
        grammar: wire.Grammar | None = None,
    ) -> AsyncIterator[Answer]:
        """Submit the prompts, and abort what has not ended on exit."""
        if body.tells_reading and not body.stream:
            raise bad_request("cairn", "cairn.reading comes in a stream; set stream too")
        trace = None
        if body.traced:
            trace = await self.text().pages(prompts[0], self.client.check_running())
        choices: list[Choice] = []
        messages = []
        stop = self._stop_strings(params)
        params = replace(params, stop=())  # the engine does not look for them
        for ids in prompts:
            own = [
                self._choice(len(choices) + i, ids, stop, body, parsed=bool(options.parsers))
                for i in range(params.n)
            ]
            choices += own
            submit = wire.Submit(
                own[0].number,
                ids,
                params,
                body.cache_salt,
                trace=body.traced,
                dense=body.dense,
                reading=body.tells_reading,
                grammar=grammar,
            )
            messages.append(submit)
        text, stream = self.text(), body.stream_options
        with_usage = stream is not None and bool(stream.include_usage)
        options = replace(
            options,
            streams=bool(body.stream),
            with_usage=with_usage,
            continuous_usage=with_usage and bool(stream and stream.continuous_usage_stats),
            token_ids=bool(body.return_token_ids),
            every_token=text.tokenizer is None,
            prompt_logprobs=body.prompt_logprobs is not None,
            trace=trace,
        )
        token_texts = text.token_ids if body.return_tokens_as_token_ids else text.token_texts
        model = self.check_model(body.model)
        form = make_format(model, prompts, choices, token_texts, options)
        async with self._submitted(choices, messages, form, record) as answer:
            yield answer

    @asynccontextmanager
    async def _embed(self, body: EmbeddingsRequest, record: Record) -> AsyncIterator[Answer]:
        prompts = _prompts("input", body.input)
        text, model = self._begin(body, record), self.check_model(body.model)
        with self._hold(len(prompts)):
            ids = await self._tokens(body, prompts)
            choices, messages = [], []
            for index, each in enumerate(ids):
                choices.append(Choice(self.client.new_number(), index, len(each), None))
                pooling = body.pooling or "mean"
                messages.append(
                    wire.Submit(choices[-1].number, each, SamplingParams(), returns=pooling)
                )
            form = EmbeddingsFormat(body, model, ids, choices, text.token_texts)
            async with self._submitted(choices, messages, form, record) as answer:
                yield answer

    @asynccontextmanager
    async def _submitted(
        self,
        choices: Sequence[Choice],
        messages: Sequence[wire.Submit],
        form: Format,
        record: Record,
    ) -> AsyncIterator[Answer]:
        answer = Answer(choices, form, len(messages), record.arrival)
        self.client.submit(messages, answer)
        try:
            yield answer
        finally:
            self.client.release(answer)
            if answer.first_token is not None:
                record.ttft = round(answer.first_token - answer.arrival, 4)
            record.prompt_tokens = sum(map(len, form.prompts))
            record.completion_tokens = sum(choice.tokens for choice in choices)
            record.cached_tokens = form.usage()["prompt_tokens_details"]["cached_tokens"]
            record.drafted_tokens = sum(choice.drafted for choice in choices) or None
            record.accepted_tokens = record.drafted_tokens and sum(own.accepted for own in choices)
            record.finish = [choice.reason for choice in choices if choice.reason is not None]
            self.metrics.answered(answer)

    def _stop_strings(self, params: SamplingParams) -> StopStrings:
        if self.text().tokenizer is None and params.stop_strings:
            raise bad_request(
                "stop",
                "stop needs a tokenizer and this model has no tokenizer.json; add one, or leave "
                "stop out",
            )
        return StopStrings(params.stop_strings)

    def _choice(
        self, index: int, prompt: list[int], stop: StopStrings, body: Sampling, *, parsed: bool
    ) -> Choice:
        tokenizer = self.text().tokenizer_for(body, parsed=parsed)
        detokenizer = None
        if tokenizer is not None:
            keep = bool(body.include_stop_str_in_output or body.no_stop_trim)
            detokenizer = Detokenizer(tokenizer, stop, prompt, keep_stop=keep)
        silent = isinstance(body, CompletionRequest) and body.max_tokens == 0
        number = self.client.new_number()
        return Choice(number, index, len(prompt), detokenizer, silent=silent)

    # -- tokens -------------------------------------------------------------------------------

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        self.check_model(body.model)
        text = self.text()
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("prompt", "give prompt or messages, and not both")
        with self._hold():
            if body.messages is not None:
                variables = dict(body.chat_template_kwargs or {})
                ids, _ = await text.encode_chat(body, body.tools, variables)
            else:
                assert body.prompt is not None
                ids = await text.encode(body.prompt, special=body.add_special_tokens)
        limit = self.client.check_running().max_tokens
        spellings = None
        if body.return_token_strs:
            spellings = [text.threads.need("a token").fast.id_to_token(token) for token in ids]
        return {"tokens": ids, "count": len(ids), "max_model_len": limit, "token_strs": spellings}

    async def count_tokens(self, body: ChatRequest, record: Record) -> int:
        """Tokens of the prompt of a chat."""
        text = self._begin(body, record)
        with self._hold():
            return len((await text.chat_prompt(body, record.ignored)).ids)

    async def detokenize(self, tokens: list[int]) -> dict[str, Any]:
        text = self.text()
        vocab = self.client.check_running().vocab_size
        if (most := max(tokens, default=0)) >= vocab:
            raise bad_request(
                "tokens", f"tokens holds {most}; ids of this model run from 0 to {vocab - 1}"
            )
        with self._hold():
            return {"prompt": await text.threads.decode(tokens)}


def _prompts(name: str, prompt: Prompts) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request(name, f"{name} is empty; give a text or token ids")
    if isinstance(prompt[0], int):
        return [prompt]
    return cast(list[str | list[int]], prompt)
