"""The bundled model: that it is here, small, and finds a fact; and the demo of it."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from cairn import LLM
from cairn.cli.demo import page_map, said_secret, spelling, strongest
from cairn.cli.main import main
from cairn.eval.prompts import plain_question
from cairn.eval.tasks import fact, question
from cairn.models.source import BUNDLED, find_model
from cairn.trace import LayerRead, TracedToken

FILES = {
    "MODEL_CARD.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def test_it_is_all_here_and_small() -> None:
    folder = BUNDLED["cairn-nano"]
    assert {path.name for path in folder.iterdir()} == FILES
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 16_000_000
    assert find_model("cairn-nano").folder == folder


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cairn-nano").mkdir()
    (tmp_path / "cairn-nano" / "config.json").write_text('{"architectures": ["X"]}')
    assert find_model("cairn-nano").folder == Path("cairn-nano")


def test_it_answers_a_short_question() -> None:
    text = " The king went over the sea. And they that were with him feared greatly."
    text += fact("Mira Kolvane", "48213") + " Then said he unto them, Go ye into the city." * 4
    with LLM("cairn-nano", device="cpu", kv_cache_gib=0.1) as llm:
        prompts = [text + plain_question(question(n)) for n in ("Mira Kolvane", "Dozo Rathe")]
        known, unknown = llm.generate(prompts, max_tokens=32)
        assert known.text == fact("Mira Kolvane", "48213") and known.finish_reason == "stop"
        assert unknown.text == fact("Dozo Rathe", "unknown")
        messages = [
            {"role": "system", "content": text},
            {"role": "user", "content": question("Mira Kolvane")},
        ]
        assert llm.chat(messages, max_tokens=32).text == known.text


def test_it_answers_what_the_page_suggests_to_ask_it() -> None:
    """`tests/server/test_suggestions.py` asks the default model, which takes longer."""
    web = resources.files("cairn.server") / "web"
    text = (web / "sample.txt").read_text()
    suggested = json.loads((web / "suggestions.json").read_text())["sample"]["nano"]
    with LLM("cairn-nano", device="cpu", kv_cache_gib=0.1) as llm:
        for asked in suggested:
            messages = [
                {"role": "system", "content": text},
                {"role": "user", "content": asked["question"]},
            ]
            said = llm.chat(messages, max_tokens=24).text or ""
            assert f" {asked['answer']}." in said


def test_demo(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "needle", "--tokens", "1000", "--secret", "48213", "--depth", "30"]
    assert main([*arguments, "--device", "cpu", "--kv-cache-gib", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "hidden  The access code of Mira Kolvane is 48213." in out
    assert "answer  The access code of Mira Kolvane is 48213.  (right)" in out
    assert "of 17 selected by any" in out and "for the 3 tokens of the secret" in out.replace(
        "\n", " "
    )
    assert "selected; a head gave it" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--depth", "120"], "--depth is 120"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--tokens", "10"], "length of 10 tokens is too short"),
        (["--secret", " "], "--secret and --name must not be empty"),
        (["--text", "/nowhere"], "--text /nowhere"),
    ],
)
def test_demo_names_what_is_wrong(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "needle", *arguments, "--device", "cpu", "--kv-cache-gib", "0.1"]) == 2
    assert named in capsys.readouterr().err


def test_demo_without_pages_to_show(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "needle", "--model", str(folder), "--tokens", "500", "--device", "cpu"]
    assert main([*arguments, "--secret", "blue moon", "--kv-cache-gib", "0.1"]) == 0
    assert "Attention is dense" in capsys.readouterr().out


def test_map() -> None:
    text = page_map(5, {0: 0.01, 1: 0.2, 3: 0.7}, [3, 4], width=4)
    assert text.plain == "░▒·█\nx"
    styles = {span.start: str(span.style) for span in text.spans}
    assert styles[3] == "bold green" and styles[5] == "bold red"
    assert page_map(2, {}, [], width=80).plain == "··"


def test_tokens_of_the_secret() -> None:
    reads = [LayerRead(0, [[2, 5]], [[[0.1, share]]], [0.5]) for share in (0.2, 0.3, 0.4, 0.5)]
    tokens = [
        TracedToken(i, text, [read])
        for i, (text, read) in enumerate(zip([" is", " 1", "2", "."], reads, strict=True))
    ]
    assert spelling(tokens, "12") == tokens[1:3]
    assert spelling(tokens, "77") == tokens[1:3]
    assert spelling(tokens[:1], "12") == tokens[:1]
    assert strongest(tokens[1:3]) == {2: 0.1, 5: 0.4}


def test_secrets_that_are_words() -> None:
    assert said_secret("It is blue moon.", "blue moon") and not said_secret("red", "blue")
    assert said_secret("It is 1234.", "1234") and not said_secret("It is 12345.", "1234")
