"""Answers in a form that was asked for: tokens that would leave a grammar are never chosen.

The grammar is a function of one row's answer alone, so every node of a candidate tree can be asked for the
tokens that may follow its own path, and the text is that of plain decoding with the same grammar. llguidance
(https://github.com/guidance-ai/llguidance, MIT) compiles grammars and computes what may follow; it is an
optional dependency.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line: where any white space may come, a small model may write nothing else."""


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
                "grammars need llguidance, which is not installed: pip install 'medusa-heads[grammar]'"
            ) from error
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"grammars need a fast tokenizer, got {type(tokenizer).__name__}")
        self._matcher_of = LLMatcher
        self._tokens = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=[*eos_ids])
        self._eos_ids, self._vocab_size = frozenset(eos_ids), vocab_size

    def json(self, schema: Mapping[str, Any], before: str = "", after: str = "") -> Grammar:
        """JSON by ``schema``, between two fixed strings.

        Raises:
            ValueError: the schema is wrong, or uses what llguidance does not know.
        """
        spaced = {**schema, "x-guidance": ONE_LINE}
        parts = [json.dumps(before)] * bool(before) + ["json"] + [json.dumps(after)] * bool(after)
        lark = f"start: {' '.join(parts)}\njson: %json {json.dumps(spaced)}"
        source = self._matcher_of.grammar_from_lark(lark)
        if problem := self._matcher_of.validate_grammar(source, self._tokens):
            raise ValueError(problem)
        return Grammar(self._matcher_of(self._tokens, source), self._eos_ids, self._vocab_size)


class Grammar:
    """A compiled grammar; :meth:`processor` holds one answer to it."""

    def __init__(self, matcher: Any, eos_ids: frozenset[int], vocab_size: int):
        self._matcher, self._eos_ids, self._vocab_size = matcher, eos_ids, vocab_size

    def processor(self, num_prompt: int) -> GrammarProcessor:
        """What forbids all other tokens after a prompt of ``num_prompt`` tokens, for one row."""
        return GrammarProcessor(self._matcher.deep_copy(), self._eos_ids, self._vocab_size, num_prompt)


class GrammarProcessor(LogitsProcessor):
    """Scores with minus infinity at tokens that leave the grammar; a function of ``input_ids`` alone.

    The matcher stands somewhere in the grammar, and is moved to each path that is asked about: what it shares
    with the last one is not read again.
    """

    def __init__(self, matcher: Any, eos_ids: frozenset[int], vocab_size: int, num_prompt: int):
        self._matcher, self._eos_ids = matcher, eos_ids
        self._vocab_size, self._num_prompt = vocab_size, num_prompt
        self._read: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids (M, T) long, scores (M, V) float -> (M, V).

        Raises:
            RuntimeError: the grammar is too large to go on in.
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
        """Whether the grammar allows ``path``; the matcher then stands behind it."""
        shared = 0
        for ours, theirs in zip(self._read, path, strict=False):
            if ours != theirs:
                break
            shared += 1
        self._matcher.rollback(len(self._read) - shared)
        num_read = self._matcher.try_consume_tokens(path[shared:])
        self._check()
        self._read = path[: shared + num_read]
        return len(self._read) == len(path)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RuntimeError(self._matcher.get_error().partition("\n")[0])
