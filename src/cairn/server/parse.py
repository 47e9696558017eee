"""From a request's bytes to its fields; errors name the field."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from cairn.server.api_error import ApiError

B = TypeVar("B", bound=BaseModel)

_TOLD = 3  # errors told at once
_SMALL = 64 * 1024  # bytes; not worth counting
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
    """Many small values take long to check, and meanwhile nobody's tokens are sent.

    Counts them in a few passes at the speed of memory; texts count as one, however long.
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
    told = []
    for problem in problems[:_TOLD]:
        where = ".".join(str(part) for part in problem["loc"])
        what = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            what = "this field is not known here"
        told.append(f"{where}: {what}"[:_LONGEST] if where else f"the body: {what}"[:_LONGEST])
    if len(problems) > _TOLD:
        told.append(f"and {len(problems) - _TOLD} more")
    first = problems[0]["loc"]
    return ApiError(400, "; ".join(told), param=_path(first) if first else None)


def _path(parts: tuple[int | str, ...]) -> str:
    """messages[0].content, without the names that unions put into the path."""
    path = str(parts[0])
    if len(parts) > 1 and isinstance(parts[1], int):
        path += f"[{parts[1]}]"
    return path[:100]
