"""Messages between the API process and the engine's process: msgpack over a zmq pair.

The API process numbers the choices it asks for. The engine sends their token ids, and nothing that
can be computed from them elsewhere. Every engine process has a socket of its own, so that messages
to or from one that died do not reach the next.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cairn.engine.logprobs import TokenLogprob
from cairn.engine.sampling_params import SamplingParams
from cairn.trace import TokenReads


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """What the choices of a request must follow, as `server/grammar.py` writes it."""

    text: str
    field: str  # of the body, for errors


class Submit(msgspec.Struct, tag="submit", frozen=True):
    number: int  # of the first choice; the others have the following numbers
    token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None
    trace: bool = False
    dense: bool = False  # read every page for each token
    reading: bool = False  # report how far the prompt is read
    returns: Literal["none", "mean", "last"] = "none"  # an embedding, pooled so, and no tokens
    grammar: Grammar | None = None


class End(msgspec.Struct, tag="end", frozen=True):
    """Choices that need no more tokens: a stop string is complete, or the client has left."""

    numbers: list[int]
    reason: Literal["stop", "abort"]


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    pass


ToEngine = Submit | End | Shutdown


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The model is loaded."""

    context_length: int
    max_tokens: int  # of a request, prompt and output
    vocab_size: int
    eos_token_ids: list[int]
    page_size: int
    tokens_per_page: int
    unit_size: int  # rows that queries select as a whole: a page, or a part of it
    tokens_per_unit: int
    can_trace: bool
    can_read_densely: bool
    sparse_layers: list[int]
    sparse_topk: int  # pages that a query reads besides its window
    notes: list[str]


class Start(msgspec.Struct, array_like=True, frozen=True):
    """What is known of a choice with its first token."""

    cached_tokens: int
    prompt_logprobs: list[TokenLogprob | None] | None


class Detail(msgspec.Struct, array_like=True, frozen=True):
    """More about a choice's new token than its id. Most tokens have none."""

    at: int  # place of the token in the report
    start: Start | None  # with the first token
    logprob: TokenLogprob | None  # if asked for
    reads: TokenReads | None  # if traced
    reason: Literal["stop", "length"] | None  # "stop": the token is a stop token


class Refused(msgspec.Struct, array_like=True, frozen=True):
    """A request that does not run, by the number of its first choice, or a choice that failed."""

    number: int
    kind: Literal["request", "full", "engine"]
    message: str


class Pages(msgspec.Struct, array_like=True, frozen=True):
    group: str
    total: int
    free: int
    cached: int
    owned: int


class Tier(msgspec.Struct, frozen=True):
    """Pages of host memory by state, and totals since the engine started."""

    pages: dict[str, int]
    resident: int  # slices of (layer, kv head, page) read where they were
    hits: int  # read from the hot cache
    misses: int  # copied from the host first
    bytes_in: int
    bytes_out: int
    stall_seconds: float


class Stats(msgspec.Struct, frozen=True):
    """The engine's totals since it started, and what it holds now."""

    running: int
    waiting: int
    pages: list[Pages]
    steps: int
    scheduler_seconds: float
    model_seconds: float
    message_seconds: float
    prompt_tokens: int  # looked up in the prefix cache
    hit_tokens: int
    computed_tokens: int
    generated_tokens: int
    evicted_pages: int
    retractions: int
    aborted: int
    drafted_tokens: int  # that were checked
    accepted_tokens: int  # and came true
    read_pages: int  # pages that generated tokens' rows read in a sparse layer
    held_pages: int  # pages they had behind them
    start_compilations: int  # kernels compiled before the engine was ready
    serving_compilations: int  # and since then, while a request waited
    longest_prefill_step: float  # seconds of the longest step with prefill
    tier: Tier | None = None


class Report(msgspec.Struct, tag="report", frozen=True):
    """Sent after each step, and while idle at regular intervals, to show that the engine is alive.

    Choice numbers[i] got the token tokens[i]. A choice may get several, which are next to each
    other.
    """

    accepted: list[int]  # requests, by the number of their first choice
    refused: list[Refused]
    numbers: list[int]
    tokens: list[int]
    details: list[Detail]
    stats: Stats | None = None
    vectors: list[tuple[int, bytes]] = []  # choice number, its embedding as float32
    reading: list[tuple[int, int]] = []  # choice number, tokens of its prompt that are read
    drafts: list[tuple[int, int, int]] = []  # choice number, its drafts so far, and right ones


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine's last message: the error that ends it."""

    message: str
    usage: bool  # caused by an option, or by a model that cannot be served


FromEngine = Ready | Report | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
