"""JSON repair: what a model has written for JSON, as valid JSON, while it comes.

Small models write line breaks into strings, commas before a closing bracket, Python's ``None`` and quotes,
and braces doubled as a template shows them. Every text gives valid JSON in the end, and what is valid
stays as it is, letter for letter. So the pieces of a stream, joined, are what is given back whole.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass

from medusa.serving.body import json_value

INVALID = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Exceptions of parsing a text as JSON or Python."""
PYTHON_NAMES = {"None": "null", "True": "true", "False": "false"}
IN_STRINGS = {chr(code): json.dumps(chr(code))[1:-1] for code in range(0x20)} | {'"': '\\"'}
"""Characters that a string of JSON cannot hold as they are."""
SIMPLE_ESCAPES = {f"\\{letter}": f"\\{letter}" for letter in '"\\/bfnrt'} | {"\\'": "'"}
CODE_BEGUN = re.compile(r"\\u[0-9a-fA-F]{0,3}")
CODE = re.compile(r"\\u[0-9a-fA-F]{4}")


@dataclass(frozen=True)
class Level:
    """An object or a list that is not closed yet."""

    end: str
    """Its closing bracket."""
    is_written: bool = True
    """Not the second one of two opening braces."""

    @property
    def has_fields(self) -> bool:
        """Also where it is the second one of two: these are only opened where a key comes next."""
        return self.end == "}" or not self.is_written


