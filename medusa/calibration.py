"""How often each head is right, counted on text: the statistics that choose a candidate tree.

The base model reads finished answers once (teacher forcing). At the position t of an answer the base
emits token t+1 by itself, and head d guesses token t+1+d from the hidden state at t; what is kept is
the *rank* of the true token among the head's guesses. Everything else follows from those ranks:
top-k accuracy per head, which rank path would have been right and how often, the tree with the most
accepted tokens, and the tokens per step that decoding this very text with a tree would have shown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from medusa.base import CausalLM, hidden_states, layers_of, output_embedding
from medusa.eagle import EagleHead, Heads, drafted_features
from medusa.tree import CandidateTree, RankPath, best_tree, grown_path_values

MISS = -1
"""Rank of a true token that is not among the head's ``max_rank`` best guesses."""
UNKNOWN = -2
"""Rank where the answer is already over."""
UNSEEN = 0.1
"""Times that a rank counts as right before any text is read."""
LOGITS_PER_CHUNK = 2**25
"""Head logits held at a time: 128 MB in float32."""


class AnsweredTokens(NamedTuple):
    """One row to calibrate on."""

    token_ids: Sequence[int]
    is_label: Sequence[bool]
    """Which tokens the model wrote: those that decoding would have emitted."""

    @classmethod
    def after_prompt(cls, token_ids: Sequence[int], prompt_length: int) -> AnsweredTokens:
        """A row whose answer is everything after the first ``prompt_length`` tokens."""
        return cls(token_ids, [place >= prompt_length for place in range(len(token_ids))])


