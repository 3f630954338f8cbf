"""Tokens to text as they come, and never a part of a character."""

from __future__ import annotations

import re
from typing import Any

REPLACEMENT = "\ufffd"
LONGEST_INCOMPLETE = 3
"""Bytes of a UTF-8 character that can be there while its last one is missing."""


ALONE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""Bytes that byte-level vocabularies spell as the character of that number; the others follow each other."""
BYTE_OF = {chr(byte): byte for byte in ALONE}
BYTE_OF |= {chr(0x100 + at): byte for at, byte in enumerate(sorted({*range(256)}.difference(ALONE)))}
ONE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
WORD_BEGINS = "\u2581"
"""SentencePiece's mark for a space; decoding a single token drops the first one."""


def token_bytes(spelt: str | None, decoded: str) -> bytes:
    """The bytes of a token, from its spelling in the vocabulary and its decoded text; also for a part of a
    character, so that the bytes of all tokens joined are the text."""
    if spelt is None:
        return decoded.encode()
    if one := ONE_BYTE.fullmatch(spelt):
        return bytes([int(one[1], 16)])
    if WORD_BEGINS in spelt:
        return spelt.replace(WORD_BEGINS, " ").encode()
    if REPLACEMENT in decoded and BYTE_OF.keys() >= set(spelt):
        return bytes(BYTE_OF[letter] for letter in spelt)
    return decoded.encode()


class TextStream:
    """Tokens in, text out as soon as no later token can change it.

    A character may take several tokens, and its first bytes decode to replacement characters, so these are
    held back until they are complete or known to be broken. Joined, the pieces are the tokenizer's own
    decoding of all tokens.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._window: list[int] = []  # enough tokens to decode the next one in context
        self._num_emitted = 0  # characters of the window's text that are out

    def feed(self, token: int) -> str:
        """The text that ``token`` makes certain; often a word, sometimes nothing."""
        self._window.append(token)
        text = self._decoded(self._window)
        num_held = min(len(text) - len(text.rstrip(REPLACEMENT)), LONGEST_INCOMPLETE)
        piece = text[self._num_emitted : len(text) - num_held]
        self._num_emitted += len(piece)
        if not num_held and (last := self._decoded(self._window[-1:])):
            self._window, self._num_emitted = self._window[-1:], len(last)
        return piece

    def finish(self) -> str:
        """Held-back text, at the end of the answer."""
        text = self._decoded(self._window)
        rest, self._num_emitted = text[self._num_emitted :], len(text)
        return rest

    def _decoded(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
