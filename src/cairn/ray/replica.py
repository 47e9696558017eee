"""A replica: the API in this actor, the engine in a child process, no port."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from dataclasses import replace

from ray import serve

from cairn.config import EngineConfig
from cairn.errors import CairnError
from cairn.ray.call import Call, Head, answer
from cairn.server.app import build_app
from cairn.server.middleware import RequestLog
from cairn.server.options import ServeConfig
from cairn.server.service import Service

NAME_HEADER = b"x-cairn-replica"


class Replica:
    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it; returns when the model is ready
        self, engine: EngineConfig, options: ServeConfig
    ) -> None:
        logging.getLogger("cairn").setLevel(logging.INFO)
        if options.api_key is None:  # the environment keeps it out of Ray's records
            options = replace(options, api_key=os.environ.get("CAIRN_API_KEY") or None)
        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        self._service = Service(engine, options)
        self._log = RequestLog(options.request_log)
        self._app = build_app(self._service, engine, options, self._log)
        self._service.start()
        await self._service.started()

    async def check_health(self) -> None:
        """Asked by Ray, which replaces a replica that raises."""
        health = self._service.health
        if health.state == "dead":
            raise CairnError(f"the engine is dead: {health.reason}")

    async def call(self, call: Call) -> AsyncIterator[Head | bytes]:
        async for part in answer(self._app, call):
            if isinstance(part, Head):
                yield Head(part.status, [*part.headers, (NAME_HEADER, self._name)])
            else:
                yield part

    async def __del__(self) -> None:
        """Called by Ray Serve once, before it ends the actor."""
        await self._service.close()
        self._log.close()
