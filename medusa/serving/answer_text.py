"""The text of an answer under way: whole characters only, and nothing of a stop string.

What could still become a stop string is held back until it cannot, so no part of one is ever sent, whichever
tokens and steps it spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medusa.serving.answer_reader import overlap
from medusa.text_stream import TextStream


@dataclass(frozen=True)
class Piece:
    """A stretch of text."""

    text: str
    depth: int
    """The depth of the guess behind it; 0 for the base model's own."""


class AnswerText:
    """Tokens in, pieces of text out. ``marks`` are control tokens, by id, that are text; others are not."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), marks: Mapping[int, str] | None = None):
        self._stream, self._stops, self._marks = TextStream(tokenizer), tuple(stops), marks or {}
        self._held: list[Piece] = []
        self.is_stopped = False
        """A stop string has come; nothing follows."""

    def feed(self, tokens: Sequence[int], depths: Sequence[int]) -> tuple[int, list[Piece]]:
        """How many of the tokens belong to the text, and what they make certain; ``depths`` are those of the
        guesses behind them.

        Taken one by one, so that where the text stops does not depend on how many tokens a step gives.
        """
        pieces: list[Piece] = []
        for num_fed, (token, depth) in enumerate(zip(tokens, depths, strict=True)):
            if self.is_stopped:
                return num_fed, pieces
            mark = self._marks.get(token)
            text = self._stream.feed(token) if mark is None else self._stream.finish() + mark
            if mark is not None:
                self._stream = TextStream(self._stream.tokenizer)
            pieces += self._passed(Piece(text, depth))
        return len(tokens), pieces

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the answer."""
        if self.is_stopped:
            return []
        pieces = self._passed(Piece(self._stream.finish(), 0))
        held, self._held = self._held, []
        return pieces if self.is_stopped else pieces + held

    def _passed(self, new: Piece) -> list[Piece]:
        """What may go out of all that is held and ``new``; the rest is held."""
        if self.is_stopped:
            return []
        pieces = [piece for piece in [*self._held, new] if piece.text]
        text = "".join(piece.text for piece in pieces)
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, []
            return _cut(pieces, min(found))[0]
        num_held = max((overlap(text, stop) for stop in self._stops), default=0)
        passed, self._held = _cut(pieces, len(text) - num_held)
        return passed


def _cut(pieces: list[Piece], length: int) -> tuple[list[Piece], list[Piece]]:
    """The first ``length`` characters, and the rest."""
    before: list[Piece] = []
    for index, piece in enumerate(pieces):
        if len(piece.text) > length:
            head = [Piece(piece.text[:length], piece.depth)] if length else []
            rest = [Piece(piece.text[length:], piece.depth), *pieces[index + 1 :]]
            return before + head, rest
        before.append(piece)
        length -= len(piece.text)
    return before, []
