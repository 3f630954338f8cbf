"""Tokens to text as they come: never a part of a character, and nothing of a stop string."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

REPLACEMENT = "\ufffd"
LONGEST_INCOMPLETE = 3
"""Bytes of a UTF-8 character that can be there while its last one is missing."""
LONGEST_WINDOW = 32
"""Tokens that are decoded for the text of the next one, however long the bytes before it are broken."""


ALONE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""Bytes that byte-level vocabularies spell as the character of that number; the others follow each other."""
BYTE_OF = {chr(byte): byte for byte in ALONE}
BYTE_OF |= {chr(0x100 + at): byte for at, byte in enumerate(sorted({*range(256)}.difference(ALONE)))}
ONE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: Any, token: int, before: int | None = None) -> bytes:
    """The bytes of a token that follows the token ``before``, None at the start of a text; also for a part of
    a character, so that the bytes of all tokens joined are the text."""
    spelt = tokenizer.convert_ids_to_tokens(token)
    alone = _decoded(tokenizer, [token])
    byte = _one_byte(spelt, alone)
    if byte is not None:
        return bytes([byte])
    if spelt is not None and REPLACEMENT in alone and BYTE_OF.keys() >= set(spelt):
        return bytes(BYTE_OF[letter] for letter in spelt)
    if before is not None:  # alone it may lose its space, or keep a mark that says that it has none
        start = _decoded(tokenizer, [before])
        both = _decoded(tokenizer, [before, token])
        if both.startswith(start):
            return both[len(start) :].encode()
    return alone.encode()


def _one_byte(spelt: str | None, alone: str) -> int | None:
    """The byte that a token of byte fallback stands for, from its spelling and its text; None for others."""
    one = ONE_BYTE.fullmatch(spelt or "")
    return int(one[1], 16) if one and alone != spelt else None


