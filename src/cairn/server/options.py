"""Every option of the server, in one place. `cairn serve` makes its flags from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from cairn.errors import ConfigError
from cairn.server.reasoning import REASONING_FORMS

_REASONING = ", ".join(REASONING_FORMS)


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    host: str = _option("127.0.0.1", "Address to listen on; 0.0.0.0 for all of the machine's.")
    port: int = _option(8000, "Port to listen on; 0 takes a free one and prints it.")
    served_model_name: str | None = _option(
        None, "The model's names in the API, as A,B; by default the last part of --model."
    )
    any_model_name: bool = _option(False, "Answer requests for any model, under its name.")
    strict_fields: bool = _option(False, "Refuse requests with fields that are not known here.")
    reasoning_parser: str = _option(
        "auto",
        f"How the model marks its thoughts: auto (see the chat template), none, or {_REASONING}.",
    )
    api_key: str | None = _option(
        None, "Clients must send it as a bearer token. By default $CAIRN_API_KEY, or no key."
    )
    cors_origin: tuple[str, ...] = _option(
        (), "A site whose pages may call the API, such as https://example.org; may be repeated."
    )
    demo: bool = _option(
        False,
        "The page also offers cairn-nano, which finds facts in long texts. Its engine starts when "
        "a visitor asks it, on the CPU.",
    )
    allowed_host: tuple[str, ...] = _option(
        (),
        "A name under which clients reach this server, besides localhost, addresses, and --host; "
        "may be repeated; * for any. With a key and without this option any name is accepted.",
    )
    max_body_mib: float = _option(8.0, "Largest request body.")
    max_concurrent_requests: int = _option(
        512, "Choices being answered or waiting at once; more get 429."
    )
    request_timeout: float = _option(
        600.0, "Seconds after which an answer that is not complete is ended with an error."
    )
    client_timeout: float = _option(
        60.0, "Seconds that a client has to send the headers of a request, and then its body."
    )
    drain_timeout: float = _option(
        30.0, "Seconds that open answers get to complete when the server is stopped."
    )
    engine_timeout: float = _option(
        120.0,
        "Seconds of silence after which the engine counts as stuck and is restarted.",
    )
    max_restarts: int = _option(
        3, "How often a lost engine is restarted within ten minutes; 0 for never."
    )
    tokenizer_threads: int = _option(2, "Threads that turn prompts into tokens.")
    request_log: str = _option(
        "-", "Where to write one line of JSON per request: a file, - for stderr, or off."
    )

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_concurrent_requests", 1, 100_000),
            ("max_restarts", 0, 1000),
            ("tokenizer_threads", 1, 64),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(
                    f"{name} is {value!r}; it must be a whole number from {low} to {high}"
                )
        for name in (
            *("max_body_mib", "request_timeout", "client_timeout"),
            *("drain_timeout", "engine_timeout"),
        ):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value!r}; it must be a number above 0")
        for name in ("host", "request_log"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty")
        if self.reasoning_parser not in ("auto", "none", *REASONING_FORMS):
            given = self.reasoning_parser
            raise ConfigError(f"reasoning_parser is {given!r}; give auto, none, {_REASONING}")
        if self.served_model_name is not None and "" in self.model_names:
            raise ConfigError("served_model_name has an empty name; give one or more, as A,B")
        for name in ("cors_origin", "allowed_host"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.api_key is not None:
            # Blanks at the ends of a header do not reach the server.
            object.__setattr__(self, "api_key", self.api_key.strip())
            if not self.api_key or not self.api_key.isascii():
                raise ConfigError("api_key must be a non-empty ASCII string")

    @property
    def model_names(self) -> list[str]:
        """Names that were given; none by default."""
        given = self.served_model_name
        return [] if given is None else [name.strip() for name in given.split(",")]

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * 2**20)
