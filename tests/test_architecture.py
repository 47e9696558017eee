"""The rules of docs/architecture.md that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import cairn

ROOT = Path(cairn.__file__).parent

# Each room may import from itself and from rooms further down.
ROOMS = [
    {"cli"},
    {"bench", "eval", "ray", "sglang"},
    {"server"},
    {"llm", "async_llm"},
    {"frontend"},
    {"cli_flags", "outputs", "progress"},
    {"trace"},
    {"engine"},
    {"text"},
    {"models"},
    {"attention"},
    {"sparsity"},
    {"memory"},
    {"kernels"},
    {"config"},
    {"errors", "interrupts"},
]


def room_of(module: str) -> int:
    name = module.split(".")[1]
    return next(i for i, names in enumerate(ROOMS) if name in names)


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.startswith("cairn.")}


def test_rooms_import_only_downwards() -> None:
    checked = 0
    for path in ROOT.rglob("*.py"):
        module = ".".join(("cairn", *path.relative_to(ROOT).with_suffix("").parts))
        if module == "cairn.__init__":
            continue
        for imported in imports_of(path):
            checked += 1
            assert room_of(imported) >= room_of(module), f"{module} imports {imported}"
    assert checked > 50


def test_the_scheduler_knows_no_feature_by_name() -> None:
    files = ROOT / "engine" / "scheduler.py", ROOT / "engine" / "step.py"
    words = {word for path in files for word in re.findall(r"[a-z]+", path.read_text().lower())}
    features = {"hsa", "hils", "hisparse", "sparse", "landmark", "quest", "tier", "tp", "ranks"}
    assert not words & features


def test_the_core_imports_without_the_servers_packages() -> None:
    missing = [
        "fastapi",
        "uvicorn",
        "msgspec",
        "zmq",
        "prometheus_client",
        "ray",
        "sglang",
        "triton",
        "transformers",
        "matplotlib",
    ]
    script = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({missing!r}))\n"
        "from cairn import LLM, SamplingParams\n"
        "import cairn.cli.main\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_api_process_starts_without_torch() -> None:
    """It takes seconds to import, and the engine's process, which needs it, comes after."""
    script = "import sys; sys.modules['torch'] = None; import cairn.cli.main, cairn.server.run"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_hints_name_this_project_and_extras_that_it_has() -> None:
    top = ROOT.parent.parent
    extras = tomllib.loads((top / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set()
    for path in [*ROOT.rglob("*.py"), *(top / "docs").glob("*.md"), top / "README.md"]:
        text = path.read_text()
        assert "cairn[" not in text, f"{path}: the package is cairn-llm"
        named |= set(re.findall(r"install\([\"'](\w+)[\"']\)|cairn-llm\[(\w+)\]", text))
    found = {name for pair in named for name in pair if name}
    assert {"server", "grammar"} <= found <= set(extras)
