"""Two servers behind sglang-router, or smg, on one machine."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.scaleout.load import (
    STREAM_TOKENS,
    Sent,
    returns,
    send_prefixes,
    streams_through_a_loss,
)
from tests.scaleout.router_process import MODULES, RouterProcess
from tests.server.process import ServerProcess, write_chat_model

pytestmark = pytest.mark.slow

# As in docs/scale-out.md: a dead replica is out before the last retry of a request. The breaker
# would do it sooner, but sglang-router's counts refused requests (400) as failures too.
ROUTER_FLAGS = (
    "--disable-circuit-breaker",
    "--health-check-interval-secs=1",
    "--health-failure-threshold=2",
    "--health-success-threshold=1",
    "--retry-max-retries=8",
    "--retry-initial-backoff-ms=100",
)
SERVER_FLAGS = ("--page-size=16", "--kv-cache-gib=0.25")


def installed(kind: str) -> str:
    if importlib.util.find_spec(kind) is None:
        package = kind.replace("_", "-")
        pytest.skip(f"needs {package}: pip install {package}, in an environment of its own")
    return kind


@pytest.fixture(params=list(MODULES))
def kind(request: pytest.FixtureRequest) -> str:
    return installed(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture
def servers(kind: str, folder: Path, tmp_path: Path) -> Iterator[list[ServerProcess]]:
    del kind  # skipped, if it is not there, before anything is started
    with ExitStack() as stack:
        yield [
            stack.enter_context(ServerProcess(folder, tmp_path / name, *SERVER_FLAGS))
            for name in ("first.jsonl", "second.jsonl")
        ]


def router(kind: str, servers: list[ServerProcess], log: Path, policy: str) -> RouterProcess:
    urls = [server.url for server in servers]
    return RouterProcess(kind, urls, log, f"--policy={policy}", *ROUTER_FLAGS)


def send_more(url: str, model: str) -> list[int]:
    """Eight short requests; returns their statuses."""
    statuses = []
    for number in range(8):
        body = {"model": model, "prompt": f"after {number}", "max_tokens": 4}
        headers = {"x-request-id": f"after-{number}"}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
        statuses.append(answer.status_code)
    return statuses


def answered_by(server: ServerProcess) -> set[str]:
    """Ids of the requests that a server completed, from its log."""
    return {line["id"] for line in server.log_lines() if line.get("status") == 200}


@pytest.mark.parametrize("policy", ["cache_aware", "round_robin"])
def test_a_returning_prefix_finds_its_replica(
    kind: str, policy: str, servers: list[ServerProcess], tmp_path: Path
) -> None:
    with router(kind, servers, tmp_path / "router.log", policy) as front:
        assert {worker["model_id"] for worker in front.workers} == {servers[0].model}
        answered = send_prefixes(front.url, servers[0].model)
    for server in servers:
        server.wait_until_idle()  # a line is written after its answer
    logs = {server.url: answered_by(server) for server in servers}

    def replica_of(sent: Sent) -> str:
        (url,) = (url for url, ids in logs.items() if sent.id in ids)
        return url

    found = returns(answered, replica_of)
    print(f"\n{kind} {policy}: {found}")
    if policy == "cache_aware":
        assert found.share >= 0.95 and found.cached / found.of >= 0.95
        assert len(found.spread) == 2, "all prefixes went to one replica: that shows nothing"
    else:
        assert found.share < 0.9, "the measurement cannot tell affinity from chance"


def test_a_killed_replica_loses_its_own_streams_only(
    kind: str, servers: list[ServerProcess], tmp_path: Path
) -> None:
    killed, survivor = servers
    with router(kind, servers, tmp_path / "router.log", "cache_aware") as front:
        after: list[int] = []

        def kill() -> None:
            killed.signal(signal.SIGKILL)
            killed.wait()
            after.extend(send_more(front.url, survivor.model))  # at once: nobody knows yet

        streams = streams_through_a_loss(front.url, survivor.model, kill)
    kept = {stream.id for stream in streams if stream.complete}
    lost = [stream for stream in streams if not stream.complete]
    print(f"\n{kind}: {len(kept)} streams kept, {len(lost)} lost; errors seen by clients:")
    for stream in lost:
        print(f"  {stream.id}: {stream.error or 'none: it ended in silence'}")
    print(f"  then {after}")
    survivor.wait_until_idle()  # a line is written after its answer
    ids = answered_by(survivor)
    assert kept and lost
    assert kept == {name for name in ids if name.startswith("stream-")}
    assert all(stream.tokens == STREAM_TOKENS for stream in streams if stream.complete)
    assert all(stream.error for stream in lost), "a client cannot tell that its answer is cut short"
    assert after == [200] * 8
    assert {f"after-{number}" for number in range(8)} <= ids


def test_a_stopped_replica_loses_nothing(
    kind: str, servers: list[ServerProcess], tmp_path: Path
) -> None:
    stopped, other = servers
    with router(kind, servers, tmp_path / "router.log", "cache_aware") as front:
        during: list[int] = []

        def stop() -> None:
            stopped.signal(signal.SIGTERM)
            during.extend(send_more(front.url, other.model))

        streams = streams_through_a_loss(front.url, other.model, stop)
    assert all(stream.complete for stream in streams), streams
    assert during == [200] * 8
    assert stopped.wait() == 0
    assert answered_by(stopped) & {stream.id for stream in streams}


def test_keys_and_refusals_pass_through(kind: str, folder: Path, tmp_path: Path) -> None:
    flags = (*SERVER_FLAGS, "--api-key=secret", "--max-concurrent-requests=2")
    with (
        ServerProcess(folder, tmp_path / "requests.jsonl", *flags) as server,
        RouterProcess(
            kind, [server.url], tmp_path / "router.log", *ROUTER_FLAGS, key="secret"
        ) as front,
        httpx.Client(base_url=front.url, timeout=60) as client,
    ):
        assert front.workers[0]["model_id"] == server.model
        body = {"model": server.model, "prompt": "hello", "max_tokens": 4}
        assert client.post("/v1/completions", json=body).status_code == 401
        client.headers = httpx.Headers(front.headers)
        wrong, much = {**body, "top_k": -2}, {**body, "n": 3}
        refused = [client.post("/v1/completions", json=wrong).status_code for _ in range(12)]
        assert refused == [400] * 12
        assert client.post("/v1/completions", json=much).status_code == 429
        # A client that errs, or asks for too much, takes nothing away from others.
        assert client.post("/v1/completions", json=body).status_code == 200
        chat = {"model": server.model, "messages": [{"role": "user", "content": "hello"}]}
        streamed = client.post("/v1/chat/completions", json={**chat, "stream": True, "n": 2})
        assert streamed.status_code == 200 and "data: [DONE]" in streamed.text
