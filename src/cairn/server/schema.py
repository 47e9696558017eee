"""What clients may send: OpenAI's fields, and a few of ours.

Every field of OpenAI's schema is here. One that Cairn cannot honour is refused by name, with the
values that change nothing still allowed; a field that nobody knows is refused too.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from cairn.engine.sampling_params import MAX_CHOICES, MAX_LOGPROBS, MAX_SEED

MAX_PROMPTS = 1024
_MAX_STOPS = 16
_MAX_TOOLS = 128
_MAX_INT = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=_MAX_INT)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Text = str


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    include_usage: bool | None = Field(None, description="Send a last chunk with the usage.")
    include_obfuscation: bool | None = Field(None, description="Only false: nothing is padded.")

    @field_validator("include_obfuscation")
    @classmethod
    def _no_padding(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("this server does not pad its chunks; leave it out")
        return value


class CairnOptions(_Strict):
    """Extensions of this server."""

    trace: bool | None = Field(
        None, description="Tell which pages each token was read from (sparse attention)."
    )


def _refused(reason: str, *allowed: Any) -> Any:
    """A field whose only possible values are those that ask for nothing."""

    def check(value: Any) -> Any:
        if value is not None and value not in allowed:
            also = f", or send {', '.join(map(repr, allowed))}" if allowed else ""
            raise ValueError(f"{reason}; leave it out{also}")
        return value

    return check


class RouterDefaults(_Strict):
    """What sglang-router writes into every request it forwards, asked for or not."""

    skip_special_tokens: bool | None = Field(None, description="Only true.")
    no_stop_trim: bool | None = Field(None, description="Only false.")
    return_hidden_states: bool | None = Field(None, description="Only false.")
    continue_final_message: bool | None = Field(None, description="Only false.")
    separate_reasoning: bool | None = Field(None, description="Changes nothing: all is content.")
    stream_reasoning: bool | None = Field(None, description="Changes nothing: all is content.")

    _skip_special_tokens = field_validator("skip_special_tokens")(
        _refused("special tokens have no text here", True)
    )
    _no_stop_trim = field_validator("no_stop_trim")(
        _refused("an answer ends before its stop string", False)
    )
    _return_hidden_states = field_validator("return_hidden_states")(
        _refused("this server returns no hidden states", False)
    )
    _continue_final_message = field_validator("continue_final_message")(
        _refused("an answer is always a new message", False)
    )


class Sampling(RouterDefaults):
    """Fields that both kinds of completion have."""

    model: Text | None = Field(None, description="This server's model, as /v1/models names it.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, allow_inf_nan=False)
    logit_bias: dict[Text, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=1024, description="Token id to a number added to its logit."
    )
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), le=MAX_SEED)
    stop: Text | Annotated[list[Text], Field(max_length=_MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=_MAX_INT)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    min_tokens: int | None = Field(None, ge=0, le=_MAX_INT)
    ignore_eos: bool | None = None
    user: Text | None = Field(None, max_length=512, description="Goes to the request log.")
    cache_salt: Text | None = Field(
        None, max_length=512, description="Cached prefixes are shared only under the same salt."
    )
    cairn: CairnOptions | None = None

    @field_validator("seed")
    @classmethod
    def _positive_seed(cls, value: int | None) -> int | None:
        if value is not None and value < 0:
            raise ValueError("must be at least 0")
        return value

    @field_validator("top_k")
    @classmethod
    def _some_top_k(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("must be at least 1, or -1 to keep all tokens")
        return value

    @field_validator("top_p")
    @classmethod
    def _some_top_p(cls, value: float | None) -> float | None:
        if value == 0:
            raise ValueError("must be above 0; temperature 0 takes the most likely token")
        return value

    @property
    def traced(self) -> bool:
        return self.cairn is not None and bool(self.cairn.trace)


class CompletionRequest(Sampling):
    """https://platform.openai.com/docs/api-reference/completions/create"""

    prompt: (
        Text
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[Text], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[list[TokenId]], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    ) = Field(description="A text, token ids, or a list of either.")
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Only the value of n.")
    echo: bool | None = Field(None, description="Begin the answer with the prompt.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_tokens: int | None = Field(None, ge=1, le=_MAX_INT, description="16 by default.")
    suffix: Text | None = Field(None, description="Refused: only ''.")

    _no_suffix = field_validator("suffix")(
        _refused("this server does not insert text between a prompt and a suffix", "")
    )


class TextPart(_Strict):
    type: Literal["text"]
    text: Text


Content = Text | list[TextPart]


class SystemMessage(_Strict):
    role: Literal["system", "developer"]
    content: Content
    name: Text | None = Field(None, max_length=64)


class UserMessage(_Strict):
    role: Literal["user"]
    content: Content
    name: Text | None = Field(None, max_length=64)


class CalledFunction(_Strict):
    name: Name
    arguments: Text


class ToolCall(_Strict):
    id: Text
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(_Strict):
    role: Literal["assistant"]
    content: Content | None = None
    name: Text | None = Field(None, max_length=64)
    refusal: Text | None = Field(None, description="Ignored: this server's answers have none.")
    tool_calls: list[ToolCall] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None
    annotations: list[Any] | None = None

    _no_audio = field_validator("audio")(_refused("this server has text only"))
    _no_function_call = field_validator("function_call")(
        _refused("function_call is superseded by tool_calls")
    )
    _no_annotations = field_validator("annotations")(_refused("annotations are not used", []))
    _no_refusal = field_validator("refusal")(_refused("refusals are not used", ""))


class ToolMessage(_Strict):
    role: Literal["tool"]
    content: Content
    tool_call_id: Text


ChatMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class Function(_Strict):
    name: Name
    description: Text | None = None
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
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(_Strict):
    type: Literal["text"]


class JsonObjectFormat(_Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(_Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class ChatRequest(Sampling):
    """https://platform.openai.com/docs/api-reference/chat/create"""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_tokens: int | None = Field(None, ge=1, le=_MAX_INT, description="Superseded by the next.")
    max_completion_tokens: int | None = Field(
        None, ge=1, le=_MAX_INT, description="By default whatever the context has room for."
    )
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=_MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | (
        None
    ) = Field(None, max_length=16, description="Goes to the request log.")
    safety_identifier: Text | None = Field(
        None, max_length=512, description="Goes to the request log."
    )
    prompt_cache_key: Text | None = Field(
        None, max_length=512, description="Goes to the request log: one cache serves everybody."
    )
    prompt_cache_retention: Text | None = Field(None, description="Only 'in_memory'.")
    store: bool | None = Field(None, description="Only false: nothing is stored.")
    service_tier: Text | None = Field(None, description="Only 'auto' or 'default'.")
    modalities: list[Text] | None = Field(None, description="Only ['text'].")
    audio: dict[str, Any] | None = Field(None, description="Refused.")
    prediction: dict[str, Any] | None = Field(None, description="Refused.")
    reasoning_effort: Text | None = Field(None, description="Refused.")
    verbosity: Text | None = Field(None, description="Refused but for 'medium'.")
    web_search_options: dict[str, Any] | None = Field(None, description="Refused.")
    functions: list[Any] | None = Field(None, description="Refused: use tools.")
    function_call: Text | dict[str, Any] | None = Field(
        None, description="Refused: use tool_choice."
    )

    _prompt_cache_retention = field_validator("prompt_cache_retention")(
        _refused("prefixes are cached in memory, as long as there is room", "in_memory")
    )
    _store = field_validator("store")(_refused("this server stores no completions", False))
    _service_tier = field_validator("service_tier")(
        _refused("this server has one tier", "auto", "default")
    )
    _modalities = field_validator("modalities")(_refused("this server has text only", ["text"]))
    _audio = field_validator("audio")(_refused("this server has text only"))
    _prediction = field_validator("prediction")(_refused("predicted outputs are not supported"))
    _reasoning_effort = field_validator("reasoning_effort")(
        _refused("this server's models have no such switch")
    )
    _verbosity = field_validator("verbosity")(
        _refused("this server's models have no such switch", "medium")
    )
    _web_search_options = field_validator("web_search_options")(
        _refused("this server searches nothing")
    )
    _functions = field_validator("functions")(_refused("functions is superseded by tools"))
    _function_call = field_validator("function_call")(
        _refused("function_call is superseded by tool_choice")
    )


class TokenizeRequest(_Strict):
    model: Text | None = None
    prompt: Text | None = Field(None, description="A text; or messages.")
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)] | None = None
    add_special_tokens: bool | None = Field(None, description="With a prompt; true by default.")


class DetokenizeRequest(_Strict):
    model: Text | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
