"""`cairn doctor`: what is installed, what the machine has, what runs and why the rest does not."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "jinja2",
    "rich",
    "gguf",
    "huggingface_hub",
    "triton",
    "transformers",
)


def examine() -> dict[str, Any]:
    import torch

    from cairn import __version__
    from cairn.attention.backend import backend_class, backend_names
    from cairn.engine.build import resolve_device

    packages: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    devices: list[dict[str, Any]] = [
        {
            "name": "cpu",
            "model": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        }
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": f"cuda:{index}",
                "model": properties.name,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    if torch.backends.mps.is_available():
        devices.append({"name": "mps", "model": "Apple GPU"})
    default = resolve_device("auto")
    reasons = {name: backend_class(name).unavailable_reason(default) for name in backend_names()}
    return {
        "cairn": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "devices": devices,
        "default_device": default.type,
        "attention_backends": {
            name: {"available": reason is None, "reason": reason}
            for name, reason in reasons.items()
        },
    }


def print_report(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=2))
        return
    console = Console()
    console.print(f"cairn {report['cairn']}, Python {report['python']}, {report['platform']}")
    packages = Table("package", "version", title="Packages", title_justify="left")
    for name, version in report["packages"].items():
        packages.add_row(name, version or "not installed")
    devices = Table("device", "what it is", title="Devices", title_justify="left")
    for device in report["devices"]:
        facts = ", ".join(f"{key} {value}" for key, value in device.items() if key != "name")
        chosen = " (default)" if device["name"].startswith(report["default_device"]) else ""
        devices.add_row(device["name"] + chosen, facts)
    backends = Table("attention backend", "state", title="Backends", title_justify="left")
    for name, state in report["attention_backends"].items():
        backends.add_row(name, "available" if state["available"] else f"off: {state['reason']}")
    for table in (packages, devices, backends):
        console.print()
        console.print(table)


def examine_sglang() -> dict[str, Any]:
    """The plug-in for SGLang in this environment; each problem is None where there is none."""
    from cairn.sglang.check import examine as look

    return {
        finding.what: {"problem": finding.problem, "detail": finding.detail} for finding in look()
    }


def print_sglang(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=2))
        return
    table = Table("part", "state", title="Plug-in for SGLang", title_justify="left")
    for what, found in report.items():
        state = found["detail"] or "there"
        if found["problem"] is not None:
            state = f"broken: {found['problem']}"
        table.add_row(what, escape(state))
    Console().print(table)
