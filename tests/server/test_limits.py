"""What the server refuses, and how it says so."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.patience import PATIENCE, tries
from tests.server.process import COMMAND, ServerProcess, connect

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def guarded(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Small limits, a key, and a site that may call it."""
    log = tmp_path_factory.mktemp("guarded") / "requests.jsonl"
    flags = (
        "--api-key=secret",
        "--max-body-mib=1",
        "--max-concurrent-requests=4",
        "--cors-origin=https://example.org",
        "--served-model-name=named",
    )
    with ServerProcess(model_folder, log, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def hurried(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Answers must be complete within a second."""
    log = tmp_path_factory.mktemp("hurried") / "requests.jsonl"
    flags = ("--max-concurrent-requests=4", "--request-timeout=1")
    with ServerProcess(model_folder, log, *flags) as running:
        yield running


def ask(server: ServerProcess, path: str = CHAT, **options: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    given: dict[str, Any] = {"json": body, "headers": {"Authorization": "Bearer secret"}}
    return server.post(path, **{**given, **options})


def test_the_key_is_needed_where_something_is_done(guarded: ServerProcess) -> None:
    assert ask(guarded).status_code == 200
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        refused = ask(guarded, headers=headers)
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
        assert refused.headers["www-authenticate"] == "Bearer"
    for path, status in (
        ("/health", 200),
        ("/", 200),
        ("/docs", 200),
        ("/openapi.json", 200),
        ("/v1/models", 401),
        ("/metrics", 401),
        ("/stats", 401),
    ):
        assert guarded.get(path).status_code == status, path
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="no").models.list()
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="secret")
    assert [model.id for model in client.models.list()] == ["named"]


def test_only_the_named_site_may_call(guarded: ServerProcess, server: ServerProcess) -> None:
    def allowed(target: ServerProcess, origin: str) -> str | None:
        answer = target.get("/health", headers={"Origin": origin})
        header: str | None = answer.headers.get("access-control-allow-origin")
        return header

    def may_send(headers: str) -> int:
        """The answer to the question that browsers ask first."""
        asked = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
        asked["Access-Control-Request-Headers"] = headers
        return httpx.options(guarded.url + CHAT, headers=asked, timeout=PATIENCE).status_code

    assert allowed(guarded, "https://example.org") == "https://example.org"
    assert may_send("authorization,content-type,x-stainless-os,openai-organization") == 200
    assert may_send("x-api-key,anthropic-version,anthropic-dangerous-direct-browser-access") == 200
    assert allowed(guarded, "https://example.com") is None
    assert allowed(server, "https://example.org") is None


def test_a_large_body_is_refused_with_and_without_a_length(guarded: ServerProcess) -> None:
    large = json.dumps({"messages": [{"role": "user", "content": "x" * 2**21}]}).encode()
    headers = {"Authorization": "Bearer secret", "content-type": "application/json"}
    assert ask(guarded, json=None, content=large, headers=headers).status_code == 413

    def pieces() -> Any:
        for begin in range(0, len(large), 2**16):
            yield large[begin : begin + 2**16]

    chunked = ask(guarded, json=None, content=pieces(), headers=headers)
    assert chunked.status_code == 413
    assert "max_body_mib" in chunked.json()["error"]["message"]


def test_more_than_can_be_taken_on_gets_429(guarded: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    refused = ask(guarded, json={**body, "n": 5})
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "max_concurrent_requests" in refused.json()["error"]["message"]
    assert ask(guarded, json={**body, "n": 4}).status_code == 200


def test_an_answer_that_takes_too_long_ends_with_an_error(hurried: ServerProcess) -> None:
    """The engine is stopped meanwhile: no machine is so fast that it answers."""
    client = openai.OpenAI(base_url=f"{hurried.url}/v1", api_key="unused", max_retries=0)
    given: Any = {"model": hurried.model, "messages": MESSAGES, "max_tokens": 4000}
    engine = hurried.engine_pid()
    with pytest.raises(openai.APIError, match="request_timeout"):
        for _ in client.chat.completions.create(
            **given, stream=True, extra_body={"ignore_eos": True}
        ):
            os.kill(engine, signal.SIGSTOP)
    os.kill(engine, signal.SIGSTOP)  # if not even the stream has begun in time
    try:
        late = ask(hurried)
    finally:
        os.kill(engine, signal.SIGCONT)
    assert late.status_code == 504
    assert "request_timeout" in late.json()["error"]["message"]


def test_a_reader_that_stops_reading_is_given_up(hurried: ServerProcess) -> None:
    """Its answer fills the connection; the deadline frees its place."""
    body = json.dumps(
        {
            "messages": MESSAGES,
            "max_tokens": 3000,
            "ignore_eos": True,
            "stream": True,
            "n": 4,
            "logprobs": True,
            "top_logprobs": 20,
        }
    ).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for _ in tries():
        with connect(hurried) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            begun = connection.recv(15) == b"HTTP/1.1 200 OK"
            if begun and ask(hurried).status_code == 429:  # all four places are taken
                while ask(hurried).status_code != 200:
                    pass
                return
    raise AssertionError("the server was never fast enough to begin an answer in time")


def test_a_bad_request_id_and_a_bad_content_type(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    bad = server.post(CHAT, json=body, headers={"X-Request-ID": "a b"})
    assert bad.status_code == 400 and "X-Request-ID" in bad.json()["error"]["message"]
    text = httpx.post(
        server.url + CHAT, content=json.dumps(body), headers={"content-type": "text/plain"}
    )
    assert text.status_code == 415
    missing = server.get("/nowhere")
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
    assert missing.headers["x-request-id"].startswith("req-")
    assert server.get(CHAT).status_code == 405
    for path in ("/", "/health"):  # as monitors ask
        head = httpx.head(server.url + path, timeout=PATIENCE)
        assert head.status_code == 200 and not head.content
    assert server.get("/web/..%2f..%2fpyproject.toml").status_code == 404


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--model=/nowhere"], 2, "/nowhere"),
        (["--port=99999"], 2, "port is 99999"),
        (["--max-body-mib=0"], 2, "max_body_mib"),
        (["--page-size=0"], 2, "page_size"),
        (["--request-log=/nowhere/log"], 2, "request_log"),
    ],
)
def test_what_cannot_be_served_is_said_at_the_start(
    model_folder: Path, flags: list[str], code: int, said: str
) -> None:
    base = [f"--model={model_folder}", "--port=0"]
    done = subprocess.run(
        [*COMMAND, *base, *flags],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == code
    assert said in done.stderr and "Traceback" not in done.stderr


def test_a_port_that_is_taken(server: ServerProcess, model_folder: Path) -> None:
    port = server.url.rpartition(":")[2]
    done = subprocess.run(
        [*COMMAND, f"--port={port}", f"--model={model_folder}"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 2 and f"port {port} cannot be listened on" in done.stderr
