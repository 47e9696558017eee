"""What is particular to a model's text: its tokenizer, chat template, thoughts and tool calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from cairn.server.api_error import bad_request
from cairn.server.chat_input import message_text, template_messages
from cairn.server.grammar import ModelForms
from cairn.server.output import OutputParser
from cairn.server.reasoning import Place, ReasoningParser, reasoning_form
from cairn.server.schema import ChatRequest, Sampling, TokenizeRequest, Tool
from cairn.server.text_threads import TextThreads
from cairn.server.token_texts import TokenTexts
from cairn.server.tools.choose import tool_form
from cairn.server.tools.parser import ToolParser
from cairn.server.wire import Ready
from cairn.text.tokenizer import Tokenizer


class ChatPrompt(NamedTuple):
    ids: list[int]
    place: Place | None
    """Where in its thoughts the answer begins; None if thoughts are not told apart."""


class ModelText:
    def __init__(
        self, tokenizer: Tokenizer | None, *, ends: Collection[int], threads: int, reasoning: str
    ) -> None:
        self.tokenizer = tokenizer
        self.threads = TextThreads(tokenizer, threads)
        self.token_texts = TokenTexts(tokenizer, ends)
        self.token_ids = TokenTexts(None, ends)
        """Writes tokens as their ids."""
        template = None if tokenizer is None else tokenizer.template
        self._template = "" if template is None else template.source
        special = {} if tokenizer is None else tokenizer.special_tokens
        self.forms = ModelForms(
            tool_form(self._template), reasoning_form(reasoning, self._template), special
        )
        self._showing = lru_cache(4)(self._make_showing)

    # -- prompts ------------------------------------------------------------------------------

    async def encode(self, prompt: str, *, special: bool | None = None) -> list[int]:
        return await self.threads.encode(prompt, special=special is not False)

    async def encode_chat(
        self,
        body: ChatRequest | TokenizeRequest,
        tools: Sequence[Tool] | None,
        variables: dict[str, Any],
    ) -> tuple[list[int], str]:
        """Token ids of a conversation, and its text."""
        self.threads.need("chat")
        assert body.messages is not None
        continues = bool(body.continue_final_message)
        if continues and body.add_generation_prompt:
            raise bad_request(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other; give one",
            )
        rendered, listed = template_messages(body.messages, tools, self._template)
        return await self.threads.encode_chat(
            rendered,
            listed,
            special=bool(body.add_special_tokens),
            variables=variables,
            continue_final_message=continues,
            add_generation_prompt=body.add_generation_prompt is not False,
        )

    async def chat_prompt(self, body: ChatRequest, ignored: list[str]) -> ChatPrompt:
        """`ignored` gets the names of switches that the chat template does not have."""
        tools = None if body.tool_choice == "none" else body.tools
        ids, text = await self.encode_chat(body, tools, self._variables(body, ignored))
        form = self.forms.reasoning
        if form is None or body.separate_reasoning is False:
            return ChatPrompt(ids, None)
        last = message_text(body.messages[-1]) if body.continue_final_message else None
        return ChatPrompt(ids, form.place(text, last))

    async def pages(self, ids: list[int], engine: Ready) -> dict[str, Any]:
        """The prompt's pages, or what queries select in their place, as the page map draws them."""
        if not engine.can_trace:
            raise bad_request(
                "cairn",
                "cairn.trace shows which pages sparse attention reads; start the server with "
                "--attention-backend hsa",
            )
        size = engine.tokens_per_unit
        parts = [ids[begin : begin + size] for begin in range(0, len(ids), size)]
        return {
            "page_size": engine.unit_size,
            "tokens_per_page": size,
            "sparse_layers": engine.sparse_layers,
            "prompt_tokens": len(ids),
            "texts": await self.threads.decode_each(parts),
        }

    def _variables(self, body: ChatRequest, ignored: list[str]) -> dict[str, Any]:
        """The chat template's variables that a request sets."""
        variables = dict(body.chat_template_kwargs or {})
        unknown = [
            f"chat_template_kwargs.{name}" for name in variables if name not in self._template
        ]
        switched = body.enable_thinking
        if body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
            if switched is None:
                switched = body.reasoning_effort != "none"
            if "reasoning_effort" not in self._template and "thinking" not in self._template:
                unknown.append("reasoning_effort")
        if switched is not None:
            for name in ("enable_thinking", "thinking"):  # as templates call it
                variables.setdefault(name, switched)
            if body.enable_thinking is not None and "thinking" not in self._template:
                unknown.append("enable_thinking")
        ignored += unknown
        return variables

    # -- answers ------------------------------------------------------------------------------

    def parsers(
        self, body: ChatRequest, place: Place | None, count: int
    ) -> list[OutputParser] | None:
        """One for each choice; None if everything is content."""
        tools = None if body.tool_choice == "none" else body.tools
        form = None if place in (None, "after") else self.forms.reasoning
        if form is None and not tools:
            return None
        schemas = {tool.function.name: tool.function.parameters or {} for tool in tools or ()}
        result = []
        for _ in range(count):
            thoughts = None
            if form is not None and place is not None:
                streams = body.stream_reasoning is not False
                thoughts = ReasoningParser(form, place, streams=streams)
            calls = ToolParser(self.forms.tools, schemas) if tools else None
            keeps = body.include_reasoning is not False
            result.append(OutputParser(thoughts, calls, keeps_reasoning=keeps))
        return result

    def tokenizer_for(self, body: Sampling, *, parsed: bool) -> Tokenizer | None:
        """The tokenizer that writes an answer, with the special tokens that are wanted as text."""
        shown: tuple[str, ...] = ()
        if body.skip_special_tokens is False:
            shown = tuple(self.forms.special)
        elif parsed:
            form = self.forms.reasoning
            tags = self.forms.tools.special + (() if form is None else (form.begin, form.end))
            shown = tuple(tag for tag in tags if tag in self.forms.special)
        return self._showing(shown) if shown else self.tokenizer

    def _make_showing(self, special: tuple[str, ...]) -> Tokenizer | None:
        return None if self.tokenizer is None else self.tokenizer.showing(special)

    def close(self) -> None:
        self.threads.close()
