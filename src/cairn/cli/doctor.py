"""`cairn doctor`: what is installed, what the machine has, what runs and why the rest does not."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Sequence
from typing import Any

import torch
from rich.markup import escape

from cairn import __version__
from cairn.attention.backend import AUTO_SPARSE, backend_class, backend_names
from cairn.bench.report import print_rows
from cairn.engine.resolve import resolve_device
from cairn.errors import install
from cairn.kernels.cpu import CpuKernelsUnavailableError, find_compiler

_PACKAGES = """
    torch numpy safetensors tokenizers jinja2 rich prompt_toolkit gguf huggingface_hub triton
    transformers fastapi uvicorn pyzmq llguidance
"""
_SERVER = "fastapi uvicorn httptools uvloop msgspec zmq prometheus_client pypdf".split()


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
        "features": {
            "hsa": _state(backend_class(AUTO_SPARSE).unavailable_reason(default), _hsa(default)),
            "quantised weights": _state(
                _compiler_missing(), "GGUF, GPTQ, AWQ and int8 are multiplied as they are, on a CPU"
            ),
            "server": _state(_missing("server", _SERVER), "cairn serve, make run"),
            "grammar": _state(_missing("grammar", ["llguidance"]), "response_format, tools"),
        },
    }


def _hsa(device: torch.device) -> str:
    """What computes sparse attention."""
    missing = backend_class("triton").unavailable_reason(device)
    return "by kernels" if missing is None else f"in torch, without kernels: {missing}"


def _compiler_missing() -> str | None:
    try:
        find_compiler()
    except CpuKernelsUnavailableError as error:
        return f"dequantised at load: {error}"
    return None


def _missing(extra: str, modules: Sequence[str]) -> str | None:
    """Why a part that needs these modules does not run."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed; {install(extra)}" if missing else None


def _state(reason: str | None, detail: str) -> dict[str, Any]:
    return {"available": reason is None, "reason": reason, "detail": detail}


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
    features = {
        name: state["detail"] if state["available"] else f"off: {state['reason']}"
        for name, state in report["features"].items()
    }
    _show("Features", ("feature", "state"), features)


def _show(title: str, columns: tuple[str, str], rows: dict[str, str]) -> None:
    print_rows(
        title, (dict(zip(columns, row, strict=True)) for row in rows.items()), columns, escape
    )
