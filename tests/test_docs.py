"""Links, files, commands and options that the documentation names exist."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.cli.main import _parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "training/README.md"]
CODE = re.compile(r"```.*?```|`[^`]+`", re.DOTALL)
# Where a file that the text names by a relative path may be.
FOLDERS = [
    *(ROOT, ROOT / "training", ROOT / "tests/server"),
    *(ROOT / "src/cairn" / name for name in (".", "server", "engine/parallel")),
]
PATH = r"(?:[\w.]+/)*\w+\.(?:py|cu|cpp|hpp|md|yaml)"
# Options of other programs: pip, routers, SGLang, lm-eval, schemathesis.
FOREIGN = set(
    """--extra-index-url
    --router --replicas --gpus --policy --worker-urls --disable-circuit-breaker
    --health-check-interval-secs --health-failure-threshold --health-success-threshold
    --retry-max-retries --retry-initial-backoff-ms
    --model-path --cuda-graph-backend-prefill --json-model-override-args --enable-mixed-chunk
    --include_path --metadata --model_args --apply_chat_template
    --checks --max-examples""".split()
)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    words = re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower())
    return words.replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def parsers(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, set[str]]]:
    """Every command below `parser`, with its options."""
    yield name, set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                yield from parsers(command, f"{name} {word}")


PARSER = _parser()
COMMANDS = dict(parsers(PARSER, "cairn"))


def commands_of(text: str) -> Iterator[str]:
    """The shell commands in code of a page, one string each."""
    for code in CODE.findall(text):
        joined = code.strip("`").replace("\\\n", " ")
        lines = joined.splitlines() if code.startswith("```") else [" ".join(joined.split())]
        for line in lines:
            yield from re.split(r"\s#\s|&|;|\|", line)


def options(command: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*\w(?![\w-])", command))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_are_named_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    named = re.findall(rf"`({PATH})`", text)
    missing = [name for name in named if not any((place / name).exists() for place in FOLDERS)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_understood(page: Path) -> None:
    for command in commands_of(page.read_text()):
        words = command.replace(".venv/bin/", "").split()
        while words and re.fullmatch(r"\$|\w+=\S*", words[0]):
            words = words[1:]
        if not words:
            continue
        if words[0] == "cairn" and options(command):
            try:
                PARSER.parse_args(shlex.split(" ".join(words))[1:])
            except SystemExit:
                pytest.fail(f"{page.name}: {command}")  # pytest shows what argparse printed
        elif words[0] == "python" and words[1:] and words[1].endswith(".py"):
            script = (ROOT / words[1]).read_text()
            own = re.sub(r"--engine\s+(['\"]).*?\1", "--engine", command)
            missing = [flag for flag in options(own) if f'"{flag}"' not in script]
            assert set(missing) <= COMMANDS["cairn serve"], f"{page.name}: {command}"
        elif words[0] == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert words[1] in targets, f"{page.name}: {command}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_that_are_named_exist(page: Path) -> None:
    ours = set().union(*COMMANDS.values())
    for script in [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "training").glob("*.py")]:
        ours |= set(re.findall(r'"(--[\w-]+)"', script.read_text()))
    known = ours | FOREIGN
    for code in CODE.findall(page.read_text()):
        unknown = options(code) - known
        assert not unknown, f"{page.name}: {sorted(unknown)} in {code}"


def test_members_that_are_named_exist() -> None:
    """`Class.member` in a page: the class is Cairn's, and its module has the member's name."""
    sources = [path.read_text() for path in (ROOT / "src/cairn").rglob("*.py")]
    for page in PAGES:
        for owner, member in re.findall(r"`([A-Z]\w+)\.(\w+)[^`]*`", page.read_text()):
            defined = rf"class {owner}\b(.|\n)*\b{member}\b"
            assert any(re.search(defined, source) for source in sources), (
                f"{page.name}: {owner}.{member}"
            )
