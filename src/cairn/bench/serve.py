"""`cairn bench serve`: load for any server that speaks OpenAI's protocol, and how it fares.

The clock of a request starts when it is sent, or was due to be sent: waiting counts. What a stream
brings at once counts as one moment, so that servers that send tokens in bundles are not flattered.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cairn.bench.http_stream import HttpError, Target
from cairn.errors import CairnError, ConfigError

_PERCENTILES = (50, 90, 99)
_WORDS = (
    "stone path ridge water lamp door snow bread wind rope stove bell map candle valley cloud "
    "ledge spring roof glove compass trout season warden supper blanket barrel mule flour letter"
).split()


@dataclass(slots=True)
class Sent:
    """One request, in seconds since its clock started."""

    first: float = 0.0
    moments: list[float] = field(default_factory=list)
    total: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


def add_serve_bench(kinds: Any) -> None:
    parser = kinds.add_parser(
        "serve", help="load for a server with OpenAI's API, at any URL", allow_abbrev=False
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="Default: %(default)s.")
    parser.add_argument("--api-key", metavar="KEY", help="Sent as a bearer token.")
    parser.add_argument("--model", metavar="NAME", help="By default the server's first.")
    parser.add_argument("--requests", type=int, default=64, metavar="N")
    parser.add_argument(
        "--concurrency", type=int, default=16, metavar="N", help="Requests open at once."
    )
    parser.add_argument(
        "--rate", type=float, metavar="N", help="Requests per second instead, at random moments."
    )
    parser.add_argument("--input-len", type=int, default=128, metavar="WORDS")
    parser.add_argument("--output-len", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--shared-prefix", type=int, default=0, metavar="WORDS")
    parser.add_argument(
        "--ignore-eos", action="store_true", help="Answers of full length, where servers know it."
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--output", metavar="FILE", help="Write the JSON line to a file too.")
    parser.add_argument("--plot", metavar="FILE", help="Draw a PNG.")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    for name in ("requests", "concurrency", "input_len", "output_len"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    if arguments.rate is not None and arguments.rate <= 0:
        raise ConfigError("--rate must be above 0")
    for name in ("output", "plot"):
        path = getattr(arguments, name)
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no such folder")
    record, sent = asyncio.run(_bench(arguments))
    _show(record, sent, arguments.output, arguments.plot)
    return 0 if not record["errors"] else 1


async def _bench(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Sent]]:
    target = Target(arguments.url, arguments.api_key, arguments.timeout)
    model = arguments.model or await _first_model(target)
    bodies = _bodies(arguments, model)
    warm = await _send(target, {**bodies[0], "max_tokens": 2})
    if warm.error is not None:
        raise CairnError(f"{arguments.url} refuses the first request: {warm.error}")
    begin = time.perf_counter()
    if arguments.rate is None:
        turn = asyncio.Semaphore(arguments.concurrency)

        async def limited(body: dict[str, Any]) -> Sent:
            async with turn:
                return await _send(target, body)

        sent = await asyncio.gather(*map(limited, bodies))
    else:
        sent = await _paced(target, bodies, arguments.rate, arguments.seed)
    seconds = time.perf_counter() - begin
    return _record(arguments, model, sent, seconds), sent


async def _first_model(target: Target) -> str:
    try:
        return str(json.loads(await target.read("/models"))["data"][0]["id"])
    except (HttpError, ValueError, LookupError) as error:
        raise CairnError(f"--url does not answer with a list of models: {error}") from error


def _bodies(arguments: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    draw = random.Random(arguments.seed)

    def words(count: int) -> str:
        return " ".join(draw.choice(_WORDS) for _ in range(count))

    more = {"ignore_eos": True} if arguments.ignore_eos else {}
    shared = words(arguments.shared_prefix) + " " if arguments.shared_prefix else ""
    return [
        {
            "model": model,
            "prompt": f"{shared}{number} {words(arguments.input_len)}",
            "max_tokens": arguments.output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        for number in range(arguments.requests)
    ]


async def _paced(
    target: Target, bodies: list[dict[str, Any]], rate: float, seed: int
) -> list[Sent]:
    """Send on time, whatever has been answered by then."""
    draw = random.Random(seed)
    due = list(itertools.accumulate(draw.expovariate(rate) for _ in bodies))
    begin = time.perf_counter()

    async def one(body: dict[str, Any], moment: float) -> Sent:
        await asyncio.sleep(max(0.0, begin + moment - time.perf_counter()))
        return await _send(target, body, clock=begin + moment)

    return list(await asyncio.gather(*(one(b, m) for b, m in zip(bodies, due, strict=True))))


async def _send(target: Target, body: dict[str, Any], clock: float | None = None) -> Sent:
    begin = time.perf_counter() if clock is None else clock
    result = Sent()
    try:
        async for line in target.lines("/completions", body):
            if line.startswith(b"data: {"):
                _take(json.loads(line[6:]), result, time.perf_counter() - begin)
    except HttpError as error:
        result.error = str(error)
    result.total = time.perf_counter() - begin
    return result


def _take(event: dict[str, Any], result: Sent, now: float) -> None:
    if "error" in event:
        result.error = str(event["error"])
    if event.get("usage"):
        result.prompt_tokens = event["usage"]["prompt_tokens"]
        result.output_tokens = event["usage"]["completion_tokens"]
    if any(choice.get("text") for choice in event.get("choices", ())):
        result.first = result.first or now
        result.moments.append(now)


def _record(
    arguments: argparse.Namespace, model: str, sent: list[Sent], seconds: float
) -> dict[str, Any]:
    good = [one for one in sent if one.error is None and one.moments]
    gaps = [b - a for one in good for a, b in itertools.pairwise(one.moments)]
    tokens = sum(one.output_tokens or len(one.moments) for one in good)
    return {
        "workload": "serve",
        "url": arguments.url,
        "model": model,
        "requests": len(sent),
        "load": f"{arguments.rate} requests/s"
        if arguments.rate is not None
        else f"{arguments.concurrency} at once",
        "errors": len(sent) - len(good),
        "first_error": next((one.error for one in sent if one.error is not None), None),
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(one.prompt_tokens for one in good),
        "output_tokens": tokens,
        "output_tokens_per_second": round(tokens / seconds, 2),
        "requests_per_second": round(len(good) / seconds, 3),
        "ttft_ms": _percentiles([one.first for one in good]),
        "between_tokens_ms": _percentiles(gaps),
        "answer_ms": _percentiles([one.total for one in good]),
    }


def _percentiles(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    values = np.array(seconds) * 1e3
    found = {f"p{p}": round(float(np.percentile(values, p)), 2) for p in _PERCENTILES}
    return {"mean": round(float(values.mean()), 2), **found, "max": round(float(values.max()), 2)}


def _show(record: dict[str, Any], sent: list[Sent], output: str | None, plot: str | None) -> None:
    console = Console()
    console.print(
        f"{record['requests']} requests to {record['model']} at {record['url']}, {record['load']}: "
        f"{record['output_tokens_per_second']:.1f} tokens/s, "
        f"{record['requests_per_second']:.2f} requests/s, {record['errors']} errors"
    )
    if record["first_error"] is not None:
        console.print(f"[red]{record['first_error']}[/red]")
    table = Table("ms", "mean", *(f"p{p}" for p in _PERCENTILES), "max")
    for title, name in (
        ("first token", "ttft_ms"),
        ("between tokens", "between_tokens_ms"),
        ("whole answer", "answer_ms"),
    ):
        values = record[name] or {}
        table.add_row(title, *(f"{value:.1f}" for value in values.values()))
    console.print(table)
    line = json.dumps(record)
    if output is not None:
        Path(output).write_text(line + "\n", encoding="utf-8")
    if plot is not None:
        _plot(record, sent, Path(plot))
    print(line)


def _plot(record: dict[str, Any], sent: list[Sent], path: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'cairn[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = [one for one in sent if one.error is None and one.moments]
    gaps = [b - a for one in good for a, b in itertools.pairwise(one.moments)]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for axis, title, values in (
        (axes[0], "first token, ms", [one.first * 1e3 for one in good]),
        (axes[1], "between tokens, ms", [gap * 1e3 for gap in gaps]),
    ):
        ordered = np.sort(values)
        axis.plot(ordered, np.linspace(0, 100, len(ordered)), color="#2a6f97")
        axis.set_xlabel(title)
        axis.set_ylabel("% of them are faster")
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{record['model']}, {record['requests']} requests, {record['load']}: "
        f"{record['output_tokens_per_second']:.1f} tokens/s",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
