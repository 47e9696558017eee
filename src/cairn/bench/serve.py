"""`cairn bench serve`: what a user of a server meets, under loads of token ids.

Each server runs the workloads twice: cold, and warm with other tokens of the same shapes. The clock
of a request starts when it is sent, or was due to be sent: waiting counts. What a stream brings at
once counts as one moment, so that servers that send tokens in bundles are not flattered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import shlex
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cairn import __version__
from cairn.bench.client_speed import client_speed
from cairn.bench.collector import settled
from cairn.bench.http_stream import HttpError, Reply, Target
from cairn.bench.load import Asked, Load, draw_requests, due_times, parse_load, redraw
from cairn.bench.spawned import Spawned, check_flags, spawn
from cairn.errors import CairnError, ConfigError

_LABEL = re.compile(r"([\w.-]+)=(.*)", re.DOTALL)
_COMPILATIONS = b"cairn_kernel_compilations_total"
_WIDTH = 160  # of tables that go to a file
_PASSES = ("cold", "warm")
_ROWS = (
    ("all requests ended, s", "seconds", "{:.3f}"),
    ("output tokens/s", "output_tokens_per_second", "{:.1f}"),
    ("first token, median ms", "first_token_ms_p50", "{:.1f}"),
    ("first token, p99 ms", "first_token_ms_p99", "{:.1f}"),
    ("between tokens, median ms", "between_tokens_ms_p50", "{:.2f}"),
    ("largest gap in a stream, ms", "largest_gap_ms", "{:.1f}"),
    ("prompt tokens found cached", "cached_tokens", "{}"),
    ("failed requests", "failed", "{}"),
)
_ONLY_IF_ANY = ("cached_tokens", "failed")


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go: flags of a server to start, or the address of one that runs."""

    label: str
    flags: tuple[str, ...] | None = None
    url: str | None = None


@dataclass(slots=True)
class Sent:
    """One request; seconds since its clock started."""

    part: int
    prompt_tokens: int
    asked_tokens: int
    begin: float
    """On the clock of the pass."""
    first_token: float | None = None
    total: float = 0.0
    largest_gap: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    gaps: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Measured:
    """A server and what it did: for each pass, the requests of each workload."""

    server: Server
    model: str | None = None
    seconds_to_ready: float | None = None
    passes: dict[str, list[list[Sent]]] = field(default_factory=dict)
    compilations: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def failed(self) -> bool:
        requests = (one for sent in self.passes.values() for some in sent for one in some)
        return self.error is not None or any(one.error is not None for one in requests)


def run(arguments: argparse.Namespace) -> int:
    """The command; returns 1 if a server or a request has failed."""
    if arguments.client_speed:
        if arguments.workload or arguments.spawn or arguments.url:
            raise ConfigError("--client-speed has its own server and workload; give it alone")
        print(json.dumps(client_speed()))
        return 0
    loads = [parse_load(spec) for spec in arguments.workload]
    servers = _servers(arguments)
    if not loads:
        raise ConfigError(
            "there is no workload; add one like --workload 64x1024-6144:100-300 (see --help)"
        )
    if arguments.vocab_size < 1:
        raise ConfigError("--vocab-size must be at least 1")
    if not 0 < arguments.timeout < float("inf"):
        raise ConfigError("--timeout must be a number of seconds above 0")
    if arguments.json is not None and not Path(arguments.json).absolute().parent.is_dir():
        raise ConfigError(f"--json {arguments.json}: there is no such folder")
    requests = _requests(loads, arguments.seed, arguments.vocab_size)
    measured = [asyncio.run(_measure(server, loads, requests, arguments)) for server in servers]
    _show(arguments, loads, measured)
    return 1 if any(one.failed for one in measured) else 0


def _servers(arguments: argparse.Namespace) -> list[Server]:
    servers = []
    for text in arguments.spawn:
        label, flags = _labelled(text)
        try:
            split = tuple(shlex.split(flags))
        except ValueError as error:
            raise ConfigError(f"--spawn {text!r}: {error}; close every quote") from error
        check_flags(split)
        servers.append(Server(label, flags=split))
    for text in arguments.url:
        label, url = _labelled(text)
        Target(url, None, 1.0)  # refused before servers are started
        servers.append(Server(label, url=url))
    if not servers:
        raise ConfigError("there is no server; add --spawn FLAGS to start one, or --url URL")
    labels = [server.label for server in servers]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"two servers are called {label!r}; label them: NAME={label}")
    return servers


def _labelled(text: str) -> tuple[str, str]:
    """A label and what it stands for; without one, the text is its own."""
    found = None if text.startswith("-") else _LABEL.fullmatch(text)
    return (text.strip() or "cairn serve", text) if found is None else (found[1], found[2])