def _decoded(tokenizer: Any, tokens: list[int], skip_special_tokens: bool = False) -> str:
    return tokenizer.decode(
        tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


class TextStream:
    """Tokens in, text out as soon as no later token can change it.

    A character may take several tokens, and its first bytes decode to replacement characters, so these are
    held back until they are complete or known to be broken. Byte fallback spells what the vocabulary lacks
    byte by byte, and one byte that is wrong breaks all bytes beside it, so such a run is held back until it
    ends. Joined, the pieces are the tokenizer's own decoding of all tokens.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._window: list[int] = []  # enough tokens to decode the next one in context
        self._context: list[int] = []  # the window's first token, where its text is whole
        self._num_emitted = 0  # characters of the window's text that are out
        self._in_bytes = False  # the window ends with a run of bytes

    def feed(self, token: int) -> str:
        """The text that ``token`` makes certain; often a word, sometimes nothing."""
        alone = self._decoded([token])
        if not alone and self._is_control(token):
            return ""  # it is left out before any bytes are joined
        self._window.append(token)
        if _one_byte(self.tokenizer.convert_ids_to_tokens(token), alone) is not None:
            self._in_bytes = True
        elif alone:
            self._in_bytes = False
        if self._in_bytes:
            return ""
        text = self._decoded(self._window)
        num_held = min(len(text) - len(text.rstrip(REPLACEMENT)), LONGEST_INCOMPLETE)
        piece = text[self._num_emitted : len(text) - num_held]
        self._num_emitted += len(piece)
        if not num_held and alone:
            self._context = [token]
            self._window = [token]
            self._num_emitted = len(alone)
        elif len(self._window) >= LONGEST_WINDOW:
            self._shorten(text)
        return piece

    def _is_control(self, token: int) -> bool:
        """Whether ``token``, which alone has no text, has none because control tokens are left out."""
        return token in self.tokenizer.all_special_ids or _decoded(self.tokenizer, [token]) != ""

    def _shorten(self, text: str) -> None:
        """Drop the first tokens of the window, whose text is ``text``: where it has ended in broken bytes for
        long, bytes further back than the longest character are certain.

        Decoding goes from left to right. So where the texts of both sides of a place between two tokens join
        to the text of the whole, no character lies across it, whatever follows. At most three places in a
        row lie in one character.
        """
        middle = len(self._window) // 2
        for place in range(middle, middle + LONGEST_INCOMPLETE + 1):
            before = self._decoded(self._window[:place])
            after = self._decoded(self._window[place:])
            if after and len(before) <= self._num_emitted and before + after == text:
                self._window = self._window[place:]
                self._num_emitted -= len(before)
                return

    def finish(self) -> str:
        """Held-back text, at the end of the answer or before something that no text goes on behind."""
        text = self._decoded(self._window)
        rest = text[self._num_emitted :]
        if self._in_bytes or text.endswith(REPLACEMENT):  # it is out, and must not become another
            self._window = [*self._context]
            self._in_bytes = False
            text = self._decoded(self._window)
        self._num_emitted = len(text)
        return rest

    def _decoded(self, tokens: list[int]) -> str:
        return _decoded(self.tokenizer, tokens, skip_special_tokens=True)


@dataclass(frozen=True)
class Piece:
    """A stretch of text."""

    text: str
    depth: int
    """The depth of its draft token; 0 for the base model's own."""
    is_shown: bool = True
    """Control tokens are not, and a stop string may hold them."""


class AnswerText:
    """The text of an answer under way, tokens in, pieces out: whole characters, and nothing of a stop string.

    Text that could still become a stop string is held back until it cannot, across tokens and steps.
    ``marks`` are control tokens, by id, that are text; ``controls`` are all of them, which stop strings may
    spell. None is looked for in reasoning, which stands between ``reasoning_tags`` at the beginning;
    ``in_reasoning`` says that the prompt has opened it.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        marks: Mapping[int, str] | None = None,
        controls: Mapping[int, str] | None = None,
        reasoning_tags: tuple[str, str] = ("", ""),
        in_reasoning: bool = False,
    ):
        self._stream = TextStream(tokenizer)
        self._stops = tuple(stops)
        self._marks = marks or {}
        self._controls = controls or {}
        self._held: list[Piece] = []
        self._reasoning_tags = reasoning_tags
        # None until the text says whether it begins with reasoning
        self._in_reasoning = (in_reasoning or None) if stops and reasoning_tags[1] else False
        self.stop_string: str | None = None
        """The stop string that has come."""
        self._starts: list[int] = []  # characters before each token
        self._num_written = self._num_passed = 0  # characters, and those of them that are out
        self._has_ended = False

    def feed(self, tokens: Sequence[int], depths: Sequence[int]) -> tuple[int, list[Piece]]:
        """The number of tokens that belong to the text, and the text that is certain; ``depths`` are the
        tokens' own.

        Taken one by one, so that where the text stops does not depend on how many tokens a step gives.
        """
        pieces: list[Piece] = []
        for num_fed, (token, depth) in enumerate(zip(tokens, depths, strict=True)):
            if self.is_stopped:
                return num_fed, pieces
            self._starts.append(self._num_written)
            mark = self._marks.get(token)
            text = self._stream.feed(token) if mark is None else self._stream.finish() + mark
            pieces += self._passed(Piece(text, depth))
            control = self._controls.get(token) if mark is None else None
            if control is not None:
                pieces += self._passed(Piece(control, depth, is_shown=False))
        return len(tokens), pieces

    def finish(self) -> list[Piece]:
        """Held-back text, at the end of the answer."""
        if self.is_stopped:
            return []
        self._has_ended = True
        if self._in_reasoning is None:  # what could become its tag is text
            self._in_reasoning = False
        pieces = self._passed(Piece(self._stream.finish(), 0))
        held = self._held
        self._held = []
        return pieces if self.is_stopped else pieces + _shown(held)

    @property
    def is_stopped(self) -> bool:
        """A stop string has come; nothing follows."""
        return self.stop_string is not None

    @property
    def num_told(self) -> int:
        """The number of tokens, from the first one on, some of whose text is out: of an answer that a stop
        string ended those before it."""
        if self._has_ended and not self.is_stopped:
            return len(self._starts)
        return bisect_left(self._starts, self._num_passed)

    def _passed(self, new: Piece) -> list[Piece]:
        """The pieces of held and ``new`` text that may be emitted; the rest is held."""
        if self.is_stopped:
            return []
        pieces = [piece for piece in [*self._held, new] if piece.text]
        self._num_written += len(new.text)
        if self._in_reasoning is not False:
            num_thought = self._num_thought("".join(piece.text for piece in pieces))
            self._num_passed += num_thought
            thought, pieces = _cut(pieces, num_thought)
            if self._in_reasoning is not False:
                self._held = pieces
                return _shown(thought)
            return _shown(thought) + self._searched(pieces)
        return self._searched(pieces)

    def _num_thought(self, text: str) -> int:
        """The number of characters of ``text`` that are reasoning for certain."""
        begin, end = self._reasoning_tags
        if self._in_reasoning is None:
            start = text.lstrip()
            if begin.startswith(start[: len(begin)]) and len(start) < len(begin):
                return 0
            self._in_reasoning = start.startswith(begin)
        if not self._in_reasoning:
            return 0
        end_at = text.find(end)
        if end_at < 0:
            return len(text) - overlap(text, end)
        self._in_reasoning = False
        return end_at + len(end)

    def _searched(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces that may be emitted, up to a stop string; the rest is held."""
        whole = "".join(piece.text for piece in pieces)
        num_before = self._num_written - len(whole)
        shown = "".join(piece.text for piece in _shown(pieces))
        stop_places = [(at, stop) for stop in self._stops if (at := whole.find(stop)) >= 0]
        stop_places += [(_place(pieces, at), stop) for stop in self._stops if (at := shown.find(stop)) >= 0]
        if stop_places:
            end, self.stop_string = min(stop_places)
            self._held = []
            self._num_passed = num_before + end
            return _shown(_cut(pieces, end)[0])
        open_at = [len(whole) - overlap(whole, stop) for stop in self._stops]
        open_at += [_place(pieces, len(shown) - overlap(shown, stop)) for stop in self._stops]
        num_certain = min(open_at, default=len(whole))
        self._num_passed = num_before + num_certain
        passed, self._held = _cut(pieces, num_certain)
        return _shown(passed)


def _shown(pieces: list[Piece]) -> list[Piece]:
    return [piece for piece in pieces if piece.is_shown]


def _place(pieces: list[Piece], num_shown: int) -> int:
    """The number of characters up to and including the ``num_shown``-th shown one."""
    length = 0
    for piece in pieces:
        if piece.is_shown:
            if len(piece.text) >= num_shown:
                return length + num_shown
            num_shown -= len(piece.text)
        length += len(piece.text)
    return length


def _cut(pieces: list[Piece], length: int) -> tuple[list[Piece], list[Piece]]:
    """The first ``length`` characters, and the rest."""
    before: list[Piece] = []
    for index, piece in enumerate(pieces):
        if len(piece.text) > length:
            head = [replace(piece, text=piece.text[:length])] if length else []
            rest = [replace(piece, text=piece.text[length:]), *pieces[index + 1 :]]
            return before + head, rest
        before.append(piece)
        length -= len(piece.text)
    return before, []


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of ``text`` ``mark`` begins with, not all of it."""
    longest = min(len(text), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)
