"""Checks that SGLang has the plug-in, since SGLang starts without it if it fails.

`cairn doctor --sglang` prints the findings, and a test asserts them.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

from cairn.errors import install
from cairn.sglang.hooks import missing_hooks
from cairn.sglang.plugin import MODELS, NAME

GROUP = "sglang.srt.plugins"
TESTED = ("0.5.15", "0.5.23")
_MODEL, _MODEL_TYPES = "HiLSForCausalLM", ("qwen_hils", "olmo_hils")


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    problem: str | None
    detail: str = ""


def examine() -> list[Finding]:
    """Load SGLang's plug-ins, as its server does, and look for each part of ours."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return [Finding("sglang", f"not installed; {install('sglang')}")]
    known = "tested" if version in TESTED else f"not tested; tested are {', '.join(TESTED)}"
    findings = [Finding("sglang", None, f"{version}, {known}"), _entry_point()]
    if findings[-1].problem is not None:
        return findings
    try:
        from sglang.srt.plugins import load_plugins

        load_plugins()
    except Exception as error:  # whatever SGLang raises here keeps it from serving at all
        return [*findings, Finding("plug-ins", f"SGLang cannot load them: {error!r}")]
    return [*findings, *(_look(what, problem) for what, problem in _CHECKS.items())]


def _entry_point() -> Finding:
    what = f"entry point {GROUP}"
    found = [point for point in importlib.metadata.entry_points(group=GROUP) if point.name == NAME]
    if not found:
        return Finding(what, "none for hsa; reinstall cairn-llm in this environment")
    from sglang.srt.environ import envs

    chosen = envs.SGLANG_PLUGINS.get()
    if chosen and NAME not in [name.strip() for name in chosen.split(",")]:
        return Finding(what, f"SGLANG_PLUGINS is {chosen!r}, which leaves {NAME} out; add it")
    return Finding(what, None, found[0].value)


def _look(what: str, problem: Callable[[], str | None]) -> Finding:
    try:
        return Finding(what, problem())
    except (ImportError, AttributeError) as error:
        return Finding(what, f"this SGLang is different: {error}")


def _registration() -> str | None:
    """Register again, to see the error that SGLang only logged."""
    from cairn.sglang.plugin import register

    try:
        register()
    except Exception as error:  # the reason is what is wanted, whatever it is
        return f"it fails: {error!r}"
    return None


def _choice() -> str | None:
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    return None if NAME in ATTENTION_BACKEND_CHOICES else "the command line does not know it"


def _backend() -> str | None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    made_by = getattr(ATTENTION_BACKENDS.get(NAME), "__module__", "nobody")
    return None if made_by == "cairn.sglang.backend" else f"it would be made by {made_by}"


def _models() -> str | None:
    from sglang.srt.models.registry import ModelRegistry

    found = ModelRegistry.models.get(_MODEL)
    if getattr(found, "__module__", "").startswith(MODELS):
        return None
    return f"{_MODEL} would be {found}"


def _configs() -> str | None:
    from transformers import AutoConfig

    for model_type in _MODEL_TYPES:
        made = type(AutoConfig.for_model(model_type)).__module__
        if made != "cairn.sglang.hf_config":
            return f"{model_type} would be read by {made}"
    return None


_CHECKS: dict[str, Callable[[], str | None]] = {
    "registration": _registration,
    f"--attention-backend {NAME}": _choice,
    "backend": _backend,
    "model classes": _models,
    "model configs": _configs,
    "hooks": missing_hooks,
}
"""What must be there -> what is wrong with it, None if nothing is."""
