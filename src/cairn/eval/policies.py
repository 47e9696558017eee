"""`cairn eval policies`: page-selection policies side by side, at equal bytes read.

A budget is the share of the KV bytes of all full-attention layers that a generated token reads:
window, sinks and dense layers included. What was read is measured, not assumed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cairn.attention.backend import AUTO_SPARSE
from cairn.bench.report import check_files
from cairn.cli_flags import check_at_least, collect
from cairn.config import EngineConfig
from cairn.engine.locate import locate
from cairn.errors import ConfigError
from cairn.eval import needle, ppl, recall, report, resume, ruler
from cairn.eval.haystack import encode_text, read_text
from cairn.eval.ruler_tasks import Corpus
from cairn.eval.settings import native_sparsity
from cairn.llm import LLM
from cairn.models.registry import read_spec
from cairn.models.spec import ModelSpec
from cairn.progress import loading_bar

VARIANTS: Mapping[str, dict[str, Any]] = {
    "quest": {"hsa_policy": "quest"},
    "mean": {"hsa_policy": "mean"},
    "spread": {"hsa_policy": "spread"},
    "streaming": {"hsa_policy": "streaming"},
    "snapkv": {"hsa_policy": "snapkv"},
    "dense-layers": {"hsa_dense_layers": 2},
    "top-p": {"hsa_top_p": 0.9},
    "by-layer": {"hsa_budget": "auto"},
}
"""Options of each policy; a budget sets the rest. Without `hsa_policy` it is the default one."""
STRATEGIES = ("group", "head", "softmax_head")
"""Compared in models that were trained with a policy of their own."""
_COLUMNS = ("policy", "bytes", "landmarks", "far", "ratio", "facts", "kept", "ruler", "ms")
_DEPTHS = (0.75, 0.5, 0.25, 0.0)  # facts right before the question are found by the window
_PAGE_SIZE, _WINDOW, _SINKS = 16, 128, 1
_TIMED = 32  # tokens
_STRIDE = 16  # tokens between queries


@dataclass(frozen=True, slots=True)
class Point:
    """A policy at one budget; without one, what all are compared with."""

    policy: str
    budget: float | None
    options: dict[str, Any]  # of the engine


def command(arguments: argparse.Namespace) -> int:
    check_at_least(arguments, 512, "tokens")
    check_at_least(arguments, 1, "samples", "rows")
    if arguments.rows * _STRIDE > arguments.tokens // 2:
        raise ConfigError(
            f"--rows is {arguments.rows}, one query every {_STRIDE} tokens; at most "
            f"{arguments.tokens // 2 // _STRIDE} are near the end of {arguments.tokens} tokens"
        )
    engine = collect(arguments, EngineConfig)
    budgets = [percent / 100 for percent in arguments.budgets]
    points = make_points(engine, arguments.tokens, arguments.policies, budgets)
    check_files(output=arguments.output, plot=arguments.plot, points=arguments.points)
    text = read_text(arguments.text)
    asked = {
        "model": getattr(arguments, "model", EngineConfig().model),
        "seed": getattr(arguments, "seed", 0),
        **{name: getattr(arguments, name) for name in ("text", "tokens", "rows", "samples")},
        "tasks": arguments.tasks,
    }
    same = {**asked, "options": engine}
    done = resume.earlier(arguments.points, "--points", same) if arguments.resume else []
    with loading_bar("Measuring") as progress:
        measuring = measure(points, text, arguments, progress, {row["flags"] for row in done})
        found, whole = resume.take(measuring, arguments.points, same, done)
    rows = compare(points, found)
    if not whole:
        print(resume.say_stopped(len(found), arguments.points), file=sys.stderr)
    varied = {"budgets": arguments.budgets, "policies": arguments.policies, "whole": whole}
    record = report.make_record("policies", engine, {**asked, **varied}, rows)
    report.show_rows(record, _COLUMNS)
    for row in rows:
        print(f"{row['policy']}, {100 * row['bytes']:.1f} % of the bytes: {row['flags']}")
    report.finish(record, arguments)
    return 0


def make_points(
    given: dict[str, Any], tokens: int, names: Sequence[str], budgets: Sequence[float]
) -> list[Point]:
    """Dense attention first, then each policy with each budget. A model that was trained with
    sparse attention is compared with itself as trained."""
    config = EngineConfig.from_kwargs(given)
    native = native_sparsity(config)
    chosen = [*VARIANTS, *(name for name in names if ":" in name)] if "all" in names else names
    if native is not None:
        points = [Point("as trained", None, given)]
        size, window = native.chunk_size, native.window
        for strategy in STRATEGIES:
            for budget in budgets:
                topk = _pages(budget, tokens, size) - _window_pages(window, size)
                _check(topk, budget, tokens)
                own = {"hsa_selection_strategy": strategy, "hsa_topk": topk}
                points.append(Point(strategy, budget, {**given, **own}))
        return points
    spec = read_spec(locate(config).config, config.model_impl)
    full = sum(window is None for window in spec.windows)
    plain = {name: own for name, own in given.items() if not name.startswith("hsa_")}
    plain.pop("attention_backend", None)
    common: dict[str, Any] = {"page_size": _PAGE_SIZE, **given, "attention_backend": AUTO_SPARSE}
    common.setdefault("hsa_unit_size", common["page_size"])  # the same for all policies
    common["hsa_dense_below"] = 0  # the policy is what is measured
    points = [Point("dense", None, {**plain, "page_size": common["page_size"]})]
    for name in chosen:
        for budget in budgets:
            own = {**common, **VARIANTS.get(name, {"hsa_policy": name})}
            points.append(Point(name, budget, _fitted(own, budget, tokens, full)))
    return points


def _fitted(options: dict[str, Any], budget: float, tokens: int, full: int) -> dict[str, Any]:
    """The options with as many pages as the budget has room for."""
    dense, size = options.get("hsa_dense_layers", 0), options["hsa_unit_size"]
    share = (budget * full - dense) / max(1, full - dense)
    pages = _pages(share, tokens, size)
    sinks = options.setdefault("hsa_sinks", _SINKS)
    if options.get("hsa_policy") == "streaming":
        window = (pages - sinks - 1) * size
        _check(window, budget, tokens)
        return {**options, "hsa_window": window}
    window = options.setdefault("hsa_window", _WINDOW)
    topk = pages - _window_pages(window, size)
    _check(topk - sinks + 1, budget, tokens)
    if "hsa_top_p" in options:
        topk = _pages(1.0, tokens, size)  # the share ends it, at the budget's share of the mass
        options = {**options, "hsa_top_p": round(min(0.99, 0.5 + budget), 2)}
    return {**options, "hsa_topk": topk}


def _pages(share: float, tokens: int, size: int) -> int:
    return round(share * tokens / size)


def _window_pages(window: int, size: int) -> int:
    return -(-window // size) + 1  # a window that starts inside a page touches one more


def _check(room: int, budget: float, tokens: int) -> None:
    if room < 1:
        raise ConfigError(
            f"--budgets has {budget:.0%}, and window, sinks and dense layers take more of {tokens} "
            "tokens; raise it or --tokens, or lower --hsa-window"
        )


# -- measuring --------------------------------------------------------------------------------


def measure(
    points: Sequence[Point],
    text: str,
    arguments: argparse.Namespace,
    progress: Callable[[int, int], None],
    done: Collection[str] = (),
) -> Iterator[dict[str, Any]]:
    """A row for each point whose flags are not among `done`."""
    for count, point in enumerate(points):
        progress(count, len(points))
        if flags_of(point.options) not in done:
            yield _measure(point, text, arguments)
    progress(len(points), len(points))


def compare(points: Sequence[Point], found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the points that were measured. Facts and perplexity are compared with those of
    the first point."""
    by_flags = {row["flags"]: row for row in found}
    flags = [flags_of(point.options) for point in points]
    base = by_flags[flags[0]]
    rows = []
    for row in (by_flags[own] for own in flags if own in by_flags):
        tail = row["ppl_tail"]
        ratio = None if tail is None else round(tail / base["ppl_tail"], 4)
        share, low, high = needle.kept(row["rights"], base["rights"]) or (None, None, None)
        rows.append({**row, "ratio": ratio, "kept": share, "kept_low": low, "kept_high": high})
    return rows


