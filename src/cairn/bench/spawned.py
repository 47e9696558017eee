"""A `cairn serve` that a benchmark starts, waits for and stops.

Servers stream text and presets have no tokenizer, so a preset gets one here: each token is a word.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tokenizers import Tokenizer, decoders, models

from cairn.errors import CairnError, ConfigError
from cairn.models.config_reader import ConfigReader
from cairn.models.presets import PRESETS
from cairn.models.registry import read_spec

_KEPT_LINES = 200
_STOP_SECONDS = 60
_END_SECONDS = 2  # to wait for the end of a process whose connections failed
_LOOK_SECONDS = 0.02  # between two looks at what a process has printed
_ADDRESS = re.compile(r"\(API: (http://\S+)\)")


class Spawned:
    """The process, which prints to a file, and its address."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log
        self._begin = time.perf_counter()
        self.seconds_to_ready = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        """The last lines it printed."""
        lines = self._log.read_text(errors="replace").splitlines(keepends=True)
        return "".join(lines[-_KEPT_LINES:])

    def check(self) -> None:
        """Raises CairnError if the process has ended. Call it when a request has failed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_END_SECONDS)
            raise CairnError(f"it ended with exit code {code}")

    def wait_until_ready(self) -> str:
        """Returns the URL of the API."""
        while (found := _ADDRESS.search(self.output)) is None:
            code = self._process.poll()
            if code is not None:
                raise CairnError(f"it ended with exit code {code} before it was ready")
            time.sleep(_LOOK_SECONDS)
        self.seconds_to_ready = time.perf_counter() - self._begin
        return found[1]

    def stop(self) -> int | None:
        """Ask the process to end; returns its exit code, or None if it had to be killed."""
        try:
            self._process.terminate()
            return self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            return None
        except BaseException:  # a second signal: whoever sent it does not want to wait
            self._kill()
            raise

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()


class _Interrupts:
    """Raises SystemExit on SIGTERM and KeyboardInterrupt on SIGINT, so that `finally` runs.

    Signals that come before `deliver` is called wait for it: an exception while a process is being
    started would leave that process behind.
    """

    def __init__(self) -> None:
        self._delivers = False
        self._pending: int | None = None

    def receive(self, number: int, _: FrameType | None) -> None:
        self._pending = number
        if self._delivers:
            self.deliver()

    def deliver(self) -> None:
        self._delivers = True
        number, self._pending = self._pending, None
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number is not None:
            raise SystemExit(128 + number)  # as a shell reports a process that a signal ended


@contextlib.contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    """Handles SIGTERM and SIGINT, except those that this process ignores. Only the main thread
    can; in others nothing is changed."""
    received = _Interrupts()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, received.receive)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


@contextlib.contextmanager
def spawn(flags: Sequence[str]) -> Iterator[Spawned]:
    """`cairn serve` with these flags, on a free port unless they name one; stopped at the end,
    which SIGTERM and SIGINT bring about too."""
    with tempfile.TemporaryDirectory(prefix="cairn-bench-") as name, _interrupts() as interrupts:
        folder, preset = Path(name), _preset(flags)
        if preset is not None:
            _write_preset(folder, PRESETS[preset])
            flags = [*flags, f"--model={folder}", f"--served-model-name={preset}"]
        command = [sys.executable, "-m", "cairn.cli.main", "serve", "--port=0", "--request-log=off"]
        log = folder / "output.txt"
        with log.open("wb") as output:
            process = subprocess.Popen([*command, *flags], stdout=output, stderr=output)
        server = Spawned(process, log)
        try:
            interrupts.deliver()
            yield server
        finally:
            server.stop()


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
