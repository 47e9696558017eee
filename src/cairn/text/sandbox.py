"""Renders chat templates, which come with downloads, within limits of steps, size and time.

jinja2's sandbox keeps a template away from Python, but not from endless loops and huge strings. So
a template is changed before it is compiled: every loop and macro counts its steps. Whatever makes a
value spends from a budget before the value is made, or, where it cannot be much larger than its
operands, after. What cannot be bounded that way is left out: some filters, methods of numbers and
lists, and str.format.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache, partial
from types import CodeType
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes, pass_context
from jinja2.filters import FILTERS
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MOST_SOURCE = 2**18  # characters of a template
_SECONDS = 5.0
# Steps are nodes of the syntax tree that are evaluated; sizes are characters. Both grow with what
# the template is given.
_STEPS, _STEPS_PER_VALUE = 2**16, 2**10
_SIZE, _SIZE_PER_CHARACTER = 2**26, 2**5
_ELEMENT = 16  # what a new value in a list or dict counts for, in characters
_POINTER = 2  # and one that was there before
_LONGEST_ARGUMENT = 1000  # of a method that searches for each of its characters
_MOST_BITS = 2**12  # of whole numbers
_MOST_INDENT = 16
_MOST_DIGITS = 20  # that numbers are rounded to
_MOST_COLUMNS = 10_000  # of `batch` and `slice`

_METHODS: Mapping[type | tuple[type, ...], frozenset[str]] = {
    str: frozenset(
        """
        capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit
        islower isnumeric isspace istitle isupper join lower lstrip partition removeprefix
        removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip
        swapcase title upper
        """.split()
    ),
    dict: frozenset(("get", "items", "keys", "values")),
    (list, tuple, range, int, float): frozenset(),
    LoopContext: frozenset(
        """
        cycle depth depth0 first index index0 last length nextitem previtem revindex revindex0
        """.split()
    ),
}

# Filters whose result is at most a few times as large as what they get.
_PLAIN_FILTERS = """
    abs attr capitalize count d default e escape first float forceescape int items last length lower
    map reject rejectattr reverse safe select selectattr title trim truncate upper wordcount
""".split()
_COMPARING_FILTERS = "dictsort groupby max min sort unique".split()
_COMPARING_TESTS = "in == eq equalto != ne > gt greaterthan ge >= < lt lessthan <= le".split()
_WIDE = re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%(]*(?:\d{4}|\*)")  # formats such as %1000d and %*d
_MOST_FORMAT = 10_000  # characters of a format string


class LimitError(TemplateError):
    """A template went beyond a limit."""


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Raises whatever the template raises, and LimitError."""
    code = _compile(source)
    environment = _Environment()
    values, characters, _ = environment.measure(dict(variables))
    environment.steps_left = _STEPS + _STEPS_PER_VALUE * values
    environment.size_left = _SIZE + _SIZE_PER_CHARACTER * characters
    template = Template.from_code(environment, code, environment.globals)
    return template.render(variables)


@lru_cache(maxsize=4)
def _compile(source: str) -> CodeType:
    if len(source) > MOST_SOURCE:
        raise LimitError(f"it has {len(source)} characters; at most {MOST_SOURCE} are read")
    environment = _Environment()
    tree = _Counting().visit(environment.parse(source))
    tree.set_environment(environment)
    return environment.compile(tree)