def _measure(point: Point, text: str, arguments: argparse.Namespace) -> dict[str, Any]:
    tokens = arguments.tokens
    found: dict[str, Any] = {"policy": point.policy, "budget": point.budget, "tokens": tokens}
    found["flags"] = flags_of(point.options)
    with LLM(**point.options) as llm:
        ids = encode_text(llm, text, tokens)
        found |= _read(llm, ids, arguments.rows)
        found |= _facts(llm, text, arguments)
        found["ms"] = round(1000 * _seconds_per_token(llm, ids[: tokens - _TIMED]), 3)
        policy = None if llm.engine.sparse is None else llm.engine.sparse.policy
    if policy is not None and policy.observed:
        return {**found, "ppl_tail": None}  # it has no sparse prompts
    sparse = point.options.get("attention_backend") == AUTO_SPARSE
    scored = {**point.options, "hsa_prefill": "sparse"} if sparse else point.options
    with LLM(**scored) as llm:
        found["ppl_tail"] = ppl.measure(llm, encode_text(llm, text, tokens))["ppl_tail"]
    return found


def _read(llm: LLM, ids: list[int], rows: int) -> dict[str, Any]:
    """Shares of bytes and of attention; `landmarks` are read in addition to `bytes`."""
    sparse = llm.engine.sparse
    if sparse is None:
        return {"bytes": 1.0, "landmarks": 0.0, "mass": 1.0, "far": 1.0}
    # Near the end, where the budget is meant.
    places = [len(ids) - _STRIDE * i for i in reversed(range(rows))]
    means = recall.measure_at(llm, ids, places)
    policy, spec = sparse.policy, llm.engine.spec
    assert policy is not None
    part = len(sparse.layers) / _full_layers(spec)
    page = 2 * policy.shape.num_kv_heads * policy.shape.head_dim
    page *= llm.engine.selected.page_size
    landmark = policy.landmark_heads * policy.landmark_width
    if policy.sinks_only or policy.observed:
        landmark = 0
    return {
        "bytes": round(part * means["read"] + 1 - part, 4),
        "landmarks": round(part * landmark / page, 4),
        "mass": round(part * means["mass"] + 1 - part, 4),
        "far": round(part * means["far"] + 1 - part, 4),
    }


