"""`cairn bench serve`: what a client of a server sees, under loads of random token ids.

Each server runs the workloads twice: cold, and warm with other tokens of the same lengths. The
clock of a request starts when it is sent, or was due to be sent, so waiting counts. Tokens that
arrive together count as one moment: servers that send tokens in bundles gain nothing by it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cairn import __version__
from cairn.bench.client_speed import client_speed
from cairn.bench.engines import settled
from cairn.bench.http_stream import HttpError, Reply, Target
from cairn.bench.load import Asked, Load, draw_requests, due_times, parse_load, redraw
from cairn.bench.report import check_files, percentiles
from cairn.bench.spawned import check_flags, spawn
from cairn.cli_flags import check_at_least
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


@dataclass(slots=True)
class Sent:
    """One request; times are seconds since its clock started."""

    part: int
    prompt_tokens: int
    asked_tokens: int
    begin: float
    """Start of its clock, in seconds since the start of the workload."""
    first_token: float | None = None
    total: float = 0.0
    largest_gap: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    gaps: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Server:
    """A server to start with flags, or one that runs at a URL; and what it did."""

    label: str
    flags: tuple[str, ...] | None = None
    url: str | None = None
    model: str | None = None
    seconds_to_ready: float | None = None
    error: str | None = None
    kernel_compilations: list[str] = field(default_factory=list)
    passes: dict[str, list[list[Sent]]] = field(default_factory=dict)
    """For each pass, the requests of each workload."""

    @property
    def failed(self) -> bool:
        requests = (one for sent in self.passes.values() for some in sent for one in some)
        return self.error is not None or any(one.error is not None for one in requests)


def command(arguments: argparse.Namespace) -> int:
    """Returns 1 if a server or a request has failed."""
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
    check_at_least(arguments, 1, "vocab_size")
    if not 0 < arguments.timeout < float("inf"):
        raise ConfigError("--timeout must be a number of seconds above 0")
    check_files(json=arguments.json)
    requests: dict[str, list[Any]] = {name: [] for name in _PASSES}
    for index, load in enumerate(loads):
        # A seed for each list: prompts of one must not begin like those of another.
        seed = arguments.seed + 1_000_003 * 2 * index
        cold = draw_requests(load, seed, arguments.vocab_size)
        requests["cold"].append(cold)
        requests["warm"].append(redraw(load, cold, seed + 1_000_003, arguments.vocab_size))
    for server in servers:
        asyncio.run(_measure(server, loads, requests, arguments))
    _show(arguments, loads, servers)
    return int(any(server.failed for server in servers))


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
        Target(url, None, 1.0)  # refuse bad URLs before servers are started
        servers.append(Server(label, url=url))
    if not servers:
        raise ConfigError("there is no server; add --spawn FLAGS to start one, or --url URL")
    labels = [server.label for server in servers]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"two servers are called {label!r}; label them: NAME={label}")
    return servers


def _labelled(text: str) -> tuple[str, str]:
    """A label and what it stands for; without a label the text is its own."""
    found = None if text.startswith("-") else _LABEL.fullmatch(text)
    return (text.strip() or "cairn serve", text) if found is None else (found[1], found[2])


async def _measure(
    server: Server,
    loads: Sequence[Load],
    requests: dict[str, list[list[list[Asked]]]],
    arguments: argparse.Namespace,
) -> None:
    """Run both passes. A server that dies or cannot be used gets an error."""
    with nullcontext() if server.flags is None else spawn(server.flags) as spawned:
        url, model = server.url, arguments.model if spawned is None else None
        try:
            if spawned is not None:
                _tell(f"starting {server.label}")
                url = spawned.wait_until_ready()
                server.seconds_to_ready = spawned.seconds_to_ready
                _tell(f"{server.label} is ready after {spawned.seconds_to_ready:.1f} s")
            assert url is not None
            target = Target(url, arguments.api_key, arguments.timeout)
            server.model = model or await _first_model(target)
            for name, lists in requests.items():
                sent = server.passes[name] = []
                for load, parts in zip(loads, lists, strict=True):
                    sent.append(await _send_load(target, load, parts, server.model, arguments))
                    _tell(f"{server.label}, {name}, {load.spec}: {_brief(sent[-1])}")
                    if spawned is not None and any(one.error for one in sent[-1]):
                        spawned.check()
            with suppress(HttpError):  # other servers may have no such metrics
                lines = (await target.read("/metrics")).splitlines()
                found = [line.decode() for line in lines if line.startswith(_COMPILATIONS)]
                server.kernel_compilations = found
        except CairnError as error:
            server.error = str(error)
        if server.failed:
            printed = "" if spawned is None else f"; it printed:\n{spawned.output}"
            _tell(f"{server.label} failed: {server.error or 'see its requests'}{printed}")


def _tell(text: str) -> None:
    print(f"cairn: {text}", file=sys.stderr, flush=True)


async def _first_model(target: Target) -> str:
    try:
        return str(json.loads(await target.read("./models"))["data"][0]["id"])
    except (HttpError, ValueError, LookupError) as error:
        raise CairnError(f"it does not answer with a list of models: {error}") from error


# -- sending ----------------------------------------------------------------------------------


async def _send_load(
    target: Target,
    load: Load,
    parts: list[list[Asked]],
    model: str,
    arguments: argparse.Namespace,
) -> list[Sent]:
    """Send the parts of a workload at the same time; returns when all requests have ended."""
    common = {"model": model, "temperature": arguments.temperature, "ignore_eos": True}
    common |= {"stream": True, "stream_options": {"include_usage": True}}
    start = 0.0

    async def one(data: bytes, due: float, turn: asyncio.Semaphore | None) -> tuple[float, Reply]:
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        async with turn or nullcontext():
            begin = time.perf_counter() if turn is not None else start + due
            return begin, await target.exchange(data)

    asked, waiting = [], []
    for index, (part, requests) in enumerate(zip(load.parts, parts, strict=True)):
        turn = None if part.concurrency is None else asyncio.Semaphore(part.concurrency)
        times = due_times(part, arguments.seed + index)
        for request, due in zip(requests, times, strict=True):
            own = {"prompt": request.prompt, "max_tokens": request.output_len}
            asked.append((index, request))
            waiting.append(one(target.post("/completions", {**common, **own}), due, turn))
    with settled():
        start = time.perf_counter()
        replies = await asyncio.gather(*waiting)
    return [
        read_reply(reply, begin, start, index, request)
        for (begin, reply), (index, request) in zip(replies, asked, strict=True)
    ]


def read_reply(reply: Reply, begin: float, start: float, part: int, asked: Asked) -> Sent:
    """Parse an answer; `start` is that of the workload."""
    sent = Sent(part, len(asked.prompt), asked.output_len, begin - start)
    moments: list[float] = []
    tokens = 0
    usage: dict[str, Any] = {}
    try:
        for moment, event in reply.events():
            if "error" in event:
                raise HttpError(str(event["error"]))
            usage = event.get("usage") or usage
            # An event without text may stand for a token whose bytes are not complete yet. The
            # event with the finish reason stands for a token only if it brings one.
            brought = (one.get("text") or one.get("token_ids") for one in event["choices"])
            reasons = (one.get("finish_reason") for one in event["choices"])
            if any(brought) or any(reason is None for reason in reasons):
                tokens += 1
                if not moments or moment > moments[-1]:
                    moments.append(moment)
        sent.output_tokens = usage["completion_tokens"] if usage else tokens
        details = usage.get("prompt_tokens_details") or {}
        sent.cached_tokens = int(details.get("cached_tokens") or 0)
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


# -- reporting --------------------------------------------------------------------------------


def summarize(sent: list[Sent]) -> dict[str, Any]:
    """The numbers of one workload on one server in one pass, of requests that did not fail."""
    good = [one for one in sent if one.error is None]
    first = percentiles([one.first_token for one in good if one.first_token is not None], 50, 99)
    gaps = percentiles([gap for one in good for gap in one.gaps], 50, 99, 100)
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
        "first_token_ms_p50": first.get("p50"),
        "first_token_ms_p99": first.get("p99"),
        "between_tokens_ms_p50": gaps.get("p50"),
        "between_tokens_ms_p99": gaps.get("p99"),
        "largest_gap_ms": gaps.get("p100"),
    }


def _brief(sent: list[Sent]) -> str:
    """The numbers that matter most, told as soon as a workload ends: a later one may take long."""
    summary = summarize(sent)
    forms = {
        "seconds": "{:.2f} s",
        "output_tokens_per_second": "{:,.0f} tokens/s",
        "first_token_ms_p50": "first token {:.1f} ms",
        "largest_gap_ms": "largest gap {:.1f} ms",
        "failed": "{} failed",
    }
    return ", ".join(form.format(summary[key]) for key, form in forms.items() if summary[key])


def _show(arguments: argparse.Namespace, loads: Sequence[Load], servers: Sequence[Server]) -> None:
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    for index, load in enumerate(loads):
        console.print(_table(index, load, servers))
    results, requests = [], []
    for server in servers:
        line = f"{server.label}: model {server.model}"
        if server.seconds_to_ready is not None:
            line += f", ready after {server.seconds_to_ready:.1f} s"
        if server.error is not None:
            line += f", failed: {server.error}"
        for text in (line, *(f"  {line}" for line in server.kernel_compilations)):
            console.print(text, markup=False)
        fields = asdict(server)
        requests.append(fields.pop("passes"))
        workloads = [
            {"workload": load.spec, "pass": name, **summarize(sent)}
            for name, lists in server.passes.items()
            for load, sent in zip(loads, lists, strict=False)  # fewer if it died
        ]
        results.append({"server": fields.pop("label"), **fields, "workloads": workloads})
    record: dict[str, Any] = {"workload": "serve", "date": date.today().isoformat()}
    record |= {"cairn": __version__, "results": results}
    record |= {name: getattr(arguments, name) for name in ("seed", "vocab_size", "temperature")}
    if arguments.json is not None:
        whole = json.dumps({**record, "requests": requests})
        Path(arguments.json).write_text(whole + "\n", encoding="utf-8")
    print(json.dumps(record))


def _table(index: int, load: Load, servers: Sequence[Server]) -> Table:
    """Servers and passes side by side; parts that list their lengths have a row for each."""
    table = Table("", title=load.spec, title_justify="left")
    columns: list[list[Sent]] = []
    for server in servers:
        for name in _PASSES:
            lists = server.passes.get(name, [])
            columns.append(lists[index] if index < len(lists) else [])
            table.add_column(f"{server.label}, {name}", justify="right")
    summaries = [summarize(sent) if sent else {} for sent in columns]
    for title, key, form in _ROWS:
        values = [summary.get(key) for summary in summaries]
        if any(values) or key not in _ONLY_IF_ANY:
            cells = ("-" if value is None else form.format(value) for value in values)
            table.add_row(title, *cells)
    for number, part in enumerate(load.parts):
        for place, (length, _) in enumerate(part.inputs if part.listed else ()):
            own = ([one for one in sent if one.part == number] for sent in columns)
            times = [sent[place].first_token if sent else None for sent in own]
            cells = ("-" if first is None else f"{1e3 * first:.1f}" for first in times)
            table.add_row(f"first token of {part.prefix + length} in, ms", *cells)
    errors = {summary.get("first_error") for summary in summaries} - {None}
    if errors:
        table.caption = "\n".join(sorted(map(str, errors)))
    return table
