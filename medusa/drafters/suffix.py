"""Suffix matching: continues earlier occurrences of the last tokens of a text.

Prompt lookup in prompt and answer, in predictions of the caller, and in earlier texts
(:mod:`medusa.drafters.references`). It costs no model call and shines where text repeats.

Several occurrences may be continued in several ways, so the result is a tree. Each occurrence is weighted by
its odds: how often its continuation was right, relative to the heads' guess (:data:`ODDS`). Weights of equal
continuations add up, and the tree holds their share of the probability (SuffixDecoding, arXiv 2411.04975,
counts occurrences in the same way; pointer-generator networks, arXiv 1704.04368, mix so with a model).
Besides the longest match in row and prediction only matches of four tokens or more are used: shorter ones
predict worse than the heads.

The search is one operator of :mod:`medusa.engine.kernels`, where these are loaded. Elsewhere, and in steps
that must not wait for the device, a few tensor operations find the longest match in the row itself and in its
prediction.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa.drafters.protocol import Draft, DraftContext, StatelessDrafter
from medusa.drafters.references import LOCK
from medusa.engine.kernels import are_loaded, shared_constant
from medusa.trees.candidate_tree import CandidateTree, TreeTopology

MAX_MATCH = int(shared_constant("MAX_MATCH"))
"""Tokens that a match counts at most."""
MAX_CHILDREN = int(shared_constant("MAX_CHILDREN"))
"""Largest number of children of a node of the continuations."""
SPARE_CONTINUATIONS = int(shared_constant("SPARE_CONTINUATIONS"))
"""Nodes of the continuations beyond one per depth."""
LEAST_OF_SEVERAL = int(shared_constant("LEAST_OF_SEVERAL"))
"""Tokens that agree at places of a corpus, and beside the best of the others."""
MATCH_WEIGHTS = (0.0, 0.11, 0.35, 0.42, 0.56, 0.65, 0.72, *[0.83] * 6, *[0.93] * 3, 0.97)
MATCH_ODDS = tuple(weight / (1 - weight) for weight in MATCH_WEIGHTS)
ODDS = torch.tensor([1, 1, 0.22], dtype=torch.float32)[:, None] * torch.tensor(
    MATCH_ODDS, dtype=torch.float32
)
"""(sources, MAX_MATCH + 1): how much a place of the row itself, of its prediction and of its corpus counts
beside the heads, whose guesses count 1, by the tokens that agree.

For one place that is a weight in a mixture, :data:`MATCH_WEIGHTS`. These make the mixture of heads and match
likeliest for the shipped heads: 3,532 tokens that followed a match in SmolLM2-135M-Instruct's greedy answers
to 24 prompts of twelve kinds, MT-bench not among them. A prediction, the original of an edit, is right as
often as the row itself after as long a match. Answers to other questions are right half as often."""
_USUAL_IN_ROW = [0.01, 0.29, 0.5, 0.57, *[0.82] * 6, *[0.88] * 6, 0.97]
_USUAL_IN_CORPUS = [*[0.01] * 4, 0.4, *[0.43] * 5, *[0.73] * 6, 0.95]
USUAL = torch.tensor([_USUAL_IN_ROW, _USUAL_IN_ROW, _USUAL_IN_CORPUS], dtype=torch.float32).logit()
"""(sources, MAX_MATCH + 1): how often the best place is right about a step's first token, by the tokens that
agree, as logarithms of odds; of 1,970 steps of such answers. A source that is right more often is believed
more."""

_NOTHING = torch.empty(0, dtype=torch.long)


@dataclass(frozen=True)
class Continuations:
    """Continuations found in earlier text: a tree of T nodes below each row's root token, node 0."""

    tokens: Tensor
    """(B, T) long."""
    parents: Tensor
    """(B, T) long; parents come before their children."""
    children: Tensor
    """(B, T, W) long: the nodes that may follow each; 0 for none."""
    shares: Tensor
    """(B, T): the probability of each node after its parent; the rest is left to the heads."""
    num_matched: Tensor
    """(B,) long: of the last tokens, how many agree at the best place, at most :data:`MAX_MATCH`."""
    source_guesses: Tensor | None = None
    """(B, 7) long: the next token by each source, from which the next search learns."""

    def best_path(self, length: int) -> tuple[Tensor, Tensor]:
        """The likeliest path of ``length`` tokens, and the share of each token: (B, length) each. The root
        token where there is no continuation."""
        row = torch.arange(len(self.tokens), device=self.tokens.device)
        node = torch.zeros_like(row)
        nodes = self.children[:, 0, :0]
        for depth in range(length):
            children = self.children[row, node]  # (B, W)
            best = self.shares[row[:, None], children].argmax(1)
            node = torch.where((node > 0) | (depth == 0), children[row, best], 0)
            nodes = torch.cat([nodes, node[:, None]], dim=1)
        return self.tokens.gather(1, nodes), self.shares.gather(1, nodes)


