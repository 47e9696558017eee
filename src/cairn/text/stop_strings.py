"""Finds stop strings in a text that comes in pieces, in time linear in the text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

State = list[int]
"""For each stop string the number of its characters with which the text so far ends."""


class StopStrings:
    """Knuth, Morris and Pratt's search, for each of the strings. May serve many texts."""

    def __init__(self, strings: Sequence[str] = ()) -> None:
        self._strings = [(string, _borders(string)) for string in strings]

    def __bool__(self) -> bool:
        return bool(self._strings)

    def start(self) -> State:
        return [0] * len(self._strings)

    def find(self, text: str, state: State) -> tuple[int, int] | None:
        """Continue by `text`. Returns where the first stop string to be complete begins and ends.

        Places count from the beginning of `text`, so that a beginning may be negative. Of strings
        that end at the same place, the longest counts.
        """
        found: tuple[int, int] | None = None
        for index, (string, borders) in enumerate(self._strings):
            state[index], end = _advance(string, borders, state[index], text)
            if end is not None:
                match = end - len(string), end
                if found is None or (end, match[0]) < (found[1], found[0]):
                    found = match
        return found


def _borders(string: str) -> array[int]:
    """For each beginning of the string: length of the longest end of it that also begins it."""
    borders = array("i", [0]) * len(string)
    length = 0
    for place in range(1, len(string)):
        while length and string[place] != string[length]:
            length = borders[length - 1]
        length += string[place] == string[length]
        borders[place] = length
    return borders


def _advance(string: str, borders: array[int], matched: int, text: str) -> tuple[int, int | None]:
    """The new number of matched characters, and where in the text the string is complete."""
    place = 0
    while place < len(text):
        if not matched:
            place = text.find(string[0], place)
            if place < 0:
                return 0, None
        while matched and text[place] != string[matched]:
            matched = borders[matched - 1]
        matched += text[place] == string[matched]
        place += 1
        if matched == len(string):
            return borders[-1], place
    return matched, None
