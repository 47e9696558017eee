"""Errors in the form that OpenAI's clients expect, or Anthropic's."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from starlette.responses import Response

from cairn.engine.sampling_params import SamplingParams

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_ANTHROPIC_PATHS = ("/messages", "/messages/count_tokens")
_FIELDS = {
    *("prompt", "cache_salt"),
    *("response_format", "structured_outputs", "tools", "json_schema", "regex", "ebnf"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *(option.name for option in fields(SamplingParams)),
}


_LONGEST = 2000  # characters of a message, which may quote the client


class ApiError(Exception):
    """An error for the client: a status, and a message with the field and the way out."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message[:_LONGEST])
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def encoded(self) -> bytes:
        """The body, in ASCII: a message may quote a lone surrogate, which UTF-8 cannot encode."""
        other = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, other)
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def anthropic(self) -> dict[str, Any]:
        """The body that Anthropic's clients expect."""
        kind = _ANTHROPIC.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "api_error"
        return {"type": "error", "error": {"type": kind, "message": str(self)}}

    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status == 413:
            headers["connection"] = "close"  # there may be more of the body
        return headers

    def response(self, path: str = "") -> Response:
        """In the form of the API that has this path."""
        body = self.encoded()
        if path.endswith(_ANTHROPIC_PATHS):
            body = json.dumps(self.anthropic()).encode()
        return Response(body, self.status, self.headers())


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    """The error for a field that cannot be honoured."""
    return ApiError(400, message, param=param, code=code)


def refusal(message: str) -> ApiError:
    """The error for a message of the engine's checks, which begins with the field's name."""
    if message.startswith("the prompt"):
        code = "context_length_exceeded" if "tokens, at most" in message else None
        return bad_request("prompt", message, code)
    first = message.split(" ", 1)[0].split("[", 1)[0]
    return bad_request(first if first in _FIELDS else None, message)