def nothing_expected(root: Tensor) -> Continuations:
    """The result without any match: trees of only the root tokens (B,) long."""
    zeros = torch.zeros_like(root[:, None])
    children = zeros[..., None].expand(-1, -1, MAX_CHILDREN).contiguous()
    return Continuations(root[:, None], zeros, children, zeros.to(torch.float32), zeros[:, 0])


def no_trust() -> Tensor:
    """The trust, (sources,), that :func:`continuations` begins with."""
    return torch.zeros(len(ODDS), dtype=torch.float32)  # as the kernel has it, whatever torch's default is


def continuations(
    context: DraftContext, num_tokens: int, trust: Tensor | None = None, source_guesses: Tensor | None = None
) -> Continuations:
    """The possible continuations of each row, up to ``num_tokens`` tokens deep.

    ``trust`` (sources,) is the logarithm of the factor of each source's odds. It is updated here if
    ``source_guesses``, the :attr:`Continuations.source_guesses` of the previous search, is passed; 0 by
    default.
    """
    is_on_host = context.tokens.device.type == "cpu" and not context.fixed_shape
    if not is_on_host or not are_loaded():
        return _chains(context, num_tokens)
    predictions = [_NOTHING if row.prediction is None else row.prediction for row in context.references]
    corpora = [row.corpus for row in context.references]
    indices: list[Tensor] = []  # two tensors for each row
    with LOCK:
        for corpus in corpora:
            indices += corpus.index if corpus else (_NOTHING, _NOTHING)
        totals = torch.tensor([corpus.total if corpus else 0 for corpus in corpora], dtype=torch.long)
        tree = torch.ops.medusa.continuations(
            context.tokens,
            context.lengths,
            predictions,
            indices,
            totals,
            ODDS,
            USUAL,
            no_trust() if trust is None else trust,
            source_guesses,
            num_tokens,
            context.vocab_size,
        )
    return Continuations(*tree)


def _chains(context: DraftContext, num_tokens: int) -> Continuations:
    """The longest match of each row, in its prediction and itself, by tensor operations."""
    root = context.root[:, None]
    tokens = context.tokens
    nothing = context.root[:0]
    predictions = [nothing if row.prediction is None else row.prediction for row in context.references]
    width = max((1 + len(prediction) for prediction in predictions), default=0)
    if width:  # predictions go before the text, aligned to its start; -1 separates texts
        reversed_predictions = [prediction.flip(0) for prediction in predictions]
        before = torch.nn.utils.rnn.pad_sequence(reversed_predictions, True, -1).flip(1)
        tokens = torch.cat([torch.nn.functional.pad(before, (0, 1), value=-1), tokens], dim=1)
    match = longest_match(tokens, context.lengths + width, num_tokens)
    matched = match.num_matched[:, None]
    ahead = torch.arange(num_tokens, device=tokens.device)
    length = (matched + ahead).clamp(max=MAX_MATCH)
    counts = torch.zeros(length.shape, dtype=torch.float32, device=length.device)
    for least, count in enumerate(MATCH_ODDS):  # no table: it would have to be moved to the device
        counts.masked_fill_(length >= least, count)
    is_output = (match.continuation >= 0) & (match.continuation < context.vocab_size)
    goes_on = is_output.cumprod(1) > 0
    shares = torch.where((matched > 0) & goes_on, counts / (1 + counts), 0)
    nodes = torch.arange(num_tokens + 1, device=tokens.device).expand(len(tokens), -1)
    return Continuations(
        torch.cat([root, torch.where(goes_on, match.continuation, root)], dim=1),
        (nodes - 1).clamp(min=0),
        torch.nn.functional.pad(nodes[:, 1:, None], (0, MAX_CHILDREN - 1, 0, 1)),
        torch.nn.functional.pad(shares, (1, 0)),
        match.num_matched,
    )


