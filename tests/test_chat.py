from __future__ import annotations

import asyncio
import io
import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.cells import cell_len

from cairn import LLM, SamplingParams
from cairn.cli.chat import Chat
from cairn.cli.terminal import WordWrap, edited_lines
from tests.helpers import TINY_LLAMA, byte_tokenizer, write_model

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("chat-model")
    write_model(path, {**TINY_LLAMA, "vocab_size": 256, "eos_token_id": None})
    byte_tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    with LLM(path, device="cpu", page_size=16) as llm:
        yield llm


def talk(llm: LLM, *lines: str, system: str | None = None) -> tuple[Chat, str]:
    said = iter(lines)

    def read(prompt: str) -> str:
        line = next(said, None)
        if line is None:
            raise EOFError
        if line == "^C":
            raise KeyboardInterrupt
        return line

    out = io.StringIO()
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=0)
    chat = Chat(llm, params, system=system, read=read, out=out)
    assert chat.run() == 0
    return chat, out.getvalue()


def test_history_grows_and_is_reused_from_the_cache(llm: LLM) -> None:
    chat, printed = talk(llm, "hello there", "and again", "/stats", system="Be brief.")
    roles = [message["role"] for message in chat._messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    # Control characters are left out: a terminal would obey them.
    answer = chat._messages[2]["content"]
    assert "".join(c for c in answer if c in "\n\t" or c.isprintable()) in printed
    assert chat._last is not None and chat._last.usage.cached_tokens > 0
    assert "of them cached" in printed and "pages (full)" in printed


def typed(*lines: str) -> list[str]:
    """What a new session reads when these keys are pressed in a terminal, line by line."""
    read = []
    with create_pipe_input() as terminal, create_app_session(terminal, DummyOutput()):
        prompt: Any = edited_lines(Path("history"))
        buffer = prompt.__self__.default_buffer

        async def press(keys: str) -> None:
            while buffer._load_history_task is None:
                await asyncio.sleep(0)
            await buffer._load_history_task
            terminal.send_text(keys + "\r")

        for line in lines:
            start = partial(prompt.__self__.app.create_background_task, press(line))
            read.append(prompt("> ", pre_run=start))
            buffer._load_history_task = None
    return read


def test_lines_can_be_edited_and_recalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left, up = "\x1b[D", "\x1b[A"
    assert typed(f"helo{left}l", f"{up} again") == ["hello", "hello again"]
    assert Path("history").stat().st_mode & 0o077 == 0
    assert typed(up + up) == ["hello"]  # of the session before


def test_a_history_that_cannot_be_kept_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("history").mkdir()
    assert typed("one", "\x1b[A") == ["one", "one"]


@given(
    text=st.text(alphabet="ab \n漢", max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    width=st.integers(4, 20),
)
def test_streamed_text_is_wrapped_at_words(text: str, cuts: list[int], width: int) -> None:
    wrap = WordWrap(lambda: width)
    ends = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    shown = "".join(wrap.push(text[a:b]) for a, b in itertools.pairwise(ends)) + wrap.finish()
    whole = WordWrap(lambda: width)
    assert shown == whole.push(text) + whole.finish()
    if all(cell_len(word) < width for word in text.split()):  # longer words are cut
        assert shown.split() == text.split() or "漢" in text
    assert "".join(shown.split()) == "".join(text.split())
    for line in shown.split("\n"):
        assert cell_len(line) <= width or " " not in line.strip()


def test_indented_lines_keep_their_indentation() -> None:
    wrap = WordWrap(lambda: 12)
    assert wrap.push("if x:\n    do(1) and more\n") + wrap.finish() == (
        "if x:\n    do(1)\nand more\n"
    )


def test_reset_help_and_unknown_commands(llm: LLM) -> None:
    chat, printed = talk(llm, "hi", "/reset", "/help", "/what", "^C", "/stats", "", "/exit")
    assert chat._messages == []
    assert "/reset   start a new conversation" in printed
    assert "No such command: /what" in printed
    assert "Ctrl-D or /exit" in printed


def test_text_with_brackets_is_shown_as_it_is(llm: LLM) -> None:
    _, printed = talk(llm, "/[bold]", "/[/b]")
    assert "No such command: /[bold]" in printed
    assert "No such command: /[/b]" in printed


def test_a_message_that_does_not_fit_is_an_error_and_not_kept(llm: LLM) -> None:
    chat, printed = talk(llm, "x" * 600)
    assert chat._messages == []
    assert "tokens, at most" in printed
