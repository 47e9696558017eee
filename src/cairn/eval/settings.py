"""The attention settings to compare: dense, and each policy with each page budget."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cairn.attention.backend import AUTO_SPARSE, sparse_class
from cairn.bench.report import check_files
from cairn.cli_flags import check_at_least, collect
from cairn.config import EngineConfig
from cairn.engine.locate import locate
from cairn.errors import ConfigError
from cairn.eval.haystack import encode_text, read_text
from cairn.eval.report import make_record
from cairn.llm import LLM
from cairn.models.registry import read_spec
from cairn.models.spec import NativeSparsity
from cairn.progress import loading_bar

_PAGE_SIZE = 64
_WINDOW_PAGES = 2  # by default; the engine's default window would use up a small budget


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    options: dict[str, Any]  # of the engine
    policy: str | None = None
    budget: float | None = None
    """Share of the text's pages that its last token reads, including its window."""
    topk: int | None = None

    def as_dict(self) -> dict[str, Any]:
        rest = {"policy": self.policy, "budget": self.budget, "topk": self.topk}
        return {"setting": self.name, **rest}


def compare(
    arguments: argparse.Namespace,
    kind: str,
    measure: Callable[[LLM, list[int]], dict[str, Any]],
    *,
    dense: bool,
) -> dict[str, Any]:
    """Measure the text in an engine of every setting; returns the record."""
    check_at_least(arguments, 4, "tokens")
    policies = None if arguments.policies is None else arguments.policies.split(",")
    engine, tokens = collect(arguments, EngineConfig), arguments.tokens
    budgets = [percent / 100 for percent in arguments.budgets]
    settings = make_settings(engine, tokens, policies, budgets, dense=dense)
    check_files(output=arguments.output, plot=arguments.plot)
    text = read_text(arguments.text)
    with loading_bar("Measuring") as progress:
        rows = measure_settings(settings, text, tokens, measure, progress)
    names = ("text", "tokens", "budgets", "policies", "rows")
    asked = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    model = getattr(arguments, "model", EngineConfig().model)
    return make_record(kind, engine, {"model": model, **asked}, rows)


def measure_settings(
    settings: Sequence[Setting],
    text: str,
    tokens: int,
    measure: Callable[[LLM, list[int]], dict[str, Any]],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """A row for each setting: what `measure` finds for the first `tokens` tokens of the text."""
    rows: list[dict[str, Any]] = []
    for setting in settings:
        progress(len(rows), len(settings))
        begin = time.perf_counter()
        with LLM(**setting.options) as llm:
            found = measure(llm, encode_text(llm, text, tokens))
        seconds = round(time.perf_counter() - begin, 2)
        rows.append({**setting.as_dict(), "tokens": tokens, **found, "seconds": seconds})
    progress(len(settings), len(settings))
    return rows


def make_settings(
    given: dict[str, Any],
    tokens: int,
    policies: Sequence[str] | None,
    budgets: Sequence[float],
    *,
    dense: bool,
) -> list[Setting]:
    """The settings to compare. `given` are the user's engine options; `dense` adds the baseline.

    A model trained with sparse attention has no dense form, so its first setting is "as trained".
    """
    config = EngineConfig.from_kwargs(given)
    native = native_sparsity(config)
    if native is not None:
        if policies not in (None, [native.policy]):
            raise ConfigError(
                f"--policies is {','.join(policies or ())}, but the model was trained with "
                f"{native.policy!r}; leave it out"
            )
        own = {name: value for name, value in given.items() if name != "hsa_topk"}
        first = Setting("as trained", own, native.policy, None, native.topk)
        size = native.chunk_size
        rows = -(-tokens // (size - 1)) * size  # one row of each page is its landmark row
        choices = _budgets(config.hsa_topk, rows, size, native.window, budgets)
        return [first, *(_setting(native.policy, *choice, own) for choice in choices)]
    backend = config.attention_backend or AUTO_SPARSE
    given_names = [name.strip() for name in backend.split(",")]
    sparse_kind = sparse_class(given_names)
    page_size = config.page_size or _PAGE_SIZE
    unit_size = config.hsa_unit_size or page_size  # the same for all policies
    window = config.hsa_window or _WINDOW_PAGES * page_size
    common = {**given, "page_size": page_size}
    settings = []
    if dense:
        plain = {name: value for name, value in common.items() if not name.startswith("hsa_")}
        if sparse_kind is not None:
            plain["attention_backend"] = given_names[0] if len(given_names) > 1 else "auto"
        settings.append(Setting("dense", plain))
    sparse = {
        **common,
        "attention_backend": AUTO_SPARSE if sparse_kind is None else backend,
        "hsa_unit_size": unit_size,
        "hsa_window": window,
        # The policy is being measured, so read nothing densely unless requested.
        "hsa_dense_below": config.hsa_dense_below or 0,
    }
    if "," not in backend:
        sparse["hsa_prefill"] = config.hsa_prefill or "sparse"
    choices = _budgets(config.hsa_topk, tokens, unit_size, window, budgets)
    for policy in policies or [config.hsa_policy or "quest"]:
        own = {**sparse, "hsa_policy": policy}
        settings += [_setting(policy, *choice, own) for choice in choices]
    return settings


def native_sparsity(config: EngineConfig) -> NativeSparsity | None:
    """The sparse attention that the model was trained with; None for an ordinary model."""
    if config.model_impl == "transformers":
        return None
    return read_spec(locate(config).config, config.model_impl).sparsity


def _setting(policy: str, budget: float | None, topk: int, options: dict[str, Any]) -> Setting:
    name = f"{policy} top-{topk}" if budget is None else f"{policy} {budget:.0%}"
    return Setting(name, {**options, "hsa_topk": topk}, policy, budget, topk)


def _budgets(
    topk: int | None, rows: int, page_size: int, window: int, budgets: Sequence[float]
) -> list[tuple[float | None, int]]:
    """The number of pages to select for each budget, or only `topk` if it is given."""
    if topk is not None:
        return [(None, topk)]
    pages = -(-rows // page_size)
    in_window = -(-window // page_size) + 1  # a window that starts inside a page touches one more
    found: list[tuple[float | None, int]] = []
    for budget in budgets:
        left = pages if budget >= 1 else round(budget * pages) - in_window
        if left < 1:
            raise ConfigError(
                f"--budgets has {budget:.0%}: of {pages} pages that is {round(budget * pages)}, "
                f"and the window of {window} rows takes {in_window}; raise it or --tokens, or "
                "lower --hsa-window"
            )
        found.append((budget, left))
    return found
