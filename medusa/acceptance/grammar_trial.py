"""A process that tries grammars out, so that one which breaks the compiler breaks nothing else.

It is run as a program of its own and imports nothing of this package: a start takes half a second. Standard
input has a line of JSON with the tokenizer, and then one grammar a line; standard output has one line for
each grammar: its error, or an empty text. It ends when its input does.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

STACK_BYTES = 2**20
"""An eighth of what threads usually have: what fits here fits where the grammar is compiled again."""
MEMORY_BYTES = 2**30
"""Memory that the process may use beyond its use at the start."""
MAX_STEPS = 128
"""Tokens that a trial writes."""


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


def main() -> None:
    """Try grammars until there are no more."""
    settings = json.loads(sys.stdin.readline())
    sys.path[:] = settings["path"]
    from llguidance import LLMatcher, LLTokenizer

    tokens = LLTokenizer(settings["tokenizer"], n_vocab=settings["num_tokens"], eos_token=settings["eos_ids"])
    quotes = sum(1 << token for token in settings["quotes"])
    _bound_memory()
    for line in sys.stdin:
        print(json.dumps(problem_of(json.loads(line), LLMatcher, tokens, quotes)), flush=True)


def _bound_memory() -> None:
    if sys.platform != "linux":  # elsewhere the time limit has to do
        return
    import resource

    with open("/proc/self/statm") as sizes:
        taken = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, taken + MEMORY_BYTES))


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