@dataclass(frozen=True)
class SuffixMatch:
    """The longest earlier occurrence of each row's last tokens. Ties go to the occurrence that agrees in more
    of the tokens before it, the newest first; then to the latest.

    In 54,000 tokens of SmolLM2-135M-Instruct's answers to 400 prompts, half of them greedy, the token after
    the latest match was right more often than that after the first: 24 % and 19 % after matches of one
    token, 48 and 46 after two, 64 and 62 after four, 76 and 75 after eight, 97 and 97 after 16 or more.
    """

    num_matched: Tensor
    """(B,) long: how many of the last tokens, at most :data:`MAX_MATCH`; 0 where even the last one is new."""
    continuation: Tensor
    """(B, C) long: the tokens that followed. Where fewer than C did, they go round: the text between match
    and end of the row is taken to repeat. Without a match, any tokens of the row."""


def longest_match(tokens: Tensor, lengths: Tensor, num_tokens: int) -> SuffixMatch:
    """The longest earlier match of each row's end, and ``num_tokens`` = C tokens that followed it.

    tokens (B, S) long hold ``lengths`` (B,) long tokens a row, at least one; the rest is padding.
    """
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    newest = torch.arange(MAX_MATCH, device=tokens.device)  # the last is the row's last token
    last = lengths[:, None] - 1
    padded = torch.nn.functional.pad(tokens, (MAX_MATCH - 1, 0), value=-1)
    agrees = padded.unfold(1, MAX_MATCH, 1) == padded.gather(1, last + newest)[:, None]  # (B, S, M)
    # As a binary number with the last token in front, a longer match is a larger one; the column in the
    # low bits breaks ties in favour of later ones.
    pattern = (agrees * (1 << newest)).sum(2)
    best = torch.where(columns < last, pattern << 32 | columns, 0).amax(1, keepdim=True)
    longer = (1 << MAX_MATCH) - (1 << newest)  # the least patterns of matches of M, M - 1, ... 1 tokens
    num_matched = (best >> 32 >= longer).sum(1)
    end = best & 0xFFFFFFFF
    ahead = torch.arange(num_tokens, device=tokens.device) % (last - end).clamp(min=1)
    return SuffixMatch(num_matched, tokens.gather(1, (end + 1 + ahead).clamp(max=tokens.shape[1] - 1)))


class SuffixDrafter(StatelessDrafter):
    """Drafts a chain of ``length`` tokens, the continuation of a match of at least ``min_match`` tokens.

    Rows without such a match draft their root token over and over, which is harmless. When no row has one,
    and drafts need not have one shape, nothing is drafted.
    """

    def __init__(self, length: int = 16, min_match: int = 2):
        if length < 1 or not 1 <= min_match <= MAX_MATCH:
            raise ValueError(
                f"length must be at least 1 and min_match in [1, {MAX_MATCH}], got {length} and {min_match}"
            )
        self.length = length
        self.min_match = min_match

    @property
    def max_depth(self) -> int:
        return self.length

    @property
    def num_nodes(self) -> int:
        return self.length + 1

    @property
    def static_key(self) -> Hashable:
        """See :class:`medusa.drafters.protocol.StaticDrafter`."""
        return "suffix", self.length, self.min_match

    def with_tree(self, tree: CandidateTree | None = None) -> SuffixDrafter:
        """A drafter of chains as deep as ``tree``."""
        return SuffixDrafter(self.length if tree is None else tree.depth, self.min_match)

    def tensors(self) -> list[Tensor]:
        return []

    def draft(self, context: DraftContext) -> Draft:
        root = context.root[:, None]
        expected = continuations(context, self.length)
        is_match = expected.num_matched >= self.min_match
        length = self.length if context.fixed_shape or is_match.any() else 0
        tokens, shares = expected.best_path(length)
        guesses = torch.where(is_match[:, None], tokens, root)
        path_logprob = torch.where(is_match[:, None], shares, 0).log().cumsum(1)
        topology = TreeTopology.chain(length + 1, root.device, is_draft=True)
        return Draft(
            torch.cat([root, guesses], 1),
            topology,
            path_logprob=torch.nn.functional.pad(path_logprob, (1, 0)),
        )
