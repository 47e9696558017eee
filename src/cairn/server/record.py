"""What is known of one HTTP request, for the log and for who answers it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope, Send

_KEY = "cairn_record"


@dataclass(slots=True)
class Record:
    id: str
    method: str
    path: str
    arrival: float  # on the clock of time.perf_counter
    send: Send
    """The server's own. What is between it and a route concerns the start of a response only, and a
    stream sends too often to go through it."""
    status: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish: list[str] | None = None
    ttft: float | None = None
    error: str | None = None
    told: dict[str, Any] = field(default_factory=dict)
    """What the client wants in the log: user, metadata and the like."""

    def attach(self, scope: Scope) -> None:
        scope.setdefault("state", {})[_KEY] = self


def record_of(scope: Scope) -> Record:
    record: Record = scope["state"][_KEY]
    return record
