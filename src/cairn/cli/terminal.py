"""Lines that can be edited and recalled, and text that is wrapped at words while it arrives."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from rich.cells import cell_len

from cairn.config import cache_folder

_TAB = "    "


def line_reader() -> Callable[[str], str]:
    """Reads a line after a prompt: with editing and a history on a terminal, plainly elsewhere."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return edited_lines(cache_folder() / "chat-history")
    return input


def edited_lines(history: Path) -> Callable[[str], str]:
    """Reads lines with editing. They are kept in a file that only the user can read."""
    # Imported here because only a chat needs it.
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory

    kept: History
    try:
        history.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(history, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
        kept = FileHistory(str(history))
    except OSError:
        kept = InMemoryHistory()
    return PromptSession[str](history=kept, reserve_space_for_menu=0).prompt


class WordWrap:
    """Breaks lines between words. A word is shown when it is complete, or wider than a line."""

    def __init__(self, width: Callable[[], int]) -> None:
        """`width` is asked before each word: a window may change its size."""
        self._width = width
        self._column = 0
        self._space = self._word = ""  # what waits for the end of the word

    def push(self, text: str) -> str:
        """What can be shown after this text."""
        return "".join(self._take(character) for character in text.replace("\t", _TAB))

    def finish(self) -> str:
        """The rest. The next text begins a line."""
        rest = self._release()
        self._column = 0
        return rest

    def _take(self, character: str) -> str:
        if character == "\n":
            return self.finish() + "\n"
        if character == " ":
            shown = self._release()
            self._space += character
            return shown
        shown = ""
        if self._word and cell_len(character) == 2:  # wide scripts break between any two characters
            shown = self._release()
        self._word += character
        return shown + self._release() if cell_len(self._word) >= self._width() else shown

    def _release(self) -> str:
        if not self._word:
            return ""
        space, word, width = self._space, self._word, self._width()
        self._space = self._word = ""
        size = cell_len(word)
        if self._column and self._column + len(space) + size > width:
            self._column = size
            return "\n" + word
        self._column += len(space) + size
        return space + word
