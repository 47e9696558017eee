"""Requests that would take all time or memory are refused, and delay nobody else."""

from __future__ import annotations

import os
import signal
import socket
import string
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from llguidance import LLMatcher

from cairn.server.grammar_worker import HEADER
from cairn.server.grammars import Follower, Grammars, _Worker
from cairn.server.wire import Grammar
from cairn.text.tokenizer import Tokenizer
from tests.helpers import byte_tokenizer
from tests.patience import wait_for_end
from tests.server.process import ServerProcess

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]
ENDLESS = {"allOf": [{"type": "string", "pattern": f"(.*{c}.*)"} for c in string.ascii_lowercase]}
MANY_OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(4500)}}


def chat(server: ServerProcess, **fields: Any) -> httpx.Response:
    body = {"messages": MESSAGES, "max_tokens": 4, **fields}
    return server.post(CHAT, json=body)


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def test_a_grammar_without_end_is_refused_and_delays_nobody(server: ServerProcess) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": ENDLESS}}
    with ThreadPoolExecutor(2) as threads:
        hostile = [
            threads.submit(chat, server, response_format=schema_format(ENDLESS)),
            threads.submit(chat, server, tools=[tool], n=3),
        ]
        assert chat(server).status_code == 200
        assert chat(server, response_format={"type": "json_object"}).status_code == 200
        for asked, field in zip(hostile, ("response_format", "tools"), strict=True):
            answer = asked.result()
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"] == field and "send a simpler one" in error["message"]
    server.wait_until_idle()


def test_a_grammar_that_gives_up_is_an_error(server: ServerProcess) -> None:
    given = {"response_format": schema_format(MANY_OPTIONAL)}
    answer = chat(server, **given)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "response_format"
    streamed = chat(server, **given, stream=True)
    *_, last = (line for line in streamed.text.splitlines() if line)
    # On a busy machine it gives up before the answer begins.
    assert streamed.status_code in (200, 400)
    assert "response_format cannot be followed" in last
    assert 'finish_reason":"stop' not in streamed.text
    server.wait_until_idle()


@pytest.fixture
def grammars() -> Any:
    made = Grammars(Tokenizer(byte_tokenizer(), None), 256, frozenset({255}))
    yield made
    made.close()


def children(pid: int) -> list[int]:
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread may have ended meanwhile
            found += (thread / "children").read_text().split()
    return [int(each) for each in found]


def settle(grammars: Grammars) -> None:
    while grammars.num_pending:
        grammars.take()
        time.sleep(0.001)  # workers need the processor


def test_a_dead_worker_takes_one_choice_with_it(grammars: Grammars) -> None:
    """The choice whose question it was given fails; another worker answers the others."""
    grammar = Grammar(LLMatcher.grammar_from_regex("[ab]{3}"), "response_format")
    own, other = grammars.follow(grammar, [0, 1])
    a, b = byte_tokenizer().encode("ab").ids
    settle(grammars)
    other.advance([a])
    settle(grammars)
    worker = worker_of()
    os.kill(worker, signal.SIGSTOP)
    own.advance([a])
    other.advance([b])
    os.kill(worker, signal.SIGKILL)
    settle(grammars)
    assert grammars.take_failed() == [own]
    assert own.error is not None and own.allowed is None
    assert other.error is None and other.allowed is not None
    (mask,) = other.allowed.masks
    # Two of three letters are there: the third is not the end.
    allowed = {token for token in range(256) if mask[token // 8] >> token % 8 & 1}
    assert allowed == {a, b}


def test_a_worker_that_gets_no_processor_is_given_up(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = Grammar(LLMatcher.grammar_from_regex("[ab]{3}"), "response_format")
    (follower,) = grammars.follow(grammar, [0])
    settle(grammars)
    os.kill(worker_of(), signal.SIGSTOP)
    monkeypatch.setattr("cairn.server.grammars._MOST_SECONDS", 0.1)
    follower.advance(byte_tokenizer().encode("a").ids)
    settle(grammars)
    assert grammars.take_failed() == [follower]


def test_the_time_of_an_answer_begins_when_its_worker_runs() -> None:
    """The host may take long to start on a busy machine; a worker is not blamed for that."""
    own, other = socket.socketpair()
    with own, other, subprocess.Popen(["sleep", "600"]) as process:
        worker = _Worker(own)
        worker.pending.append(Follower(None, Grammar("", ""), 0))  # type: ignore[arg-type]
        worker.asked = time.monotonic() - 1000
        other.sendall(HEADER.pack(process.pid))
        assert worker.receive() == (True, [])
        worker.make_way()
        process.terminate()
        assert process.wait() == -signal.SIGTERM  # not killed before


def worker_of() -> int:
    """The only worker of this process."""
    hosts = [host for host in children(os.getpid()) if b"spawn" in command(host)]
    (worker,) = [pid for host in hosts for pid in children(host)]
    return worker


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_grammar_workers_end_with_the_engine(model_folder: Path, tmp_path: Path) -> None:
    with ServerProcess(model_folder, tmp_path / "log") as running:
        engine = running.engine_pid()
        assert chat(running, response_format={"type": "json_object"}).status_code == 200
        hosts = [pid for pid in children(engine) if b"spawn" in command(pid)]
        workers = [pid for host in hosts for pid in children(host)]
        assert len(hosts) == len(workers) == 1
        running.signal(signal.SIGKILL)
        running.wait()
        for pid in (*hosts, *workers):
            wait_for_end(pid)


def test_a_stop_does_not_wait_for_a_grammar(model_folder: Path, tmp_path: Path) -> None:
    """Nor is a client of it left without an answer."""
    with ServerProcess(model_folder, tmp_path / "log", "--drain-timeout=1") as running:
        engine = running.engine_pid()
        with ThreadPoolExecutor(1) as threads:
            hostile = threads.submit(chat, running, response_format=schema_format(ENDLESS))
            while not (hosts := [pid for pid in children(engine) if b"spawn" in command(pid)]):
                pass
            running.signal(signal.SIGTERM)
            assert running.wait() == 0
            assert hostile.result().status_code in (400, 503)
        wait_for_end(hosts[0])


def test_stop_strings_have_a_limit(server: ServerProcess) -> None:
    assert chat(server, stop=["x" * 1024] * 16).status_code == 200
    for stop in ("x" * 1025, ["y", "x" * 10_000]):
        answer = chat(server, stop=stop)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "stop" and "1024" in answer.text
