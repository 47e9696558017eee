"""Makes Triton's interpreter faster, without a change of what it computes or checks."""

from __future__ import annotations

from typing import Any

import pytest


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[int] = set()  # globals, by id, of the functions called by this launch

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    def patch_once(fn: Any) -> Any:
        """The interpreter does it at every call of a device function. After the first one of a
        launch and module it changes nothing."""
        if id(fn.__globals__) in patched:
            return None
        patched.add(id(fn.__globals__))
        return patch(fn)

    find, known = interpreter._get_np_dtype, {}

    def numpy_type(kind: Any) -> Any:
        """It would be looked up in a new table at every operation."""
        name = kind.scalar.name
        if name not in known:
            known[name] = find(kind)
        return known[name]

    make_type = core.block_type.__init__
    # By element type (which stays alive in the value) and shape: what a type and its tensors have.
    types: dict[tuple[int, tuple[int, ...]], tuple[dict[str, Any], Any, Any]] = {}

    def type_once(self: Any, element: Any, shape: Any) -> None:
        sizes = tuple([size if type(size) is int else size.value for size in shape])
        if (id(element), sizes) not in types:
            make_type(self, element, shape)
            own = core.tuple([core.constexpr(size) for size in sizes])
            types[id(element), sizes] = dict(self.__dict__), own, core.constexpr(self.numel)
        self.__dict__.update(types[id(element), sizes][0])

    single = core.tuple([]), core.constexpr(1)

    def make_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = single
        if kind.is_block():
            _, self.shape, self.numel = types[id(kind.element_ty), tuple(kind.shape.values)]

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_others(self: Any, left: Any, right: Any) -> Any:
        """Most operands have the same shape."""
        if left.shape.values == right.shape.values:
            return left, right
        return broadcast(self, left, right)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_type)
    monkeypatch.setattr(core.block_type, "__init__", type_once)
    monkeypatch.setattr(core.tensor, "__init__", make_tensor)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_others)
    # Overflows would be looked for, and the result dropped: assertions are off.
    monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