def _requests(loads: Sequence[Load], seed: int, vocab_size: int) -> dict[str, list[Any]]:
    """The requests of each workload for both passes. Every list has a seed of its own: prompts of
    one must not begin like those of another."""
    cold = [
        draw_requests(load, seed + 1_000_003 * (2 * i), vocab_size) for i, load in enumerate(loads)
    ]
    warm = [
        redraw(load, parts, seed + 1_000_003 * (2 * i + 1), vocab_size)
        for i, (load, parts) in enumerate(zip(loads, cold, strict=True))
    ]
    return dict(zip(_PASSES, (cold, warm), strict=True))


async def _measure(
    server: Server,
    loads: Sequence[Load],
    requests: dict[str, list[list[list[Asked]]]],
    arguments: argparse.Namespace,
) -> Measured:
    """Both passes over a server. One that dies or cannot be used has an error in the result."""
    measured = Measured(server)
    async with _reach(server) as spawned:
        try:
            if spawned is not None:
                _tell(f"starting {server.label}")
                await spawned.wait_until_ready()
                measured.seconds_to_ready = spawned.seconds_to_ready
                _tell(f"{server.label} is ready after {spawned.seconds_to_ready:.1f} s")
            url = server.url if spawned is None else spawned.url
            assert url is not None
            target = Target(url, arguments.api_key, arguments.timeout)
            named = arguments.model if spawned is None else None
            measured.model = named or await _first_model(target)
            for name, lists in requests.items():
                sent = measured.passes[name] = []
                for load, parts in zip(loads, lists, strict=True):
                    sent.append(await _send_load(target, load, parts, measured.model, arguments))
                    _tell(f"{server.label}, {name}, {load.spec}: done")
                    if spawned is not None and any(one.error for one in sent[-1]):
                        await spawned.check()
            measured.compilations = await _compilations(target)
        except CairnError as error:
            measured.error = str(error)
        if measured.failed:
            printed = "" if spawned is None else f"; it printed:\n{spawned.output}"
            _tell(f"{server.label} failed: {measured.error or 'see its requests'}{printed}")
    return measured


@contextlib.asynccontextmanager
async def _reach(server: Server) -> AsyncIterator[Spawned | None]:
    if server.flags is None:
        yield None
    else:
        async with spawn(server.flags) as spawned:
            yield spawned


def _tell(text: str) -> None:
    print(f"cairn: {text}", file=sys.stderr, flush=True)


async def _first_model(target: Target) -> str:
    try:
        return str(json.loads(await target.read("./models"))["data"][0]["id"])
    except (HttpError, ValueError, LookupError) as error:
        raise CairnError(f"it does not answer with a list of models: {error}") from error


async def _compilations(target: Target) -> list[str]:
    """The lines of /metrics on kernels that were compiled; servers may have none."""
    try:
        text = await target.read("/metrics")
    except HttpError:
        return []
    return [line.decode() for line in text.splitlines() if line.startswith(_COMPILATIONS)]


# -- sending ----------------------------------------------------------------------------------


async def _send_load(
    target: Target,
    load: Load,
    parts: list[list[Asked]],
    model: str,
    arguments: argparse.Namespace,
) -> list[Sent]:
    """Send the parts of a workload at the same time; returns when all requests have ended."""

    def body(asked: Asked) -> bytes:
        return target.post(
            "/completions",
            {
                "model": model,
                "prompt": asked.prompt,
                "max_tokens": asked.output_len,
                "temperature": arguments.temperature,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
            },
        )

    bodies = [[body(asked) for asked in part] for part in parts]
    start = 0.0

    async def one(data: bytes, due: float, turn: asyncio.Semaphore | None) -> tuple[float, Reply]:
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        async with turn or contextlib.nullcontext():
            begin = time.perf_counter() if turn is not None else start + due
            return begin, await target.exchange(data)

    waiting = []
    for index, (part, datas) in enumerate(zip(load.parts, bodies, strict=True)):
        turn = None if part.concurrency is None else asyncio.Semaphore(part.concurrency)
        times = due_times(part, arguments.seed + index)
        waiting += [one(data, due, turn) for data, due in zip(datas, times, strict=True)]
    with settled():
        start = time.perf_counter()
        replies = await asyncio.gather(*waiting)
    asked = [(index, request) for index, part in enumerate(parts) for request in part]
    return [
        _read(reply, begin, start, index, request)
        for (begin, reply), (index, request) in zip(replies, asked, strict=True)
    ]


def _read(reply: Reply, begin: float, start: float, part: int, asked: Asked) -> Sent:
    """Take an answer apart; `start` is that of the pass."""
    sent = Sent(part, len(asked.prompt), asked.output_len, begin - start)
    moments: list[float] = []
    tokens = 0
    usage: dict[str, Any] | None = None
    try:
        for moment, event in reply.events():
            if "error" in event:
                raise HttpError(str(event["error"]))
            usage = event.get("usage") or usage
            # An event without text may stand for a token whose bytes are not complete yet, but
            # the one that says how the answer ended stands for nothing.
            if any(
                choice.get("text") or choice.get("finish_reason") is None
                for choice in event["choices"]
            ):
                tokens += 1
                if not moments or moment > moments[-1]:
                    moments.append(moment)
        sent.output_tokens = tokens if usage is None else usage["completion_tokens"]
        sent.cached_tokens = _cached(usage or {})
        if sent.output_tokens != asked.output_len:
            raise HttpError(f"it has {sent.output_tokens} of {asked.output_len} tokens")
    except (HttpError, ValueError, LookupError) as error:
        sent.error = str(error)
    if moments:
        sent.first_token = moments[0] - begin
        sent.gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
        sent.largest_gap = max(sent.gaps, default=None)
    sent.total = (reply.moments[-1] if reply.moments else begin) - begin
    return sent


