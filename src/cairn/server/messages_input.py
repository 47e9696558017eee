"""Anthropic's Messages API: its request bodies, and the chat request that each one means."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic import field_validator as check_field

from cairn.server.parse import chat_request
from cairn.server.schema import MAX_STOPS, Body, ChatRequest, Count, Name, OptDict, OptStr, only

_TEXT_ONLY = "this server reads text only; leave the block out"
_BLOCKS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
_CACHED = "Changes nothing: prefixes are always cached."


class Block(Body):
    """A part of a message. Which fields it has depends on its type."""

    type: str
    text: str | None = None
    id: str | None = Field(None, description="Of a tool_use.")
    name: str | None = Field(None, description="Of a tool_use.")
    input: OptDict = Field(None, description="Of a tool_use.")
    tool_use_id: str | None = Field(None, description="Of a tool_result.")
    content: str | list[Block] | None = Field(None, description="Of a tool_result.")
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = Field(None, description="Of redacted_thinking; not shown to the model.")
    cache_control: OptDict = Field(None, description=_CACHED)

    @check_field("type")
    @classmethod
    def _check_type(cls, value: str) -> str:
        if value not in _BLOCKS:
            raise ValueError(_TEXT_ONLY)
        return value


Blocks = str | list[Block]


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class MessagesTool(Body):
    name: Name
    type: str | None = None
    description: str | None = None
    input_schema: OptDict = None
    cache_control: OptDict = Field(None, description=_CACHED)

    @check_field("type")
    @classmethod
    def _check_type(cls, value: str | None) -> str | None:
        if value not in (None, "custom"):
            raise ValueError("this server runs no tools of its own; leave the tool out")
        return value


class MessagesToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: SchemaFormat | None = None
    effort: str | None = Field(None, max_length=16)


class Conversation(Body):
    """https://docs.anthropic.com/en/api/messages-count-tokens"""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    system: Blocks | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=128)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    mcp_servers: Annotated[list[Any] | None, only("this server runs no tools of its own", [])] = (
        None
    )

    def meant(self) -> dict[str, Any]:
        """The fields of the chat request."""
        last = self.messages[-1]
        continued = last.role == "assistant" and not _uses_tools(last)
        result: dict[str, Any] = {
            "model": self.model,
            "messages": [each for message in self.messages for each in _chat(message)],
            "continue_final_message": continued or None,
        }
        if self.system:
            result["messages"].insert(0, {"role": "system", "content": _text(self.system)})
        if self.tools:
            result["tools"] = [_tool(tool) for tool in self.tools]
        if self.tool_choice is not None:
            kinds = {"auto": "auto", "any": "required", "none": "none"}
            named = {"type": "function", "function": {"name": self.tool_choice.name}}
            result["tool_choice"] = kinds.get(self.tool_choice.type, named)
            if self.tool_choice.disable_parallel_tool_use:
                result["parallel_tool_calls"] = False
        if self.thinking is not None:
            result["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None:
            result["reasoning_effort"] = self.output_config.effort
            if (form := self.output_config.format) is not None:
                named_schema = {"name": "answer", "schema": form.schema_}
                result["response_format"] = {"type": "json_schema", "json_schema": named_schema}
        return result

    def as_chat(self) -> ChatRequest:
        return chat_request(self.meant())


class MessagesRequest(Conversation):
    """https://docs.anthropic.com/en/api/messages"""

    max_tokens: Count
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=0)
    metadata: OptDict = Field(None, description="Its user_id goes to the request log.")
    service_tier: Annotated[OptStr, only("this server has one tier", "auto", "standard_only")] = (
        None
    )
    container: Annotated[OptStr, only("this server runs no tools of its own")] = None

    def meant(self) -> dict[str, Any]:
        copied = ("stream", "temperature", "top_p", "top_k")
        user = (self.metadata or {}).get("user_id")
        return {
            **super().meant(),
            **{name: getattr(self, name) for name in copied},
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "user": user[:512] if isinstance(user, str) else None,
        }


def _chat(message: Message) -> list[dict[str, Any]]:
    """The chat messages that one message means: results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, texts, calls, thoughts = [], [], [], []
    for block in message.content:
        if block.type == "tool_result":
            content = _text(block.content or "")
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif block.type == "tool_use":
            function = {"name": block.name or "", "arguments": block.input or {}}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "text":
            texts.append(block.text or "")
    own: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
    if calls:
        own["tool_calls"] = calls
    if thoughts:
        own["reasoning_content"] = "\n".join(thoughts)
    return [*results, own] if texts or calls or not results else results


def _text(content: Blocks) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text or "" for block in content)


def _uses_tools(message: Message) -> bool:
    return not isinstance(message.content, str) and any(
        block.type == "tool_use" for block in message.content
    )


def _tool(tool: MessagesTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description}
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}
