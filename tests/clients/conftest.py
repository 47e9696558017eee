"""Other people's clients, against a real server with the tiny model of tests/server."""

from __future__ import annotations

from tests.server.conftest import model_folder, server

__all__ = ["model_folder", "server"]
