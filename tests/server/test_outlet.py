"""Events reach a client at once, or, if it does not read, later, in order and once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from cairn.server.answer import Answer
from cairn.server.api_error import ApiError
from cairn.server.formats import Format, FormOptions
from cairn.server.outlet import Outlet
from cairn.server.token_texts import TokenTexts


class Client:
    """Reads while `reads` is set."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.got: list[bytes] = []

    async def send(self, message: Message) -> None:
        assert message["type"] == "http.response.body" and message["more_body"]
        if not self.reads.is_set():
            await self.reads.wait()
        self.got.append(message["body"])


def test_what_a_reader_is_sent_needs_no_task() -> None:
    async def main() -> None:
        client, outlet = Client(), Outlet()
        client.reads.set()
        outlet.write(b"early, ")
        outlet.write(b"too")
        assert client.got == []
        outlet.open(client.send)
        outlet.write(b"now")
        assert client.got == [b"early, too", b"now"]
        assert len(asyncio.all_tasks()) == 1
        await outlet.drained()

    asyncio.run(main())


def test_what_comes_while_a_client_does_not_read_follows_in_one_piece() -> None:
    async def main() -> None:
        client, outlet = Client(), Outlet()
        outlet.open(client.send)
        for part in (b"a", b"b", b"c"):
            outlet.write(part)
        await asyncio.sleep(0)
        outlet.write(b"d")
        assert client.got == []
        client.reads.set()
        await outlet.drained()
        assert client.got == [b"a", b"bcd"]
        outlet.write(b"e")
        assert client.got == [b"a", b"bcd", b"e"]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_a_client_that_is_given_up_is_sent_nothing_more() -> None:
    async def main() -> None:
        client, outlet = Client(), Outlet()
        outlet.open(client.send)
        outlet.write(b"a")
        outlet.write(b"b")
        await asyncio.sleep(0)
        outlet.close()
        client.reads.set()
        await outlet.drained()
        outlet.write(b"c")
        await asyncio.sleep(0)
        assert client.got == [] and len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_a_stop_is_told_to_a_client_that_does_not_read() -> None:
    async def main() -> None:
        answer = Answer([], Format("", "", [], [], TokenTexts(None), FormOptions()), 1, 0.0)
        answer.outlet.open(Client().send)
        answer.outlet.write(b"a")
        await asyncio.sleep(0)
        answer.fail(ApiError(503, "the server is stopping"))
        answer.outlet.close()
        with pytest.raises(ApiError, match="is stopping"):
            await answer.complete()

    asyncio.run(main())


def test_a_failure_to_send_is_told() -> None:
    async def main() -> None:
        async def at_once(message: Message) -> None:
            raise OSError("gone")

        outlet = Outlet()
        outlet.open(at_once)
        with pytest.raises(OSError, match="gone"):
            outlet.write(b"a")

        async def later(message: Message) -> Any:
            await asyncio.sleep(0)
            raise OSError("gone")

        outlet = Outlet()
        outlet.open(later)
        outlet.write(b"a")
        with pytest.raises(OSError, match="gone"):
            await outlet.drained()

    asyncio.run(main())
