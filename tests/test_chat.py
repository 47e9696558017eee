from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest

from cairn import LLM, SamplingParams
from cairn.cli.chat import Chat
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
