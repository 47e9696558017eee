"""The request bodies: every field of OpenAI's schema, and a few of Cairn's own.

A field that Cairn cannot honour is refused by name, except for values that ask for nothing. Unknown
fields are refused too. Ranges that `SamplingParams` checks better are left to it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, StringConstraints
from pydantic.annotated_handlers import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from cairn.engine.sampling_params import MAX_CHOICES, MAX_LOGPROBS, MAX_SEED

MAX_PROMPTS = 1024
_MAX_STOPS = 16
_MAX_TOOLS = 128
_MAX_INT = 2**31 - 1
_LOGGED = "Goes to the request log."

TokenId = Annotated[int, Field(ge=0, le=_MAX_INT)]
Count = Annotated[int, Field(ge=1, le=_MAX_INT)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Label = Annotated[str, Field(max_length=512)]
OptBool = bool | None
OptStr = str | None
OptDict = dict[str, Any] | None


@dataclass(frozen=True)
class _Only:
    """Marks a field that accepts only values that ask for nothing."""

    reason: str
    allowed: tuple[Any, ...]

    def check(self, value: Any) -> Any:
        if value is not None and value not in self.allowed:
            also = f", or send {', '.join(map(repr, self.allowed))}" if self.allowed else ""
            raise ValueError(f"{self.reason}; leave it out{also}")
        return value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        values = " or ".join(map(json.dumps, self.allowed))
        text = f"Only {values}: {self.reason}." if values else f"Refused: {self.reason}."
        return {**handler(core), "description": text}


def _only(reason: str, *allowed: Any) -> _Only:
    return _Only(reason, allowed)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    include_usage: bool | None = Field(None, description="Send a last chunk with the usage.")
    include_obfuscation: Annotated[OptBool, _only("this server does not pad its chunks", False)] = (
        None
    )


class CairnOptions(_Strict):
    """Extensions of this server."""

    trace: bool | None = Field(
        None, description="Report which pages each token was read from (sparse attention)."
    )
    dense: bool | None = Field(None, description="Read every page for each token.")
    reading: bool | None = Field(
        None, description="In a stream: report how far the prompt is read."
    )


class Sampling(_Strict):
    """Fields that both kinds of completion have."""

    model: str | None = Field(None, description="This server's model, as /v1/models names it.")
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, gt=0, allow_inf_nan=False)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=1024, description="Token id to a number added to its logit."
    )
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), le=MAX_SEED)
    stop: str | Annotated[list[str], Field(max_length=_MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=_MAX_INT)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    min_tokens: int | None = Field(None, ge=0, le=_MAX_INT)
    ignore_eos: bool | None = None
    user: Label | None = Field(None, description=_LOGGED)
    cache_salt: Label | None = Field(
        None, description="Cached prefixes are shared only under the same salt."
    )
    cairn: CairnOptions | None = None
    # sglang-router writes these into every request that it forwards.
    skip_special_tokens: Annotated[OptBool, _only("special tokens have no text here", True)] = None
    no_stop_trim: Annotated[OptBool, _only("an answer ends before its stop string", False)] = None
    return_hidden_states: Annotated[
        OptBool, _only("this server returns no hidden states", False)
    ] = None
    continue_final_message: Annotated[
        OptBool, _only("an answer is always a new message", False)
    ] = None
    separate_reasoning: bool | None = Field(None, description="Changes nothing: all is content.")
    stream_reasoning: bool | None = Field(None, description="Changes nothing: all is content.")

    @property
    def traced(self) -> bool:
        return self.cairn is not None and bool(self.cairn.trace)

    @property
    def dense(self) -> bool:
        return self.cairn is not None and bool(self.cairn.dense)

    @property
    def tells_reading(self) -> bool:
        return self.cairn is not None and bool(self.cairn.reading)


class CompletionRequest(Sampling):
    """https://platform.openai.com/docs/api-reference/completions/create"""

    prompt: (
        str
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[list[TokenId]], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    ) = Field(description="A text, token ids, or a list of either.")
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Only the value of n.")
    echo: bool | None = Field(None, description="Begin the answer with the prompt.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_tokens: Count | None = Field(None, description="16 by default.")
    suffix: Annotated[
        OptStr, _only("this server does not insert text between a prompt and a suffix", "")
    ] = None


class TextPart(_Strict):
    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class PlainMessage(_Strict):
    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = Field(None, max_length=64)


class CalledFunction(_Strict):
    name: Name
    arguments: str


class ToolCall(_Strict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(_Strict):
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = Field(None, max_length=64)
    tool_calls: list[ToolCall] | None = None
    refusal: Annotated[OptStr, _only("refusals are not used", "")] = None
    audio: Annotated[OptDict, _only("this server has text only")] = None
    function_call: Annotated[OptDict, _only("function_call is superseded by tool_calls")] = None
    annotations: Annotated[list[Any] | None, _only("annotations are not used", [])] = None


class ToolMessage(_Strict):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


ChatMessage = Annotated[PlainMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
ChatMessages = Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]


class Function(_Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    type: Literal["function"]
    function: Function


class ChosenFunction(_Strict):
    name: Name


class ToolChoice(_Strict):
    type: Literal["function"]
    function: ChosenFunction


class JsonSchema(_Strict):
    name: Name
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class PlainFormat(_Strict):
    type: Literal["text", "json_object"]


class JsonSchemaFormat(_Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(Sampling):
    """https://platform.openai.com/docs/api-reference/chat/create"""

    messages: ChatMessages
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_tokens: Count | None = Field(None, description="Superseded by max_completion_tokens.")
    max_completion_tokens: Count | None = Field(
        None, description="By default whatever the context has room for."
    )
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=_MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[Annotated[str, Field(max_length=64)], Label] | None = Field(
        None, max_length=16, description=_LOGGED
    )
    safety_identifier: Label | None = Field(None, description=_LOGGED)
    prompt_cache_key: Label | None = Field(
        None, description="Goes to the request log: one cache serves everybody."
    )
    prompt_cache_retention: Annotated[
        OptStr, _only("prefixes are cached in memory, as long as there is room", "in_memory")
    ] = None
    store: Annotated[OptBool, _only("this server stores no completions", False)] = None
    service_tier: Annotated[OptStr, _only("this server has one tier", "auto", "default")] = None
    modalities: Annotated[list[str] | None, _only("this server has text only", ["text"])] = None
    audio: Annotated[OptDict, _only("this server has text only")] = None
    prediction: Annotated[OptDict, _only("predicted outputs are not supported")] = None
    reasoning_effort: Annotated[OptStr, _only("this server's models have no such switch")] = None
    verbosity: Annotated[OptStr, _only("this server's models have no such switch", "medium")] = None
    web_search_options: Annotated[OptDict, _only("this server searches nothing")] = None
    functions: Annotated[list[Any] | None, _only("functions is superseded by tools")] = None
    function_call: Annotated[
        str | dict[str, Any] | None, _only("function_call is superseded by tool_choice")
    ] = None


class TokenizeRequest(_Strict):
    model: str | None = None
    prompt: str | None = Field(None, description="A text; or messages.")
    messages: ChatMessages | None = None
    add_special_tokens: bool | None = Field(None, description="With a prompt; true by default.")


class DetokenizeRequest(_Strict):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
