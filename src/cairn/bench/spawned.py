"""A `cairn serve` that a benchmark starts, waits for and stops.

Servers stream text and presets have no tokenizer, so a preset gets one here: each token is a word.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

from cairn.errors import CairnError, ConfigError
from cairn.models.config_reader import ConfigReader
from cairn.models.presets import PRESETS
from cairn.models.registry import read_spec

_KEPT_LINES = 200
_STOP_SECONDS = 60
_END_SECONDS = 2  # to wait for the end of a process whose connections failed
_ADDRESS = re.compile(r"\(API: (http://\S+)\)")


class Spawned:
    """The process, its address and the last lines it printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._begin = time.perf_counter()
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())
        self.seconds_to_ready = 0.0

    @property
    def output(self) -> str:
        return "".join(self._lines)

    async def check(self) -> None:
        """Raises CairnError if the process has ended. Call it when a request has failed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                code = await self._process.wait()
                await self._reading  # all of its output
                raise CairnError(f"it ended with exit code {code}")

    async def wait_until_ready(self) -> str:
        """Returns the URL of the API."""
        either: list[asyncio.Future[Any]] = [self._reading, self._address]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._address.done():
            code = await self._process.wait()
            raise CairnError(f"it ended with exit code {code} before it was ready")
        self.seconds_to_ready = time.perf_counter() - self._begin
        return self._address.result()

    async def stop(self) -> None:
        """Ask the process to end, and kill it if it does not."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._process.wait()
        await self._reading

    def _signal(self, number: signal.Signals) -> None:
        """asyncio's own method may take the exit code from the task that waits for it."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def _read(self) -> None:
        """Read all output, so that the process never blocks on a full pipe."""
        assert self._process.stdout is not None
        async for data in self._process.stdout:
            line = data.decode(errors="replace")
            self._lines.append(line)
            found = _ADDRESS.search(line)
            if found is not None and not self._address.done():
                self._address.set_result(found[1])


def check_flags(flags: Sequence[str]) -> None:
    """Raises ConfigError if they name a preset that cannot have a tokenizer."""
    preset = _preset(flags)
    if preset is None:
        return
    try:
        read_spec(ConfigReader(PRESETS[preset], preset))
    except ConfigError as error:
        raise ConfigError(
            f"--spawn: preset {preset} cannot be given a tokenizer, and servers stream text; name "
            "a model folder or another preset"
        ) from error


@contextlib.asynccontextmanager
async def spawn(flags: Sequence[str]) -> AsyncIterator[Spawned]:
    """`cairn serve` with these flags, on a free port unless they name one; stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="cairn-bench-") as folder:
        preset = _preset(flags)
        if preset is not None:
            _write_preset(Path(folder), PRESETS[preset])
            flags = [*flags, f"--model={folder}", f"--served-model-name={preset}"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cairn.cli.main", "serve", "--port=0", "--request-log=off"),
            *flags,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=1 << 20,
        )
        server = Spawned(process)
        try:
            yield server
        finally:
            await server.stop()


def _preset(flags: Sequence[str]) -> str | None:
    """The preset that --model names, if it names one."""
    parser = argparse.ArgumentParser("--spawn", add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default="")
    model: str = parser.parse_known_args(flags)[0].model
    return model if model in PRESETS and not Path(model).exists() else None


def _write_preset(folder: Path, config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"\u0120w{token}": token for token in range(config["vocab_size"])}  # \u0120: a blank
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