@dataclass(frozen=True)
class RankCounts:
    """Ranks of the true tokens, and what they say; ``a + b`` is both texts together."""

    ranks: tuple[Tensor, ...]
    """One (P, K) int16 tensor per answer: position by position, head by head; MISS or UNKNOWN below 0."""
    max_rank: int
    """How many guesses of each head were looked at."""

    def __add__(self, other: RankCounts) -> RankCounts:
        if (self.max_rank, self.num_heads) != (other.max_rank, other.num_heads):
            raise ValueError(
                f"counts to add must agree in (max_rank, heads): {(self.max_rank, self.num_heads)} "
                f"and {(other.max_rank, other.num_heads)}"
            )
        return RankCounts(self.ranks + other.ranks, self.max_rank)

    @property
    def num_heads(self) -> int:
        """K."""
        return self.ranks[0].shape[1]

    @cached_property
    def head_totals(self) -> list[int]:
        """Positions at which each head's true token is known."""
        return (torch.cat(self.ranks) != UNKNOWN).sum(dim=0).tolist()

    @cached_property
    def head_counts(self) -> Tensor:
        """[d-1, r] = positions at which the rank-r guess of head d was right, (K, max_rank) long."""
        ranks = torch.cat(self.ranks).long()
        return torch.stack([(ranks == rank).sum(dim=0) for rank in range(self.max_rank)], dim=1)

    @cached_property
    def num_positions(self) -> int:
        """Positions at which every head's true token is known; the joint counts are over these."""
        return self.head_totals[-1]

    @cached_property
    def joint_counts(self) -> Counter[RankPath]:
        """[path] = how often every guess on ``path`` was right, over :attr:`num_positions`."""
        longest = Counter(
            _right_path(row) for ranks in self.ranks for row in ranks.tolist() if row[-1] != UNKNOWN
        )
        counts: Counter[RankPath] = Counter()
        for path, count in longest.items():
            for depth in range(1, len(path) + 1):
                counts[path[:depth]] += count
        return counts

    def top_k_accuracy(self, k: int) -> list[float]:
        """[d-1] = how often the true token was among the k best guesses of head d; NaN where never known."""
        if not 1 <= k <= self.max_rank:
            raise ValueError(
                f"k must be in [1, max_rank={self.max_rank}], got {k}; calibrate with more ranks"
            )
        hits = self.head_counts[:, :k].sum(dim=1).tolist()
        return [hit / total if total else math.nan for hit, total in zip(hits, self.head_totals, strict=True)]

    def path_values(
        self, prior_strength: float = 64.0, max_depth: int | None = None, max_paths: int = 4096
    ) -> dict[RankPath, float]:
        """Estimated probability that every guess on a path is right, for the paths worth most.

        Given its parent, a path's rate is its joint count, drawn towards the head's own rank rates as
        if those had been seen ``prior_strength`` times. Where counts are many the joint counts decide;
        where there are none the value is the product of independent depths. Ranks never seen count a
        little, so a tree of any size can be built.
        """
        self._check_not_empty()
        totals = torch.tensor(self.head_totals)[:, None] + UNSEEN * self.max_rank
        alone = ((self.head_counts + UNSEEN) / totals).tolist()
        depth_limit = self.num_heads if max_depth is None else min(max_depth, self.num_heads)

        def child_rates(path: RankPath) -> list[float]:
            if len(path) == depth_limit:
                return []
            seen = self.joint_counts[path] if path else self.num_positions
            return [
                (self.joint_counts[(*path, rank)] + prior_strength * rate) / (seen + prior_strength)
                for rank, rate in enumerate(alone[len(path)])
            ]

        return grown_path_values(child_rates, max_paths)

    def best_tree(self, num_nodes: int, max_depth: int | None = None) -> CandidateTree:
        """The tree of ``num_nodes`` nodes (the root included) that should accept most."""
        return best_tree(self.path_values(max_depth=max_depth, max_paths=num_nodes), num_nodes)

    def expected_tokens_per_step(self, tree: CandidateTree) -> float:
        """1 + mean accepted tokens when a step starts at every position of the text alike."""
        self._check_not_empty()
        return 1 + sum(self.joint_counts[path] for path in tree.paths if path) / self.num_positions

    def replayed_tokens_per_step(self, tree: CandidateTree) -> float:
        """What greedy decoding of these very answers with ``tree`` measures as tokens per step.

        A step starts where the one before it ended, so this is not :meth:`expected_tokens_per_step`:
        steps begin more often after a token that was hard to guess.
        """
        num_steps, num_tokens = map(sum, zip(*self.replay(tree), strict=True))
        return num_tokens / num_steps if num_steps else 1.0

    def replay(self, tree: CandidateTree) -> list[tuple[int, int]]:
        """The steps that greedy decoding of each answer with ``tree`` takes, and the tokens they emit."""
        nodes = set(tree.paths)
        replayed = []
        for ranks in self.ranks:
            rows, root, num_steps = ranks.tolist(), 0, 0
            while root < len(rows) - 1:
                path = _right_path(rows[root])
                depth = next(d for d in range(len(path), -1, -1) if path[:d] in nodes)
                num_steps, root = num_steps + 1, min(root + depth + 1, len(rows) - 1)
            replayed.append((num_steps, root))
        return replayed

    def halves(self) -> tuple[RankCounts, RankCounts]:
        """The answers dealt out in two, to choose on one half and judge on the other."""
        if len(self.ranks) < 2:
            raise ValueError(f"two halves need at least 2 answers, got {len(self.ranks)}")
        return RankCounts(self.ranks[::2], self.max_rank), RankCounts(self.ranks[1::2], self.max_rank)

    def _check_not_empty(self) -> None:
        if not self.num_positions:
            raise ValueError(
                f"no answer is long enough to see all {self.num_heads} heads guess (it takes "
                f"{self.num_heads + 1} tokens); calibrate on longer answers"
            )


@torch.no_grad()
def calibrate(
    base: PreTrainedModel,
    heads: Heads,
    rows: Iterable[AnsweredTokens],
    *,
    max_rank: int = 16,
    batch_size: int = 4,
) -> RankCounts:
    """Ranks of the true tokens of ``rows`` among each head's ``max_rank`` best guesses.

    Rows of similar length share a forward pass; logits exist for a few positions at a time.

    Raises:
        ValueError: no row has a labelled token after its first.
    """
    return calibrate_each(base, [heads], rows, max_rank=max_rank, batch_size=batch_size)[0]


@torch.no_grad()
def calibrate_each(
    base: PreTrainedModel,
    sets: Sequence[Heads],
    rows: Iterable[AnsweredTokens],
    *,
    max_rank: int = 16,
    batch_size: int = 4,
) -> list[RankCounts]:
    """:func:`calibrate` for several sets of heads on the same rows, which the base then reads once."""
    ordered = sorted(enumerate(rows), key=lambda item: len(item[1].token_ids))
    layers = sorted({layer for heads in sets for layer in heads.reads_layers})
    answers: list[list[list[Tensor]]] = [[[] for _ in ordered] for _ in sets]
    for start in range(0, len(ordered), batch_size):
        indices, batch = zip(*ordered[start : start + batch_size], strict=True)
        ids, states = _states(base, batch, layers)
        for heads, found in zip(sets, answers, strict=True):
            theirs = layers_of(states, layers, heads.reads_layers)
            ranks = _batch_ranks(base, heads, batch, ids, theirs, max_rank)
            for index, of_row in zip(indices, ranks, strict=True):
                found[index] = of_row
    counts = [RankCounts(tuple(ranks for row in found for ranks in row), max_rank) for found in answers]
    if not all(each.ranks for each in counts):
        raise ValueError("rows hold no labelled token after their first: there is nothing to calibrate on")
    return counts


