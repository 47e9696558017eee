"""The commands of `cairn eval` and their flags: answer quality for any model and policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cairn.cli_flags import OUTPUT, PLOT, TEXT, Flag, add_command, flag, flags_of, list_flag
from cairn.config import EngineConfig

TASKS = ("single", "multikey", "multiquery", "variables", "absent")
_PROMPTS = ("auto", "plain", "chat")
_BUDGET = "%% of the pages that the last token reads, its window (by default two pages) included"
_ANSWERS = flag("answers", None, "Write every answer, a JSON line each.", metavar="FILE")
_RESUME = flag("resume", False, "Go on where that file ends.", action="store_true")
_NEEDLE = (
    list_flag("task", ("single",), "Of these; or all.", str, choices=(*TASKS, "all")),
    list_flag("lengths", (2048, 8192), "Tokens of the whole prompt, exactly."),
    list_flag(
        "depths",
        (0, 25, 50, 75, 100),
        "Depth of the fact, in %% of the text.",
        float,
        low=0,
        high=100,
    ),
    flag("samples", 4, "Texts for each length."),
    flag("keys", 8, "Facts or chains in a text of multikey and variables."),
    flag("prompt", "auto", "auto takes the model's chat format if it has one.", choices=_PROMPTS),
    flag("answer-start", "", "First words of the answer; {name} is the one asked about."),
    flag("max-tokens", 48, "Of an answer."),
    TEXT,
    _ANSWERS,
    _RESUME,
    flag("against", None, "Compare with --answers of another run, in pairs.", metavar="FILE"),
)
RULER_TASKS = (
    *(f"niah_single_{i}" for i in (1, 2, 3)),
    *(f"niah_multikey_{i}" for i in (1, 2, 3)),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa"),
)
_RULER = (
    list_flag("tasks", ("all",), "Of these; or all.", str, choices=(*RULER_TASKS, "all")),
    list_flag("lengths", (4096,), "Most tokens of prompt and answer."),
    flag("samples", 20, "Of each task and length; RULER itself takes 500."),
    flag("prompt", "auto", "auto takes the model's chat format if it has one.", choices=_PROMPTS),
    TEXT,
    flag("qa", None, "Questions for the task qa, as JSON of SQuAD or HotpotQA.", metavar="FILE"),
    _ANSWERS,
    _RESUME,
)
_BUDGETS = (
    TEXT,
    flag("tokens", 4096, "Of the text."),
    list_flag("budgets", (12, 25, 50), f"{_BUDGET}; or give --hsa-topk.", float, low=0, high=100),
    flag("policies", None, "Ways to score pages; by default --hsa-policy, or quest."),
)
_VARIANTS = ("quest", "mean", "spread", "streaming", "snapkv", "dense-layers", "top-p", "by-layer")
_POLICIES = (
    TEXT,
    flag("tokens", 4096, "Of the text and of the questions."),
    list_flag(
        "budgets",
        (12, 25, 50),
        "%% of the KV bytes that a token reads: window, sinks and dense layers included.",
        float,
        low=0,
        high=100,
    ),
    list_flag(
        "policies",
        ("all",),
        f"Of {', '.join(_VARIANTS)}, or your own as module:Class; or all.",
        str,
        choices=(*_VARIANTS, "all"),
        or_class=True,
    ),
    list_flag(
        "tasks",
        ("niah_single_2", "niah_multikey_1", "vt"),
        "Of RULER.",
        str,
        choices=[task for task in RULER_TASKS if task != "qa"],
    ),
    flag("samples", 10, "Texts with four facts each, and samples of each of RULER's tasks."),
    flag("rows", 8, "Queries whose pages are compared with dense attention."),
    flag("points", None, "Write what each point gave, a JSON line each.", metavar="FILE"),
    _RESUME,
)
_ROWS = flag("rows", 16, "Queries, over the text's second half.")
# What it measures, and its flags by the title of their group.
_KINDS: dict[str, tuple[str, str, Sequence[Flag]]] = {
    "needle": ("facts hidden in long texts, by length and depth", "needle", _NEEDLE),
    "ruler": ("RULER's tasks, by length", "ruler", _RULER),
    "ppl": ("perplexity of a text, sparse against dense, by budget", "text and budgets", _BUDGETS),
    "recall": (
        "how much of dense attention a policy's pages hold",
        "text and budgets",
        (*_BUDGETS, _ROWS),
    ),
    "policies": ("policies side by side, at equal bytes read", "text and budgets", _POLICIES),
}


def add_eval(commands: Any) -> None:
    parser = commands.add_parser("eval", help="measure quality", allow_abbrev=False)
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    for kind, (text, title, flags) in _KINDS.items():
        groups = {title: flags, "results": [OUTPUT, PLOT], "engine": flags_of(EngineConfig)}
        add_command(kinds, kind, text, f"cairn.eval.{kind}:command", groups)
