"""Splits the text of an answer into thoughts, content and tool calls."""

from __future__ import annotations

from typing import NamedTuple

from cairn.server.reasoning import ReasoningParser
from cairn.server.tools.form import Call
from cairn.server.tools.parser import ToolParser


class Parsed(NamedTuple):
    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class OutputParser:
    """Of one choice. Without parsers everything is content."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        keeps_reasoning: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._keeps = keeps_reasoning

    @property
    def thinking(self) -> bool:
        """Whether what came last are thoughts."""
        return self._reasoning is not None and self._reasoning.inside

    def push(self, text: str, reason: str | None) -> Parsed:
        """What new text brings. `reason` says why no more comes, if that is so."""
        final, thoughts = reason is not None, ""
        if self._reasoning is not None:
            thoughts, text = self._reasoning.push(text, final=final)
        calls: list[Call] = []
        if self._tools is not None:
            text, calls = self._tools.push(text, final=final, cut=reason == "length")
        return Parsed(text, thoughts if self._keeps else "", tuple(calls))
