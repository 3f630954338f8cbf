"""Answers in a form that was asked for: tokens that would leave a grammar are never chosen.

The grammar is a function of one row's answer, so the allowed tokens of every node of a candidate tree follow
from its own path, and the text equals plain decoding with the same grammar. llguidance
(https://github.com/guidance-ai/llguidance, MIT) compiles grammars and computes the allowed tokens; it is an
optional dependency.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from medusa.acceptance import grammar_trial
from medusa.bounded_process import BoundedProcess, OutOfBounds

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line: where any white space may come, a small model may write nothing else."""
MAX_SCHEMA_LENGTH = 2**18
"""Characters of a schema, as JSON, or of another grammar."""
MAX_TOLD = 300
"""Largest length of an error message about a grammar, in characters."""
MAX_SCHEMA_DEPTH = 256
"""Levels of a schema, of definitions inside of definitions too."""
TRIAL_SECONDS = 5.0
"""In which a grammar must have been compiled."""
NUM_KEPT = 64
"""Grammars that are kept compiled."""
DEFINITIONS = ("$defs", "definitions")
"""Keys of a schema with subschemas that are read only where something refers to them."""
VALUES = ("const", "enum", "default", "examples")
"""Keys of a schema without subschemas."""


class GrammarFailed(RuntimeError):
    """An answer cannot go on in its grammar."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer.

    Args:
        tokenizer: a fast tokenizer of ``transformers``.
        vocab_size: columns of the model's logits.
        eos_ids: tokens that end an answer, allowed where the grammar may end.

    Raises:
        ImportError: llguidance is not installed.
        ValueError: the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]):
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ImportError(
                "grammars need llguidance, which is not installed: pip install llguidance"
            ) from error
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"grammars need a fast tokenizer, got {type(tokenizer).__name__}")
        self._matcher_of = LLMatcher
        self._tokens = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=[*eos_ids])
        self._eos_ids = frozenset(eos_ids)
        self._vocab_size = vocab_size
        self._control_ids = {
            added.content: token
            for token, added in tokenizer.added_tokens_decoder.items()
            if len(added.content) > 1
        }
        longest_first = sorted(self._control_ids, key=len, reverse=True)
        self._controls = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._lock = threading.Lock()
        settings = partial(_trial_settings, tokenizer, vocab_size, eos_ids)
        self._trial = BoundedProcess(Path(grammar_trial.__file__), settings, TRIAL_SECONDS)
        self._compiled = functools.lru_cache(NUM_KEPT)(self._compile)

    def as_terminals(self, text: str) -> str:
        """``text`` as a part of a rule: special tokens as themselves, the rest as any tokens."""
        parts = filter(None, self._controls.split(text))
        return " ".join(
            f"<[{self._control_ids[part]}]>" if part in self._control_ids else json.dumps(part)
            for part in parts
        )

    def compile(self, rules: Sequence[str], before: str = "", of_before: Sequence[str] = ()) -> Grammar:
        """The grammar of the rule ``answer``, in Lark's syntax as llguidance reads it.

        It is tried in a process of its own first, which may die of it.

        Args:
            rules: ``answer`` and the rules below it; see :func:`json_rule`, :func:`pattern_rule` and
                :func:`lark_rule`.
            before: what comes before it, as a part of a rule; it is not tried.
            of_before: the rules below that.

        Raises:
            ValueError: a rule is wrong, too large or too deep, or uses what llguidance does not know.
        """
        with self._lock:
            return self._compiled("\n".join(rules), before, "\n".join(of_before))

    def _compile(self, rules: str, before: str, of_before: str) -> Grammar:
        grammar_of = self._matcher_of.grammar_from_lark
        try:
            problem = self._trial.ask(grammar_of(f"start: answer\n{rules}"))
        except OutOfBounds as error:
            raise ValueError(
                f"compiling it takes more than {self._trial.bounds}; ask for a simpler form"
            ) from error
        if problem:
            raise ValueError(_message_of(problem))
        whole = grammar_of(f"start: {before} answer\n{rules}\n{of_before}")
        return Grammar(self._matcher_of(self._tokens, whole, log_level=0), self._eos_ids, self._vocab_size)


LISTED = re.compile(r"\s*(\d+ \|.*|\^+\s*)")
"""A line of a grammar as llguidance lists it, or what marks a place in it."""


def _message_of(problem: str) -> str:
    """The error message of llguidance, without the grammar that was built from a client's input."""
    lines = [line.strip() for line in problem.splitlines() if not LISTED.fullmatch(line)]
    message = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: | \(in regex\)", "", " ".join(lines))
    return " ".join(message.split())[:MAX_TOLD]


def json_rule(name: str, schema: Mapping[str, Any]) -> str:
    """A rule for JSON by ``schema``, on one line.

    Raises:
        ValueError: the schema is too large or too deep.
    """
    check_schema(schema)
    return f"{name}: %json {json.dumps({**schema, 'x-guidance': ONE_LINE})}"


SPELT = {"\n": r"\n", "\\\n": r"\n", "/": r"\/"}
"""Escapes for a pattern in a rule, which is written between slashes on one line."""


def pattern_rule(name: str, pattern: str) -> str:
    """A rule for the full matches of a regular expression.

    Raises:
        ValueError: it is too long.
    """
    _check_length("a regular expression", pattern)
    escaped = re.sub(r"\\?\n|\\.|/", lambda match: SPELT.get(match[0], match[0]), pattern)
    return f"{name}: /{escaped}/"


