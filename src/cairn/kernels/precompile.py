"""Compiles kernels before they are needed: many at once, and only those that are not on disk.

    with collecting() as forms:
        ...  # launches only note which compiled form of their kernel they would use
    compile_all(forms, progress)

What kernels would have written is not initialised meanwhile. Triton keeps what it compiles on disk,
under a key of the code, its own version and the GPU; a form that is there is loaded in
milliseconds. All others are compiled in processes of their own, which do not touch the GPU.
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
"""progress(done, total), after each kernel."""


@dataclass(frozen=True, slots=True)
class KernelForm:
    """A kernel for arguments of certain types, with certain constants."""

    jit: Any  # Triton's JITFunction
    key: str
    """Under which the kernel looks for the form."""
    data: str
    """What it is compiled from, as Triton writes it down."""

    @property
    def name(self) -> str:
        return f"{self.jit.__module__}:{self.jit.__name__}"


class Collector:
    """Triton's hook before it compiles, while forms are collected."""

    def __init__(self) -> None:
        self.forms: list[KernelForm] = []
        self._known: set[tuple[str, str]] = set()
        self.seen: set[Hashable] = set()
        """Launches that need not be looked at again."""

    def __call__(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        form = KernelForm(fn.jit_function, key, compile["specialization_data"])
        if (form.name, key) not in self._known:
            self._known.add((form.name, key))
            self.forms.append(form)
        return True  # it is not to be compiled


@contextmanager
def collecting() -> Iterator[list[KernelForm]]:
    """Kernels are neither compiled nor launched within; the forms that they lack are listed."""
    before = knobs.runtime.jit_cache_hook
    collector = Collector()
    knobs.runtime.jit_cache_hook = collector
    try:
        yield collector.forms
    finally:
        knobs.runtime.jit_cache_hook = before


def is_collecting() -> bool:
    """For kernels that Triton does not compile: they are not to be launched then either."""
    return isinstance(knobs.runtime.jit_cache_hook, Collector)


def compile_all(forms: Sequence[KernelForm], progress: Progress | None = None) -> None:
    """Compile forms and load them onto the current device, so that launches find them there.

    Raises CairnError that names the kernel if one cannot be compiled.
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
    """Compiles the form here if it is not on disk."""
    launcher = form.jit.preload(form.data).run  # asking for it loads the binary
    assert launcher is not None


def _load_from_disk(form: KernelForm) -> bool:
    """Whether it is there."""
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
    """What Triton looks up in its cache on disk, and would compile if it is not there."""

    def make_ir(self, *_: Any, **__: Any) -> Any:
        raise _NotOnDiskError


class _NotOnDiskError(Exception):
    pass


@contextmanager
def _alone() -> Iterator[None]:
    """One process of the machine at a time: ranks and replicas want the same kernels, and who comes
    later finds them on disk."""
    folder = Path(knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "cairn.lock").open("w") as lock:
        with suppress(OSError):  # where files cannot be locked, the same is compiled twice
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        yield


def _compile(forms: Sequence[KernelForm]) -> Iterator[KernelForm]:
    """Each form when it is on disk."""
    waiting = list(reversed(forms))
    # A process takes some seconds to start: none is for one kernel alone.
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

    It is not one of multiprocessing's: those run the main script again, and a daemon has none.
    """

    def __init__(self) -> None:
        target = driver.active.get_current_target()
        self._form: KernelForm | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cairn.kernels.compile_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is this process's affair
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
        """Waits for the form that was begun."""
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
        with suppress(BrokenPipeError):  # it has ended: there will be no answer
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()


def _compiles_launchers() -> bool:
    """Triton 3.6 compiles a launcher in C for each kind of arguments; later ones have one for all
    of them."""
    return hasattr(nvidia, "make_launcher") and driver.active.launcher_cls is nvidia.CudaLauncher
