"""Runs the server: uvicorn in this process, until a signal or an engine that cannot start."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial

import uvicorn
import uvloop

from cairn.config import EngineConfig
from cairn.engine.locate import locate
from cairn.errors import ConfigError
from cairn.models.source import needs_download
from cairn.server.connection import Connection, ConnectionLimits, raise_file_limit
from cairn.server.log import start_logging
from cairn.server.middleware import RequestLog
from cairn.server.options import ServeConfig
from cairn.server.service import Service
from cairn.server.text_threads import THREADS

_BACKLOG = 2048
# Seconds that an idle connection stays open. Proxies keep theirs for 60: were it closed here first,
# a request that is just being sent would be lost.
_KEEP_ALIVE = 75
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_AFTER_DRAIN = 2  # seconds to send errors for what is not complete
_THREAD_SECONDS = 0.2  # for a thread without work to end

_log = logging.getLogger("cairn.server")


def run_server(engine: EngineConfig, serve: ServeConfig) -> None:
    """Returns after a signal and a clean stop. Raises if the engine cannot be started."""
    if not needs_download(engine.model):
        locate(engine)  # what is wrong with it is told at once, before the engine's process starts
    listening = _listen(serve)
    log = RequestLog(serve.request_log)
    with closing(start_logging()), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(engine, serve, listening, log))
    _leave_busy_threads()


def _leave_busy_threads() -> None:
    """End the process if texts are still being tokenised: Python would wait for that."""
    left = [thread for thread in threading.enumerate() if thread.name.startswith(THREADS)]
    for thread in left:
        thread.join(_THREAD_SECONDS)
    if any(thread.is_alive() for thread in left):
        sys.stdout.flush()
        os._exit(0)


async def _serve(
    engine: EngineConfig, serve: ServeConfig, listening: socket.socket, log: RequestLog
) -> None:
    service = Service(engine, serve)
    service.start()
    starting = asyncio.create_task(service.started())
    await asyncio.sleep(0)  # let the engine's process start
    try:
        # Imported here because it takes long, and the engine's process now loads meanwhile.
        from cairn.server.app import build_app

        limits = ConnectionLimits(serve.client_timeout, raise_file_limit())
        config = uvicorn.Config(
            build_app(service, engine, serve, log),
            log_level="warning",
            log_config=None,
            access_log=False,
            http=partial(Connection, limits),  # type: ignore[arg-type]
            ws="none",
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=int(serve.drain_timeout) + _AFTER_DRAIN,
        )
        server = _Server(config, service, serve.drain_timeout)
        serving = asyncio.create_task(server.serve([listening]))
        await asyncio.wait({starting, serving}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and starting.exception() is None:
            _announce(service, serve, listening)
        server.should_exit |= starting.done() and starting.exception() is not None
        await serving
    finally:
        starting.cancel()
        await service.close()
    if starting.done() and not starting.cancelled():
        starting.result()  # raises if the engine cannot be started


def _announce(service: Service, serve: ServeConfig, listening: socket.socket) -> None:
    assert service.client.ready is not None
    for note in service.client.ready.notes:
        _log.info("%s", note)
    host, port = listening.getsockname()[:2]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    address = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
    print(f"Cairn serves {service.model} at {address}/ (API: {address}/v1)", flush=True)
    if serve.api_key is None and serve.host not in _LOOPBACK:
        _log.warning(
            "anybody who can reach %s may use this server; set --api-key to change that", serve.host
        )


class _Server(uvicorn.Server):
    """Drains on a signal: refuses new requests, lets open ones complete, then fails the rest."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_timeout: float) -> None:
        super().__init__(config)
        self._service = service
        self._drain_timeout = drain_timeout

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own version raises the signal again before the engine is stopped."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._drain, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _drain(self, number: int) -> None:
        if not self.should_exit:
            self._service.drain()
            loop = asyncio.get_running_loop()
            loop.call_later(self._drain_timeout, self._service.give_up)
        self.handle_exit(number, None)


def _listen(serve: ServeConfig) -> socket.socket:
    """Listen before the model is loaded: a port in use is an error at once, /health answers."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            serve.host, serve.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, proto)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"host {serve.host}, port {serve.port} cannot be listened on: {error}; choose another "
            "with --host and --port (0 takes a free port)"
        ) from error
    listening.setblocking(False)
    return listening