def _full_layers(spec: ModelSpec) -> int:
    return sum(window is None for window in spec.windows)


def _facts(llm: LLM, text: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Right answers of `multiquery`, and the mean score of RULER's tasks."""
    seed = getattr(arguments, "seed", 0)
    options = needle.NeedleOptions(
        tasks=["multiquery"],
        lengths=[arguments.tokens],
        depths=_DEPTHS,
        samples=arguments.samples,
        keys=8,
        prompt="auto",
        answer_start="",
        max_tokens=24,
        seed=seed,
    )
    answers = list(needle.ask(llm, text, options, _ignore))
    rights = [answer.right for answer in answers]
    low, high = needle.wilson(sum(rights), len(rights))
    found: dict[str, Any] = {"facts": sum(rights) / len(rights), "rights": rights}
    found |= {"low": round(low, 4), "high": round(high, 4)}
    keys = [
        (task, arguments.tokens, i) for task in arguments.tasks for i in range(arguments.samples)
    ]
    own = ruler.Ruler(llm, Corpus(text, (), ()), "auto", str(seed))
    scores = [answer.score for answer in own.ask(keys, set(), _ignore)]
    return {**found, "ruler": round(sum(scores) / len(scores), 4)}


def _seconds_per_token(llm: LLM, ids: list[int]) -> float:
    """Of one sequence, behind a prompt that is cached."""
    llm.generate(ids, max_tokens=1)
    begin = time.perf_counter()
    llm.generate(ids, max_tokens=1, ignore_eos=True)
    first = time.perf_counter()
    llm.generate(ids, max_tokens=_TIMED, ignore_eos=True)
    return (time.perf_counter() - 2 * first + begin) / (_TIMED - 1)


def flags_of(options: Mapping[str, Any]) -> str:
    """Options as flags of the command line."""
    parts = []
    for name, value in options.items():
        parts += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return " ".join(parts)


def _ignore(done: int, total: int) -> None:
    """Progress within a point is not shown."""
