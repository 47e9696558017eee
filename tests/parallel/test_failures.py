"""Ranks that are killed, stuck or failing: an error that says why, and no process left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from cairn import LLM
from cairn.async_llm import AsyncLLM
from cairn.engine.engine import Engine
from cairn.errors import CairnError, RankError
from tests.helpers import TINY_LLAMA, tokens_of, write_model
from tests.parallel.ranks import SPARSE, in_step, lead, load
from tests.patience import tries, wait_for_end

POLICIES = "tests.parallel.ranks"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ranks"), TINY_LLAMA)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits as long as it takes: it must see what is wrong, not run out of time."""
    monkeypatch.setattr("cairn.engine.parallel.rank_group.PATIENCE", timedelta(hours=1))


def amid_steps(engine: Engine, call: Callable[[], None]) -> threading.Thread:
    """Call once some steps have run, while more do."""

    def run() -> None:
        while engine.stats.steps < 5:
            time.sleep(0.001)
        call()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_killed_rank_ends_the_engine(folder: Path, spawned: None) -> None:
    with load(folder, 2) as llm:
        (pid,) = lead(llm.engine).ranks.pids
        thread = amid_steps(llm.engine, lambda: os.kill(pid, signal.SIGKILL))
        with pytest.raises(RankError, match="rank 1 ended with exit code -9"):
            llm.generate(tokens_of(8), max_tokens=500, ignore_eos=True)
        thread.join()
        llm.engine.scheduler.check()
        with pytest.raises(RankError, match="exit code -9; start the engine again"):
            llm.generate(tokens_of(8), max_tokens=2)
    wait_for_end(pid)


def test_a_rank_that_is_killed_while_idle_is_noticed(folder: Path) -> None:
    with load(folder, 2) as llm:
        llm.engine.watch()
        (pid,) = lead(llm.engine).ranks.pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError, match="rank 1 ended with exit code -9"):
            for _ in tries():
                llm.engine.watch()


def test_a_stuck_rank_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.engine.parallel.ranks._CAUSE_SECONDS", 0.1)
    hurry = timedelta(seconds=1)

    def generate(llm: LLM) -> None:
        llm.generate(tokens_of(8), max_tokens=2)

    def look(llm: LLM) -> None:
        llm.engine.runner.check()

    for use, message in ((generate, "rank 0: .*"), (look, "rank 1 said nothing for 1 s; ")):
        with load(folder, 2) as llm, monkeypatch.context() as patch:
            (pid,) = lead(llm.engine).ranks.pids
            os.kill(pid, signal.SIGSTOP)
            patch.setattr("cairn.engine.parallel.rank_group.PATIENCE", hurry)
            lead(llm.engine).ranks._group._set_default_timeout(hurry)
            with pytest.raises(RankError, match=f"{message}no rank said why"):
                use(llm)
            wait_for_end(pid)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_failing_rank_says_why(tp: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path, {**TINY_LLAMA, "num_key_value_heads": 4})
    options = {**SPARSE, "hsa_policy": f"{POLICIES}:FailsOnRankOne"}
    with load(folder, tp, **options) as llm:
        pids = lead(llm.engine).ranks.pids
        with pytest.raises(RankError, match=r"rank 1 failed: ArithmeticError: .*too much") as e:
            llm.generate(tokens_of(40), max_tokens=2)
        assert "in landmark" in e.value.__notes__[0]
        for pid in pids:
            wait_for_end(pid)


def test_rank_0_failing_ends_the_others(folder: Path) -> None:
    with load(folder, 2, **SPARSE, hsa_policy=f"{POLICIES}:FailsOnRankZero") as llm:
        (pid,) = lead(llm.engine).ranks.pids
        with pytest.raises(ArithmeticError, match="rank 0 cannot do it"):
            llm.generate(tokens_of(40), max_tokens=2)
        wait_for_end(pid)
        with pytest.raises(
            RankError, match=r"rank 0 failed: ArithmeticError.*start the engine again"
        ):
            llm.generate(tokens_of(8), max_tokens=2)


def test_a_rank_that_cannot_be_built_says_why(folder: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 failed: ConfigError: .*not on this rank"):
        load(folder, 2, **SPARSE, hsa_policy=f"{POLICIES}:FailsWhileLoading")


def test_an_interrupt_waits_for_the_step_and_leaves_the_ranks_in_step(folder: Path) -> None:
    prompt = tokens_of(20)
    with load(folder, 2, dtype="float64") as llm:
        before = llm.generate(prompt, max_tokens=30, ignore_eos=True).token_ids
        begun = llm.engine.stats.steps
        for _ in range(3):
            llm.engine.stats.steps = 0
            thread = amid_steps(llm.engine, lambda: os.kill(os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompt, max_tokens=450, ignore_eos=True)
            thread.join()
            in_step(llm.engine)
        assert begun
        assert llm.generate(prompt, max_tokens=30, ignore_eos=True).token_ids == before


def test_ranks_end_with_their_parent(folder: Path) -> None:
    script = (
        "import sys\n"
        "from cairn import LLM\n"
        "if __name__ == '__main__':\n"
        "    llm = LLM(sys.argv[1], device='cpu', tp=2)\n"
        "    print(*llm.engine.runner.ranks.pids, flush=True)\n"
        "    llm.generate([5], max_tokens=500, ignore_eos=True) and sys.stdin.read()\n"
    )
    path = folder / "script.py"
    path.write_text(script)
    command = [sys.executable, str(path), str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_for_end(pid)


@pytest.mark.slow
def test_a_script_that_every_rank_would_run_is_told_so(folder: Path) -> None:
    path = folder / "unguarded.py"
    path.write_text(f"from cairn import LLM\nLLM({str(folder)!r}, device='cpu', tp=2)\n")
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("under `if __name__ == '__main__':`")


def test_an_engine_that_nobody_closes_leaves_no_rank(folder: Path) -> None:
    llm = load(folder, 2)
    (pid,) = lead(llm.engine).ranks.pids
    del llm
    wait_for_end(pid)


def test_async_streams_end_with_the_error(folder: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(folder, device="cpu", tp=2)
        engine = llm._frontend.engine
        (pid,) = lead(engine).ranks.pids
        expected = (await llm.generate(tokens_of(8), max_tokens=5, ignore_eos=True)).token_ids
        assert len(expected) == 5
        calls = [
            asyncio.create_task(llm.generate(tokens_of(8), max_tokens=480, ignore_eos=True))
            for _ in range(2)
        ]
        thread = amid_steps(engine, lambda: os.kill(pid, signal.SIGKILL))
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, CairnError) and "exit code -9" in str(result)
        thread.join()
        await llm.close()

    asyncio.run(main())
