"""Parses request bodies; errors name the field."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from cairn.server.api_error import ApiError, bad_request

B = TypeVar("B", bound=BaseModel)

_REPORTED = 3  # errors in one response
_SMALL = 64 * 1024  # bytes of a body that need not be checked
_MOST_STRINGS, _MOST_CONTAINERS, _MOST_VALUES = 50_000, 20_000, 1_000_000
_LONGEST = 300  # characters of an error


async def read_body(request: Request, kind: type[B]) -> B:
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise ApiError(
            415, f"content-type is {media[:100]!a}; send application/json", param="content-type"
        )
    body = await request.body()
    _check_size(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from error


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


def _refusal(error: ValidationError) -> ApiError:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    messages = []
    for problem in problems[:_REPORTED]:
        where = ".".join(map(str, problem["loc"])) or "the body"
        what = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            what = "this field is not known here"
        messages.append(f"{where}: {what}"[:_LONGEST])
    if len(problems) > _REPORTED:
        messages.append(f"and {len(problems) - _REPORTED} more")
    first = problems[0]["loc"]
    return bad_request(_path(first) if first else None, "; ".join(messages))


def _path(parts: tuple[int | str, ...]) -> str:
    """messages[0].content, without the names that unions put into the path."""
    path = str(parts[0])
    if len(parts) > 1 and isinstance(parts[1], int):
        path += f"[{parts[1]}]"
    return path[:100]
