"""The page in a real browser. Screenshots go to a temporary folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.browser import Browser, find_chromium
from tests.server.process import ServerProcess

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, which is not installed")

READY = "document.querySelector('#state.ok') && document.querySelector('#send').disabled === false"
PIXELS = "document.querySelector('#pages').toDataURL()"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM) as running:
        yield running


def ask(browser: Browser, text: str) -> None:
    browser.run("document.querySelector('#question').focus()")
    browser.type(text)
    browser.press("Enter")
    browser.until("document.querySelector('#messages .note')")
    browser.until(READY)


def test_chat_document_and_map(browser: Browser, server: ServerProcess, tmp_path: Path) -> None:
    browser.open(server.url + "/")
    browser.until(READY)
    assert browser.run("document.querySelector('#model').textContent") == server.model
    browser.run("localStorage.clear()")
    # With these the model, whose weights are random, goes on as long as it may.
    for name, value in (("max_tokens", "24"), ("temperature", "0.7"), ("top_p", "0.9")):
        browser.run(
            f"(() => {{ const box = document.querySelector('#s-{name}'); box.value = '{value}';"
            "box.dispatchEvent(new Event('change')); })()"
        )
    ask(browser, "Hello there")
    assert browser.run("document.querySelector('#messages .assistant').textContent.length") > 0
    browser.screenshot(tmp_path / "chat.png")

    text = tmp_path / "document.txt"
    text.write_text("".join(f"Line {i}: the {i}th stone of the cairn.\n" for i in range(40)))
    browser.choose_file("#file", text)
    browser.until("document.querySelector('#document-size').textContent.includes('tokens')")
    ask(browser, "Which stone is the last?")
    pages = int(browser.run("document.querySelector('#map-about').textContent").split()[3])
    assert pages > 90
    assert browser.run("document.querySelector('#token').max") == "23"
    browser.screenshot(tmp_path / "document.png")

    # Another token, another layer, another picture.
    last = browser.run(PIXELS)
    move = "(() => { const t = document.querySelector('#token'); t.value = %d;"
    move += "t.dispatchEvent(new Event('input')); })()"
    browser.run(move % 3)
    browser.until(f"{PIXELS} !== {last!r}")
    third = browser.run(PIXELS)
    assert browser.run("document.querySelector('#token-number').textContent") == "4/24"
    browser.run(
        "(() => { const l = document.querySelector('#layer'); l.value = '1';"
        "l.dispatchEvent(new Event('change')); })()"
    )
    browser.until(f"{PIXELS} !== {third!r}")

    # The page's text: under the pointer, and by keyboard.
    box = browser.run(
        "(() => { const b = document.querySelector('#pages').getBoundingClientRect();"
        "return [b.left, b.top]; })()"
    )
    browser.move_to(box[0] + 4, box[1] + 4)
    browser.until("!document.querySelector('#tip').hidden")
    assert "<user>Here is a" in browser.run("document.querySelector('#tip').textContent")
    browser.run("document.querySelector('#pages').focus()")
    browser.press("ArrowRight")
    browser.until("document.querySelector('#page-detail').textContent.startsWith('Page 1,')")
    browser.screenshot(tmp_path / "hover.png")

    # The second question finds the document in the prefix cache.
    ask(browser, "And the first?")
    browser.until(
        "[...document.querySelectorAll('#messages .note')].length === 2 && "
        "!/\\(0 from/.test([...document.querySelectorAll('#messages .note')].pop().textContent)"
    )
    browser.until("document.querySelector('#g-hits').textContent.includes('%')")
    assert browser.problems == []
    print("screenshots:", tmp_path)


def test_dark_phone_and_keyboard(browser: Browser, server: ServerProcess, tmp_path: Path) -> None:
    browser.open(server.url + "/")
    browser.until(READY)
    back = "getComputedStyle(document.body).backgroundColor"
    browser.scheme("light")
    light = browser.run(back)
    browser.scheme("dark")
    assert browser.run(back) != light
    browser.run("document.querySelector('#theme').click()")  # light, whatever the system says
    assert browser.run(back) == light
    browser.run("localStorage.clear()")
    browser.resize(390, 844, phone=True)
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.run(overflow) == 0
    browser.screenshot(tmp_path / "phone.png")
    browser.resize(1280, 860)
    # Everything is reached with the Tab key.
    reached = set()
    for _ in range(14):
        browser.press("Tab")
        reached.add(browser.run("document.activeElement.id"))
    assert {"question", "load", "sample", "clear", "send", "open-settings", "theme"} <= reached
    browser.open(server.url + "/docs")
    browser.until("document.querySelectorAll('.docs details').length > 10")
    browser.screenshot(tmp_path / "docs.png")
    assert browser.problems == []


def test_errors_are_shown(browser: Browser, server: ServerProcess, tmp_path: Path) -> None:
    browser.open(server.url + "/")
    browser.until(READY)
    text = tmp_path / "long.txt"
    text.write_text("far too long for this model " * 400)
    browser.choose_file("#file", text)
    browser.until("document.querySelector('#document.bad')")
    browser.run("document.querySelector('#question').focus()")
    browser.type("Well?")
    browser.press("Enter")
    said = browser.until("document.querySelector('#messages .error')?.textContent")
    assert "at most 4095" in said
    browser.until(READY)
