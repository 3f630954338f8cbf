"""Keyboard and screen of a chat: questions in, text out with its words whole, and Ctrl-C.

Knows nothing of models and imports no torch.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from types import FrameType

from rich.cells import cell_len
from rich.console import Console

from medusa.console import log_console
from medusa.options import NOT_UTF8, checked_utf8

try:
    import termios
except ImportError:  # Windows
    termios = None  # type: ignore[assignment]


class WrappedText:
    """Text that comes in pieces, with line breaks between words where a terminal would break inside them.

    A word is held back until it has ended, since only then is it known whether it fits its line. Wide
    characters, which are written without spaces, are words of their own. Elsewhere than on a terminal,
    text passes as it is.
    """

    def __init__(self, console: Console):
        self.console = console
        self._column = 0
        self._word: list[tuple[str, str | None]] = []

    def write(self, text: str, style: str | None = None) -> None:
        """Print ``text`` in ``style``, but for a word that may go on."""
        if not self.console.is_terminal:
            self._out(text, style)
            return
        for character in text:
            if character.isspace():
                self._end_word()
                self._write_space(character)
            else:
                if cell_len(character) > 1:
                    self._end_word()
                self._word.append((character, style))
                if cell_len(character) > 1 or len(self._word) >= self.console.width:
                    self._end_word()

    def finish(self) -> None:
        """Print held-back text, and end the line."""
        self._end_word()
        self._out("\n")

    def _write_space(self, character: str) -> None:
        if character == "\n":
            self._out(character)
            self._column = 0
            return
        width = 8 - self._column % 8 if character == "\t" else 1
        if self._column + width < self.console.width:
            self._out(" " * width)
        self._column += width

    def _end_word(self) -> None:
        width = cell_len("".join(text for text, _ in self._word))
        if self._column and self._column + width > self.console.width:
            self._out("\n")
            self._column = 0
        for style, letters in groupby(self._word, key=itemgetter(1)):
            self._out("".join(letter for letter, _ in letters), style)
        self._column += width
        self._word.clear()

    def _out(self, text: str, style: str | None = None) -> None:
        self.console.out(text, style=style, end="", highlight=False)


@contextmanager
def stop_button() -> Iterator[threading.Event]:
    """Set by the first Ctrl-C, so that a step ends in peace; a second one interrupts at once."""
    stopped = threading.Event()

    def press(signum: int, frame: FrameType | None) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    before = signal.signal(signal.SIGINT, press)
    try:
        with controls_not_echoed():
            yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def controls_not_echoed() -> Iterator[None]:
    """Keep the terminal, if there is one, from writing ``^C`` into an answer."""
    if termios is None or not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = [*before[:3], before[3] & ~termios.ECHOCTL, *before[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def typed_questions(console: Console) -> Iterator[str]:
    """Questions from the keyboard, with editing and history where the system has readline.

    A pasted text of several lines is one question: readline takes a paste as a whole.
    """
    try:
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
    except ImportError:
        log_console().print("no readline on this system: arrow keys do not edit the line", style="dim")
    while True:
        try:
            yield checked_utf8(input("> "), "the question")
        except KeyboardInterrupt:
            console.print("\nCtrl-C stops answers; /exit or Ctrl-D leaves.", style="dim")
        except EOFError:
            console.out("")
            return


def piped_lines(console: Console) -> Iterator[str]:
    """Lines from a pipe, shown as if they had been typed."""
    for line in utf8_lines():
        console.out(f"> {line.rstrip()}", highlight=False)
        yield line


def utf8_lines() -> Iterator[str]:
    """The lines of standard input."""
    try:
        for line in sys.stdin:
            yield checked_utf8(line, "standard input")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input {NOT_UTF8}") from error
