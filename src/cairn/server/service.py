"""Checks a request, tokenises it, submits it to the engine, and cleans up after it."""

from __future__ import annotations

import asyncio
import gc
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, cast

import msgspec

from cairn.config import EngineConfig
from cairn.engine.locate import locate, sampling_defaults
from cairn.engine.sampling_params import SamplingParams
from cairn.server import wire
from cairn.server.answer import Answer, Choice
from cairn.server.api_error import ApiError, bad_request
from cairn.server.chat_input import template_messages
from cairn.server.engine_client import EngineClient, Health
from cairn.server.formats import ChatFormat, CompletionFormat, Format, TokenTexts
from cairn.server.generated import GeneratedResponse
from cairn.server.grammar import chat_grammar
from cairn.server.metrics import Metrics
from cairn.server.middleware import Record
from cairn.server.options import ServeConfig
from cairn.server.sampling import chat_params, completion_params
from cairn.server.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Sampling,
    TokenizeRequest,
)
from cairn.server.text_threads import TextThreads
from cairn.text.detokenizer import Detokenizer
from cairn.text.load import load_tokenizer

_LOGGED = ("user", "metadata", "safety_identifier", "prompt_cache_key")


class Service:
    def __init__(self, engine: EngineConfig, serve: ServeConfig) -> None:
        self.metrics = Metrics()
        self.client = EngineClient(engine, serve, self.metrics)
        self.model = serve.served_model_name or engine.model.rstrip("/").rpartition("/")[2]
        self.created = int(time.time())
        self._engine_config = engine
        self._serve = serve
        self._held = 0  # choices from when their request is read to when it is answered
        self._text: TextThreads | None = None
        self._defaults: dict[str, Any] = {}
        self._token_texts = TokenTexts(None)

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
        self._token_texts = TokenTexts(tokenizer)
        self._text = TextThreads(tokenizer, self._serve.tokenizer_threads)

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

    def text(self) -> TextThreads:
        self.client.check_running()
        if self._text is None:
            raise ApiError(503, "the server is loading the model", code="loading", retry_after=5)
        return self._text

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise ApiError(
                404,
                f"model is {name[:100]!a}; this server has {self.model!a}",
                param="model",
                code="model_not_found",
            )

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

    def chat(self, body: ChatRequest) -> GeneratedResponse:
        return GeneratedResponse(partial(self._chat, body), self._serve.request_timeout)

    @asynccontextmanager
    async def _complete(self, body: CompletionRequest, record: Record) -> AsyncIterator[Answer]:
        prompts = _prompts(body)
        text = self._begin(body, record)
        if body.echo and body.stream and body.logprobs is not None:
            raise bad_request(
                "echo",
                "echo with logprobs cannot be streamed: the prompt's scores come last; leave "
                "stream out",
            )
        if body.traced and len(prompts) > 1:
            raise bad_request("cairn", "cairn.trace works with one prompt at a time")
        with self._hold((body.n or 1) * len(prompts)):
            ids = [await text.encode(p) if isinstance(p, str) else p for p in prompts]
            params = completion_params(body, self._room(ids), self._defaults)
            echo = None
            if body.echo:
                echo = [p if isinstance(p, str) else await text.decode(p) for p in prompts]
            form = partial(CompletionFormat, f"cmpl-{secrets.token_hex(12)}", echo=echo)
            async with self._answer(body, record, ids, params, form) as answer:
                yield answer

    @asynccontextmanager
    async def _chat(self, body: ChatRequest, record: Record) -> AsyncIterator[Answer]:
        text = self._begin(body, record)
        tools = None if body.tool_choice == "none" else body.tools
        with self._hold(body.n or 1):
            grammar = chat_grammar(body)
            ids = [await self._encode_chat(text, body.messages, tools)]
            params = chat_params(body, self._room(ids), self._defaults)
            form = partial(ChatFormat, f"chatcmpl-{secrets.token_hex(12)}", tools=bool(tools))
            async with self._answer(body, record, ids, params, form, grammar) as answer:
                yield answer

    def _begin(self, body: Sampling, record: Record) -> TextThreads:
        for name in _LOGGED:
            if (value := getattr(body, name, None)) is not None:
                record.client_fields[name] = value
        self.check_model(body.model)
        return self.text()

    async def _encode_chat(
        self, text: TextThreads, messages: Sequence[ChatMessage], tools: Any = None
    ) -> list[int]:
        template = text.need("chat").template
        rendered, listed = template_messages(messages, tools, template.source if template else "")
        return await text.encode_chat(rendered, listed)

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

    async def _traced_prompt(self, ids: list[int]) -> dict[str, Any]:
        """The prompt's pages, as the page map draws them."""
        engine = self.client.check_running()
        if not engine.can_trace:
            raise bad_request(
                "cairn",
                "cairn.trace shows which pages sparse attention reads; start the server with "
                "--attention-backend hsa",
            )
        size = engine.tokens_per_page
        parts = [ids[begin : begin + size] for begin in range(0, len(ids), size)]
        return {
            "page_size": engine.page_size,
            "tokens_per_page": size,
            "sparse_layers": engine.sparse_layers,
            "prompt_tokens": len(ids),
            "texts": await self.text().decode_each(parts),
        }

    @asynccontextmanager
    async def _answer(
        self,
        body: Sampling,
        record: Record,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        make_format: Callable[..., Format],
        grammar: wire.Grammar | None = None,
    ) -> AsyncIterator[Answer]:
        """Submit the prompts, and abort what has not ended on exit."""
        options = body.stream_options
        if body.tells_reading and not body.stream:
            raise bad_request("cairn", "cairn.reading comes in a stream; set stream too")
        trace = await self._traced_prompt(prompts[0]) if body.traced else None
        choices: list[Choice] = []
        messages = []
        for ids in prompts:
            own = [self._choice(len(choices) + i, ids, params) for i in range(params.n)]
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
        form = make_format(
            self.model,
            choices,
            self._token_texts,
            prompts=len(prompts),
            streams=bool(body.stream),
            with_usage=options is not None and bool(options.include_usage),
            trace=trace,
        )
        answer = Answer(choices, form, len(messages), record.arrival)
        self.client.submit(messages, answer)
        try:
            yield answer
        finally:
            self.client.release(answer)
            if answer.first_token is not None:
                record.ttft = round(answer.first_token - answer.arrival, 4)
            record.prompt_tokens = sum(map(len, prompts))
            record.completion_tokens = sum(choice.tokens for choice in choices)
            record.cached_tokens = form.usage()["prompt_tokens_details"]["cached_tokens"]
            record.finish = [choice.reason for choice in choices if choice.reason is not None]
            self.metrics.answered(answer)

    def _choice(self, index: int, prompt: list[int], params: SamplingParams) -> Choice:
        tokenizer, stop = self.text().tokenizer, params.stop_strings
        if tokenizer is None and stop:
            raise bad_request(
                "stop",
                "stop needs a tokenizer and this model has no tokenizer.json; add one, or leave "
                "stop out",
            )
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer, stop, prompt)
        return Choice(self.client.new_number(), index, len(prompt), detokenizer)

    # -- tokens -------------------------------------------------------------------------------

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        self.check_model(body.model)
        text = self.text()
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("prompt", "give prompt or messages, and not both")
        if body.messages is not None and body.add_special_tokens is not None:
            raise bad_request(
                "add_special_tokens",
                "add_special_tokens goes with prompt: a chat template writes its own",
            )
        with self._hold():
            if body.messages is not None:
                ids = await self._encode_chat(text, body.messages)
            else:
                assert body.prompt is not None
                special = body.add_special_tokens is not False
                ids = await text.encode(body.prompt, special=special)
        limit = self.client.check_running().max_tokens
        return {"tokens": ids, "count": len(ids), "max_model_len": limit}

    async def detokenize(self, tokens: list[int]) -> dict[str, Any]:
        text = self.text()
        vocab = self.client.check_running().vocab_size
        if (most := max(tokens, default=0)) >= vocab:
            raise bad_request(
                "tokens", f"tokens holds {most}; ids of this model run from 0 to {vocab - 1}"
            )
        with self._hold():
            return {"prompt": await text.decode(tokens)}


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt", "prompt is empty; give a text or token ids")
    if isinstance(prompt[0], int):
        return [prompt]
    return cast(list[str | list[int]], prompt)
