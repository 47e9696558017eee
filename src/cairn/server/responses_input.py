"""OpenAI's Responses API: its request body, and the chat request that it means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic import field_validator as check_field

from cairn.server.api_error import bad_request
from cairn.server.parse import chat_request
from cairn.server.schema import (
    Body,
    ChatRequest,
    Count,
    Label,
    Name,
    OptBool,
    OptDict,
    OptStr,
    Part,
    StreamOptions,
    only,
)

_ITEMS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
LOGPROBS = "message.output_text.logprobs"


class ItemPart(Part):
    types = (*Part.types, "reasoning_text", "summary_text", "refusal")


class Item(Body):
    """A part of a conversation. Which fields it has depends on its type."""

    type: str = Field("message", description=", ".join(_ITEMS))
    id: str | None = None
    status: str | None = None
    role: str | None = Field(None, max_length=64)
    content: str | list[ItemPart] | None = None
    call_id: str | None = Field(None, description="Of a function_call and its output.")
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    encrypted_content: str | None = None

    @check_field("type")
    @classmethod
    def _check_type(cls, value: str) -> str:
        if value not in _ITEMS:
            raise ValueError("this server knows no such items; leave it out")
        return value


class ResponsesTool(Body):
    type: str
    name: Name | None = None
    description: str | None = None
    parameters: OptDict = None
    strict: bool | None = None

    @check_field("type")
    @classmethod
    def _check_type(cls, value: str) -> str:
        if value != "function":
            raise ValueError("this server runs no tools of its own; leave the tool out")
        return value


class ResponsesToolChoice(Body):
    type: Literal["function"]
    name: Name


class FlatSchema(Body):
    """A format as this API writes it, in one object."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: OptDict = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: FlatSchema | None = None


class ReasoningOptions(Body):
    effort: str | None = Field(None, max_length=16)


class ResponsesRequest(Body):
    """https://platform.openai.com/docs/api-reference/responses/create"""

    input: str | Annotated[list[Item], Field(max_length=10_000)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[str] | None = Field(None, description=f"Only {LOGPROBS} adds anything.")
    tools: Annotated[list[ResponsesTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = Field(None, description="Keep the response in memory; not by default.")
    previous_response_id: str | None = Field(None, description="Of a response that was stored.")
    metadata: dict[Annotated[str, Field(max_length=64)], Label] | None = Field(None, max_length=16)
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    cache_salt: Label | None = None
    background: Annotated[OptBool, only("this server answers at once", False)] = None
    conversation: Annotated[str | dict[str, Any] | None, only("send the items as input")] = None
    prompt: Annotated[OptDict, only("this server stores no prompts")] = None
    service_tier: Annotated[OptStr, only("this server has one tier", "auto", "default")] = None
    truncation: Annotated[OptStr, only("a prompt that is too long is refused", "disabled")] = None

    def items(self) -> list[Item]:
        if isinstance(self.input, str):
            return [Item.model_validate({"role": "user", "content": self.input})]
        return self.input

    def as_chat(self, items: Sequence[Item]) -> ChatRequest:
        """`items` are the whole conversation."""
        copied = (
            *("model", "temperature", "top_p", "stream", "parallel_tool_calls", "metadata"),
            *("user", "safety_identifier", "prompt_cache_key", "cache_salt"),
        )
        meant: dict[str, Any] = {name: getattr(self, name) for name in copied}
        meant["messages"] = _messages(items)
        if self.instructions:
            meant["messages"].insert(0, {"role": "system", "content": self.instructions})
        meant["max_completion_tokens"] = self.max_output_tokens
        if self.tools:
            meant["tools"] = [_tool(tool) for tool in self.tools]
        choice = self.tool_choice
        if isinstance(choice, ResponsesToolChoice):
            meant["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            meant["tool_choice"] = choice
        if self.reasoning is not None:
            meant["reasoning_effort"] = self.reasoning.effort
        if self.text is not None and self.text.format is not None:
            meant["response_format"] = _format(self.text.format)
        if LOGPROBS in (self.include or ()):
            meant |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return chat_request(meant)


def whole_conversation(
    body: ResponsesRequest, before: Sequence[Item], find: Callable[[str], Item | None]
) -> list[Item]:
    """The items of earlier responses and of this request, with references resolved."""
    found: list[Item] = [*before]
    for index, item in enumerate(body.items()):
        if item.type != "item_reference":
            found.append(item)
            continue
        stored = find(item.id or "")
        if stored is None:
            raise bad_request(
                f"input[{index}]",
                f"input[{index}] refers to the item {item.id!a}, which is not stored; send the "
                "item itself, or store responses with store: true",
            )
        found.append(stored)
    return found


def _messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Chat messages. Thoughts, text and calls that follow each other are one message."""
    result: list[dict[str, Any]] = []
    thoughts = ""
    for item in items:
        last = result[-1] if result and result[-1]["role"] == "assistant" else None
        if item.type == "function_call_output":
            output = _text(item.output)
            result.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        elif item.type == "reasoning":
            thoughts = _text(item.content) or _text(item.summary)
            continue
        elif item.type == "function_call":
            if last is None or thoughts:
                last = {"role": "assistant", "content": ""}
                result.append(last)
            function = {"name": item.name or "", "arguments": item.arguments or ""}
            calls = last.setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})
        else:
            result.append({"role": item.role or "user", "content": _text(item.content)})
        if thoughts and result[-1]["role"] == "assistant":
            result[-1]["reasoning_content"] = thoughts
        thoughts = ""
    return result


def _text(content: str | Sequence[ItemPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or "" for part in content)


def _tool(tool: ResponsesTool) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: getattr(tool, name) for name in names}}


def _format(form: FlatSchema) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    named = {"name": form.name or "answer", "schema": form.schema_, "strict": form.strict}
    return {"type": "json_schema", "json_schema": named}
