"""Refusals in one table: what is done, the exception that comes of it, and the words that it must have."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

Kinds = type[BaseException] | tuple[type[BaseException], ...]


def pattern(words: str) -> str:
    """A regular expression of ``words``; `` ... `` among them stands for anything."""
    return "(?s)" + ".*".join(map(re.escape, words.split(" ... ")))


def assert_refused(done: Callable[[], Any], kind: Kinds, words: str) -> None:
    """``done()`` raises ``kind``, whose message has the ``words``."""
    with pytest.raises(kind, match=pattern(words)):
        done()


def refusals(*rows: tuple) -> Callable[..., None]:
    """The test of a table of ``(id, what is done, exception, words)``; ``(id, what is done, words)`` stands
    for ValueError.

    The words are the argument's name and the rule, not the sentence. What is done asks for fixtures by the
    names of its parameters, as a test does.
    """
    cases = [pytest.param(done, *(ValueError, *rest)[-2:], id=name) for name, done, *rest in rows]

    @pytest.mark.parametrize(("done", "kind", "words"), cases)
    def test(request, done, kind, words):
        asked = inspect.signature(done).parameters.values()
        names = [
            each.name for each in asked if each.default is each.empty and each.kind is not each.VAR_KEYWORD
        ]
        fixtures = {name: request.getfixturevalue(name) for name in names}
        assert_refused(lambda: done(**fixtures), kind, words)

    return test
