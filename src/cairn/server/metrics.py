"""Prometheus metrics: counted here, or by the engine, whose totals survive its restarts."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cairn.server.answer import Answer, Choice
from cairn.server.wire import Stats

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TBT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOTAL = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# Totals of the engine: name, help, label, and the field of Stats for each value of the label.
_TEXT_SECONDS = "text_seconds"  # counted here, not by the engine
_TOTALS = (
    ("engine_steps", "Steps of the engine.", "", {"": "steps"}),
    ("computed_tokens", "Tokens whose KV was computed.", "", {"": "computed_tokens"}),
    ("prefix_lookup_tokens", "Prompt tokens looked up in the cache.", "", {"": "prompt_tokens"}),
    ("prefix_hit_tokens", "Prompt tokens found in the prefix cache.", "", {"": "hit_tokens"}),
    ("evicted_pages", "Cached pages evicted to make room.", "", {"": "evicted_pages"}),
    ("retractions", "Running requests sent back to wait for pages.", "", {"": "retractions"}),
    ("aborted_requests", "Choices ended before their time.", "", {"": "aborted"}),
    ("drafted_tokens", "Drafted tokens that were checked.", "", {"": "drafted_tokens"}),
    ("accepted_draft_tokens", "Drafted tokens that were right.", "", {"": "accepted_tokens"}),
    ("read_pages", "Pages that sparse layers read for generated tokens.", "", {"": "read_pages"}),
    ("held_pages", "Pages that were there to be read.", "", {"": "held_pages"}),
    (
        "step_seconds",
        "Host time of steps: the engine's, and text, which another process makes.",
        "part",
        {
            "scheduler": "scheduler_seconds",
            "model": "model_seconds",
            "messages": "message_seconds",
            "text": _TEXT_SECONDS,
        },
    ),
    (
        "kernel_compilations",
        "Kernels compiled or loaded from disk, before the engine was ready and since then.",
        "phase",
        {"start": "start_compilations", "serving": "serving_compilations"},
    ),
)
# Likewise of the host tier.
_TIER = (
    (
        "tier_reads",
        "Slices of pages that were selected, by where they were found.",
        "place",
        {"resident": "resident", "hot": "hits", "host": "misses"},
    ),
    (
        "tier_bytes",
        "Bytes between host and device.",
        "direction",
        {"in": "bytes_in", "out": "bytes_out"},
    ),
    ("tier_stall_seconds", "Time spent waiting for copies.", "", {"": "stall_seconds"}),
)


class Metrics(Collector):
    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.stats: Stats | None = None
        self._before: dict[str, float] = {}  # totals of engines that are gone

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"cairn_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"cairn_{name}", text, buckets=buckets, registry=registry)

        self.ready = Gauge("cairn_ready", "1 while the engine takes requests.", registry=registry)
        self.http = counter("http_requests", "HTTP requests by route and status.", "path", "status")
        self._lost = counter("engine_lost", "Engines that died or got stuck.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of answered choices.")
        self._generated_tokens = counter("generated_tokens", "Tokens given to clients.")
        self._finished = counter("choices", "Choices by how they ended.", "reason")
        self._ttft = histogram(
            "time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            _TTFT,
        )
        self._duration = histogram(
            "answer_seconds", "From the arrival of a request to its last token.", _TOTAL
        )
        # Updated for every token, so plain numbers: they cost a tenth of a Histogram.
        self._gaps = [0] * (len(_TBT) + 1)
        self._gap_seconds = 0.0
        self._text_seconds = 0.0
        registry.register(self)

    # -- called by the engine's client --------------------------------------------------------

    def tokens_came(self, choices: Sequence[Choice], now: float) -> None:
        """Count one token for each of these choices."""
        self._generated_tokens.inc(len(choices))
        for choice in choices:
            last = choice.last_token
            choice.last_token = now
            if last is not None:
                self._gaps[bisect_left(_TBT, now - last)] += 1
                self._gap_seconds += now - last
                continue
            if choice.answer.first_token is None:
                choice.answer.first_token = now
            self._ttft.observe(now - choice.answer.arrival)

    def text_took(self, seconds: float) -> None:
        self._text_seconds += seconds

    def engine_lost(self, last: Stats | None) -> None:
        self.stats = None
        self._lost.inc()
        for name, value in _totals(last).items():
            self._before[name] = self._before.get(name, 0) + value

    def answered(self, answer: Answer) -> None:
        for choice in answer.choices:
            self._finished.labels(choice.reason or "abort").inc()
            if choice.reason is not None:
                self._prompt_tokens.inc(choice.prompt_tokens)
        if not answer.open:
            last = max(choice.last_token or 0.0 for choice in answer.choices)
            self._duration.observe(last - answer.arrival)

    # -- called by Prometheus -----------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        totals = {**_totals(stats), _TEXT_SECONDS: self._text_seconds}
        tier = None if stats is None else stats.tier
        for name, text, label, fields in _TOTALS if tier is None else (*_TOTALS, *_TIER):
            family = CounterMetricFamily(f"cairn_{name}", text, labels=(label,) if label else ())
            for value, field in fields.items():
                total = totals.get(field, 0) + self._before.get(field, 0)
                family.add_metric((value,) if label else (), total)
            yield family
        yield self._time_between_tokens()
        running, waiting = (0, 0) if stats is None else (stats.running, stats.waiting)
        yield GaugeMetricFamily("cairn_running_requests", "Choices in the batch.", running)
        yield GaugeMetricFamily("cairn_waiting_requests", "Choices in the queue.", waiting)
        yield GaugeMetricFamily(
            "cairn_longest_prefill_step_seconds",
            "Longest step with prefill since the engine started.",
            0.0 if stats is None else stats.longest_prefill_step,
        )
        pages = GaugeMetricFamily("cairn_pages", "Pages by state.", labels=("group", "state"))
        for group in [] if stats is None else stats.pages:
            for state in ("free", "cached", "owned"):
                pages.add_metric((group.group, state), getattr(group, state))
        yield pages
        if tier is not None:
            text = "Pages of host memory by state."
            held = GaugeMetricFamily("cairn_tier_pages", text, labels=("state",))
            for state, count in tier.pages.items():
                held.add_metric((state,), count)
            yield held

    def _time_between_tokens(self) -> Metric:
        counted, buckets = 0, []
        for bound, count in zip((*_TBT, math.inf), self._gaps, strict=True):
            counted += count
            buckets.append(("+Inf" if bound == math.inf else repr(float(bound)), counted))
        return HistogramMetricFamily(
            "cairn_time_between_tokens_seconds",
            "Between two tokens of a choice.",
            buckets=buckets,
            sum_value=self._gap_seconds,
        )

    def write(self) -> bytes:
        return generate_latest(self.registry)


def _totals(stats: Stats | None) -> dict[str, float]:
    """The engine's totals by field."""
    found: dict[str, float] = {}
    for source, table in ((stats, _TOTALS), (stats and stats.tier, _TIER)):
        for *_, fields in table if source is not None else ():
            found |= {
                field: getattr(source, field) for field in fields.values() if field != _TEXT_SECONDS
            }
    return found
