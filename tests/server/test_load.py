"""Many at once, long next to short, and input nobody should send."""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from cairn import LLM
from tests.patience import PATIENCE
from tests.server.process import ServerProcess

STREAMS = 200
TOKENS = 24


def memory_mib(server: ServerProcess) -> dict[int, float]:
    """Resident memory of the server's two processes."""
    found = {}
    for pid in (server.pid, server.engine_pid()):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                found[pid] = int(line.split()[1]) / 1024
    return found


async def stream_tokens(client: httpx.AsyncClient, body: dict[str, Any]) -> list[int]:
    """Bytes of every token, from the log-probabilities, which come one entry per token."""
    found: list[int] = []
    said = b""
    request = {**body, "stream": True, "logprobs": True}
    async with client.stream("POST", "/v1/chat/completions", json=request) as stream:
        assert stream.status_code == 200, await stream.aread()
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            (choice,) = event["choices"]
            said += (choice["delta"].get("content") or "").encode()
            if choice["logprobs"]:
                for entry in choice["logprobs"]["content"]:
                    found += entry["bytes"]
    assert said == bytes(found).decode(errors="replace").encode()
    return found


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"question {number}"}]


def test_two_hundred_streams_lose_and_repeat_nothing(model_folder: Path, tmp_path: Path) -> None:
    # float64: what a token is must not depend on who shares its batch.
    options: dict[str, Any] = {"dtype": "float64", "max_running_requests": STREAMS}
    with LLM(model_folder, device="cpu", **options) as llm:
        assert llm.tokenizer is not None
        prompts = [llm.tokenizer.apply_chat_template(question(i)) for i in range(STREAMS)]
        results = llm.generate(prompts, max_tokens=TOKENS, ignore_eos=True)
        alphabet = {i: c for c, i in llm.tokenizer.fast.get_vocab().items()}
        spelled = [[alphabet[token] for token in result.token_ids] for result in results]
    flags = ("--dtype=float64", f"--max-running-requests={STREAMS}")
    with ServerProcess(model_folder, tmp_path / "log", *flags) as server:

        async def round_of() -> list[list[int]]:
            limits = httpx.Limits(max_connections=STREAMS)
            async with httpx.AsyncClient(
                base_url=server.url, limits=limits, timeout=PATIENCE
            ) as client:
                body = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
                return await asyncio.gather(
                    *(
                        stream_tokens(client, {**body, "messages": question(i)})
                        for i in range(STREAMS)
                    )
                )

        rounds, used = [], []
        for _ in range(3):
            rounds.append(asyncio.run(round_of()))
            used.append(memory_mib(server))
        server.wait_until_idle()
    spell = _spelling()
    expected = [[spell[c] for c in letters] for letters in spelled]
    assert all(found == expected for found in rounds)
    # What leaks, leaks in every round; what an allocator keeps, it takes once.
    for pid in used[0]:
        assert min(b[pid] - a[pid] for a, b in pairwise(used)) < 4, used


def _spelling() -> dict[str, int]:
    from cairn.server.token_texts import byte_alphabet
    from cairn.text.tokenizer import Tokenizer
    from tests.helpers import byte_tokenizer

    alphabet = byte_alphabet(Tokenizer(byte_tokenizer(), None))
    assert alphabet is not None
    return alphabet


