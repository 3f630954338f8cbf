"""The text of an answer under way: whole characters only, and nothing of a stop string.

What could still become a stop string is held back until it cannot, so no part of one is ever sent, whichever
tokens and steps it spans.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa.acceptance.grammar import moved
from medusa.text_stream import TextStream


@dataclass(frozen=True)
class Piece:
    """A stretch of text."""

    text: str
    depth: int
    """The depth of the guess behind it; 0 for the base model's own."""


class AnswerText:
    """Tokens in, pieces of text out."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()):
        self._stream, self._stops = TextStream(tokenizer), tuple(stops)
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
            pieces += self._passed(Piece(self._stream.feed(token), depth))
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


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` ``stop`` begins with, not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


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


BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """One call."""

    name: str
    arguments: str
    """JSON."""
    identity: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    @property
    def as_json(self) -> dict[str, Any]:
        """As clients read it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.identity, "type": "function", "function": function}


class ToolCallReader:
    """Text in, text and calls out. ``names`` are the tools that were offered, ``most`` calls are read."""

    def __init__(self, names: Collection[str], most: int | None = None):
        self.num_calls = 0
        self._names, self._most = frozenset(names), most
        self._held, self._is_first = "", True

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """What is certain now: text outside of calls, and whole calls."""
        self._held += text
        if self._is_first and self._held.lstrip()[:1] in ("", "{", "["):
            return "", []  # may be a call as a whole
        self._is_first = False
        return self._taken()

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest, at the end of the answer."""
        held = self._held
        if self._is_first and (calls := self._calls_in(held)):
            self._held = ""
            return "", self._counted(calls)
        if held.startswith(BEGIN) and (calls := self._calls_in(held.removeprefix(BEGIN))):
            self._held = ""
            return "", self._counted(calls)  # the model ended without closing it
        text, calls = self._taken()
        text, self._held = text + self._held, ""
        return text, calls

    def _taken(self) -> tuple[str, list[ToolCall]]:
        said, found = "", []
        while True:
            before, begins, rest = self._held.partition(BEGIN)
            if not begins:
                kept = len(before) - overlap(before, BEGIN)
                self._held, said = before[kept:], said + before[:kept]
                break
            inner, ends, behind = rest.partition(END)
            if not ends:
                self._held, said = BEGIN + rest, said + before
                break
            calls = self._calls_in(inner)
            found += calls
            said += before if calls else before + BEGIN + inner + END
            self._held = behind
        counted = self._counted(found)
        # White space around calls is no answer.
        return ("" if not said.strip() and self.num_calls else said), counted

    def _counted(self, calls: list[ToolCall]) -> list[ToolCall]:
        room = len(calls) if self._most is None else max(0, self._most - self.num_calls)
        self.num_calls += len(calls[:room])
        return calls[:room]

    def _calls_in(self, text: str) -> list[ToolCall]:
        """The calls that ``text`` is; none unless all of it is."""
        try:
            given = json.loads(text)
        except (ValueError, RecursionError):
            return []
        calls = [self._call(each) for each in (given if isinstance(given, list) else [given])]
        return [] if None in calls else [call for call in calls if call is not None]

    def _call(self, given: Any) -> ToolCall | None:
        if not isinstance(given, dict) or given.get("name") not in self._names:
            return None
        arguments = given.get("arguments", given.get("parameters"))
        if not isinstance(arguments, dict):
            return None
        return ToolCall(given["name"], json.dumps(arguments, ensure_ascii=False))


def forced_call(tools: Sequence[Mapping[str, Any]], template: str) -> tuple[dict[str, Any], str, str]:
    """A schema of one call of any of ``tools``, and what stands before and behind it, as ``template`` has
    models write calls. References of a tool's schema stay inside of it."""
    is_hermes = BEGIN in template
    key = "parameters" if '"parameters": ' in template and not is_hermes else "arguments"
    kinds: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        place = f"#/$defs/{index}"
        definitions[str(index)] = moved({"type": "object", **(tool.get("parameters") or {})}, place)
        properties = {"name": {"const": tool["name"]}, key: {"$ref": place}}
        kinds.append({"type": "object", "properties": properties, "required": ["name", key]})
        kinds[-1]["additionalProperties"] = False
    return {"anyOf": kinds, "$defs": definitions}, *((f"{BEGIN}\n", f"\n{END}") if is_hermes else ("", ""))
