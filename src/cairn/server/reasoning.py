"""Separates what a model thinks from what it answers.

<think>
Oslo is in Norway.
</think>

It is cold there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from cairn.text.detokenizer import overlap

Place = Literal["before", "inside", "after"]


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    begin: str
    end: str
    inside: bool = False
    """Models write no opening tag: every answer begins with thoughts."""

    def place(self, prompt: str, continued: str | None = None) -> Place:
        """Where in its thoughts an answer begins. `continued` is the message it continues."""
        if continued is not None:
            inside = continued.rfind(self.begin) > continued.rfind(self.end)
            return "inside" if inside else "after" if continued.strip() else "before"
        if prompt.rstrip().endswith(self.begin):
            return "inside"
        if prompt.rstrip().endswith(self.end):
            return "after"
        return "inside" if self.inside else "before"


_THINK = ReasoningForm("<think>", "</think>")
REASONING_FORMS: Mapping[str, ReasoningForm] = {
    "think": _THINK,
    "deepseek_r1": replace(_THINK, inside=True),
    "mistral": ReasoningForm("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningForm("<seed:think>", "</seed:think>"),
}


def reasoning_form(name: str, template: str) -> ReasoningForm | None:
    """`auto` is the first form whose tags the chat template has."""
    if name != "auto":
        return REASONING_FORMS.get(name)
    return next((form for form in REASONING_FORMS.values() if form.end in template), None)


class ReasoningParser:
    """Splits a choice's text, as it comes, into thoughts and the rest."""

    def __init__(self, form: ReasoningForm, place: Place, *, streams: bool = True) -> None:
        """`streams`: return thoughts as they come; otherwise in one piece."""
        self._form = form
        self._place = place
        self._streams = streams
        self._held = ""
        self._fresh = True  # white space at the beginning of a part is dropped

    @property
    def inside(self) -> bool:
        return self._place == "inside"

    def push(self, text: str, *, final: bool) -> tuple[str, str]:
        """Thoughts and content that new text brings."""
        self._held += text
        thoughts = ""
        if self._place == "before":
            start = self._held.lstrip()
            if start.startswith(self._form.begin):
                self._place, self._held = "inside", start[len(self._form.begin) :]
            elif self._form.begin.startswith(start) and not final:
                return "", ""
            else:
                self._place, self._fresh = "after", False
        if self._place == "inside":
            inner, ended, rest = self._held.partition(self._form.end)
            if ended:
                thoughts, self._held = self._strip(inner.rstrip()), rest
                self._place, self._fresh = "after", True
            else:
                return self._think(final=final), ""
        ready = self._strip(self._held)
        self._held = ""
        return thoughts, ready

    def _think(self, *, final: bool) -> str:
        """Thoughts that cannot belong to the end tag, nor to white space before it."""
        if not final and not self._streams:
            return ""
        held = self._held
        ready = held if final else held[: len(held) - overlap(held, self._form.end)]
        self._held = held[len(ready.rstrip()) :]
        return self._strip(ready.rstrip())

    def _strip(self, text: str) -> str:
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return text
