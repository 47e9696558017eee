"""Between HTTP and the engine: checks a request, tokenises it, submits it, and cleans up after."""

from __future__ import annotations

import asyncio
import gc
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import msgspec

from cairn.config import EngineConfig
from cairn.engine.locate import locate, sampling_defaults
from cairn.engine.sampling_params import SamplingParams
from cairn.server import wire
from cairn.server.answer import Answer, Choice
from cairn.server.api_error import ApiError
from cairn.server.chat_input import template_messages
from cairn.server.engine_client import EngineClient, Health
from cairn.server.events import Generated
from cairn.server.formats import ChatFormat, CompletionFormat, PageTexts
from cairn.server.gate import Gate
from cairn.server.grammar import chat_grammar
from cairn.server.metrics import Metrics
from cairn.server.options import ServeConfig
from cairn.server.record import Record
from cairn.server.sampling import chat_params, completion_params
from cairn.server.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Sampling,
    TokenizeRequest,
)
from cairn.server.text_threads import TextThreads
from cairn.server.token_text import TokenTexts
from cairn.text.detokenizer import Detokenizer
from cairn.text.load import load_tokenizer

_LOGGED = ("user", "metadata", "safety_identifier", "prompt_cache_key")


class Service:
    def __init__(self, engine: EngineConfig, serve: ServeConfig) -> None:
        self.metrics = Metrics()
        self.client = EngineClient(engine, serve, self.metrics)
        self.gate = Gate(serve.max_concurrent_requests)
        self.model = serve.served_model_name or engine.model.rstrip("/").rpartition("/")[2]
        self.created = int(time.time())
        self._engine_config = engine
        self._serve = serve
        self._text: TextThreads | None = None
        self._defaults: dict[str, Any] = {}
        self._token_texts = TokenTexts(None)

    # -- starting and stopping ----------------------------------------------------------------

    def start(self) -> None:
        """Have the engine's process started."""
        self.client.start()

    async def started(self) -> None:
        """Returns when there is something to serve, raises if there never will be."""
        ready = asyncio.create_task(self.client.became_ready.wait())
        failed = asyncio.create_task(self.client.failed.wait())
        try:
            await asyncio.wait({ready, failed}, return_when=asyncio.FIRST_COMPLETED)
            if self.client.failure is not None:
                raise self.client.failure
            # The engine's process has fetched what had to be fetched.
            source = await asyncio.to_thread(locate, self._engine_config)
            tokenizer = await asyncio.to_thread(load_tokenizer, source)
            self._defaults = sampling_defaults(source)
        finally:
            ready.cancel()
            failed.cancel()
        # What is there now stays: the collector need not go through it again and again.
        gc.freeze()
        self._token_texts = TokenTexts(tokenizer)
        self._text = TextThreads(tokenizer, self._serve.tokenizer_threads)

    def drain(self) -> None:
        self.client.drain()

    def give_up(self) -> None:
        """Answers that are not complete when the time to drain is over."""
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

    def summary(self) -> dict[str, Any]:
        """What the page's gauges show."""
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

    # -- generating ---------------------------------------------------------------------------

    def complete(self, body: CompletionRequest) -> Generated:
        return Generated(partial(self._open_completion, body), self._serve.request_timeout)

    def chat(self, body: ChatRequest) -> Generated:
        return Generated(partial(self._open_chat, body), self._serve.request_timeout)

    @asynccontextmanager
    async def _open_completion(
        self, body: CompletionRequest, record: Record
    ) -> AsyncIterator[Answer]:
        prompts = _prompts(body)
        text = self._begin(body, record)
        if body.echo and body.stream and body.logprobs is not None:
            raise ApiError(
                400,
                "echo with logprobs cannot be streamed: the prompt's scores come last; leave "
                "stream out",
                param="echo",
            )
        if body.traced and len(prompts) > 1:
            raise ApiError(400, "cairn.trace works with one prompt at a time", param="cairn")
        choices = body.n or 1
        with self.gate.hold(choices * len(prompts)):
            ids = [
                await text.encode(prompt) if isinstance(prompt, str) else prompt
                for prompt in prompts
            ]
            params = completion_params(body, self._room(ids), self._defaults)
            echo = None
            if body.echo:
                echo = [
                    prompt if isinstance(prompt, str) else await text.decode(prompt)
                    for prompt in prompts
                ]
            answer_id = f"cmpl-{secrets.token_hex(12)}"
            form = CompletionFormat(
                answer_id,
                self.model,
                choices * len(prompts),
                self._token_texts,
                prompts=len(prompts),
                echo=echo,
                pages=await self._pages(ids[0]) if body.traced else None,
                **_stream(body),
            )
            async with self._submit(body, record, ids, params, form, None) as answer:
                yield answer

    @asynccontextmanager
    async def _open_chat(self, body: ChatRequest, record: Record) -> AsyncIterator[Answer]:
        text = self._begin(body, record)
        for name in _LOGGED:
            if (value := getattr(body, name)) is not None:
                record.told[name] = value
        tools = None if body.tool_choice == "none" else body.tools
        with self.gate.hold(body.n or 1):
            grammar = await text.run(lambda: chat_grammar(body))
            ids = [await self._encode_chat(text, body.messages, tools)]
            params = chat_params(body, self._room(ids), self._defaults)
            answer_id = f"chatcmpl-{secrets.token_hex(12)}"
            form = ChatFormat(
                answer_id,
                self.model,
                body.n or 1,
                self._token_texts,
                tools=bool(tools),
                pages=await self._pages(ids[0]) if body.traced else None,
                **_stream(body),
            )
            async with self._submit(body, record, ids, params, form, grammar) as answer:
                yield answer

    async def _encode_chat(
        self, text: TextThreads, messages: Sequence[ChatMessage], tools: Any = None
    ) -> list[int]:
        template = text.need("chat").template
        rendered, listed = template_messages(messages, tools, template.source if template else "")
        return await text.encode_chat(rendered, listed)

    def _begin(self, body: Sampling, record: Record) -> TextThreads:
        if body.user is not None:
            record.told["user"] = body.user
        self.check_model(body.model)
        return self.text()

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise ApiError(
                404,
                f"model is {name!a}; this server has {self.model!a}",
                param="model",
                code="model_not_found",
            )

    def _room(self, prompts: Sequence[list[int]]) -> int:
        """Tokens left for the answer. A prompt that leaves none does not bother the engine."""
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

    async def _pages(self, ids: list[int]) -> PageTexts:
        engine = self.client.check_running()
        if not engine.can_trace:
            raise ApiError(
                400,
                "cairn.trace shows which pages sparse attention reads; start the server with "
                "--attention-backend hsa",
                param="cairn",
            )
        size = engine.tokens_per_page
        parts = [ids[begin : begin + size] for begin in range(0, len(ids), size)]
        return PageTexts(await self.text().decode_each(parts), len(ids), engine)

    @asynccontextmanager
    async def _submit(
        self,
        body: Sampling,
        record: Record,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        form: CompletionFormat | ChatFormat,
        grammar: str | None,
    ) -> AsyncIterator[Answer]:
        choices: list[Choice] = []
        messages: list[wire.Submit] = []
        for ids in prompts:
            number = len(choices)
            choices += [self._choice(len(choices) + i, ids, params) for i in range(body.n or 1)]
            messages.append(
                wire.Submit(
                    number=choices[number].number,
                    token_ids=ids,
                    params=params,
                    cache_salt=body.cache_salt,
                    trace=body.traced,
                    grammar=grammar,
                )
            )
        answer = Answer(choices, form, record.arrival)
        self.client.submit(messages, answer)
        try:
            yield answer
        finally:
            self.client.release(answer)
            if answer.first_token is not None:
                record.ttft = answer.first_token - answer.arrival
            usage = form.usage()
            record.prompt_tokens = usage["prompt_tokens"] or sum(map(len, prompts))
            record.completion_tokens = usage["completion_tokens"]
            record.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
            record.finish = [c.ended.reason for c in choices if c.ended is not None]
            self.metrics.answered(answer)

    def _choice(self, index: int, prompt: list[int], params: SamplingParams) -> Choice:
        tokenizer, stop = self.text().tokenizer, params.stop_strings
        if tokenizer is None and stop:
            raise ApiError(
                400,
                "stop needs a tokenizer and this model has no tokenizer.json; add one, or leave "
                "stop out",
                param="stop",
            )
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer, stop, prompt)
        return Choice(self.client.new_number(), index, len(prompt), detokenizer)

    # -- tokens -------------------------------------------------------------------------------

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        self.check_model(body.model)
        text = self.text()
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give prompt or messages, and not both", param="prompt")
        if body.messages is not None and body.add_special_tokens is not None:
            raise ApiError(
                400,
                "add_special_tokens goes with prompt: a chat template writes its own",
                param="add_special_tokens",
            )
        with self.gate.hold():
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
        for token in tokens:
            if token >= vocab:
                raise ApiError(
                    400,
                    f"tokens holds {token}; ids of this model run from 0 to {vocab - 1}",
                    param="tokens",
                )
        with self.gate.hold():
            return {"prompt": await text.decode(tokens)}


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt is empty; give a text or token ids", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return cast(list[str | list[int]], prompt)


def _stream(body: Sampling) -> dict[str, Any]:
    options = body.stream_options
    return {
        "streams": bool(body.stream),
        "with_usage": options is not None and bool(options.include_usage),
    }
