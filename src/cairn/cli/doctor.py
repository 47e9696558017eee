"""`cairn doctor`: what is installed, what the machine has, what runs and why the rest does not."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_PACKAGES = (
    "torch numpy safetensors tokenizers jinja2 rich gguf huggingface_hub triton transformers"
)


def doctor(arguments: argparse.Namespace) -> int:
    """The command. With --sglang it returns 1 if a part of the plug-in is broken."""
    if arguments.sglang:
        from cairn.sglang.check import examine as examine_sglang

        found = examine_sglang()
        parts = {part.what: {"problem": part.problem, "detail": part.detail} for part in found}
        states = {
            part.what: f"broken: {part.problem}" if part.problem else part.detail or "there"
            for part in found
        }
        _print(arguments, parts, {("part", "state", "Plug-in for SGLang"): states})
        return int(any(part.problem for part in found))
    report = examine()
    if not arguments.json:
        print(f"cairn {report['cairn']}, Python {report['python']}, {report['platform']}")
    packages = {name: version or "not installed" for name, version in report["packages"].items()}
    devices = {}
    for device in report["devices"]:
        chosen = " (default)" if device["name"].startswith(report["default_device"]) else ""
        facts = (f"{key} {value}" for key, value in device.items() if key != "name")
        devices[device["name"] + chosen] = ", ".join(facts)
    backends = {
        name: "available" if state["available"] else f"off: {state['reason']}"
        for name, state in report["attention_backends"].items()
    }
    tables = {
        ("package", "version", "Packages"): packages,
        ("device", "what it is", "Devices"): devices,
        ("attention backend", "state", "Backends"): backends,
    }
    _print(arguments, report, tables)
    return 0


def examine() -> dict[str, Any]:
    import torch

    from cairn import __version__
    from cairn.attention.backend import backend_class, backend_names
    from cairn.engine.build import resolve_device

    devices: list[dict[str, Any]] = [{"name": "cpu", "model": platform.machine()}]
    devices[0] |= {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        facts = {"memory_gib": round(found.total_memory / 2**30, 1)}
        capability = f"{found.major}.{found.minor}"
        device = {"name": f"cuda:{index}", "model": found.name, **facts, "capability": capability}
        devices.append(device)
    if torch.backends.mps.is_available():
        devices.append({"name": "mps", "model": "Apple GPU"})
    default = resolve_device("auto")
    reasons = {name: backend_class(name).unavailable_reason(default) for name in backend_names()}
    return {
        "cairn": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES.split()},
        "devices": devices,
        "default_device": default.type,
        "attention_backends": {
            name: {"available": reason is None, "reason": reason}
            for name, reason in reasons.items()
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _print(
    arguments: argparse.Namespace,
    report: dict[str, Any],
    tables: dict[tuple[str, str, str], dict[str, str]],
) -> None:
    """The report as JSON, or tables of (key column, value column, title)."""
    if arguments.json:
        print(json.dumps(report, indent=2))
        return
    for (key, value, title), rows in tables.items():
        table = Table(key, value, title=title, title_justify="left")
        for row in rows.items():
            table.add_row(*map(escape, row))
        Console().print(table)
