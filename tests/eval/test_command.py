"""The commands, from their arguments to the JSON line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cairn import LLM
from cairn.cli.main import main
from cairn.eval.needle import Answer, against
from tests.helpers import exit_code

CPU = ["--device", "cpu", "--kv-cache-gib", "0.05"]
PAGES = ["--page-size", "16", "--hsa-window", "32"]


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(arguments) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return record


def test_needle(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / name for name in ("output", "plot", "answers")}
    arguments = ["eval", "needle", "--model", str(folder), *CPU, "--task", "single,multiquery"]
    arguments += ["--lengths", "500,700", "--depths", "0,100", "--samples", "2"]
    arguments += ["--max-tokens", "3"]
    for name, path in files.items():
        arguments += [f"--{name}", str(path)]
    record = run(arguments, capsys)
    assert record == json.loads(files["output"].read_text())
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in files["answers"].read_text().splitlines()[1:]]
    assert len(lines) == 2 * 2 * 2 * 2
    assert sum(line["cached_tokens"] for line in lines) > 0
    cells = {(row["task"], row["length"], row["depth"]): row for row in record["results"]}
    assert len(cells) == 2 * 2 * 3
    assert cells["single", 700, None]["asked"] == 4
    assert cells["multiquery", 500, 1.0]["asked"] == 2
    again = run([a for a in arguments if a != str(files["plot"]) and a != "--plot"], capsys)
    assert again == record

    # Compared with itself, nothing is lost.
    compared = run([*arguments[:-6], "--against", str(files["answers"])], capsys)
    found = compared.pop("against")
    assert compared == record
    assert (found["asked"], found["lost"], found["won"]) == (16, 0, 0)
    assert main([*arguments[:-6], "--against", str(files["answers"]), "--keys", "3"]) != 0
    assert "keys was 8 there and is 3 now" in capsys.readouterr().err


def test_answers_are_compared_in_pairs() -> None:
    def answers(*rights: bool) -> list[Answer]:
        return [
            Answer("single", 500, 0.0, i, "Mira", "1", "1", right, 0)
            for i, right in enumerate(rights)
        ]

    found = against(answers(True, False, True, True), answers(True, True, False))
    counts = {"asked": 3, "right": 2, "theirs": 2, "lost": 1, "won": 1, "kept": 1.0}
    assert {name: found[name] for name in counts} == counts
    assert found["low"] < 1 < found["high"]


def test_answers_until_ctrl_c_are_reported(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers, calls, generate = tmp_path / "answers", [], LLM.generate_each

    def interrupted(self: LLM, *args: Any, **options: Any) -> Any:
        calls.append(len(answers.read_text().splitlines()))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(self, *args, **options)

    monkeypatch.setattr(LLM, "generate_each", interrupted)
    arguments = ["eval", "needle", "--model", str(folder), *CPU, "--lengths", "500"]
    arguments += ["--depths", "0,100", "--samples", "5", "--max-tokens", "3"]
    arguments += ["--answers", str(answers)]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    record = json.loads(printed.out.strip().splitlines()[-1])
    # After the header, each answer is in the file before the next text is asked about.
    assert calls == [1, 3, 5]
    assert not record["asked"]["whole"]
    assert {row["depth"]: row["asked"] for row in record["results"]} == {0.0: 2, 1.0: 2, None: 4}
    assert "stopped by Ctrl-C after 4 results" in printed.err

    # The second text has one of its two answers only, so it is asked about again.
    kept = answers.read_text().splitlines()[:-1]
    answers.write_text("\n".join(kept) + "\n")
    record = run([*arguments, "--resume"], capsys)
    assert calls[3:] == [3, 5, 7, 9] and record["asked"]["whole"]
    assert {row["depth"]: row["asked"] for row in record["results"]} == {0.0: 5, 1.0: 5, None: 10}
    assert answers.read_text().splitlines()[: len(kept)] == kept
    assert main([*arguments, "--resume", "--max-tokens", "4"]) != 0
    assert "max_tokens was 3" in capsys.readouterr().err


def test_sparse_with_all_pages_is_as_perplexed_as_dense(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "ppl.png"
    arguments = ["eval", "ppl", "--model", str(folder), *CPU, *PAGES, "--tokens", "600"]
    arguments += ["--policies", "quest,mean", "--budgets", "20,100", "--plot", str(plot)]
    dense, *sparse = run(arguments, capsys)["results"]
    assert [row["setting"] for row in sparse] == [
        "quest 20%",
        "quest 100%",
        "mean 20%",
        "mean 100%",
    ]
    for row in sparse:
        assert (row["ppl"] == pytest.approx(dense["ppl"], rel=1e-4)) == (row["budget"] == 1.0)
    assert dense["ratio"] == 1.0 and plot.read_bytes().startswith(b"\x89PNG")


def test_recall(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "recall.png"
    arguments = ["eval", "recall", "--model", str(folder), *CPU, *PAGES, "--tokens", "600"]
    arguments += ["--budgets", "20,100", "--rows", "3", "--plot", str(plot)]
    some, whole = run(arguments, capsys)["results"]
    assert 0 < some["mass"] < 1 and some["top"] <= 1 and whole["mass"] == 1.0
    assert len(some["layers"]) == 2 and plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["needle", "--task", "hay"], "--task: has 'hay'; choose among single"),
        (["needle", "--lengths", "2k"], "--lengths: has '2k'; write whole numbers from 1"),
        (["needle", "--lengths", "50"], "length of 50 tokens is too short"),
        (["needle", "--lengths", "500,9999"], "--lengths has 9999"),
        (["needle", "--depths", "0,101"], "--depths: has '101'; write numbers from 0 to 100"),
        (["needle", "--samples", "0"], "--samples is 0"),
        (["needle", "--prompt", "chat"], "--prompt is chat"),
        (["needle", "--text", "/nowhere"], "--text /nowhere"),
        (["needle", "--answers", "/nowhere/x"], "--answers /nowhere/x cannot be written"),
        (["ppl", "--plot", "/nowhere/x"], "--plot /nowhere/x cannot be written"),
        (["ppl", "--tokens", "1"], "--tokens is 1"),
        (["ppl", "--tokens", "4000", "--text", "TEXT"], "--tokens is 4000 and the text has"),
        (["ppl", "--attention-backend", "torch,hsa"], "reads prompts densely"),
        (["recall", "--budgets", "1"], "--budgets has 1%"),
        (["recall", "--policies", "hils"], "hsa_policy 'hils' needs a model trained"),
        (["recall", "--rows", "0"], "--rows is 0"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str],
    named: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("A few words. " * 20)
    arguments = [str(short) if a == "TEXT" else a for a in arguments]
    assert exit_code(["eval", *arguments, "--model", str(folder), *CPU]) == 2
    assert named in capsys.readouterr().err
