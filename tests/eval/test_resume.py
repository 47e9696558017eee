"""Files of results survive a run that is stopped at any time."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.errors import ConfigError
from cairn.eval.resume import earlier, take

ASKED = {"seed": 0}
FIRST, SECOND, THIRD = ({"answer": n} for n in range(3))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    assert take(iter([FIRST, SECOND]), str(path), ASKED) == ([FIRST, SECOND], True)
    return path


def test_a_resumed_run_appends(file: Path) -> None:
    before = file.read_text()
    done = earlier(str(file), "--answers", ASKED)
    assert take(iter([THIRD]), str(file), ASKED, done) == ([FIRST, SECOND, THIRD], True)
    assert file.read_text() == f'{before}{{"answer": 2}}\n'
    assert list(file.parent.iterdir()) == [file]


def test_a_run_that_ends_while_it_writes_old_results_keeps_the_file(file: Path) -> None:
    before = file.read_text()
    with pytest.raises(TypeError, match="not JSON serializable"):
        take(iter([THIRD]), str(file), ASKED, [FIRST, {"answer": object()}])
    assert file.read_text() == before


@pytest.mark.parametrize("cut", ['{"answer": ', '{"answer": {"text": "}', '{"answer": {}'])
def test_a_last_line_that_was_cut_off_is_left_out(file: Path, cut: str) -> None:
    whole = file.read_text()
    file.write_text(whole + cut)
    done = earlier(str(file), "--answers", ASKED)
    assert done == [FIRST, SECOND]
    take(iter([THIRD]), str(file), ASKED, done)
    assert file.read_text() == f'{whole}{{"answer": 2}}\n'


def test_another_broken_line_is_named(file: Path) -> None:
    header, first, second = file.read_text().splitlines()
    file.write_text("\n".join([header, first[:-1], second]) + "\n")
    with pytest.raises(ConfigError, match="line 2 is not JSON"):
        earlier(str(file), "--answers", ASKED)
