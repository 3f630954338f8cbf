"""What goes into a verification rule, what comes out, and which drafts a rule is exact for.

This module holds no rule and does no probability; ``medusa.acceptance.rules`` explains the protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from medusa.trees.candidate_tree import TreeTopology


class DraftKind(Enum):
    """How the children of a node came about. The values are the words error messages use."""

    RANKED = "ranked candidates (top-k of the heads, a suffix match)"
    CHAIN = "one chain sampled from q"
    WITH_REPLACEMENT = "a tree whose siblings are sampled from q independently"
    WITHOUT_REPLACEMENT = "a tree whose siblings are sampled from q without replacement"


_WHY_NOT = {
    DraftKind.RANKED: "a ranked candidate was not drawn from q, it is a point mass, so a test on p/q is "
    "biased; use acceptance='exact', or have the drafter sample",
    DraftKind.WITHOUT_REPLACEMENT: "a sibling depends on those drawn before it, and the rule takes each as a "
    "fresh draw from q; draw with replacement",
}


@dataclass(frozen=True)
class SampledDraft:
    """A drafted tree and the two distributions at its nodes. ``medusa.acceptance.rules`` has the details."""

    tokens: Tensor  # (B, N) long
    topology: TreeTopology
    target: Tensor  # (B, N, V) p after each node
    proposal: Tensor  # (B, N, V) q the children of each node were drawn from


@dataclass(frozen=True)
class VerificationNoise:
    """All the randomness of one verification."""

    uniform: Tensor  # (B, N) in [0, 1)
    gumbel: Tensor  # (B, V) standard Gumbel


@dataclass(frozen=True)
class Verdict:
    """What a rule decided for each row."""

    best: Tensor  # (B,) long
    num_accepted: Tensor  # (B,) long
    next_token: Tensor  # (B,) long
    residual: Tensor  # (B, V)
    acceptance: Tensor  # (B, N); NaN for an unused coin
    state: Any = None


VerifyFunction = Callable[[SampledDraft, VerificationNoise, Any], Verdict]


@dataclass(frozen=True)
class VerificationRule:
    """A rule and the drafts it is exact for.

    ``context_only_proposal``: the rule reads q again at later steps, so q after a token may depend on
    the text before it and on nothing else (a draft model, an early exit), and not on how far the token
    stood from the root (Medusa heads, an EAGLE-3 head).
    """

    name: str
    function: VerifyFunction
    draft_kinds: tuple[DraftKind, ...]  # the first is the one to draw where a tree may branch
    summary: str
    context_only_proposal: bool = False

    @property
    def only_chains(self) -> bool:
        return self.draft_kinds == (DraftKind.CHAIN,)

    def verify(self, draft: SampledDraft, noise: VerificationNoise, state: Any = None) -> Verdict:
        """The verdict on ``draft``.

        Raises:
            ValueError: shapes or dtypes do not fit together, or a chain rule got a tree.
        """
        check_shapes(draft, noise)
        if self.only_chains:
            check_chain(self.name, draft)
        return self.function(draft, noise, state)

    def require(self, kind: DraftKind, context_only: bool = True, keeps_state: bool = False) -> None:
        """Nothing, if the rule is exact for drafts of this kind.

        ``context_only`` says whether the drafter's q depends on the text alone, ``keeps_state`` whether the
        base keeps a state, and so has steps without a draft.

        Raises:
            ValueError: it is not; the message says why and what to use instead.
        """
        if kind not in self.draft_kinds:
            reason = _WHY_NOT.get(kind, f"it is exact for {self.draft_kinds[0].value}")
            if self.only_chains and kind in (DraftKind.WITH_REPLACEMENT, DraftKind.WITHOUT_REPLACEMENT):
                reason = "the rule walks one path; draft a chain, or use a tree rule such as 'traversal'"
            raise ValueError(f"acceptance={self.name!r} cannot verify {kind.value}: {reason}")
        if self.context_only_proposal and not context_only:
            raise ValueError(
                f"acceptance={self.name!r} needs a drafter whose q depends on the text alone, because it "
                "reads q again at later steps; this drafter's q also depends on the step: "
                "use acceptance='block'"
            )
        if self.context_only_proposal and keeps_state:
            raise ValueError(
                f"acceptance={self.name!r} needs a draft of one length at every step, and a base that "
                "keeps a state goes without one where it has many tokens to read again: "
                "use acceptance='block'"
            )


def check_shapes(draft: SampledDraft, noise: VerificationNoise) -> None:
    """Nothing, if the tensors of ``draft`` and ``noise`` fit together. Reads shapes only.

    Raises:
        ValueError: one does not; its name, the rule and what arrived.
    """
    B, N = draft.tokens.shape
    V = draft.target.shape[-1]
    expected = {
        "target": (draft.target, (B, N, V)),
        "proposal": (draft.proposal, (B, N, V)),
        "uniform": (noise.uniform, (B, N)),
        "gumbel": (noise.gumbel, (B, V)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape} for tokens {(B, N)}, got {tuple(tensor.shape)}")
        if tensor.dtype != draft.target.dtype or tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} must be float32 or float64, the same as target ({draft.target.dtype}), got "
                f"{tensor.dtype}: convert the logits before the softmax"
            )
    if draft.topology.num_nodes != N or draft.topology.parents.shape[0] not in (1, B):
        raise ValueError(
            f"topology must hold 1 or {B} trees of {N} nodes, got {tuple(draft.topology.parents.shape)}"
        )


def check_chain(name: str, draft: SampledDraft) -> None:
    """Nothing, if the draft is a chain: as many levels as nodes.

    Raises:
        ValueError: it is not.
    """
    num_nodes, max_depth = draft.topology.num_nodes, draft.topology.max_depth
    if not draft.topology.is_chain:
        raise ValueError(
            f"acceptance={name!r} walks one chain, got a tree of {num_nodes} nodes and depth {max_depth}; "
            "use CandidateTree.chain(g).topology(), or a tree rule such as 'traversal'"
        )
