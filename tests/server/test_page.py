"""The page in a real browser. Screenshots go to a temporary folder."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.browser import Browser, find_chromium
from tests.server.conftest import SPARSE
from tests.server.process import ServerProcess

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, which is not installed")

PIXELS = "document.querySelector('#pages').toDataURL()"
LINES = "".join(f"Line {i}: the {i}th stone of the cairn.\n" for i in range(40))


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("page-log") / "requests.jsonl"
    flags = (*SPARSE, "--chunked-prefill-size=128", "--demo")
    with ServerProcess(model_folder, log, *flags) as running:
        yield running
        # Both engines, if a test has started the second, end with the server.
        running.signal(signal.SIGTERM)
        assert running.wait() == 0


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM) as running:
        yield running


@pytest.fixture
def browser(tab: Browser, server: ServerProcess) -> Browser:
    """The page as a new visitor sees it."""
    tab.open(server.url + "/docs")
    tab.run("localStorage.clear()")
    tab.open(server.url + "/")
    wait(tab)
    return tab


def wait(browser: Browser) -> None:
    """Until the page is ready, and nothing is being answered."""
    browser.until(
        "document.querySelector('#state.ok') && !document.querySelector('#start-compare').disabled"
        " && !document.querySelector('#send').hidden && !document.querySelector('.growing')"
    )


def text(browser: Browser, selector: str) -> str:
    return str(browser.run(f"document.querySelector({json.dumps(selector)})?.textContent"))


def texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)"
    )
    return found


def click(browser: Browser, selector: str) -> None:
    browser.run(f"document.querySelector({json.dumps(selector)}).click()")


def press(browser: Browser, words: str) -> None:
    """Press the last button with these words."""
    find = f"[...document.querySelectorAll('button')].filter((b) => b.textContent === {words!r})"
    browser.run(f"{find}.at(-1).click()")


def change(browser: Browser, selector: str, value: Any, kind: str = "change") -> None:
    browser.run(
        f"(() => {{ const box = document.querySelector({json.dumps(selector)});"
        f"box.value = {json.dumps(value)}; box.dispatchEvent(new Event({kind!r})); }})()"
    )


def ask(browser: Browser, words: str) -> None:
    browser.run("document.querySelector('#question').focus()")
    browser.type(words)
    browser.press("Enter")
    browser.until(f"document.querySelector('#messages').textContent.includes({words!r})")
    wait(browser)


def answer(browser: Browser) -> str:
    return str(browser.run("[...document.querySelectorAll('.assistant .body')].at(-1).innerText"))


def load(browser: Browser, folder: Path, name: str, data: bytes) -> None:
    path = folder / name
    path.write_bytes(data)
    browser.choose_file("#file", path)


def test_first_view_document_and_map(browser: Browser, tmp_path: Path) -> None:
    cards = texts(browser, "#start .cards b")
    assert cards == ["Chat", "Find a needle in a long text", "Compare sparse with dense"]
    assert len(texts(browser, ".chip")) == 3
    assert browser.unnamed() == []
    browser.screenshot(tmp_path / "first.png")
    click(browser, "#start-chat")
    assert browser.run("document.querySelector('#start').hidden") is True
    assert browser.run("document.activeElement.id") == "question"
    change(browser, "#s-max_tokens", "24")
    load(browser, tmp_path, "stones.txt", LINES.encode())
    browser.until("document.querySelector('#document-size').textContent.includes('tokens')")
    # How far the document is read is told while it is read.
    browser.run(
        "globalThis.told = []; new MutationObserver(() => { const found ="
        " document.querySelector('.reading')?.textContent; if (found) told.push(found); })"
        ".observe(document.querySelector('#messages'), { childList: true, subtree: true,"
        " characterData: true })"
    )
    ask(browser, "Which stone is the last?")
    told = browser.run("[...new Set(told)]")
    assert "Reading: 128 of 1,604 tokens" in told and "Reading: 1,536 of 1,604 tokens" in told
    assert int(text(browser, "#map-about").split()[3]) > 90
    assert browser.run("[document.querySelector('#token').max]") == ["23"]
    browser.screenshot(tmp_path / "document.png")

    # The map opens on the whole answer, and its first token is the first to be chosen.
    assert browser.run("[document.querySelector('#scope').value]") == ["sum"]
    assert text(browser, "#token-number") == "1/24"
    whole = browser.run(PIXELS)
    change(browser, "#scope", "token")
    change(browser, "#token", 3, "input")
    browser.until("document.querySelector('#token-number').textContent === '4/24'")
    fourth = browser.run(PIXELS)
    assert fourth != whole
    change(browser, "#layer", "1")
    browser.until(f"{PIXELS} !== {fourth!r}")

    # The page's text: under the pointer, and by keyboard.
    box = browser.run(
        "(() => { const b = document.querySelector('#pages').getBoundingClientRect();"
        "return [b.left, b.top]; })()"
    )
    browser.move_to(box[0] + 4, box[1] + 4)
    browser.until("!document.querySelector('#tip').hidden")
    assert "<user>Line 0:" in text(browser, "#tip")
    browser.run("document.querySelector('#pages').focus()")
    browser.press("ArrowRight")
    browser.until("document.querySelector('#page-detail').textContent.startsWith('Page 1,')")

    # The second question finds the document in the prefix cache.
    ask(browser, "And the first?")
    assert not any(" 0 of them" in note for note in texts(browser, ".note")[-1:])
    assert browser.unnamed() == []
    assert browser.problems == []


def test_a_cut_answer_goes_on_where_it_was_cut(browser: Browser) -> None:
    turns = "JSON.parse(localStorage['cairn-conversations'])[0].turns"
    change(browser, "#s-max_tokens", "20")
    ask(browser, "Tell me all")
    assert "not complete" in text(browser, ".cut")
    begun = browser.run(turns)[1]["content"]
    browser.run(
        "globalThis.sent = {}; globalThis.own = fetch;"
        "fetch = (path, more) => { sent[path] = more.body; return own(path, more); }"
    )
    press(browser, "Continue")
    browser.until("globalThis.sent['/v1/chat/completions']")
    wait(browser)
    # The model sees its words so far as its own.
    body = json.loads(browser.run("sent['/v1/chat/completions']"))
    assert body["messages"][-1] == {"role": "assistant", "content": begun}
    assert body["continue_final_message"] is True
    held = browser.run(turns)
    assert [turn["role"] for turn in held] == ["user", "assistant"]
    assert held[1]["content"].startswith(begun) and len(held[1]["content"]) > len(begun)
    assert browser.problems == []


def test_stop_edit_copy_and_conversations(browser: Browser) -> None:
    change(browser, "#s-max_tokens", "2000")
    browser.run("document.querySelector('#question').focus()")
    browser.type("Go on forever")
    browser.press("Enter")
    browser.until("document.querySelector('.growing .body')?.textContent.length > 5")
    browser.press("Escape")
    wait(browser)
    assert "You stopped" in text(browser, ".cut")
    change(browser, "#s-max_tokens", "8")
    press(browser, "Edit")
    assert browser.run("[document.querySelector('#question').value]") == ["Go on forever"]
    browser.type(" and ever")
    browser.press("Enter")
    browser.until("document.querySelector('.user').textContent.includes('and ever')")
    wait(browser)
    assert len(texts(browser, "#messages > li")) == 2
    # Without a clipboard, the text is selected.
    press(browser, "Copy")
    browser.until("/Copied|Selected/.test(document.querySelector('.assistant .tools').textContent)")

    # A conversation has a map of its own, and stays when the page is loaded again.
    pages = text(browser, "#map-about")
    assert "pages of 16" in pages
    click(browser, "#clear")
    assert "pages of 16" not in text(browser, "#map-about")
    assert browser.run("document.querySelector('#map-body').hidden") is True
    ask(browser, "Another question")
    first = answer(browser)
    browser.open(browser.run("location.href"))
    wait(browser)
    assert answer(browser) == first
    click(browser, "#chats")
    titles = texts(browser, "#chats-list .title")
    assert titles == ["Another question", "Go on forever and ever"]
    browser.run("[...document.querySelectorAll('#chats-list .title')][1].click()")
    assert "Go on forever" in text(browser, "#messages")
    click(browser, "#chats")
    browser.run("document.querySelector('#chats-list .small').click()")
    assert texts(browser, "#chats-list .title") == ["Go on forever and ever"]
    assert browser.problems == []


def test_nothing_typed_is_lost(browser: Browser) -> None:
    change(browser, "#s-max_tokens", "8")
    browser.run("document.querySelector('#question').focus()")
    browser.type("half a thought")
    browser.open(browser.run("location.href"))
    wait(browser)
    assert browser.run("document.querySelector('#question').value") == "half a thought"
    browser.offline(True)
    try:
        browser.run("document.querySelector('#question').focus()")
        browser.press("Enter")
        said = browser.until("document.querySelector('.failed')?.textContent")
        assert "cannot be reached" in said
    finally:
        browser.offline(False)
    assert "half a thought" in text(browser, ".user")
    wait(browser)
    press(browser, "Retry")
    browser.until("document.querySelector('.assistant .tools')")
    wait(browser)
    assert texts(browser, ".failed") == []
    browser.problems.clear()  # the network's own complaints


def make_pdf(words: str) -> bytes:
    """A PDF file with one line of text."""
    drawn = f"BT /F1 12 Tf 72 700 Td ({words}) Tj ET".encode()
    bodies = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%b\nendstream" % (len(drawn), drawn),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    data, starts = b"%PDF-1.4\n", []
    for number, body in enumerate(bodies, 1):
        starts.append(len(data))
        data += b"%d 0 obj\n%b\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % start for start in starts)
    rest = b"xref\n0 6\n0000000000 65535 f \n%btrailer << /Size 6 /Root 1 0 R >>\n" % table
    return data + rest + b"startxref\n%d\n%%%%EOF\n" % len(data)


def test_files(browser: Browser, tmp_path: Path) -> None:
    document = "JSON.parse(localStorage['cairn-conversations'])[0].document"
    change(browser, "#s-max_tokens", "4")
    browser.drop_file("stones.pdf", make_pdf("Nine stones mark the path."))
    browser.until("document.querySelector('#document-name').textContent === 'stones.pdf'")
    ask(browser, "How many?")
    assert "Nine stones mark the path." in browser.run(document)["text"]
    # The chat before it is still there.
    browser.drop_file("old.txt", "Der Steinmann, grün.".encode("latin-1"))
    browser.until("document.querySelector('#document-name').textContent === 'old.txt'")
    ask(browser, "Welche Farbe?")
    assert browser.run(document)["text"] == "Der Steinmann, grün."
    assert browser.run("JSON.parse(localStorage['cairn-conversations']).length") == 2

    load(browser, tmp_path, "photo.bin", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)))
    browser.until("!document.querySelector('#complaint').hidden")
    assert "photo.bin is neither text nor PDF" in text(browser, "#complaint")
    load(browser, tmp_path, "broken.pdf", b"%PDF-1.4\nnothing of the kind")
    browser.until("document.querySelector('#complaint').textContent.includes('cannot be read')")
    load(browser, tmp_path, "scan.pdf", make_pdf(""))
    browser.until("document.querySelector('#complaint').textContent.includes('only pictures')")
    assert text(browser, "#document-name") == "old.txt"
    # Too long for the model: that is said before and after asking.
    load(browser, tmp_path, "long.txt", b"far too long for this model " * 400)
    browser.until("document.querySelector('#document.bad')")
    ask(browser, "Well?")
    assert "at most 4095" in text(browser, ".failed")
    browser.problems.clear()  # the browser lists answers with an error status


def test_a_needle_is_found_and_its_page_shown(browser: Browser, tmp_path: Path) -> None:
    click(browser, "#start-needle")
    change(browser, "#n-name", "Ada Lovell")
    change(browser, "#n-code", "48213")
    browser.run("document.querySelector('#n-tokens').selectedOptions[0].value = '1500'")
    browser.screenshot(tmp_path / "needle.png")
    browser.run("document.querySelector('#needle').requestSubmit()")
    browser.until("document.querySelector('.verdict')")
    wait(browser)
    assert "48213" in answer(browser)
    assert "what was hidden" in text(browser, ".verdict.right")
    assert "The access code of Ada Lovell is 48213." in text(browser, ".source p")
    assert {"Ada", "Lovell", "48213"} <= set(texts(browser, ".source mark"))
    assert "48213" in texts(browser, "a.word")
    browser.screenshot(tmp_path / "found.png")
    # A word of the answer leads to its token and to the page it was read from.
    browser.run("[...document.querySelectorAll('a.word')].at(-1).click()")
    browser.until("document.querySelector('#scope').value === 'token'")
    browser.until("document.querySelector('#page-detail').textContent.includes('mattered most')")
    assert text(browser, "#token-strip [aria-current]").strip()[:1] == "4"
    # The map shows that page, what the answer took from it is marked.
    assert "48213" in text(browser, "#page-detail .page.mattered")
    assert "48213" in texts(browser, "#page-detail .mattered mark")
    # The visitor can ask the server's model instead, and is told what the difference is.
    assert "trained for that alone" in text(browser, "#why")
    change(browser, "#asked", "main")
    assert "its own words" in text(browser, "#why")
    # Each model is suggested questions that it can answer.
    click(browser, "#sample")
    browser.until("document.querySelectorAll('.chip').length === 4")
    assert not any("access code" in chip for chip in texts(browser, ".chip"))
    change(browser, "#asked", "nano")
    assert all("access code" in chip for chip in texts(browser, ".chip"))
    browser.run("document.querySelector('.chip').click()")
    browser.until("document.querySelector('.assistant .tools')")
    wait(browser)
    assert "27415" in answer(browser) and "27415" in text(browser, "#page-detail .mattered")
    browser.screenshot(tmp_path / "sample.png")
    assert browser.problems == []
    print("screenshots:", tmp_path)


def test_sparse_and_dense_side_by_side(browser: Browser, tmp_path: Path) -> None:
    change(browser, "#s-max_tokens", "12")
    click(browser, "#start-compare")
    browser.until("document.querySelector('#compare').checked")
    assert len(texts(browser, ".chip")) == 4
    load(browser, tmp_path, "stones.txt", LINES.encode())
    browser.until("document.querySelector('#document-name').textContent === 'stones.txt'")
    click(browser, "#compare")
    ask(browser, "Which stone is the last?")
    assert texts(browser, ".compare h3") == ["Sparse", "Dense"]
    sparse, dense = (
        list(map(int, facts.split(" of ")))
        for facts in texts(browser, ".compare dl dd:first-of-type")
    )
    assert sparse == [7, 101] and dense == [101, 101]  # a window of 3 pages, and 4 selected
    assert browser.problems == []


def test_thoughts_are_apart_from_the_answer(browser: Browser) -> None:
    """The stream of a model that thinks, which the tiny one does not."""
    deltas = [{"reasoning_content": "Let me "}, {"reasoning_content": "see."}, {"content": "Nine."}]
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    browser.run(
        "globalThis.own = fetch; fetch = (path, more) => path === '/v1/chat/completions' ?"
        f" Promise.resolve(new Response({json.dumps(stream)})) : own(path, more)"
    )
    ask(browser, "How many?")
    assert text(browser, ".thoughts p") == "Let me see."
    assert text(browser, ".assistant .body") == "Nine."
    assert browser.problems == []


MARKDOWN = """# Title
Some **bold**, *slanted* and `a < b` text, snake_case_name, 2 * 3 * 4.

