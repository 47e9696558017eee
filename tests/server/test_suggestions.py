"""The questions that the page suggests are answered rightly by the model that `make run` serves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import httpx
import pytest

from tests.server.browser import Browser, find_chromium
from tests.server.process import ServerProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="needs Chromium, which is not installed"),
]

SUGGESTED = json.loads((resources.files("cairn.server") / "web" / "suggestions.json").read_text())
SEEDS = 5


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


def test_questions_about_the_sample(server: ServerProcess, tmp_path: Path) -> None:
    """Pressed on the page: the answer is right, and read from the page that says it."""
    found = find_chromium()
    assert found is not None
    idle = "!document.querySelector('#send').hidden && !document.querySelector('.growing')"
    with Browser(found) as browser:
        browser.open(server.url + "/")
        browser.until("document.querySelector('#state.ok')")
        browser.run("document.querySelector('#sample').click()")
        for i, asked in enumerate(SUGGESTED["sample"]["questions"]):
            browser.until(f"document.querySelectorAll('.chip')[{i}] && {idle}")
            browser.run(f"document.querySelectorAll('.chip')[{i}].click()")
            browser.until(f"document.querySelectorAll('.assistant .tools')[{i}] && {idle}", 600)
            last = "[...document.querySelectorAll('.assistant')].at(-1)"
            said = browser.run(f"{last}.querySelector('.body').textContent")
            source = browser.run(f"{last}.querySelector('.source p').textContent")
            assert re.search(asked["answer"], said), (asked, said)
            assert re.search(asked["answer"], source), (asked, source)
        browser.screenshot(tmp_path / "sample.png")
        assert browser.problems == []
    print("screenshots:", tmp_path)


@pytest.mark.parametrize("asked", SUGGESTED["chat"], ids=lambda asked: asked["question"][:20])
def test_questions_to_begin_a_chat_with(server: ServerProcess, asked: dict[str, str]) -> None:
    """With the model's own temperature, whatever the seed."""
    for seed in range(SEEDS):
        body = {
            "messages": [{"role": "user", "content": asked["question"]}],
            "max_completion_tokens": 120,
            "seed": seed,
        }
        url = f"{server.url}/v1/chat/completions"
        said = httpx.post(url, json=body, timeout=600).json()["choices"][0]["message"]["content"]
        assert re.search(asked["answer"], said), (asked, seed, said)