def _states(base: CausalLM, rows: Sequence[AnsweredTokens], layers: list[int]) -> tuple[Tensor, Tensor]:
    """The tokens (B, T) long of ``rows`` and the base's hidden states (B, T, (1 + L) * D)."""
    # Padding stands on the right, where no token of a row sees it.
    ids = pad_sequence([torch.tensor(row.token_ids) for row in rows], batch_first=True)
    return ids, hidden_states(base, ids.to(base.device), layers=layers)


def _batch_ranks(
    base: PreTrainedModel,
    heads: Heads,
    rows: Sequence[AnsweredTokens],
    ids: Tensor,
    states: Tensor,
    max_rank: int,
) -> Iterator[list[Tensor]]:
    """For each row, the ranks (P, K) of its answers, given its tokens and states."""
    if isinstance(heads, EagleHead):
        states = _drafted_states(base, heads, ids.to(base.device), states)  # (B, T, K, D)
    for i, row in enumerate(rows):
        answers = []
        for start, end in _answer_spans(row.is_label):
            ahead = torch.arange(start, end)[:, None] + torch.arange(1, heads.num_heads + 1)  # (P, K)
            truth = ids[i][ahead.clamp(max=end - 1)].masked_fill(ahead >= end, UNKNOWN)
            path = ids[i][(ahead - 1).clamp(max=end - 1)]  # whatever follows an unknown token is unknown too
            answers.append(_true_ranks(base, heads, states[i, start - 1 : end - 1], path, truth, max_rank))
        yield answers


def _drafted_states(base: PreTrainedModel, head: EagleHead, ids: Tensor, features: Tensor) -> Tensor:
    """The features (B, T, K, D) that an EAGLE-style head guesses each depth from, at the position before the
    root; ids (B, T) long, features (B, T, D)."""
    following = base.get_input_embeddings()(ids.roll(-1, dims=1))
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    by_last_entry = drafted_features(head, features, following, positions)
    # A draft of d entries from position t ends at entry t + d - 1; what wraps around lies past every answer.
    return torch.stack([each.roll(-depth, dims=1) for depth, each in enumerate(by_last_entry)], dim=2)


def _answer_spans(is_label: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """(start, end) of each run of labelled tokens; token 0 is left out, since no state comes before it."""
    start = None
    for position, labelled in enumerate([*is_label, False]):
        if labelled and start is None and position > 0:
            start = position
        elif not labelled and start is not None:
            yield start, position
            start = None


def _true_ranks(
    base: PreTrainedModel, heads: Heads, states: Tensor, path: Tensor, truth: Tensor, max_rank: int
) -> Tensor:
    """Ranks (P, K) int16 of truth (P, K) long, given the states (P, (1 + L) * D) and path (P, K) long that
    Medusa heads read, or the states (P, K, D) that an EAGLE-style head predicted."""
    unembedding = output_embedding(base)
    chunk = max(1, LOGITS_PER_CHUNK // (heads.num_heads * heads.config.vocab_size))
    ranks = []
    parts = (each.split(chunk) for each in (states, path.to(states.device), truth))
    for part, behind, tokens in zip(*parts, strict=True):
        if isinstance(heads, EagleHead):
            logits = heads.unembedded(part, unembedding)  # (chunk, K, V')
        else:
            logits = heads(heads.fuse(part), unembedding, behind)
        guesses = heads.token_ids(logits.topk(min(max_rank, logits.shape[-1]), dim=-1).indices)
        is_right = guesses.cpu() == tokens[..., None]
        found = torch.where(is_right.any(dim=-1), is_right.int().argmax(dim=-1), MISS)
        ranks.append(found.masked_fill(tokens == UNKNOWN, UNKNOWN).to(torch.int16))
    return torch.cat(ranks)


def _right_path(ranks: Sequence[int]) -> RankPath:
    """The ranks up to the first head that missed."""
    depth = next((d for d, rank in enumerate(ranks) if rank < 0), len(ranks))
    return tuple(ranks[:depth])