1. one
2. two
   - nested
   - again

```python
if a < b:
    print("**not bold**")
```

| a | b |
|---|---|
| 1 | <b>2</b> |

> quoted
---
<img src=x onerror="globalThis.broken = 1"> <script>globalThis.broken = 1</script>
[good](https://example.org/a) [bad](javascript:alert(1)) [odd](data:text/html,x)
"""


def test_markdown_has_no_html_of_its_own(browser: Browser) -> None:
    page = (
        "(async () => { const { markdown } = await import('/web/markdown.js');"
        "const box = document.createElement('div'); document.body.append(box); box.id = 'tried';"
        f"box.append(markdown({json.dumps(MARKDOWN)})); return box.innerHTML; }})()"
    )
    html = browser.run(page)
    for wanted in (
        "<h3>Title</h3>",
        "<strong>bold</strong>",
        "<em>slanted</em>",
        "<code>a &lt; b</code>",
        "snake_case_name, 2 * 3 * 4.",
        "<ol><li>one</li><li><p>two</p><ul><li>nested</li><li>again</li></ul></li></ol>",
        'print("**not bold**")',
        "<td>&lt;b&gt;2&lt;/b&gt;</td>",
        "<blockquote><p>quoted</p></blockquote><hr>",
        "&lt;img src=x",
        '<a href="https://example.org/a" target="_blank" rel="noopener noreferrer nofollow">good',
    ):
        assert wanted in html, wanted
    tags = set(browser.run("[...document.querySelectorAll('#tried *')].map((e) => e.localName)"))
    assert not tags & {"img", "script", "iframe", "style", "b"}
    assert texts(browser, "#tried a") == ["good"]
    assert browser.run("globalThis.broken") is None
    # However it is written, it ends.
    for odd in ("*" * 3000, "[" * 3000, "> " * 3000, "`" * 2999, "- " * 3000, "|-" * 3000):
        browser.run(f"import('/web/markdown.js').then((m) => {{ m.markdown({odd!r}); }})")
    assert browser.problems == []


def test_dark_phone_and_keyboard(browser: Browser, server: ServerProcess, tmp_path: Path) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    browser.scheme("light")
    light = browser.run(back)
    browser.scheme("dark")
    assert browser.run(back) != light
    click(browser, "#theme")  # light, whatever the system says
    assert browser.run(back) == light
    # Everything is reached with the Tab key.
    reached = set()
    for _ in range(22):
        browser.press("Tab")
        reached.add(browser.run("document.activeElement.id"))
    wanted = {"question", "load", "sample", "send", "clear", "chats", "open-settings", "theme"}
    wanted |= {"open-help", "start-chat", "start-needle", "start-compare"}
    assert wanted <= reached, wanted - reached
    click(browser, "#open-help")
    assert "prompt from cache" in text(browser, "#help")
    browser.press("Escape")
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    browser.resize(390, 844, phone=True)
    try:
        assert browser.run(overflow) == 0
        browser.screenshot(tmp_path / "phone.png")
        click(browser, "#start-compare")
        browser.until("!document.querySelector('#document').hidden")
        assert browser.run(overflow) == 0
        click(browser, "#clear")
        click(browser, "#start-needle")
        assert browser.run(overflow) == 0
    finally:
        browser.resize(1280, 860)
    browser.open(server.url + "/docs")
    browser.until("document.querySelectorAll('.docs details').length > 10")
    browser.screenshot(tmp_path / "docs.png")
    assert browser.problems == []