class _Counting(NodeTransformer):
    """Makes a template count its steps, and sends through filters what no hook of jinja2 sees."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        if node.test is not None:
            one_step = nodes.Filter(nodes.Const(True), "_step", [], [], None, None)
            node.test = nodes.And(one_step, node.test)
        return self._counted(node)

    def _counted(self, node: Any) -> nodes.Node:
        """Each run of the body counts its nodes as steps, and its text as size."""
        self.generic_visit(node)
        inner = [each for part in node.body for each in (part, *part.find_all(nodes.Node))]
        text = sum(len(each.data) for each in inner if isinstance(each, nodes.TemplateData))
        cost: list[nodes.Expr] = [nodes.Const(len(inner) + 1), nodes.Const(text)]
        step = nodes.Filter(nodes.Const(True), "_step", cost, [], None, None)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        assert isinstance(node, nodes.Node)
        return node

    visit_Macro = visit_CallBlock = visit_Block = _counted  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "_concat", [], [], None, None, lineno=node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _through("_compared", node.expr)
        for operand in node.ops:
            operand.expr = _through("_compared", operand.expr)
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        """A list instead: the hash of nested tuples takes time without limit."""
        self.generic_visit(node)
        return nodes.List(node.items, lineno=node.lineno) if node.ctx == "load" else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.key = _through("_key", node.key)
        return node


def _through(name: str, node: nodes.Expr) -> nodes.Expr:
    """The expression, sent through a filter."""
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(SandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            optimized=False,  # nothing is computed while compiling
            finalize=_printed,
            cache_size=0,
        )
        for name in ("cycler", "joiner", "lipsum"):
            del self.globals[name]
        self.globals["dict"] = _dict
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.filters = _FILTERS
        self.tests = _TESTS
        self.steps_left = self.size_left = math.inf
        self._deadline = time.monotonic() + _SECONDS

    # -- the meter ----------------------------------------------------------------------------

    def step(self, count: int = 1) -> None:
        self.steps_left -= count
        if self.steps_left < 0:
            raise LimitError("it takes too many steps")
        if time.monotonic() > self._deadline:
            raise LimitError(f"it takes longer than {_SECONDS:g} seconds")

    def spend(self, size: int) -> None:
        self.size_left -= size
        if self.size_left < 0:
            raise LimitError("what it makes is too large")

    def measure(self, value: Any) -> tuple[int, int, int]:
        """Values within a value, the characters it is printed with, and its depth.

        What is there twice counts twice, and measuring takes steps.
        """
        values = characters = deepest = 0
        waiting = [(value, 1)]
        while waiting:
            each, depth = waiting.pop()
            values, deepest = values + 1, max(deepest, depth)
            if isinstance(each, str):
                characters += len(each)
                continue
            if isinstance(each, list | tuple | Mapping):
                self.step(len(each))
            if isinstance(each, Mapping):
                waiting.extend((item, depth + 1) for pair in each.items() for item in pair)
            elif isinstance(each, list | tuple):
                waiting.extend((item, depth + 1) for item in each)
            elif isinstance(each, Namespace):
                raise LimitError("a namespace cannot be printed or compared")
        return values, characters + _ELEMENT * values, deepest

    def made(self, value: Any) -> Any:
        """The same value, after it was spent for."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, list | tuple):
            self.spend(_POINTER * len(value))
        elif isinstance(value, dict):
            self.spend(_ELEMENT * len(value))
        elif isinstance(value, Iterator):
            return self._counted(value)
        return value

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.step()
            self.spend(_ELEMENT)
            yield value

    def text(self, value: Any) -> str:
        """The value as text, spent for before it is made."""
        if not isinstance(value, str | int | float):
            self.spend(self.measure(value)[1])
        return self.made(str(value))  # type: ignore[no-any-return]

    def joined(self, separator: str, values: Any) -> str:
        texts = [self.text(value) for value in self._counted(values)]
        self.spend(sum(map(len, texts)) + len(separator) * len(texts))
        return separator.join(texts)

    # -- hooks of jinja2 ----------------------------------------------------------------------

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, names in _METHODS.items():
            if isinstance(obj, kind):
                return attr in names
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """str.format is an attribute like any other, and not a safe one."""

    def getitem(self, obj: Any, argument: Any) -> Any:
        found = super().getitem(obj, argument)
        return self.made(found) if isinstance(argument, slice) else found

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.step()
        text = getattr(obj, "__self__", None)
        if isinstance(text, str):
            if obj.__name__ == "join":
                return self.joined(text, *args)
            self._check_method(text, obj.__name__, [*args, *kwargs.values()])
        return self.made(super().call(context, obj, *args, **kwargs))

    def _check_method(self, text: str, name: str, arguments: list[Any]) -> None:
        words = [argument for argument in arguments if isinstance(argument, str)]
        if name == "replace" and len(words) > 1:
            self.spend(len(text) + text.count(words[0]) * len(words[1]))
        elif name in ("split", "rsplit", "splitlines"):
            self.spend(_ELEMENT * (text.count(words[0]) if words and words[0] else len(text) // 4))
        elif "strip" in name and any(len(word) > _LONGEST_ARGUMENT for word in words):
            raise LimitError(f"{name} has an argument of more than {_LONGEST_ARGUMENT} characters")
        if name in ("rfind", "rindex", "rpartition", "rsplit") and words:
            # A search from the right may compare each character with each.
            self.step(len(text) * len(words[0]) // 1000)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            times = right if operator == "**" else 1
            if left.bit_length() * times + right.bit_length() > _MOST_BITS:
                raise LimitError(f"it computes with numbers of more than {_MOST_BITS} bits")
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int):
                    self.spend(len(many) * max(times, 0) * _POINTER)
        elif operator == "%" and isinstance(left, str):
            if len(left) > _MOST_FORMAT or _WIDE.search(left):
                raise LimitError("it has a format that is too long, or wider than 999 characters")
            self.spend(left.count("%") * self.measure(right)[1])
            right = tuple(right) if isinstance(right, list) else right
        return self.made(super().call_binop(context, operator, left, right))


# -- filters ----------------------------------------------------------------------------------


def _metered(function: Callable[..., Any], *, compares: bool = False) -> Callable[..., Any]:
    """A filter of jinja2 that spends for its result, and steps for what it compares."""
    passed = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def call(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        environment = _of(context)
        environment.step()
        if compares:
            value = list(value) if isinstance(value, Iterator) else value
            environment.step(environment.measure(value)[0])
        first = {
            "context": context,
            "environment": context.environment,
            "eval_context": context.eval_ctx,
        }
        given = () if passed is None else (first[passed.name],)
        return environment.made(function(*given, value, *args, **kwargs))

    return call


def _comparing(test: Any) -> Callable[..., bool]:
    @pass_context
    def call(context: Context, *args: Any) -> bool:
        for value in args:
            _compare(context, value)
        return bool(test(*args))

    return call


@pass_context
def _compare(context: Context, value: Any) -> Any:
    if isinstance(value, list | tuple | Mapping):
        environment = _of(context)
        environment.step(environment.measure(value)[0])
    return value


@pass_context
def _key(context: Context, value: Any) -> Any:
    if not isinstance(value, str | int | float | None):
        raise LimitError(f"a key of a dict is a {type(value).__name__}; use text or numbers")
    return value


@pass_context
def _step(context: Context, value: bool, steps: int = 1, size: int = 0) -> bool:
    environment = _of(context)
    environment.step(steps)
    environment.spend(size)
    return value


@pass_context
def _printed(context: Context, value: Any) -> str:
    return _of(context).text(value)


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    return _of(context).joined("", values)


@pass_context
def _join(context: Context, value: Any, d: str = "", attribute: str | None = None) -> str:
    environment = _of(context)
    if attribute is not None:
        value = environment.filters["map"](context, value, attribute=attribute)
    return environment.joined(str(d), value)


@pass_context
def _format(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
    return _of(context).call_binop(context, "%", str(value), kwargs or list(args))


@pass_context
def _list(context: Context, value: Any) -> list[Any]:
    environment = _of(context)
    if hasattr(value, "__len__"):
        environment.spend(_ELEMENT * len(value))
    return list(value)


@pass_context
def _replace(context: Context, value: Any, old: str, new: str, count: int | None = None) -> str:
    environment = _of(context)
    text = environment.text(value)
    environment.spend(text.count(str(old)) * len(str(new)))
    return text.replace(str(old), str(new), -1 if count is None else count)


@pass_context
def _indent(
    context: Context, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> Any:
    columns = width if isinstance(width, int) else len(width)
    if columns > _MOST_COLUMNS:
        raise LimitError(f"indent has a width of {columns}; at most {_MOST_COLUMNS} is possible")
    environment = _of(context)
    text = environment.text(value)
    environment.spend((len(text.splitlines()) + 1) * columns)
    return environment.made(FILTERS["indent"](text, width, first, blank))


@pass_context
def _columns(
    context: Context, value: Any, columns: int, fill_with: Any = None, *, name: str
) -> Any:
    if not 1 <= columns <= _MOST_COLUMNS:
        raise LimitError(f"{name} has {columns} columns; 1 to {_MOST_COLUMNS} are possible")
    environment = _of(context)
    environment.spend(_ELEMENT * columns)
    return environment.made(FILTERS[name](value, columns, fill_with))


@pass_context
def _round(context: Context, value: Any, precision: int = 0, method: Any = "common") -> Any:
    if abs(precision) > _MOST_DIGITS:
        raise LimitError(
            f"round has a precision of {precision}; at most {_MOST_DIGITS} is possible"
        )
    return FILTERS["round"](value, precision, method)


@pass_context
def _tojson(
    context: Context,
    value: Any,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own, as chat templates expect it: no escapes, keys in their order."""
    if indent is not None and indent > _MOST_INDENT:
        raise LimitError(f"tojson has an indent of {indent}; at most {_MOST_INDENT} is possible")
    environment = _of(context)
    values, characters, depth = environment.measure(value)
    marks = environment.measure(separators)[1]
    environment.spend(2 * characters + values * ((indent or 0) * depth + marks))
    return json.dumps(
        value,
        indent=indent,
        ensure_ascii=ensure_ascii,
        separators=None if separators is None else tuple(separators),
        sort_keys=sort_keys,
    )


def _of(context: Context) -> _Environment:
    environment: Environment = context.environment
    assert isinstance(environment, _Environment)
    return environment


def _dict(given: Mapping[Any, Any] | None = None, /, **more: Any) -> dict[Any, Any]:
    if not isinstance(given, Mapping | None):
        raise LimitError("dict() takes a dict and names with values")
    return {**(given or {}), **more}


def _raise(message: str) -> None:
    raise TemplateError(message)


_FILTERS: dict[str, Callable[..., Any]] = {
    **{name: _metered(FILTERS[name]) for name in _PLAIN_FILTERS},
    **{name: _metered(FILTERS[name], compares=True) for name in _COMPARING_FILTERS},
    "batch": pass_context(partial(_columns, name="batch")),
    "format": _format,
    "indent": _indent,
    "join": _join,
    "list": _list,
    "replace": _replace,
    "round": _round,
    "slice": pass_context(partial(_columns, name="slice")),
    "string": _printed,
    "tojson": _tojson,
    "_compared": _compare,
    "_concat": _concat,
    "_key": _key,
    "_step": _step,
}
_TESTS = {**TESTS, **{name: _comparing(TESTS[name]) for name in _COMPARING_TESTS}}
