"""How many events the client of `cairn bench serve` can take, and what each costs.

Another process plays the server. It writes one event at a time to each connection in turn, as fast
as it can.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

from cairn.bench.engines import settled
from cairn.bench.http_stream import Target

_STREAMS, _EVENTS = 256, 500
_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"canned","choices":[{"index":0,"text":" word","logprobs":null,'
    b'"finish_reason":null}],"usage":null}\n\n'
)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_END = b"0\r\n\r\n"


def client_speed(streams: int = _STREAMS, events: int = _EVENTS) -> dict[str, Any]:
    """Events per second by wall time and by the client's CPU time."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_play_server, args=(theirs, streams, events), daemon=True)
    process.start()
    try:
        target = Target(f"http://127.0.0.1:{ours.recv()}/v1", None, 600.0)
        replies, seconds, spent = asyncio.run(_take_all(target, streams))
    finally:
        process.kill()
        process.join()
    begin = time.process_time()
    came = sum(sum(1 for _ in reply.events()) for reply in replies)
    parsing = time.process_time() - begin
    assert came == streams * events
    reads = sum(len(reply.moments) for reply in replies)
    return {
        "streams": streams,
        "events": came,
        "reads": reads,
        "events_per_second": round(came / seconds),
        "events_per_cpu_second": round(came / spent),
        "cpu_us_per_read": round(1e6 * spent / reads, 2),
        "parsing_us_per_event_afterwards": round(1e6 * parsing / came, 2),
    }


async def _take_all(target: Target, streams: int) -> tuple[list[Any], float, float]:
    request = target.post("/completions", {"prompt": [1]})
    with settled():
        begin, spent = time.perf_counter(), time.process_time()
        replies = await asyncio.gather(*(target.exchange(request) for _ in range(streams)))
        return replies, time.perf_counter() - begin, time.process_time() - spent


def _play_server(link: Connection, streams: int, events: int) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=streams) as server:
        link.send(server.getsockname()[1])
        clients = [server.accept()[0] for _ in range(streams)]
    for client in clients:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.recv(1 << 16)
        client.sendall(_HEAD)
    for _ in range(events):
        for client in clients:
            client.sendall(_CHUNK)
    for client in clients:
        client.sendall(_END)
        client.close()
