"""Finds tool calls in the generated text."""

from __future__ import annotations

from cairn.server.tools.form import Call, Schemas, ToolForm
from cairn.text.detokenizer import overlap


class ToolParser:
    """Splits a choice's text, as it comes, into content and tool calls.

    A call is returned when it is complete. Text that begins like a call but is none is content. A
    call that the length limit cut is left out.
    """

    def __init__(self, form: ToolForm, tools: Schemas) -> None:
        self._form = form
        self._tools = tools
        self._held = ""
        self._opened = ""  # the text that opened the calls that are being read
        self._at_start = True
        self._after_call = False  # white space before the next call is dropped

    def push(self, text: str, *, final: bool, cut: bool = False) -> tuple[str, list[Call]]:
        """Content and calls that new text completes. `final`: no more comes; `cut`: because of the
        length limit."""
        self._held += text
        content: list[str] = []
        calls: list[Call] = []
        while True:
            if not self._opened:
                content.append(self._find_opening(final=final))
            if not self._opened or not self._read(content, calls, final=final, cut=cut):
                return "".join(content), calls

    def _find_opening(self, *, final: bool) -> str:
        """The content before an opening, or what cannot belong to one."""
        form, held = self._form, self._held
        if self._at_start and form.at_start:
            start = held.lstrip()
            if not start and not final:
                return ""
            if start.startswith(form.at_start):
                self._opened, self._held = form.at_start, start[len(form.at_start) :]
                self._at_start = False
                return ""
        before, self._opened, after = held.partition(form.opening)
        if self._opened:
            self._at_start, self._held = False, after
            return before.rstrip()  # white space before a call is dropped
        ready = held if final else held[: len(held) - overlap(held, form.opening)].rstrip()
        if not ready.strip() and self._after_call:
            return ""
        self._at_start = self._at_start and not ready
        self._after_call, self._held = False, held[len(ready) :]
        return ready

    def _read(self, content: list[str], calls: list[Call], *, final: bool, cut: bool) -> bool:
        """Read the calls that have been opened. Returns whether they are complete."""
        form = self._form
        inner, closed, after = self._held, "", ""
        if form.closing:
            inner, closed, after = self._held.partition(form.closing)
        if not (closed or final):
            return False
        opened, self._opened, self._held, self._after_call = self._opened, "", after, True
        whole = opened + inner if opened == form.at_start else inner
        if cut and not closed and form.closing:
            return False
        try:
            found = form.read(whole, self._tools)
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            found = None
        if found is not None:
            calls += found
        elif closed or not (cut and form.begun(whole)):  # a model may leave out the closing tag
            content.append(opened + inner + closed)
        return bool(after)
