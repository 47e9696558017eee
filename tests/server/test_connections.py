"""What a client may do with its connection: names, sizes, times, numbers; and what is logged."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.errors import ConfigError
from cairn.server.log import LogHandler
from cairn.server.options import ServeConfig
from cairn.server.tools.hermes import Hermes
from cairn.server.tools.parser import ToolParser
from tests.patience import PATIENCE
from tests.server.process import COMMAND, ServerProcess, connect

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def strict(model_folder: Path) -> Iterator[ServerProcess]:
    """Little time for clients, few descriptors (for 48 connections), a full disk for the log."""
    log = Path("/dev/full")
    flags = ("--client-timeout=3", "--allowed-host=cairn.example.org", "--engine-timeout=3")
    limits = {resource.RLIMIT_NOFILE: 96}
    with ServerProcess(
        model_folder, log, *flags, "--max-queued-requests=6", limits=limits
    ) as running:
        yield running


def read_all(connection: socket.socket) -> bytes:
    """What the server sends until it closes."""
    pieces = []
    try:
        while piece := connection.recv(65536):
            pieces.append(piece)
    except ConnectionError:
        pass
    return b"".join(pieces)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:80", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("192.168.1.7:8000", 200),
        ("cairn.example.org", 200),
        ("Cairn.Example.Org.:443", 200),
        ("evil.example.com", 403),
        ("localhost.evil.example.com:8000", 403),
        ("", 200),
    ],
)
def test_a_keyless_server_answers_to_its_names_only(
    strict: ServerProcess, host: str, status: int
) -> None:
    answer = strict.get("/v1/models", headers={"Host": host})
    assert answer.status_code == status
    if status == 403:
        assert "--allowed-host" in answer.json()["error"]["message"]


def test_headers_are_limited(strict: ServerProcess) -> None:
    line = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    for start in (
        line + b"".join(b"X-%d: %s\r\n" % (i, b"y" * 1000) for i in range(80)),
        line + b"X: " + b"y" * 400_000,  # one header that never ends
        b"GET /" + b"y" * 400_000,
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"y" * 400_000,  # a trailer
    ):
        with connect(strict) as connection:
            with suppress(ConnectionError):
                connection.sendall(start)
            answer = read_all(connection)
            assert not answer or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400")), answer
    assert strict.get("/health").status_code == 200


def test_a_client_that_sends_nothing_more_is_given_up(strict: ServerProcess) -> None:
    body = json.dumps(BODY).encode()
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n" % (
        CHAT.encode()
    )
    whole = head + b"content-length: %d\r\n\r\n" % len(body)
    started = (b"", b"\r\n", b"GET /hea", head, whole, whole + body[:-1])
    with ExitStack() as stack:
        connections = []
        for start in started:
            connections.append(stack.enter_context(connect(strict)))
            connections[-1].sendall(start)
        # After an answer too.
        answered = stack.enter_context(connect(strict))
        answered.sendall(whole + body)
        assert answered.recv(15) == b"HTTP/1.1 200 OK"
        answered.sendall(b"GET /hea")
        assert b"HTTP/1.1 408" in read_all(answered)
        for connection in connections:
            assert read_all(connection).startswith(b"HTTP/1.1 408")


def test_a_full_queue_is_told(strict: ServerProcess) -> None:
    full = strict.post(CHAT, {**BODY, "n": 7})
    assert full.status_code == 429 and full.headers["retry-after"]
    assert "max_queued_requests" in full.json()["error"]["message"]


def test_idle_connections_do_not_keep_others_out(strict: ServerProcess) -> None:
    """Far more than there are descriptors. The oldest that wait for their client go."""
    idle: list[socket.socket] = []
    before = len(strict.errors)
    try:
        for _ in range(300):
            idle.append(connect(strict))
            if len(idle) % 100 == 0:
                assert strict.post(CHAT, json=BODY).status_code == 200
    finally:
        for connection in idle:
            connection.close()
    assert len("".join(strict.errors[before:])) < 5000


def test_a_client_that_leaves_in_its_body_is_logged_as_that(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n"
            "X-Request-ID: leaves\r\ncontent-length: 100\r\n\r\n{".encode()
        )
    line = server.logged("leaves")
    assert line["status"] == 499 and line["error"] == "the client left"
    assert "Traceback" not in "".join(server.errors)


def test_an_aborted_stream_logs_its_tokens(server: ServerProcess) -> None:
    body = {**BODY, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    headers = {"X-Request-ID": "aborted-1"}
    with httpx.stream("POST", server.url + CHAT, json=body, headers=headers) as stream:
        lines = stream.iter_lines()
        for _ in range(20):
            next(lines)
    line = server.logged("aborted-1")
    assert line["status"] == 499 and line["completion_tokens"] >= 5
    assert line["prompt_tokens"] > 0


def test_long_names_are_cut(server: ServerProcess) -> None:
    name = "m" * 2**20
    for wrong in ({"model": name}, {"logit_bias": {name: 1}}):
        headers = {"X-Request-ID": f"long-{next(iter(wrong))}"}
        answer = server.post(CHAT, json={**BODY, **wrong}, headers=headers)
        assert answer.status_code in (400, 404) and len(answer.content) < 5000
        assert len(json.dumps(server.logged(headers["X-Request-ID"]))) < 5000


DEEP = "[" * 100_000


def test_deep_nesting_is_no_failure(server: ServerProcess) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": DEEP}}
    short = {**call, "function": {"name": "f", "arguments": DEEP[:2000]}}

    def ask(called: dict[str, Any]) -> httpx.Response:
        messages = [BODY["messages"][0], {"role": "assistant", "tool_calls": [called]}]
        return server.post(CHAT, json={**BODY, "messages": messages})

    answer = ask(call)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"  # too long
    assert ask(short).status_code == 200


def test_a_deep_call_of_a_model_is_text() -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {DEEP}'
    assert ToolParser(Hermes(), {}).push(text, final=True) == (text, [])


@pytest.mark.parametrize("key", ["secret ", " secret", "secret\n"])
def test_blanks_around_a_key_do_not_matter(key: str) -> None:
    assert ServeConfig(api_key=key).api_key == "secret"
    with pytest.raises(ConfigError, match="api_key"):
        ServeConfig(api_key=" ")


def test_only_repeated_messages_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("cairn.server.log.time.monotonic", lambda: now)
    lines: list[str] = []
    logger = logging.Logger("test")
    logger.addHandler(LogHandler(lines.append))
    for words in ("one", "two", "one", "one"):
        logger.info("%s", words)
    assert lines == ["cairn: one", "cairn: two"]
    now = 1.0
    logger.info("%s", "one")
    assert lines[2:] == ["cairn: one (2 times more)"]


def test_an_unread_pipe_stops_nobody(model_folder: Path) -> None:
    """Standard error, where requests are logged, is a pipe that nobody reads."""
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [*COMMAND, f"--model={model_folder}", "--port=0", "--drain-timeout=1"],
        stdout=subprocess.PIPE,
        stderr=write_end,
        text=True,
    )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().partition("at ")[2].partition("/ ")[0]
        body = {**BODY, "max_tokens": 1, "metadata": {f"{i:0>64}": "m" * 512 for i in range(16)}}
        with httpx.Client(base_url=address, timeout=PATIENCE) as client:
            for _ in range(30):  # 270 KB of lines; a pipe holds 64
                assert client.post(CHAT, json=body).status_code == 200
            assert client.get("/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    os.close(read_end)
    os.close(write_end)


def test_a_long_folder_for_sockets_is_said_at_once(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    done = subprocess.run(
        [*COMMAND, f"--model={model_folder}", "--port=0"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert done.returncode == 2
    assert "TMPDIR" in done.stderr and "Traceback" not in done.stderr
    assert not list(folder.iterdir())


def test_an_engine_that_cannot_be_started_is_tried_again(strict: ServerProcess) -> None:
    """Descriptors are short when it is killed, and then there are some again."""
    with httpx.Client(base_url=strict.url, timeout=PATIENCE) as client:
        for _ in range(3):  # connections of tests before this one are closed by then
            assert client.get("/health").status_code == 200
        few = len(os.listdir(f"/proc/{strict.pid}/fd"))
        resource.prlimit(strict.pid, resource.RLIMIT_NOFILE, (few, 96))
        os.kill(strict.engine_pid(), signal.SIGKILL)
        strict.wait_to_hear("the engine is lost: it cannot be started")
        assert "cannot be started" in client.get("/health").json()["reason"]
        resource.prlimit(strict.pid, resource.RLIMIT_NOFILE, (96, 96))
    strict.wait_for_health("ok")
    assert strict.post(CHAT, json=BODY).status_code == 200


def test_a_pause_of_both_processes_loses_nothing(strict: ServerProcess) -> None:
    """As when a laptop sleeps. The pause is longer than engine_timeout."""
    engine, lost = strict.engine_pid(), strict.stats()["restarts"]
    for pid in (engine, strict.pid):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3.5)
    os.kill(strict.pid, signal.SIGCONT)
    time.sleep(0.2)
    os.kill(engine, signal.SIGCONT)
    assert strict.post(CHAT, json=BODY).status_code == 200
    assert strict.engine_pid() == engine and strict.stats()["restarts"] == lost
