"""Reference texts that drafts may copy from besides the row itself: predictions of the caller, and earlier
answers.

Whatever they hold, the text that is written stays the same: they only say what to guess.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa.engine.kernels import kernels_unsupported_reason, shared_constant
from medusa.hardware import sent

NUM_ORDERS = int(shared_constant("NUM_ORDERS"))
"""Lengths of match that are indexed."""
BYTES_PER_TOKEN = 4 * (1 + NUM_ORDERS) + 2 * NUM_ORDERS
"""The token, what links it to earlier places, and its part of the tables that lead to the newest ones."""
LEAST_BYTES = 2**16
MOST_TOKENS = 2**31 - 2**16
"""Positions are numbers of 32 bits."""
PROMPT_END = 16
"""Tokens of the prompt that are put before the prediction."""
LOCK = threading.Lock()
"""Held while any corpus is read or written: microseconds each time."""


class SuffixCorpus:
    """A bounded store of earlier texts; the oldest are dropped first.

    Drafts look here for earlier occurrences of an answer's last tokens, and continue them (SuffixDecoding,
    arXiv 2411.04975). The index is one of hash chains over the newest tokens, as zlib has it: a token is
    added in constant time, and a look takes as long in a large corpus as in a small one. Several threads may
    share a corpus.

    Args:
        max_bytes: memory it may take, about :data:`BYTES_PER_TOKEN` (16) for a token; taken as texts come.

    Raises:
        ValueError: ``max_bytes`` is too small, or the kernels, which search it, cannot run here.
    """

    def __init__(self, max_bytes: int):
        if max_bytes < LEAST_BYTES:
            raise ValueError(f"max_bytes must be at least {LEAST_BYTES}, got {max_bytes}")
        requirement = kernels_unsupported_reason()
        if requirement is not None:
            raise ValueError(f"a corpus needs {requirement}")
        self.capacity = min(max_bytes // BYTES_PER_TOKEN, MOST_TOKENS // 2)
        """Tokens that it can hold."""
        self.clear()

    def clear(self) -> None:
        """Forget all texts."""
        ring = np.zeros((1 + NUM_ORDERS, self.capacity), dtype=np.int32)  # pages are taken when written to
        latest = np.zeros((NUM_ORDERS, self.capacity // 2), dtype=np.int32)
        with LOCK:
            self.index = torch.from_numpy(ring), torch.from_numpy(latest)
            """(1 + orders, C) and (orders, C / 2) int32: tokens with their links, and the tables."""
            self.total = 0
            """Tokens that were added so far."""

    def add(self, tokens: Tensor | list[int]) -> None:
        """Remember a text, (T,) token ids: a prompt with its answer, say.

        Raises:
            ValueError: these are no token ids.
        """
        text = torch.as_tensor(tokens, dtype=torch.long, device="cpu").flatten()
        if len(text) and not 0 <= int(text.min()) <= int(text.max()) < MOST_TOKENS:
            raise ValueError(
                f"tokens must be token ids from 0 to {MOST_TOKENS - 1}, got {int(text.min())} to "
                f"{int(text.max())}; add the ids that a tokenizer gives"
            )
        text = text[-(self.capacity - 1) :]
        if self.total + len(text) >= MOST_TOKENS:
            self.clear()
        with LOCK:
            self.total = torch.ops.medusa.remember(*self.index, self.total, text)

    @property
    def num_tokens(self) -> int:
        """Tokens that it holds, one between texts included."""
        return min(self.total, self.capacity)


@dataclass(frozen=True)
class References:
    """The reference texts of one row."""

    prediction: Tensor | None = None
    """(P,) long: the end of the prompt and then the answer that is expected, so that a match finds its
    beginning; None for no expectation."""
    corpus: SuffixCorpus | None = None


def references_of(
    prediction: Any,
    corpus: SuffixCorpus | None,
    prompts: Sequence[Tensor],
    vocab_size: int,
    encode: Callable[[str], Sequence[int]],
) -> tuple[References, ...]:
    """The references of each of B rows with ``prompts``, (T,) long each; () where there is nothing to copy
    from.

    Args:
        prediction: the answer that is expected, as a text or its token ids (P,); or a list of B of these,
            where None expects nothing.
        encode: a text's token ids.

    Raises:
        TypeError: ``corpus`` is no :class:`SuffixCorpus`.
        ValueError: ``prediction`` is none of these, or holds ids beyond ``vocab_size``.
    """
    if corpus is not None and not isinstance(corpus, SuffixCorpus):
        raise TypeError(f"corpus must be a medusa.SuffixCorpus, got {type(corpus).__name__}")
    references = []
    for answer, prompt in zip(_rows(prediction, len(prompts)), prompts, strict=True):
        ids = _ids(encode(answer) if isinstance(answer, str) else answer, vocab_size)
        expected = torch.cat([prompt[-PROMPT_END:], sent(ids, prompt.device)]) if len(ids) else None
        references.append(References(expected, corpus))
    is_nothing = corpus is None and all(row.prediction is None for row in references)
    return () if is_nothing else tuple(references)


def _rows(prediction: Any, num_rows: int) -> list[Any]:
    """The prediction of each row."""
    is_one = isinstance(prediction, Tensor) and prediction.dim() == 1
    is_one |= isinstance(prediction, list | tuple) and all(type(token) is int for token in prediction)
    if prediction is None or isinstance(prediction, str) or is_one:
        return [prediction] * num_rows
    if isinstance(prediction, list | tuple | Tensor) and len(prediction) == num_rows:
        return list(prediction)
    is_list = isinstance(prediction, list | tuple)
    description = f"{len(prediction)} of them" if is_list else f"{prediction!r:.80}"
    raise ValueError(
        "prediction must be a text, its token ids in one dimension, or a list with one of these for each of "
        f"the {num_rows} rows, got {description}"
    )


def _ids(answer: Any, vocab_size: int) -> Tensor:
    """The token ids (P,) long of an expected answer; none for None."""
    ids = torch.as_tensor([] if answer is None else answer)
    if ids.numel() and (ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool):
        raise ValueError(f"prediction must hold token ids in one dimension, got {answer!r:.80}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"prediction must hold token ids from 0 to {vocab_size - 1}, got {int(ids.min())} to "
            f"{int(ids.max())}; was it made by another tokenizer?"
        )
    return ids.long().flatten()
