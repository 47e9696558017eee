"""Where the Ray application sends a prompt; needs no Ray."""

from __future__ import annotations

import json
import random

import pytest

from cairn.ray.affinity import BLOCK, Affinity, blocks_of

msgspec = pytest.importorskip("msgspec")

from cairn.ray.prompt_text import routing_text  # noqa: E402


def idle(*names: str) -> dict[str, int]:
    return dict.fromkeys(names, 0)


def test_equal_hashes_are_equal_prefixes() -> None:
    text = "".join(random.Random(0).choices("abc", k=5 * BLOCK + 7))
    blocks = blocks_of(text)
    assert len(blocks) == 5
    assert blocks_of(text + "more") == blocks
    assert blocks_of(text[: 3 * BLOCK]) == blocks[:3]
    other = blocks_of("x" + text[1:])
    assert not set(other) & set(blocks)  # later blocks are the same text behind another beginning
    assert blocks_of("short") == ()
    assert len(blocks_of("\ud800" * BLOCK)) == 1


def test_a_prefix_returns_and_new_ones_take_turns() -> None:
    affinity = Affinity(imbalance=4)
    texts = [f"{number} " * BLOCK for number in range(10)]
    homes = [affinity.choose(blocks_of(text), idle("a", "b")) for text in texts]
    assert homes.count("a") == homes.count("b") == 5
    for text, home in zip(texts, homes, strict=True):
        assert affinity.choose(blocks_of(text + "and more " * 99), idle("a", "b")) == home


def test_a_busy_owner_is_passed_over_until_it_is_calm() -> None:
    affinity = Affinity(imbalance=4)
    blocks = blocks_of("text " * BLOCK)
    home = affinity.choose(blocks, idle("a", "b"))
    other = "b" if home == "a" else "a"
    assert affinity.choose(blocks, {home: 4, other: 0}) == home
    assert affinity.choose(blocks, {home: 5, other: 0}) == other
    assert affinity.choose(blocks, {home: 5, other: 1}) == home


def test_a_small_common_beginning_decides_nothing() -> None:
    affinity = Affinity(imbalance=4)
    system = "be brief. " * 26  # one block of many
    homes = [
        affinity.choose(blocks_of(system + f"{number} " * 5 * BLOCK), idle("a", "b"))
        for number in range(8)
    ]
    assert homes.count("a") == 4


def test_prefixes_of_a_lost_replica_move() -> None:
    affinity = Affinity(imbalance=4)
    blocks = [blocks_of(f"{number} " * BLOCK) for number in range(6)]
    for each in blocks:
        affinity.choose(each, idle("a", "b"))
    assert {affinity.choose(each, idle("b")) for each in blocks} == {"b"}
    assert {affinity.choose(each, idle("b", "c")) for each in blocks} == {"b"}
    assert affinity.choose(blocks_of("new " * BLOCK), idle("b", "c")) == "c"


def test_the_oldest_prefix_is_forgotten_from_its_end() -> None:
    affinity = Affinity(imbalance=4, remembered=8)
    first, second = blocks_of("one " * BLOCK), blocks_of("two " * BLOCK)
    assert len(first) == len(second) == 4
    for each in (first, second):
        affinity.choose(each, idle("a", "b"))
    affinity.choose(first, idle("a", "b"))
    third = blocks_of("six " * BLOCK)[:2]
    affinity.choose(third, idle("a", "b"))
    assert list(affinity._owners) == [*second[1::-1], *first[::-1], *third[::-1]]
    # What is left is still its beginning.
    owner = affinity._owners[second[0]]
    assert affinity.choose(second, idle("a", "b")) == owner


def test_the_text_of_a_conversation_begins_with_that_of_a_shorter_one() -> None:
    messages = [{"role": "user", "content": "What is a cairn?"}]
    longer = [
        *messages,
        {"role": "assistant", "content": "A heap of stones."},
        {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
    ]

    def text(path: str, **body: object) -> str:
        return routing_text(path, json.dumps(body).encode())

    chat, plain = "/v1/chat/completions", "/v1/completions"
    short = text(chat, messages=messages)
    assert "cairn" in short and text(chat, messages=longer).startswith(short)
    assert text(chat, messages=messages, cache_salt="s") != short
    assert "Why?" in text(chat, messages=longer)
    one = text(plain, prompt="One")
    assert text(plain, prompt=["One", "Two"]) == one
    assert text(plain, prompt=[1, 2, 3]).startswith(text(plain, prompt=[1, 2]))
    assert text(plain, prompt=[[1, 2], [3]]) == text(plain, prompt=[1, 2])


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"\xff", b'{"messages": 3}', b'{"messages": [3]}', b'{"prompt": null}'],
)
def test_what_cannot_be_read_is_left_to_the_replica(body: bytes) -> None:
    assert routing_text("/v1/chat/completions", body) == ""
    assert routing_text("/v1/models", b'{"prompt": "text"}') == ""


def test_other_apis_are_routed_by_their_conversation_too() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    more = [*turns, {"role": "user", "content": "c"}]

    def text(path: str, **body: object) -> str:
        return routing_text(path, json.dumps(body).encode())

    for path, name, system in (
        ("/v1/messages", "messages", "system"),
        ("/responses", "input", "instructions"),
    ):
        short = text(path, **{name: turns, system: "Be brief."})
        assert "Be brief." in short
        assert text(path, **{name: more, system: "Be brief."}).startswith(short)
    assert text("/v1/responses", input="Hello").endswith("Hello")