class JsonRepair:
    """Text in, valid JSON out, of one value.

    Args:
        mark: ends the value outside of strings, whatever is open.
    """

    def __init__(self, mark: str = ""):
        self.is_closed = False
        """The value is whole; nothing more is taken."""
        self._mark = mark
        self._levels: list[Level] = []
        self._num_open = Counter[str]()  # levels, by their ends
        self._is_key = False  # what comes next is the key of a field,
        self._is_behind_key = False  # a colon,
        self._needs_comma = False  # or a comma
        self._blank = ""  # white space and commas before what comes next
        self._quote = self._escape = self._word = ""  # what is begun

    def feed(self, text: str) -> tuple[int, str]:
        """The number of characters of ``text`` that belong to the value, and the JSON that is certain."""
        pieces = list[str]()
        for at, letter in enumerate(text):
            if self.is_closed:
                return at, "".join(pieces)
            if self._quote:
                pieces.append(self._in_string(letter))
            elif self._word:
                pieces.append(self._in_word(letter))
            else:
                pieces.append(self._between(letter))
        return len(text), "".join(pieces)

    def finish(self) -> str:
        """The rest, where the text ends before the value does; an empty object where there is none."""
        if self.is_closed:
            return ""
        pieces = []
        if self._quote:
            begun = "\\" + self._escape if self._escape else ""
            pieces = [begun, self._end_string()]
        elif self._word:
            pieces = [self._end_word()]
        is_empty = not self._levels and not self.is_closed
        return "".join(pieces) + ("{}" if is_empty else "") + self._close(0)

    # Strings

    def _in_string(self, letter: str) -> str:
        if self._escape:
            return self._in_escape(letter)
        if letter == "\\":
            self._escape = letter
            return ""
        return self._end_string() if letter == self._quote else IN_STRINGS.get(letter, letter)

    def _in_escape(self, letter: str) -> str:
        escape = self._escape + letter
        if CODE_BEGUN.fullmatch(escape):
            self._escape = escape
            return ""
        self._escape = ""
        if CODE.fullmatch(escape):
            return escape
        if escape in SIMPLE_ESCAPES:
            return SIMPLE_ESCAPES[escape]
        return f"\\\\{escape[1:-1]}{self._in_string(letter)}"  # such as \d of a regular expression

    def _end_string(self) -> str:
        self._quote = self._escape = ""
        self._end_value()
        return '"'

    # Numbers, and words without quotes

    def _in_word(self, letter: str) -> str:
        if letter in ',}]\n"' or (letter in ":[{" and self._is_key):
            written = self._end_word()
            return written if self.is_closed else written + self._between(letter)
        self._word += letter
        if not self._mark or not self._word.endswith(self._mark):
            return ""
        self._word = self._word.removesuffix(self._mark).rstrip()
        return self.finish()

    def _end_word(self) -> str:
        word = self._word.rstrip()
        behind = _as_blank(self._word[len(word) :])
        self._word = ""
        value = json.dumps(word, ensure_ascii=False)
        if not self._is_key and (word in PYTHON_NAMES or is_json(word)):
            value = PYTHON_NAMES.get(word, word)
        written = self._begin_value() + value
        self._end_value()
        self._blank = behind
        return written

    # What is between

    def _between(self, letter: str) -> str:
        if letter.isspace():
            self._blank += _as_blank(letter)
            return ""
        if letter in "}]":
            return self._close_at(letter)
        if letter in "{[":
            return self._open(letter)
        if letter == ",":
            return self._separate()
        if letter == ":" and self._levels:
            return self._go_on_to_value()
        if letter in "\"'":
            before = self._begin_value()
            self._quote = letter
            return f'{before}"'
        self._word = letter
        return ""

    @property
    def _is_in_object(self) -> bool:
        return bool(self._levels) and self._levels[-1].has_fields

    def _take_blank(self) -> str:
        blank = self._blank
        self._blank = ""
        return blank

    def _begin_value(self) -> str:
        """What is before a key or a value, with the comma or the colon that is missing there."""
        missing = ":" if self._is_behind_key else "," if self._needs_comma else ""
        self._needs_comma = self._is_behind_key = False
        return missing + self._take_blank()

    def _end_value(self) -> None:
        """A key or a value is written."""
        self._is_behind_key = self._is_key
        self._needs_comma = not self._is_key
        self._is_key = not self._is_key and self._is_in_object
        self.is_closed = not self._levels

    def _missing_value(self) -> str:
        """null for a key without a value, where its field ends."""
        if self._is_key or not self._is_in_object:
            return ""
        colon = ":" if self._is_behind_key else ""
        self._end_value()
        return f"{colon}{self._take_blank()}null"

    def _go_on_to_value(self) -> str:
        if not self._is_behind_key:
            return ""
        self._is_behind_key = False
        return f"{self._take_blank()}:"

    def _separate(self) -> str:
        missing = self._missing_value()
        if self._needs_comma:  # it is written once something follows
            self._needs_comma = False
            self._blank += ","
        return missing

    def _open(self, letter: str) -> str:
        end = "}" if letter == "{" else "]"
        is_doubled = self._is_key
        written = "" if is_doubled else self._begin_value() + letter
        self._levels.append(Level(end, not is_doubled))
        self._num_open[end] += 1
        self._is_key = self._is_in_object
        return written

    def _close_at(self, letter: str) -> str:
        """Close the innermost level that ends with ``letter``, and those in it, if there is one."""
        if not self._num_open[letter]:
            return ""
        num_left = len(self._levels) - 1
        while self._levels[num_left].end != letter:
            num_left -= 1
        return self._close(num_left)

    def _close(self, num_left: int) -> str:
        """Close all levels but the first ``num_left``."""
        pieces = []
        while len(self._levels) > num_left:
            if self._levels[-1].is_written:
                pieces += [self._missing_value(), self._take_blank().replace(",", "")]
            level = self._levels.pop()
            self._num_open[level.end] -= 1
            if level.is_written:
                pieces.append(level.end)
                self._is_key = False
                self._end_value()
        self.is_closed = not self._levels
        return "".join(pieces)


def _as_blank(space: str) -> str:
    return "".join(letter if letter in " \t\n\r" else " " for letter in space)


def is_json(text: str) -> bool:
    """Whether ``text`` is valid JSON."""
    try:
        json_value(text)
    except INVALID:
        return False
    return True


def repaired(text: str) -> str:
    """``text`` as valid JSON."""
    repair = JsonRepair()
    _, written = repair.feed(text)
    return written + repair.finish()
