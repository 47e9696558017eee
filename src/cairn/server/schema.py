"""The request bodies of OpenAI's completions, with the fields that vLLM and SGLang add.

A field that Cairn cannot honour is refused by name, except for values that ask for nothing. Fields
that nobody here knows are kept in `model_extra`, and `parse.py` reports them. Ranges that
`SamplingParams` checks better are left to it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, StringConstraints
from pydantic import field_validator as check_field
from pydantic.annotated_handlers import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from cairn.engine.sampling_params import MAX_CHOICES, MAX_LOGPROBS, MAX_SEED

MAX_PROMPTS = 1024
MAX_STOPS = 16
_MAX_TOOLS = 128
_MAX_INT = 2**31 - 1
_LOGGED = "Goes to the request log."
_GRAMMAR = "GBNF (root ::= ...) or Lark (start: ...)."

TokenId = Annotated[int, Field(ge=0, le=_MAX_INT)]
Count = Annotated[int, Field(ge=1, le=_MAX_INT)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Label = Annotated[str, Field(max_length=512)]
Prompts = (
    str
    | Annotated[list[TokenId], Field(fail_fast=True)]
    | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    | Annotated[list[list[TokenId]], Field(max_length=MAX_PROMPTS, fail_fast=True)]
)
OptBool = bool | None
OptStr = str | None
OptDict = dict[str, Any] | None
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1000)]


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


def only(reason: str, *allowed: Any) -> _Only:
    return _Only(reason, allowed)


class Body(BaseModel):
    """A JSON object of a request. Types are not converted; unknown fields are kept."""

    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="Send a last chunk with the usage.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: send the usage so far with every chunk."
    )
    include_obfuscation: Annotated[OptBool, only("this server does not pad its chunks", False)] = (
        None
    )


class CairnOptions(Body):
    """Extensions of this server."""

    trace: bool | None = Field(
        None, description="Report which pages each token was read from (sparse attention)."
    )
    dense: bool | None = Field(None, description="Read every page for each token.")
    reading: bool | None = Field(
        None, description="In a stream: report how far the prompt is read."
    )


class JsonSchema(Body):
    name: Name
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class PlainFormat(Body):
    type: Literal["text", "json_object"]


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """How an answer is bound, as vLLM writes it: one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = Field(None, description=_GRAMMAR)
    json_object: bool | None = None
    structural_tag: Annotated[OptStr, only("structural tags are not supported")] = None


class Sampling(Body):
    """Fields that both kinds of completion have."""

    model: str | None = Field(None, description="This server's model, as /v1/models names it.")
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, gt=0, allow_inf_nan=False)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=1024, description="Token id to a number added to its logit."
    )
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(
        None, ge=-(2**63), le=MAX_SEED, description="-1, like none, draws a seed."
    )
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=_MAX_INT, description="0 and -1 keep all tokens.")
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    min_tokens: int | None = Field(None, ge=0, le=_MAX_INT)
    ignore_eos: bool | None = None
    speculation: bool | None = Field(
        None, description="false: draft no tokens. The text is the same either way."
    )
    echo: bool | None = Field(
        None, description="Begin the answer with the prompt; in a chat, with its last message."
    )
    user: Label | None = Field(None, description=_LOGGED)
    cache_salt: Label | None = Field(
        None, description="Cached prefixes are shared only under the same salt."
    )
    cairn: CairnOptions | None = None
    # Fields of vLLM and SGLang.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="structured_outputs.json")
    guided_regex: str | None = Field(None, description="structured_outputs.regex")
    guided_choice: Choices | None = Field(None, description="structured_outputs.choice")
    guided_grammar: str | None = Field(None, description="structured_outputs.grammar")
    json_schema: dict[str, Any] | str | None = Field(None, description="structured_outputs.json")
    regex: str | None = Field(None, description="structured_outputs.regex")
    ebnf: str | None = Field(None, description="structured_outputs.grammar")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Score the prompt's tokens; not in a stream."
    )
    return_token_ids: bool | None = Field(None, description="Add prompt_token_ids and token_ids.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description='Write tokens of logprobs as "token_id:17".'
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=_MAX_INT, description="Keep this many tokens; -1: as many as fit."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where truncate_prompt_tokens cuts; left by default."
    )
    add_special_tokens: bool | None = Field(
        None, description="Of the tokenizer; by default true for a prompt, false for a chat."
    )
    skip_special_tokens: bool | None = Field(None, description="false: write them as text.")
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = Field(None, description="SGLang's include_stop_str_in_output.")
    spaces_between_special_tokens: Annotated[
        OptBool, only("this server adds no spaces of its own", True)
    ] = None
    return_hidden_states: Annotated[
        OptBool, only("this server returns no hidden states; see /v1/embeddings", False)
    ] = None

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

    prompt: Prompts = Field(description="A text, token ids, or a list of either.")
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Only the value of n.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_tokens: int | None = Field(
        None, ge=0, le=_MAX_INT, description="16 by default; 0 only with echo."
    )
    suffix: Annotated[
        OptStr, only("this server does not insert text between a prompt and a suffix", "")
    ] = None


