"""`cairn doctor`: what is installed, what the machine has, what runs and why the rest does not."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from typing import Any

import torch
from rich.markup import escape

from cairn import __version__
from cairn.attention.backend import backend_class, backend_names
from cairn.bench.report import print_rows
from cairn.engine.resolve import resolve_device

_PACKAGES = (
    "torch numpy safetensors tokenizers jinja2 rich gguf huggingface_hub triton transformers"
)


def doctor(arguments: argparse.Namespace) -> int:
    """The command. With --sglang it returns 1 if a part of the plug-in is broken."""
    report = _examine_sglang() if arguments.sglang else _examine()
    if arguments.json:
        print(json.dumps(report, indent=2))
    elif arguments.sglang:
        states = {
            name: f"broken: {part['problem']}" if part["problem"] else part["detail"] or "there"
            for name, part in report.items()
        }
        _show("Plug-in for SGLang", ("part", "state"), states)
    else:
        _show_machine(report)
    return int(arguments.sglang and any(part["problem"] for part in report.values()))


def _examine() -> dict[str, Any]:
    cores = {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    devices: list[dict[str, Any]] = [{"name": "cpu", "model": platform.machine(), **cores}]
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        memory = round(found.total_memory / 2**30, 1)
        facts = {"memory_gib": memory, "capability": f"{found.major}.{found.minor}"}
        devices.append({"name": f"cuda:{index}", "model": found.name, **facts})
    if torch.backends.mps.is_available():
        devices.append({"name": "mps", "model": "Apple GPU"})
    default = resolve_device("auto")
    backends = {}
    for name in backend_names():
        reason = backend_class(name).unavailable_reason(default)
        backends[name] = {"available": reason is None, "reason": reason}
    return {
        "cairn": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES.split()},
        "devices": devices,
        "default_device": default.type,
        "attention_backends": backends,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _examine_sglang() -> dict[str, Any]:
    from cairn.sglang.check import examine

    return {part.what: {"problem": part.problem, "detail": part.detail} for part in examine()}


def _show_machine(report: dict[str, Any]) -> None:
    print(f"cairn {report['cairn']}, Python {report['python']}, {report['platform']}")
    packages = {name: version or "not installed" for name, version in report["packages"].items()}
    _show("Packages", ("package", "version"), packages)
    devices = {}
    for device in report["devices"]:
        name = device.pop("name")
        chosen = " (default)" if name.startswith(report["default_device"]) else ""
        devices[name + chosen] = ", ".join(f"{key} {value}" for key, value in device.items())
    _show("Devices", ("device", "what it is"), devices)
    backends = {
        name: "available" if state["available"] else f"off: {state['reason']}"
        for name, state in report["attention_backends"].items()
    }
    _show("Backends", ("attention backend", "state"), backends)


def _show(title: str, columns: tuple[str, str], rows: dict[str, str]) -> None:
    print_rows(
        title, (dict(zip(columns, row, strict=True)) for row in rows.items()), columns, escape
    )
