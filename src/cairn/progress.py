"""A progress bar for what takes long: on standard error, and only where somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)


@contextmanager
def loading_bar(label: str, *, counted: bool = False) -> Iterator[Callable[[int, int], None]]:
    """`counted`: shows how many are done of how many, not the share."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn() if counted else TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(label, total=None)
    started = False

    def update(done: int, total: int) -> None:
        nonlocal started
        if not started:  # not before: a question may come first
            bar.start()
            started = True
        bar.update(task, completed=done, total=total)
        if done >= total:  # what comes next may have a bar of its own
            bar.stop()
            started = False

    try:
        yield update
    finally:
        if started:
            bar.stop()