async def beside(server: ServerProcess, disturb: Any) -> int:
    """Number of tokens of a stream that came while something else was going on."""
    body = {"prompt": "tick", "max_tokens": 3500, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
        tokens = 0
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.aiter_lines()
            for _ in range(20):
                await anext(lines)
            task = asyncio.create_task(disturb(client))
            while not task.done() and (line := await anext(lines, None)) is not None:
                tokens += bool(line)
            await task
    return tokens


def test_a_long_prompt_being_tokenised_holds_up_nobody(server: ServerProcess) -> None:
    # Were it done where streams are served, a token or two would come in between.
    tries = (asyncio.run(beside(server, tokenise_much)) for _ in range(5))
    assert any(tokens > 5 for tokens in tries)


async def tokenise_much(client: httpx.AsyncClient) -> None:
    text = "the cairn " * 10_000  # 100,000 tokens here
    answer = await client.post("/tokenize", json={"prompt": text})
    assert answer.status_code == 200
    refused = await client.post("/v1/completions", json={"prompt": text})
    assert refused.status_code == 400


@functools.cache
def large_bodies() -> list[bytes]:
    return [body for body in bodies() if len(body) > 1_000_000]


async def send_large_bodies(client: httpx.AsyncClient) -> None:
    for body in large_bodies():
        headers = {"content-type": "application/json"}
        answer = await client.post("/v1/completions", content=body, headers=headers)
        assert 400 <= answer.status_code < 500


def bodies() -> Iterator[bytes]:
    """Broken, wrong and huge; none of them can be answered."""
    rng = random.Random(3)
    good: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    yield from (b"", b"{", b"[]", b"null", b"1e999", b'"x"', b"\xff\xfe", b"{}" * 3, b"nan")
    yield b"[" * 100_000
    yield b'{"messages":' * 2000
    yield b'{"messages": [{"role": "user", "content": "\xff"}]}'
    yield b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    yield b'{"\\ud800": 1}'
    yield b'{"model": "\\u0000", "messages": [{"role": "user", "content": "x"}]}'
    values: list[Any] = [
        None,
        True,
        -1,
        1e400,
        10**30,
        "",
        "x",
        [],
        {},
        [[]],
        {"a": {}},
        "9" * 5000,
    ]
    fields = ["messages", "n", "max_tokens", "stop", "logit_bias", "response_format", "tools"]
    fields += ["temperature", "seed", "stream_options", "tool_choice", "cairn", "top_k", "user"]
    for name in fields:
        for value in values:
            yield json.dumps({**good, name: value}).encode()
    for _ in range(20):
        text = bytearray(json.dumps(good).encode())
        for _ in range(rng.randrange(1, 6)):
            text[rng.randrange(len(text))] = rng.randrange(256)
        yield bytes(text)
    for prompt in ("x" * 10_000_000, "\U0001f600" * 2_400_000):
        yield json.dumps({"prompt": prompt}, ensure_ascii=False).encode()
    yield json.dumps({**good, "messages": good["messages"] * 200_000}).encode()
    yield json.dumps({**good, "stop": ["y" * 1000] * 5000}).encode()
    yield json.dumps({**good, "logit_bias": {str(i): 1 for i in range(100_000)}}).encode()
    yield json.dumps({"prompt": [[1]] * 300_000}).encode()
    yield json.dumps({"prompt": list(range(300_000))}).encode()


def test_fuzzed_bodies_get_4xx_and_disturb_nobody(server: ServerProcess) -> None:
    seen: dict[int, int] = {}
    rng = random.Random(5)

    async def disturb(client: httpx.AsyncClient) -> None:
        for body in bodies():
            paths = ["/v1/chat/completions", "/v1/completions"]
            paths += ["/tokenize", "/detokenize"] if not seen.get(413) else []
            for path in rng.sample(paths, 2):
                headers = {"content-type": "application/json"}
                answer = await client.post(path, content=body, headers=headers)
                assert answer.status_code == 200 or 400 <= answer.status_code < 500, body[:200]
                if answer.status_code != 200:
                    assert answer.json()["error"]["message"]
                seen[answer.status_code] = seen.get(answer.status_code, 0) + 1

    async def main() -> None:
        body = {"prompt": "calm", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
            before = (await client.post("/v1/completions", json=body)).json()
            neighbour = asyncio.create_task(client.post("/v1/completions", json=body))
            await disturb(client)
            assert (await neighbour).json()["choices"][0]["text"] == before["choices"][0]["text"]

    asyncio.run(main())
    assert seen[400] > 150 and seen[413] >= 2
    tries = (asyncio.run(beside(server, send_large_bodies)) for _ in range(3))
    assert any(tokens > 10 for tokens in tries)
    assert server.get("/health").status_code == 200
    assert not [line for line in server.errors if "Traceback" in line]
    server.wait_until_idle()
