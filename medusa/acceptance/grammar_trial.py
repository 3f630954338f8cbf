"""Trials of grammars, the work of a :class:`medusa.bounded_process.BoundedProcess`: some break the compiler.

It imports nothing of this package. A question is a grammar, the answer its error, or an empty text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MAX_STEPS = 128
"""Tokens that a trial writes."""


def prepared(settings: dict[str, Any]) -> Callable[[str], str]:
    """:func:`problem_of` for the tokenizer in ``settings``."""
    from llguidance import LLMatcher, LLTokenizer

    tokens = LLTokenizer(settings["tokenizer"], n_vocab=settings["num_tokens"], eos_token=settings["eos_ids"])
    quotes = sum(1 << token for token in settings["quotes"])
    return lambda grammar: problem_of(grammar, LLMatcher, tokens, quotes)


def problem_of(grammar: str, matcher_of: Any, tokens: Any, quotes: int) -> str:
    """The error of ``grammar``, found by compiling it and by writing one answer in it.

    Some grammars fail only once a string of theirs has begun. So the answer opens and closes strings as soon
    as it may: ``quotes`` has a bit for every token with a quotation mark.
    """
    problem = matcher_of.validate_grammar(grammar, tokens)
    if problem:
        return str(problem)
    matcher = matcher_of(tokens, grammar, log_level=0)
    for _ in range(MAX_STEPS):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        chosen = allowed & quotes or allowed
        if not chosen or matcher.is_stopped():  # an error stops it too
            break
        matcher.consume_token((chosen & -chosen).bit_length() - 1)  # the lowest bit: any token does
    if matcher.is_error():
        return f"no answer can keep to it ({matcher.get_error().partition(chr(10))[0]})"
    return ""
