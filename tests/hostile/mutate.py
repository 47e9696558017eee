"""Changes to files: single bytes, numbers, pieces, and the structure of JSON."""

from __future__ import annotations

import json
import random
import re
from typing import Any

_NUMBERS = [0, 1, 2, 3, 8, 9, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]
_DEEP = "[" * 5000 + "]" * 5000
_VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 7, 10**6, 10**9, 2**31, 2**63, 10**30, 10**400, -(10**30),
    0.0, 0.5, -1.5, 1e-300, 1e308, float("inf"), float("-inf"), float("nan"),
    "", "x", "silu", "yarn", "llama3", "dynamic", "full_attention", "\x00", "../../etc/passwd",
    "\ud800", "é" * 50, "x" * 20_000, [], {}, [None], [[[[]]]], {"a": {"b": []}}, [1] * 1000,
]  # fmt: skip


def change_bytes(raw: bytes, draw: random.Random, reach: int | None = None) -> bytes:
    """A few changes among the first `reach` bytes."""
    data = bytearray(raw)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        at = draw.randrange(max(1, min(len(data), reach or len(data))))
        size = draw.choice([1, 4, 8, 8, 64])
        kind = draw.randrange(7)
        if kind == 0 and data:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at : at + 1] = bytes([draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])])
        elif kind in (2, 3):
            width = draw.choice([4, 8])
            number = draw.choice(_NUMBERS) % 2 ** (8 * width)
            data[at : at + width] = number.to_bytes(width, "little")
        elif kind == 4:
            del data[at : at + size]
        elif kind == 5:
            data[at:at] = data[at : at + size] * draw.choice([1, 2, 50])
        else:
            del data[draw.choice([at, at, len(data) - 1]) :]
    return bytes(data)


def change_json(raw: bytes, draw: random.Random) -> bytes:
    """Other values, keys or types somewhere in the document; now and then other bytes."""
    if draw.random() < 0.15:
        return change_bytes(raw, draw)
    document = json.loads(raw)
    for _ in range(draw.choice([1, 1, 2, 3])):
        place = draw.choice(list(_places(document)))
        if place is None:
            continue
        holder, key = place
        kind = draw.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[draw.choice(["", "x", key + "x", "\x00", "a" * 300])] = holder.pop(key)
        elif kind == 2:
            other = draw.choice([p for p in _places(document) if p is not None] or [place])
            holder[key] = json.loads(json.dumps(other[0][other[1]]))
        else:
            holder[key] = draw.choice(_VALUES)
    text = json.dumps(document)
    if draw.random() < 0.03:
        text = draw.choice([_DEEP, text.replace("{", '{"deep": ' + _DEEP + ",", 1), "[]", "1", ""])
    return text.encode()


def _places(value: Any) -> list[tuple[Any, Any] | None]:
    """(holder, key) of every value in a document. At most a hundred of a holder."""
    found: list[tuple[Any, Any] | None] = [None] if not isinstance(value, dict | list) else []
    waiting = [value]
    while waiting:
        each = waiting.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each))
        for key in list(keys)[:100]:
            found.append((each, key))
            if isinstance(each[key], dict | list):
                waiting.append(each[key])
    return found or [None]


def change_template(text: str, draw: random.Random, pieces: list[str]) -> str:
    """Statements inserted between others, and sometimes text changed anywhere."""
    between = [0, *(match.end() for match in re.finditer(r"[%}]}", text))]
    for at in sorted(draw.choices(between, k=draw.randrange(1, 4)), reverse=True):
        text = text[:at] + draw.choice(pieces) + text[at:]
    if draw.random() < 0.2:
        text = f"{{% for i in range(100000) %}}{text}{{% endfor %}}"
    if draw.random() < 0.6:
        return text
    for _ in range(draw.choice([1, 1, 2, 3, 5])):
        at = draw.randrange(len(text) + 1)
        end = min(len(text), at + draw.randrange(1, 40))
        kind = draw.randrange(6)
        if kind < 3:
            text = text[:at] + draw.choice(pieces) + text[at:]
        elif kind == 3:
            text = text[:at] + text[end:]
        elif kind == 4:
            text = text[:at] + text[at:end] * draw.choice([2, 3, 100]) + text[end:]
        else:
            number = draw.choice(["10**9", "999999999", "-1", "0", "1e308", "10**10**10"])
            text = text[:at] + number + text[end:]
    return text
