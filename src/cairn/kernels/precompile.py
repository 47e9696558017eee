"""Compiles kernels before they are needed: in parallel, and only those that are not on disk.

    with collecting() as forms:
        ...  # launches only record which compiled form of their kernel they would use
    compile_all(forms, progress)

While forms are collected, the outputs of kernels stay uninitialised. Triton caches compiled kernels
on disk, keyed by code, Triton version and GPU; loading one takes milliseconds. Missing ones are
compiled in worker processes, which do not touch the GPU.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from cairn.errors import CairnError

Progress = Callable[[int, int], None]
"""progress(done, total) is called after each kernel."""


@dataclass(frozen=True, slots=True)
class KernelForm:
    """A kernel specialized for certain argument types and constants."""

    jit: Any  # Triton's JITFunction
    key: str
    """Key of the form in the kernel's own cache."""
    data: str
    """Triton's serialized specialization data, from which the form is compiled."""

    @property
    def name(self) -> str:
        return f"{self.jit.__module__}:{self.jit.__name__}"


class Collector:
    """Installed as Triton's hook before compilation, while forms are collected."""

    def __init__(self) -> None:
        self.forms: list[KernelForm] = []
        self._known: set[tuple[str, str]] = set()
        self.seen: set[Hashable] = set()
        """Launches whose form has been recorded."""

    def __call__(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        form = KernelForm(fn.jit_function, key, compile["specialization_data"])
        if (form.name, key) not in self._known:
            self._known.add((form.name, key))
            self.forms.append(form)
        return True  # tells Triton not to compile


@contextmanager
def collecting() -> Iterator[list[KernelForm]]:
    """Within this context, launches neither compile nor run; the list gets the missing forms."""
    before = knobs.runtime.jit_cache_hook
    collector = Collector()
    knobs.runtime.jit_cache_hook = collector
    try:
        yield collector.forms
    finally:
        knobs.runtime.jit_cache_hook = before


def is_collecting() -> bool:
    """Whether forms are being collected. Kernels not written in Triton must not launch then."""
    return isinstance(knobs.runtime.jit_cache_hook, Collector)


def compile_all(forms: Sequence[KernelForm], progress: Progress | None = None) -> None:
    """Compile forms and load them onto the current device, ready for launches.

    Raises CairnError, which names the kernel, if one cannot be compiled.
    """
    done = 0

    def loaded() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, len(forms))

    def not_on_disk(some: Sequence[KernelForm]) -> list[KernelForm]:
        missing = []
        for form in some:
            if _load_from_disk(form):
                loaded()
            else:
                missing.append(form)
        return missing

    missing = not_on_disk(forms)
    if not missing:
        return
    with _alone():
        for form in _compile(not_on_disk(missing)):
            _load(form)
            loaded()


def _load(form: KernelForm) -> None:
    """Load the form; compiles it in this process if it is not on disk."""
    launcher = form.jit.preload(form.data).run  # reading `run` loads the binary
    assert launcher is not None


def _load_from_disk(form: KernelForm) -> bool:
    """Load the form if it is on disk; returns whether it was."""
    usual = form.jit.ASTSource
    form.jit.ASTSource = _OnDisk
    try:
        _load(form)
    except _NotOnDiskError:
        return False
    finally:
        form.jit.ASTSource = usual
    return True


class _OnDisk(ASTSource):  # type: ignore[misc]
    """A source that Triton looks up in its disk cache; raises instead of compiling on a miss."""

    def make_ir(self, *_: Any, **__: Any) -> Any:
        raise _NotOnDiskError


class _NotOnDiskError(Exception):
    pass


@contextmanager
def _alone() -> Iterator[None]:
    """Lock held by one process on the machine at a time.

    Ranks and replicas need the same kernels, and later ones find them on disk.
    """
    folder = Path(knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "cairn.lock").open("w") as lock:
        with suppress(OSError):  # without file locks, kernels may be compiled twice
            fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed
        yield


def _compile(forms: Sequence[KernelForm]) -> Iterator[KernelForm]:
    """Compile forms in worker processes; yields each form once it is on disk."""
    waiting = list(reversed(forms))
    # A process takes some seconds to start, so start no more than one for every two kernels.
    count = min(len(os.sched_getaffinity(0)), -(-len(forms) // 2))
    with ExitStack() as stack, DefaultSelector() as selector:
        for _ in range(count):
            worker = _Worker()
            stack.enter_context(worker.process)
            stack.callback(worker.process.kill)
            worker.begin(waiting.pop())
            selector.register(worker.answers, EVENT_READ, worker)
        while selector.get_map():
            for ready, _ in selector.select():
                yield ready.data.end()
                if waiting:
                    ready.data.begin(waiting.pop())
                else:
                    selector.unregister(ready.fileobj)


class _Worker:
    """A process that compiles one kernel at a time (see `compile_worker`).

    It does not use multiprocessing, which runs the main script again; a daemon has none.
    """

    def __init__(self) -> None:
        target = driver.active.get_current_target()
        self._form: KernelForm | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cairn.kernels.compile_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # only the parent handles Ctrl-C
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            },
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._orders, self.answers = self.process.stdin, self.process.stdout
        self._send(
            backend=target.backend,
            arch=target.arch,
            warp_size=target.warp_size,
            launchers=_compiles_launchers(),
        )

    def begin(self, form: KernelForm) -> None:
        self._form = form
        self._send(kernel=form.name, data=form.data)

    def end(self) -> KernelForm:
        """Wait for the form passed to `begin` and return it."""
        assert self._form is not None
        answer = self.answers.readline()
        if not answer:
            raise CairnError(
                f"kernel {self._form.name} was not compiled: its process ended with exit code "
                f"{self.process.wait()}; -9 may mean that memory ran out"
            )
        error = json.loads(answer)
        if error is not None:
            raise CairnError(f"kernel {self._form.name} cannot be compiled: {error}")
        return self._form

    def _send(self, **order: Any) -> None:
        with suppress(BrokenPipeError):  # the worker has ended; `end` reports it
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()


def _compiles_launchers() -> bool:
    """Whether Triton compiles a C launcher for each argument signature, as 3.6 does.

    Later versions share one launcher.
    """
    return hasattr(nvidia, "make_launcher") and driver.active.launcher_cls is nvidia.CudaLauncher
