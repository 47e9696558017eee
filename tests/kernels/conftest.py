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
def hurry_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch `triton.language` once per launch and module: the interpreter does it at every call of
    a device function, which takes a third of the time and changes nothing after the first one. And
    keep numpy's types, which it looks up in a new table at every operation."""
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

    find, known = interpreter._get_np_dtype, {}

    def numpy_type(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = find(kind)
        return known[name]

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_type)