class Part(Body):
    types: ClassVar[tuple[str, ...]] = ("text", "input_text", "output_text")

    type: str
    text: str | None = None

    @check_field("type")
    @classmethod
    def _check_type(cls, value: str) -> str:
        if value not in cls.types:
            raise ValueError("this server reads text only; leave the part out")
        return value


Content = str | list[Part]


class CalledFunction(Body):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    role: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        description="system, developer, user, assistant, tool, or another one of the template."
    )
    content: Content | None = None
    name: str | None = Field(None, max_length=64)
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, description="What the assistant thought.")
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")
    refusal: str | None = Field(None, description="Not shown to the model.")
    annotations: list[Any] | None = Field(None, description="Not shown to the model.")
    audio: Annotated[OptDict, only("this server has text only")] = None
    function_call: Annotated[OptDict, only("function_call is superseded by tool_calls")] = None


ChatMessages = Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]


class Function(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    name: Name


class ToolChoice(Body):
    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(Sampling):
    """https://platform.openai.com/docs/api-reference/chat/create"""

    messages: ChatMessages
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_tokens: Count | None = Field(None, description="Superseded by max_completion_tokens.")
    max_completion_tokens: Count | None = Field(
        None, description="By default whatever the context has room for."
    )
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
        OptStr, only("prefixes are cached in memory, as long as there is room", "in_memory")
    ] = None
    store: Annotated[OptBool, only("this server stores no completions", False)] = None
    service_tier: Annotated[OptStr, only("this server has one tier", "auto", "default")] = None
    modalities: Annotated[list[str] | None, only("this server has text only", ["text"])] = None
    audio: Annotated[OptDict, only("this server has text only")] = None
    prediction: Annotated[OptDict, only("predicted outputs are not supported")] = None
    reasoning_effort: str | None = Field(
        None, max_length=16, description='For the chat template. "none" switches thinking off.'
    )
    enable_thinking: bool | None = Field(None, description="For the chat template.")
    chat_template_kwargs: OptDict = Field(None, description="Variables for the chat template.")
    add_generation_prompt: bool | None = Field(
        None, description="Begin the assistant's answer; true by default."
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the last message instead of beginning a new one."
    )
    separate_reasoning: bool | None = Field(
        None, description="false: leave the reasoning in the content."
    )
    stream_reasoning: bool | None = Field(
        None, description="false: send the reasoning in one piece."
    )
    include_reasoning: bool | None = Field(None, description="false: leave the reasoning out.")
    verbosity: Annotated[OptStr, only("this server's models have no such switch", "medium")] = None
    web_search_options: Annotated[OptDict, only("this server searches nothing")] = None
    functions: Annotated[list[Any] | None, only("functions is superseded by tools")] = None
    function_call: Annotated[
        str | dict[str, Any] | None, only("function_call is superseded by tool_choice")
    ] = None


class EmbeddingsRequest(Body):
    """https://platform.openai.com/docs/api-reference/embeddings/create"""

    input: Prompts = Field(description="A text, token ids, or a list of either.")
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, description="Only the model's hidden size.")
    pooling: Literal["mean", "last"] | None = Field(
        None,
        description="The mean of the last layer's hidden states over all tokens, which is the "
        "default, or the last token's.",
    )
    user: Label | None = Field(None, description=_LOGGED)
    cache_salt: Label | None = Field(None, description="Changes nothing: nothing is cached.")
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=_MAX_INT)
    truncation_side: Literal["left", "right"] | None = None


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = Field(None, description="A text; or messages.")
    messages: ChatMessages | None = None
    tools: Annotated[list[Tool], Field(max_length=_MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = Field(
        None, description="By default true for a prompt, false for messages."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: OptDict = None
    return_token_strs: bool | None = Field(None, description="Add the tokens' spellings.")


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
