"""Parses request bodies; errors name the field, its value and what it may be.

Fields that the schema does not have are named in the log and in a header, and change nothing. With
`--strict-fields` they are errors, and so are always those that other servers know and this one
cannot honour.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from cairn.server.api_error import ApiError, bad_request
from cairn.server.middleware import Record, record_of
from cairn.server.schema import ChatRequest

B = TypeVar("B", bound=BaseModel)

_REPORTED = 3  # errors in one response
_SMALL = 64 * 1024  # bytes of a body that need not be checked
_MOST_STRINGS, _MOST_CONTAINERS, _MOST_VALUES = 50_000, 20_000, 1_000_000
_LONGEST = 300  # characters of an error
_SHOWN = 40  # characters of a value in an error
_MOST_UNKNOWN = 16  # names of unknown fields that are reported

# Fields of other servers that would change the answer.
_UNSUPPORTED = {
    "allowed_token_ids": "use logit_bias or structured_outputs",
    "bad_words": "use logit_bias",
    "chat_template": "the server uses the model's own template",
    "custom_logit_processor": "use logit_bias or structured_outputs",
    "documents": "put the documents into the messages",
    "input_embeds": "send text or token ids",
    "logprob_token_ids": "use logprobs",
    "lora_path": "this server has no adapters",
    "mm_processor_kwargs": "this server has text only",
    "prompt_embeds": "send text or token ids",
    "stop_regex": "use stop",
    "structural_tag": "use structured_outputs",
    "thinking_token_budget": "use max_completion_tokens",
    "use_beam_search": "use n",
}

# What is wrong, by the validator's kind of error; {ge} and the like are limits.
_PROBLEMS = {
    "missing": "is missing",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "is too large",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "has more than {max_length} characters",
    "string_pattern_mismatch": "must be 1 to 64 letters, digits, _, . or -",
    "too_short": "needs at least {min_length} entries",
    "too_long": "has more than {max_length} entries",
    "union_tag_invalid": "has a type other than {expected_tags}",
    "union_tag_not_found": "has no type",
}


_VERBS = ("is ", "must ", "has ", "needs ")


async def read_body(request: Request, kind: type[B], *, strict: bool = False) -> B:
    """The request's body. With `strict` unknown fields are errors."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise ApiError(
            415, f"content-type is {media[:100]!a}; send application/json", param="content-type"
        )
    body = await request.body()
    _check_size(body)
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise refused_body(error, body) from error
    _report_unknown(parsed, record_of(request.scope), strict=strict)
    return parsed


def chat_request(meant: dict[str, Any]) -> ChatRequest:
    """The chat request that another API's body means; fields that are None are left out."""
    given = {name: value for name, value in meant.items() if value is not None}
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        raise refused_body(error, given) from error


def _report_unknown(body: BaseModel, record: Record, *, strict: bool) -> None:
    for name, reason in _UNSUPPORTED.items():
        if (body.model_extra or {}).get(name) not in (None, False, "", [], {}):
            raise bad_request(name, f"{name} is not supported here: {reason}")
    found = list(islice(_unknown(body, ""), _MOST_UNKNOWN))
    if found and strict:
        raise bad_request(
            found[0],
            f"{', '.join(found)}: not known here, and the server was started with --strict-fields",
        )
    record.ignored += found


def _unknown(value: object, path: str) -> Iterator[str]:
    """Paths of fields that the schema does not have."""
    if isinstance(value, BaseModel):
        for name in value.model_extra or ():
            yield f"{path}{name}"[:_SHOWN]
        for name, inner in value.__dict__.items():
            if isinstance(inner, BaseModel):
                yield from _unknown(inner, f"{path}{name}.")
            elif isinstance(inner, list) and inner and isinstance(inner[0], BaseModel):
                for index, each in enumerate(inner):
                    yield from _unknown(each, f"{path}{name}[{index}].")


def _check_size(body: bytes) -> None:
    """Refuse bodies of very many small values: validating them would delay all streams.

    A few fast passes count them. A string counts as one, however long.
    """
    if len(body) <= _SMALL:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    _check_count("strings", plain.count(b'"') // 2, _MOST_STRINGS)
    outside = b"".join(plain.split(b'"')[::2])  # what is not in a string
    containers = outside.count(b"[") + outside.count(b"{")
    _check_count("lists and objects", containers, _MOST_CONTAINERS)
    _check_count("values", outside.count(b","), _MOST_VALUES)


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise ApiError(400, f"the body has {count} {name}, at most {most}; send fewer")


def refused_body(error: ValidationError, body: bytes | dict[str, Any]) -> ApiError:
    """The error for a body that the schema refuses, as a person would say it."""
    problems = error.errors(include_url=False, include_input=False)
    if problems[0]["type"] == "json_invalid":
        return bad_request(None, f"the body is not valid JSON: {problems[0]['msg']}"[:_LONGEST])
    document = from_json(body) if isinstance(body, bytes) else body
    said: dict[str, list[str]] = {}  # by field: the branches of a union have an error each
    values: dict[str, object] = {}
    for problem in problems:
        path, values[path] = _locate(problem["loc"], document, missing=problem["type"] == "missing")
        what = _describe(problem)
        if what not in said.setdefault(path, []):
            said[path].append(what)
    for path in list(said):  # the union's branch that fits has errors further in
        if any(other.startswith((f"{path}.", f"{path}[")) for other in said):
            del said[path]
    messages = []
    for path, wrong in islice(said.items(), _REPORTED):
        value = values[path]
        shown = "" if isinstance(value, dict | list) or wrong == ["is missing"] else _show(value)
        colon = "" if shown or wrong[0].startswith(_VERBS) else ":"
        whole = f"{path or 'the body'}{shown}{colon} {_join(wrong)}"
        messages.append(whole[:_LONGEST])
    if len(said) > _REPORTED:
        messages.append(f"and {len(said) - _REPORTED} more fields")
    first = next(iter(said))
    return bad_request(first[:100] or None, "; ".join(messages))


def _locate(parts: tuple[int | str, ...], document: Any, *, missing: bool) -> tuple[str, object]:
    """The path of an error as JavaScript writes it, and the value there.

    The validator puts names of types into its paths, which the document does not have.
    """
    path, value = "", document
    for place, part in enumerate(parts):
        if isinstance(part, int) and isinstance(value, list):
            path, value = f"{path}[{part}]", value[part]
        elif isinstance(value, dict) and (part in value or (missing and place == len(parts) - 1)):
            path, value = f"{path}.{part}" if path else str(part), value.get(part)
    return path, value


def _describe(problem: ErrorDetails) -> str:
    if problem["type"] == "value_error":
        return problem["msg"].removeprefix("Value error, ")
    limits = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in problem.get("ctx", {}).items()
    }
    known = _PROBLEMS.get(problem["type"])
    return problem["msg"] if known is None else known.format(**limits)


def _join(wrong: list[str]) -> str:
    """One sentence from the errors of a union's branches: of the one that fits, or of all."""
    for each in wrong:
        if not each.startswith("must be "):
            return each
    return "must be " + " or ".join(each.removeprefix("must be ") for each in wrong)


def _show(value: object) -> str:
    text = (
        ascii(value)
        if not isinstance(value, bool) and value is not None
        else {True: "true", False: "false", None: "null"}[value]
    )
    return f" is {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'};"
