"""How threads of the engine's processes wait for each other, and how many there are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cairn import LLM
from cairn.engine.threads import check_auto, fastest
from cairn.errors import ConfigError
from tests.helpers import TINY_LLAMA, write_model
from tests.server.process import ServerProcess, write_chat_model

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
CHOSEN = {"GOMP_SPINCOUNT": "8000", "KMP_BLOCKTIME": "0"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path, TINY_LLAMA)


@pytest.fixture
def threads() -> Iterator[int]:
    """The test's own number, which is put back."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def clean() -> dict[str, str]:
    """The environment of a user who has set nothing."""
    return {name: value for name, value in os.environ.items() if name not in VARIABLES}


def environment_of(pid: int) -> dict[str, str]:
    """What a process was started with."""
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP there")
@pytest.mark.parametrize(
    ("imports", "given", "spins"),
    [
        ("from cairn import LLM; LLM", {}, "8000"),
        ("import cairn, torch", {"GOMP_SPINCOUNT": "7"}, "7"),
        pytest.param("import cairn.cli.main, torch", {}, "8000", marks=pytest.mark.slow),
        pytest.param(
            *("import cairn, torch", {"OMP_WAIT_POLICY": "passive"}, "0"), marks=pytest.mark.slow
        ),
        # Too late: the default of the library.
        pytest.param("import torch, cairn", {}, "300000", marks=pytest.mark.slow),
    ],
)
def test_what_torch_makes_of_it(imports: str, given: dict[str, str], spins: str) -> None:
    """OMP_DISPLAY_ENV has the library say how it was set up when torch loaded it."""
    ran = subprocess.run(
        [sys.executable, "-c", imports],
        env={**clean(), **given, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.findall(r"GOMP_SPINCOUNT = '(\w+)'", ran.stderr) == [spins]


def test_what_the_user_has_set_is_left_alone() -> None:
    script = f"import cairn, os; print({{n: os.environ.get(n) for n in {VARIABLES}}})"
    for name in VARIABLES:
        ran = subprocess.run(
            [sys.executable, "-c", script],
            env={**clean(), name: "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout == f"{ {**dict.fromkeys(VARIABLES), name: '1'} }\n"


def test_every_process_of_a_server_waits_in_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    model = write_chat_model(tmp_path / "model")
    with ServerProcess(model, tmp_path / "log", "--tp=2", "--threads=5") as server:
        engine = server.engine_pid()
        children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
        ranks = [
            int(child)
            for child in children
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        assert len(ranks) == 1
        assert not CHOSEN.keys() & environment_of(server.pid).keys()  # it sets them itself
        for pid in (engine, *ranks):
            found = environment_of(pid)
            assert {name: found.get(name) for name in CHOSEN} == CHOSEN
    assert any("tp: 2 ranks, on cpu with 2 threads each" in line for line in server.errors)


def test_threads_are_as_many_as_asked_for(folder: Path, threads: int) -> None:
    with LLM(folder, device="cpu", threads=3) as llm:
        assert torch.get_num_threads() == 3
        assert llm.generate([5, 6], max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
    torch.set_num_threads(threads)
    with LLM(folder, device="cpu"):
        assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({1: [4.0], 2: [2.1], 4: [2.0]}, 2),  # the last two share cores
        ({1: [4.0], 2: [9.0], 4: [30.0]}, 1),  # others keep the cores busy
        ({1: [8.0], 2: [4.0], 4: [9.0, 2.0, 2.0]}, 4),  # one run was disturbed
        ({1: [1.0]}, 1),
    ],
)
def test_the_fewest_threads_that_are_as_fast_are_chosen(
    times: dict[int, list[float]], chosen: int
) -> None:
    assert fastest(times) == chosen


def test_auto_measures_and_says_what_it_chose(folder: Path, threads: int) -> None:
    torch.set_num_threads(2)
    with LLM(folder, device="cpu", threads="auto") as llm:
        chosen = torch.get_num_threads()
        assert chosen in (1, 2)
        (note,) = (note for note in llm.engine.notes if note.startswith("threads: "))
        assert note.startswith(f"threads: {chosen} of 2; ") and ", 2: " in note
    torch.set_num_threads(threads)
    with pytest.raises(ConfigError, match=r"tp is 2 and threads is 'auto'.*threads=N"):
        LLM(folder, device="cpu", tp=2, threads="auto", kv_cache_gib=0.01)
    with pytest.raises(ConfigError, match=r"threads is 'auto', .* the device is cuda; give a num"):
        check_auto(torch.device("cuda"))


def test_ranks_share_threads(folder: Path, threads: int) -> None:
    with LLM(folder, device="cpu", tp=2, threads=5, kv_cache_gib=0.01) as llm:
        assert torch.get_num_threads() == 2
        assert "tp: 2 ranks, on cpu with 2 threads each" in llm.engine.notes
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "2"])
def test_numbers_of_threads_that_make_no_sense(given: object, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"threads is .*; it must be a whole number from 1"):
        LLM(folder, threads=given)
