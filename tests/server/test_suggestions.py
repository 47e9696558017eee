"""The questions that the page suggests are answered rightly by the model that `make run` serves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from tests.server.browser import Browser, find_chromium
from tests.server.process import ServerProcess

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, which is not installed"),
]

SUGGESTED = json.loads((resources.files("cairn.server") / "web" / "suggestions.json").read_text())
LAST = "[...document.querySelectorAll('.assistant')].at(-1)"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """As `make run` starts it."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    flags = re.search(r"^FLAGS_smollm2 := (.*)$", makefile, re.MULTILINE)
    assert flags is not None
    given = flags.group(1).replace("--request-log off", "").split()
    log = tmp_path_factory.mktemp("log") / "requests.jsonl"
    with ServerProcess(Path("smollm2"), log, "--kv-cache-gib=1", *given) as running:
        yield running


@pytest.fixture
def browser(server: ServerProcess) -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM) as running:
        running.open(server.url + "/")
        running.until("document.querySelector('#state.ok') && document.querySelector('.chip')")
        yield running
        assert running.problems == []


def ask(browser: Browser, index: int, answers: int) -> str:
    """Press a suggested question, and wait until the page shows that many answers."""
    browser.run(f"document.querySelectorAll('.chip')[{index}].click()")
    browser.until(
        f"document.querySelectorAll('.assistant .tools').length === {answers}"
        " && !document.querySelector('#send').hidden"
    )
    return str(browser.run(f"{LAST}.querySelector('.body').textContent"))


def test_questions_about_the_sample(browser: Browser) -> None:
    """The answers are right, and read from the page that says so."""
    browser.run("document.querySelector('#sample').click()")
    browser.until("!document.querySelector('#document').hidden")
    for i, asked in enumerate(SUGGESTED["sample"]["main"]):
        said = ask(browser, i, i + 1)
        source = browser.run(f"{LAST}.querySelector('.source p').textContent")
        assert re.search(asked["answer"], said), (asked, said)
        assert re.search(asked["answer"], source), (asked, source)


def test_questions_to_begin_a_chat_with(browser: Browser) -> None:
    for i, asked in enumerate(SUGGESTED["chat"]):
        said = ask(browser, i, 1)
        assert re.search(asked["answer"], said), (asked, said)
        browser.run("document.querySelector('#clear').click()")