def _cached(usage: dict[str, Any]) -> int:
    """Tokens of the prompt that the server had computed before, if it says so."""
    details = usage.get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


# -- reporting --------------------------------------------------------------------------------


def _summary(sent: list[Sent]) -> dict[str, Any]:
    """The numbers of one workload on one server in one pass, of requests that did not fail."""
    good = [one for one in sent if one.error is None]
    first = [one.first_token for one in good if one.first_token is not None]
    gaps = [gap for one in good for gap in one.gaps]
    seconds = max((one.begin + one.total for one in good), default=0.0)
    tokens = sum(one.output_tokens for one in good)
    return {
        "requests": len(sent),
        "failed": len(sent) - len(good),
        "first_error": next((one.error for one in sent if one.error is not None), None),
        "seconds": round(seconds, 4),
        "prompt_tokens": sum(one.prompt_tokens for one in good),
        "cached_tokens": sum(one.cached_tokens for one in good),
        "output_tokens": tokens,
        "output_tokens_per_second": round(tokens / seconds, 2) if seconds else None,
        "first_token_ms_p50": _percentile(first, 50),
        "first_token_ms_p99": _percentile(first, 99),
        "between_tokens_ms_p50": _percentile(gaps, 50),
        "between_tokens_ms_p99": _percentile(gaps, 99),
        "largest_gap_ms": _percentile(gaps, 100),
    }


def _percentile(seconds: list[float], percent: int) -> float | None:
    return round(1e3 * float(np.percentile(seconds, percent)), 3) if seconds else None


def _show(
    arguments: argparse.Namespace, loads: Sequence[Load], measured: Sequence[Measured]
) -> None:
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    results = [
        {
            "server": one.server.label,
            "flags": one.server.flags,
            "url": one.server.url,
            "model": one.model,
            "seconds_to_ready": one.seconds_to_ready,
            "error": one.error,
            "kernel_compilations": one.compilations,
            "workloads": [
                {"workload": load.spec, "pass": name, **_summary(sent)}
                for name, lists in one.passes.items()
                for load, sent in zip(loads, lists, strict=False)  # fewer if it died
            ],
        }
        for one in measured
    ]
    for index, load in enumerate(loads):
        console.print(_table(index, load, measured))
    for one in measured:
        ready = one.seconds_to_ready
        console.print(
            f"{one.server.label}: model {one.model}"
            + ("" if ready is None else f", ready after {ready:.1f} s")
            + ("" if one.error is None else f", failed: {one.error}"),
            markup=False,
        )
        for line in one.compilations:
            console.print(f"  {line}", markup=False)
    record = {
        "workload": "serve",
        "date": date.today().isoformat(),
        "cairn": __version__,
        "seed": arguments.seed,
        "vocab_size": arguments.vocab_size,
        "temperature": arguments.temperature,
        "results": results,
    }
    if arguments.json is not None:
        requests = [
            {name: [[asdict(sent) for sent in some] for some in lists] for name, lists in p.items()}
            for p in (one.passes for one in measured)
        ]
        whole = {**record, "requests": requests}
        Path(arguments.json).write_text(json.dumps(whole) + "\n", encoding="utf-8")
    print(json.dumps(record))


def _table(index: int, load: Load, measured: Sequence[Measured]) -> Table:
    """Servers and passes side by side; parts that list their lengths have a row for each."""
    table = Table(title=load.spec, title_justify="left")
    table.add_column("")
    columns = []
    for one in measured:
        for name in _PASSES:
            lists = one.passes.get(name, [])
            columns.append(lists[index] if index < len(lists) else [])
            table.add_column(f"{one.server.label}, {name}", justify="right")
    summaries = [_summary(sent) for sent in columns]
    for title, key, form in _ROWS:
        if key in _ONLY_IF_ANY and not any(summary[key] for summary in summaries):
            continue
        values = (
            summary[key] if sent else None for summary, sent in zip(summaries, columns, strict=True)
        )
        table.add_row(title, *("-" if value is None else form.format(value) for value in values))
    for number, part in enumerate(load.parts):
        for place, (length, _) in enumerate(part.inputs if part.listed else ()):
            cells = []
            for sent in columns:
                of_part = [one for one in sent if one.part == number]
                first = of_part[place].first_token if of_part else None
                cells.append("-" if first is None else f"{1e3 * first:.1f}")
            table.add_row(f"first token of {part.prefix + length} in, ms", *cells)
    errors = {summary["first_error"] for summary in summaries} - {None}
    if errors:
        table.caption = "\n".join(sorted(errors))
    return table
