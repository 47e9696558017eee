"""`cairn serve --tp 2`: answers as one rank would, and outlives a rank that is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cairn import LLM
from tests.server.process import ServerProcess, write_chat_model

PROMPT = "once upon"
ASKED = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "temperature": 0}


def ranks_of(engine: int) -> list[int]:
    """Processes that the engine's own has started; one of its children is a tracker."""
    children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return [child for child, command in commands.items() if b"spawn_main" in command]


@pytest.mark.slow
def test_a_server_on_two_ranks(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path / "model")
    with LLM(folder, device="cpu") as llm:
        expected = llm.generate(PROMPT, max_tokens=12, ignore_eos=True).text
    with ServerProcess(folder, tmp_path / "log", "--tp=2") as server:

        def ask() -> str:
            answer = server.post("/v1/completions", json=ASKED)
            text: str = answer.json()["choices"][0]["text"]
            return text

        assert ask() == expected
        assert server.get("/server_info").json()["tp_size"] == 2
        engine = server.engine_pid()
        (rank,) = ranks_of(engine)
        os.kill(rank, signal.SIGKILL)
        # Nobody asks for anything: the engine notices by itself.
        server.wait_to_hear("the engine is lost: rank 1 ended with exit code -9")
        server.wait_for_health("ok")
        assert ask() == expected
        (rank,) = ranks_of(server.engine_pid())
    assert not Path(f"/proc/{rank}").exists()


@pytest.mark.slow
def test_a_model_that_cannot_be_split_is_a_usage_error(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path / "model")
    with pytest.raises(RuntimeError, match=r"num_key_value_heads 2, .*use tp=1 or 2"):
        ServerProcess(folder, tmp_path / "log", "--tp=4")
