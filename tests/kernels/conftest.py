from __future__ import annotations

import os
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of tests that run in two processes at once, those of this one."""
    half = os.environ.get("EVERY_OTHER_TEST")
    if half is not None:
        items[:] = items[int(half) :: 2]


@pytest.fixture(autouse=True)
def patch_language_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per launch and module: the interpreter patches `triton.language` at every call of a
    device function, which takes a third of the time and changes nothing after the first one."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[int] = set()  # globals, by id, of the functions called by this launch

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    def patch_once(fn: Any) -> Any:
        if id(fn.__globals__) in patched:
            return None
        patched.add(id(fn.__globals__))
        return patch(fn)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
