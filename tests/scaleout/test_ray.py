"""Two replicas in a Ray Serve application on one machine."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.scaleout.load import (
    STREAM_TOKENS,
    returns,
    send_prefixes,
    streams_through_a_loss,
)
from tests.scaleout.ray_process import RayProcess
from tests.server.process import write_chat_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="needs ray: pip install 'cairn-llm[ray]', in an environment of its own",
    ),
]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayProcess]:
    folder = tmp_path_factory.mktemp("served")
    with RayProcess(write_chat_model(folder / "tiny"), folder) as running:
        yield running


def test_answers_pass_through(app: RayProcess) -> None:
    with httpx.Client(base_url=app.url, timeout=60) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == app.model
        assert client.get("/get_server_info").json()["served_model_name"] == app.model
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        whole = client.post("/v1/chat/completions", json=chat, headers={"x-request-id": "mine"})
        assert whole.status_code == 200 and whole.json()["usage"]["completion_tokens"] > 0
        assert whole.headers.get_list("x-request-id") == ["mine"]
        streamed = client.post("/v1/chat/completions", json={**chat, "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.text.endswith("data: [DONE]\n\n")
        refused = client.post("/v1/completions", json={"prompt": "a", "top_k": -2})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "top_k"
        assert client.get("/nothing").status_code == 404
        large = client.post("/v1/completions", json={"prompt": "a" * 2**20})
        assert large.status_code == 413 and "max_body_mib" in large.json()["error"]["message"]


def test_a_returning_prefix_finds_its_replica(app: RayProcess) -> None:
    answered = send_prefixes(app.url, app.model)
    found = returns(answered, lambda sent: sent.replica)
    print(f"\nray: {found}")
    assert found.share >= 0.95 and found.cached / found.of >= 0.95
    assert len(found.spread) == 2, "all prefixes went to one replica: that shows nothing"


def test_a_client_that_leaves_frees_its_place(app: RayProcess) -> None:
    body = {"prompt": "once", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    headers = {"x-request-id": "leaver"}
    with httpx.stream("POST", f"{app.url}/v1/completions", json=body, headers=headers) as stream:
        next(stream.iter_lines())
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        lines = [json.loads(line) for line in app.log.read_text().splitlines()]
        left = [line for line in lines if line["id"] == "leaver"]
        if left:
            break
        time.sleep(0.1)
    assert left and left[0]["error"] == "the client left"


def test_a_killed_replica_loses_its_own_streams_only(app: RayProcess) -> None:
    killed = app.replica_pids()[0]
    after: list[httpx.Response] = []

    def kill() -> None:
        os.kill(killed, signal.SIGKILL)
        for number in range(8):  # at once: nobody knows yet
            body = {"prompt": f"after {number}", "max_tokens": 4}
            after.append(httpx.post(f"{app.url}/v1/completions", json=body, timeout=60))

    streams = streams_through_a_loss(app.url, app.model, kill)
    lost = [stream for stream in streams if not stream.complete]
    kept = [stream for stream in streams if stream.complete]
    print(f"\nray: {len(kept)} streams kept, {len(lost)} lost; errors seen by clients:")
    for stream in lost:
        print(f"  {stream.id}: {stream.error or 'none: it ended in silence'}")
    print(f"  then {[answer.status_code for answer in after]}")
    assert kept and lost
    assert all(stream.tokens == STREAM_TOKENS for stream in kept)
    (gone,) = {stream.replica for stream in lost}
    assert gone not in {stream.replica for stream in kept}
    assert all("died" in stream.error for stream in lost)
    assert all(answer.status_code == 200 for answer in after)
    assert gone not in {answer.headers["x-cairn-replica"] for answer in after}
    begin = time.monotonic()
    print(f"  {gone} replaced: {app.wait_for_new_replicas(gone)}")
    print(f"  {time.monotonic() - begin:.1f} s later")


def test_a_replica_with_a_dead_engine_is_replaced(app: RayProcess) -> None:
    before = app.replicas()
    killed = app.replica_pids()[0]
    os.kill(app.engine_pid(killed), signal.SIGKILL)
    deadline = time.monotonic() + 90
    while len(app.replicas() & before) == 2 and time.monotonic() < deadline:
        time.sleep(0.5)
    (gone,) = before - app.replicas()
    app.wait_for_new_replicas(gone)
