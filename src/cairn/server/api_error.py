"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from cairn.engine.sampling_params import SamplingParams

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_SAMPLING = {option.name for option in fields(SamplingParams)}


class ApiError(Exception):
    """What a client is told: a status, and a message that names the field and the way out."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error")
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def encoded(self) -> bytes:
        """ASCII: a message may quote half a character pair, which UTF-8 cannot hold."""
        return json.dumps(self.body()).encode()

    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def refusal(message: str) -> ApiError:
    """A request the engine's own checks refuse; their messages begin with the field's name."""
    first = message.split(" ", 1)[0].split("[", 1)[0]
    if message.startswith("the prompt"):
        long = "tokens, at most" in message
        code = "context_length_exceeded" if long else None
        return ApiError(400, message, param="prompt", code=code)
    return ApiError(400, message, param=first if first in _SAMPLING | {"cache_salt"} else None)