def lark_rule(name: str, grammar: str) -> str:
    """A rule for a whole grammar, in Lark's syntax or in llama.cpp's (GBNF).

    Raises:
        ValueError: it is too long, or in neither.
    """
    from llguidance.gbnf_to_lark import any_to_lark

    _check_length("a grammar", grammar)
    try:
        return f"{name}: %lark {{\n{any_to_lark(grammar)}\n}}"
    except Exception as error:  # of no type of its own where a rule is missing
        raise ValueError(f"it is neither in Lark's syntax nor GBNF ({str(error)[:200]})") from error


def choice_rule(name: str, texts: Sequence[str]) -> str:
    """A rule for one of ``texts``."""
    return f"{name}: {' | '.join(map(json.dumps, texts))}"


def _trial_settings(tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> dict[str, Any]:
    """What :mod:`medusa.acceptance.grammar_trial` needs of a tokenizer."""
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    return {
        "tokenizer": _serialised(tokenizer),
        "num_tokens": vocab_size,
        "eos_ids": [*eos_ids],
        "quotes": [token for token, name in enumerate(names) if '"' in (name or "")],
    }


def _serialised(tokenizer: Any) -> str:
    """The text of the tokenizer's ``tokenizer.json``, without what pads or cuts."""
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise ValueError where ``schema`` is too large or too deep to compile, or its definitions are none.

    A reference counts as the levels of its target; a target that occurs again counts no more, as in trees.
    """
    under_way: list[tuple[Any, int]] = [(schema, 1)]
    met: set[str] = set()
    while under_way:
        part, depth = under_way.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise ValueError(
                f"a schema may be {MAX_SCHEMA_DEPTH} levels deep, references included; this one is deeper"
            )
        if isinstance(part, list):
            under_way += [(inner, depth + 1) for inner in part]
        if not isinstance(part, Mapping):
            continue
        for key, inner in part.items():
            if key in DEFINITIONS and not isinstance(inner, Mapping):
                raise ValueError(f"{key} of a schema must be an object, got {type(inner).__name__}")
            if key not in (*DEFINITIONS, *VALUES):
                under_way.append((inner, depth + 1))
        target = part.get("$ref")
        if isinstance(target, str) and target.startswith("#") and target not in met:
            met.add(target)
            under_way.append((_referred(schema, target), depth + 1))
    _check_length("a schema", json.dumps(schema))


def _check_length(name: str, text: str) -> None:
    if len(text) > MAX_SCHEMA_LENGTH:
        raise ValueError(f"{name} may have {MAX_SCHEMA_LENGTH} characters, got {len(text)}; ask for less")


def _referred(schema: Any, pointer: str) -> Any:
    """The target of a reference inside ``schema``; None without any."""
    part = schema
    for name in filter(None, pointer[1:].split("/")):
        key = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and key.isdecimal() and len(key) < 9:
            part = part[int(key)] if int(key) < len(part) else None
        else:
            part = part.get(key) if isinstance(part, Mapping) else None
    return part


class Grammar:
    """A compiled grammar; :meth:`processor` holds one answer to it."""

    def __init__(self, matcher: Any, eos_ids: frozenset[int], vocab_size: int):
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size

    def processor(self, num_prompt: int) -> GrammarProcessor:
        """The logits processor of one row, after a prompt of ``num_prompt`` tokens."""
        return GrammarProcessor(self._matcher.deep_copy(), self._eos_ids, self._vocab_size, num_prompt)


class GrammarProcessor(LogitsProcessor):
    """Scores with minus infinity at tokens that leave the grammar; a function of only ``input_ids``.

    The matcher has a position in the grammar, and is moved to each requested path: the common prefix with the
    last path is not read again.
    """

    def __init__(self, matcher: Any, eos_ids: frozenset[int], vocab_size: int, num_prompt: int):
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._num_prompt = num_prompt
        self._consumed: list[int] = []  # the path at whose end the matcher is

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids (M, T) long, scores (M, V) float -> (M, V).

        Raises:
            GrammarFailed: the grammar is too large to go on in.
        """
        allowed = [self._allowed(path) for path in input_ids[:, self._num_prompt :].tolist()]
        mask = torch.from_numpy(np.stack(allowed)).to(scores.device)
        return scores.masked_fill(~mask, -torch.inf)

    def _allowed(self, path: list[int]) -> np.ndarray:
        """(V,) bool: what may follow. Behind a forbidden token or an end nothing is chosen, so anything."""
        if not self._eos_ids.isdisjoint(path) or not self._moved_to(path):
            return np.ones(self._vocab_size, dtype=bool)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)

    def _moved_to(self, path: list[int]) -> bool:
        """Whether the grammar allows ``path``; the matcher is then at its end."""
        shared = 0
        for earlier, token in zip(self._consumed, path, strict=False):
            if earlier != token:
                break
            shared += 1
        self._matcher.rollback(len(self._consumed) - shared)
        num_more = self._matcher.try_consume_tokens(path[shared:])
        self._check()
        self._consumed = path[: shared + num_more]
        return len(self._consumed) == len(path)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(self._matcher.get_error().partition("\n")[0])
