"""What Prometheus is told: counted here, or by the engine, whose totals survive its restarts."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cairn.server.answer import Answer, Choice
from cairn.server.wire import Stats, Tier

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TBT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOTAL = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# Totals of the engine: name, help, field.
_COUNTED = (
    ("cairn_engine_steps", "Steps of the engine.", "steps"),
    ("cairn_computed_tokens", "Tokens whose KV was computed.", "computed_tokens"),
    ("cairn_prefix_lookup_tokens", "Prompt tokens looked up in the cache.", "prompt_tokens"),
    ("cairn_prefix_hit_tokens", "Prompt tokens found in the prefix cache.", "hit_tokens"),
    ("cairn_evicted_pages", "Cached pages given up for others.", "evicted_pages"),
    ("cairn_retractions", "Running requests sent back to wait for pages.", "retractions"),
    ("cairn_aborted_requests", "Choices ended before their time.", "aborted"),
    ("cairn_read_pages", "Pages that sparse layers read for generated tokens.", "read_pages"),
    ("cairn_held_pages", "Pages that were there to be read.", "held_pages"),
)
# Totals by part: of a step's time that the engine measures (text is measured here), and kernels.
_SECONDS = {
    "scheduler": "scheduler_seconds",
    "model": "model_seconds",
    "messages": "message_seconds",
}
_COMPILATIONS = {"start": "start_compilations", "serving": "serving_compilations"}
# Totals of the host tier: name, help, label, and the field of each of its values.
_TIER = (
    (
        "cairn_tier_reads",
        "Slices of pages that were selected, by where they were found.",
        "place",
        {"resident": "resident", "hot": "hits", "host": "misses"},
    ),
    (
        "cairn_tier_bytes",
        "Bytes between host and device.",
        "direction",
        {"in": "bytes_in", "out": "bytes_out"},
    ),
    ("cairn_tier_stall_seconds", "Time spent waiting for copies.", "", {"": "stall_seconds"}),
)


class Metrics(Collector):
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.stats: Stats | None = None
        self._before: dict[str, float] = {}  # totals of engines that are gone
        self.ready = Gauge(
            "cairn_ready", "1 while the engine takes requests.", registry=self.registry
        )
        self._lost = Counter(
            "cairn_engine_lost", "Engines that died or got stuck.", registry=self.registry
        )
        self.http = Counter(
            "cairn_http_requests",
            "HTTP requests by route and status.",
            ("path", "status"),
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "cairn_prompt_tokens", "Prompt tokens of answered choices.", registry=self.registry
        )
        self.generated_tokens = Counter(
            "cairn_generated_tokens", "Tokens given to clients.", registry=self.registry
        )
        self.finished = Counter(
            "cairn_choices", "Choices by how they ended.", ("reason",), registry=self.registry
        )
        self.ttft = Histogram(
            "cairn_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            buckets=_TTFT,
            registry=self.registry,
        )
        # Every token comes by here: numbers of our own, which cost a tenth of a Histogram.
        self._gaps = [0] * (len(_TBT) + 1)
        self._gap_seconds = 0.0
        self._text_seconds = 0.0
        self.duration = Histogram(
            "cairn_answer_seconds",
            "From the arrival of a request to its last token.",
            buckets=_TOTAL,
            registry=self.registry,
        )
        self.registry.register(self)

    # -- told by the engine's client ----------------------------------------------------------

    def tokens_came(self, choices: Sequence[Choice], now: float) -> None:
        """One token for each of these choices."""
        self.generated_tokens.inc(len(choices))
        for choice in choices:
            last = choice.last_token
            choice.last_token = now
            if last is not None:
                self._gaps[bisect_left(_TBT, now - last)] += 1
                self._gap_seconds += now - last
                continue
            if choice.answer.first_token is None:
                choice.answer.first_token = now
            self.ttft.observe(now - choice.answer.arrival)

    def text_took(self, seconds: float) -> None:
        self._text_seconds += seconds

    def engine_lost(self, last: Stats | None) -> None:
        self.stats = None
        self._lost.inc()
        if last is not None:
            for name, value in _totals(last).items():
                self._before[name] = self._before.get(name, 0) + value

    def answered(self, answer: Answer) -> None:
        for choice in answer.choices:
            reason = "abort" if choice.ended is None else choice.ended.reason
            self.finished.labels(reason).inc()
            if choice.ended is not None:
                self.prompt_tokens.inc(choice.ended.prompt_tokens)
        if not answer.open:
            last = max(choice.last_token or 0.0 for choice in answer.choices)
            self.duration.observe(last - answer.arrival)

    # -- told to Prometheus -------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        totals = {} if stats is None else _totals(stats)
        for name, text, field in _COUNTED:
            value = totals.get(field, 0) + self._before.get(field, 0)
            yield CounterMetricFamily(name, text, value)
        seconds = CounterMetricFamily(
            "cairn_step_seconds",
            "Host time of steps: the engine's, and text, which another process makes.",
            labels=("part",),
        )
        for part, field in _SECONDS.items():
            seconds.add_metric((part,), totals.get(field, 0) + self._before.get(field, 0))
        seconds.add_metric(("text",), self._text_seconds)
        yield seconds
        compiled = CounterMetricFamily(
            "cairn_kernel_compilations",
            "Kernels compiled or loaded from disk, before the engine was ready and since then.",
            labels=("phase",),
        )
        for phase, field in _COMPILATIONS.items():
            compiled.add_metric((phase,), totals.get(field, 0) + self._before.get(field, 0))
        yield compiled
        yield self._time_between_tokens()
        running, waiting = (0, 0) if stats is None else (stats.running, stats.waiting)
        yield GaugeMetricFamily("cairn_running_requests", "Choices in the batch.", running)
        yield GaugeMetricFamily("cairn_waiting_requests", "Choices in the queue.", waiting)
        pages = GaugeMetricFamily("cairn_pages", "Pages by state.", labels=("group", "state"))
        for group in [] if stats is None else stats.pages:
            for state in ("free", "cached", "owned"):
                pages.add_metric((group.group, state), getattr(group, state))
        yield pages
        yield from self._collect_tier(None if stats is None else stats.tier, totals)

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

    def _collect_tier(self, tier: Tier | None, totals: dict[str, float]) -> Iterator[Metric]:
        if tier is None:
            return
        pages = GaugeMetricFamily(
            "cairn_tier_pages", "Pages of host memory by state.", labels=("state",)
        )
        for state, count in tier.pages.items():
            pages.add_metric((state,), count)
        yield pages
        for name, text, label, fields in _TIER:
            family = CounterMetricFamily(name, text, labels=(label,) if label else ())
            for value, field in fields.items():
                key = f"tier.{field}"
                total = totals.get(key, 0) + self._before.get(key, 0)
                family.add_metric((value,) if label else (), total)
            yield family

    def write(self) -> bytes:
        return generate_latest(self.registry)


def _totals(stats: Stats) -> dict[str, float]:
    names: Iterable[str] = [field for _, _, field in _COUNTED]
    split = (*_SECONDS.values(), *_COMPILATIONS.values())
    totals = {name: getattr(stats, name) for name in (*names, *split)}
    if stats.tier is not None:
        moved = [field for *_, fields in _TIER for field in fields.values()]
        totals |= {f"tier.{field}": getattr(stats.tier, field) for field in moved}
    return totals
