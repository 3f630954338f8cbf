"""Dynamic trees: trees of a fixed number of nodes, whose shape the heads' probabilities choose at every step.

A tree chosen beforehand (:func:`medusa.best_tree`) holds the rank paths that are right most often. At a given
step the heads know better: the value of a candidate is the product of the probabilities along its path, and
the N - 1 candidates of highest value form the tree (EAGLE-2, arXiv 2406.16858, section 4.2). Heads are
trained towards the base's distribution, so their probability of a token is near its acceptance rate.

This is a beam search: at each depth the candidates of highest value, at most ``beam`` of them, are expanded
into their most likely next tokens. Unless ``min_accept_prob`` cuts it short, all tensors have fixed shapes,
so static steps can run it.

Shapes beside those of :mod:`medusa`: C candidates, M nodes of the beam, R of the heads' best tokens after
each, W tokens that a suffix match expects after each, V' tokens that the heads score.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Hashable
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from medusa.acceptance.protocol import DraftKind
from medusa.base.causal_lm import CausalLM
from medusa.drafters.autoregressive import AutoregressiveDrafter
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.levels import LevelDrafter
from medusa.drafters.protocol import Draft, DraftContext, Drafter
from medusa.drafters.suffix import MAX_CHILDREN, Continuations, continuations, no_trust, nothing_expected
from medusa.engine.kernels import shared_constant
from medusa.engine.views import packed_as
from medusa.engine.weights.products import PackedMatmul
from medusa.heads.autoregressive_head import AutoregressiveHead
from medusa.heads.medusa_heads import MedusaHeads
from medusa.trees.candidate_tree import CandidateTree, TreeTopology

MIN_BEAM, MAX_BEAM = 4, 16
"""Bounds of the width of the beam. Below the first a small tree loses good candidates; above the second,
drafting costs more than it finds."""
WORST = shared_constant("WORST")
"""The lowest log-probability of a token, also where the heads give NaN. So values can always be compared, and
no child is worth more than its parent."""


class Beam(NamedTuple):
    """The M nodes of each row that are expanded next."""

    paths: Tensor
    """(B, M, depth) long: the tokens from the root to each."""
    match_nodes: Tensor
    """(B, M) long: the node of the expected continuations with the same path, or -1."""
    path_logprob: Tensor
    """(B, M)."""
    numbers: Tensor
    """(B, M) long: its number as a candidate, -1 for the root."""

    @classmethod
    def at_root(cls, root: Tensor) -> Beam:
        """The beam before the first level: the root tokens (B,) long."""
        nodes = root[:, None]
        logprob = torch.zeros_like(nodes, dtype=torch.float32)
        return cls(nodes[..., None], torch.zeros_like(nodes), logprob, torch.full_like(nodes, -1))


class DynamicDrafter(LevelDrafter):
    """Fills trees with as many nodes as ``tree``, of a shape that the heads choose; the heads reach down to
    the depth of ``tree``.

    A mixin for fixed-tree drafters; the class that it is mixed into scores the nodes.

    With ``suffix_length`` above 0, continuations of earlier occurrences of the last tokens, up to
    ``suffix_length`` tokens long, are mixed in (:mod:`medusa.drafters.suffix`). After a single match of c
    tokens the next token is the continuation with probability :data:`medusa.drafters.suffix.MATCH_WEIGHTS`
    [c], and else follows the heads' distribution: a mixture of two distributions (pointer-generator networks,
    arXiv 1704.04368, eq. 9). So a token that both expect is one node, with a higher value than from either
    source, and the heads also predict the tokens after the match. Below the deepest head only the match
    continues.

    For rules that compare two distributions, candidates are drawn in the fixed ``tree``. With a suffix match
    they cannot be drawn, and such rules refuse this drafter.
    """

    suffix_length = 0
    """How many tokens of a continuation are drafted at most."""
    optional_nodes = 0
    """Nodes beyond the size of ``tree``, which are verified only if they are likely enough."""
    has_kernels = False
    """Whether the operators of :mod:`medusa.engine.kernels` make the tree. The draft is the same."""
    trust: Tensor
    """(sources,): learned log-weight of each suffix-match source, clamped (see
    :func:`medusa.drafters.suffix.continuations`). Drafters that are derived from one another share it."""
    _source_guesses: Tensor | None = None  # `Continuations.source_guesses` of the previous step

    def _shape(self, tree: CandidateTree) -> None:
        super()._shape(tree)
        device = self._ranks.device
        num_drafted = tree.num_nodes - 1
        self.beam = min(max(MIN_BEAM, tree.num_nodes // 2), MAX_BEAM)
        num_expanded = 1 + (tree.depth - 1) * self.beam  # nodes that are expanded at most, over all levels
        self._fanout = min(max(self.beam, -(-num_drafted // num_expanded)), self.num_columns)  # R
        sizes: list[int] = []  # candidates of each level
        while len(sizes) < tree.depth:
            fanout = self._fanout + MAX_CHILDREN * (len(sizes) < self.suffix_length)
            num_parents = min(self.beam, sizes[-1]) if sizes else 1
            sizes.append(num_parents * fanout)
        self._num_nodes = 1 + min(num_drafted + self.optional_nodes, sum(sizes))
        tokens = torch.arange(self.vocab_size, device=device) if self.token_map is None else self.token_map
        self._columns = torch.full((self.vocab_size,), -1, device=device)
        """(V,) long: the column of each token in logits over ``token_map``; -1 where it has none."""
        self._columns[tokens] = torch.arange(len(tokens), device=device)

    def with_suffix(self, suffix_length: int, optional_nodes: int = 0) -> Self:
        """A drafter with these heads, with continuations of ``suffix_length`` tokens mixed in, and
        ``optional_nodes`` nodes more than ``tree`` has."""
        other = copy.copy(self)
        other.suffix_length = suffix_length
        other.optional_nodes = optional_nodes
        return other.with_tree()

    def reset(self, num_rows: int, after: Drafter | None = None) -> None:
        super().reset(num_rows, after)
        self._source_guesses = None

    def keep_rows(self, rows: Tensor) -> None:
        super().keep_rows(rows)
        self._source_guesses = None

    @property
    @abstractmethod
    def num_columns(self) -> int:
        """V': how many tokens the heads score."""

    @abstractmethod
    def logits_after_beam(self, context: DraftContext, paths: Tensor, parents: Tensor | None) -> Tensor:
        """The heads' logits (B, M, V') after each of the M nodes of the beam at one depth.

        Called once per depth, from the root down.

        Args:
            paths: (B, M, depth) long, the tokens from the root to each node.
            parents: (B, M) long, the index of each node's parent in the previous beam; None for the root.
        """

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @property
    def max_depth(self) -> int:
        return min(max(self.tree.depth, self.suffix_length), self.num_nodes - 1)

    def sampled_kind(self, wanted: DraftKind) -> DraftKind:
        return DraftKind.RANKED if self.suffix_length else super().sampled_kind(wanted)

    def _ranked(self, context: DraftContext) -> Draft:
        if self.suffix_length:
            expected = continuations(context, self.suffix_length, self.trust, self._source_guesses)
            self._source_guesses = expected.source_guesses
        else:
            expected = nothing_expected(context.root)
        if self.has_kernels:
            return self._ranked_by_kernels(context, expected)
        tokens, values, parents, depths = self._candidates(context, expected)  # (B, C) each
        # No candidate has a higher value than its parent, which comes before it and, as the sort is stable,
        # wins a tie. So the parents of all chosen candidates are chosen too.
        path_logprob, order = values.sort(dim=1, descending=True, stable=True)
        path_logprob = path_logprob[:, : self.num_nodes - 1]
        chosen = order[:, : self.num_nodes - 1]
        root = context.root[:, None]
        chosen_parents = parents.gather(1, chosen)
        # Candidate numbers of parents to node numbers: the place of the parent among the chosen.
        nodes = (chosen[:, None] == chosen_parents[..., None]).int().argmax(2) + 1
        topology = TreeTopology.from_parents(
            torch.cat([torch.zeros_like(root), nodes.masked_fill(chosen_parents < 0, 0)], dim=1),
            torch.cat([torch.zeros_like(root), depths.gather(1, chosen)], dim=1),
            self.max_depth,
        )
        tokens = torch.cat([root, tokens.gather(1, chosen)], dim=1)
        path_logprob = torch.nn.functional.pad(path_logprob, (1, 0))
        return Draft(tokens, topology, path_logprob=path_logprob, num_optional_nodes=self.optional_nodes)

    def _ranked_by_kernels(self, context: DraftContext, expected: Continuations) -> Draft:
        """The draft of :meth:`_ranked` by the operators of :mod:`medusa.engine.kernels`: one operator per
        depth in place of some thirty."""
        kernels = torch.ops.medusa
        sharpness = None
        if context.noise is not None:
            sharpness = torch.as_tensor(context.sharpness(self.beta), dtype=torch.float32)
            sharpness = sharpness.expand(len(context.root), 1, 1).flatten().contiguous()
        levels: list[Tensor] = []  # tokens, values, parents and depths of each level's candidates
        num_candidates = 0
        beam = Beam.at_root(context.root)
        parents = None
        largest_values = None  # the best values so far, which tell when the tree is full
        for depth in range(1, self.tree.depth + 1):
            noise_of_columns = noise_of_expected = None
            if context.noise is not None:
                noise_of_columns = self.noise_of_columns(context.noise, depth, len(context.root))
                noise_of_expected = context.noise.of_tokens(depth, expected.tokens)
            grown, goes_on = kernels.grow(
                self.logits_after_beam(context, beam.paths, parents).float(),
                sharpness,
                noise_of_columns,
                noise_of_expected,
                self.token_map,
                self._columns,
                expected.tokens,
                expected.children,
                expected.shares,
                *beam,
                largest_values,
                num_wanted=self.tree.num_nodes - 1,
                num_candidates=num_candidates,
                fanout=self._fanout,
                beam_width=self.beam,
                has_match=depth <= self.suffix_length,
                min_accept_prob=context.min_accept_prob,
            )
            *level, paths, match_nodes, path_logprob, numbers, parents, largest_values = grown
            beam = Beam(paths, match_nodes, path_logprob, numbers)
            levels += level
            num_candidates += level[0].shape[1]
            if not goes_on:  # the tree is full, or nothing below is likely enough to be verified
                break
        tokens, *topology, node_logprob = kernels.tree_of(
            context.root,
            levels,
            expected.tokens,
            expected.children,
            expected.shares,
            beam.match_nodes,
            beam.path_logprob,
            beam.numbers,
            num_nodes=self.num_nodes,
            max_depth=self.max_depth,
        )
        return Draft(
            tokens, TreeTopology(*topology), path_logprob=node_logprob, num_optional_nodes=self.optional_nodes
        )

    def _candidates(
        self, context: DraftContext, expected: Continuations
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens, values (log-probabilities of paths), parents and depths of all candidates, level by level.

        (B, C) each. Candidates are numbered in this order; a parent is the number of a candidate, or -1 for
        the root. ``expected`` are the continuations of suffix matches.
        """
        beam = Beam.at_root(context.root)
        levels: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        num_candidates = 0
        parents = None
        for depth in range(1, self.tree.depth + 1):
            logits = self.logits_after_beam(context, beam.paths, parents)
            if depth <= self.suffix_length:
                # (B, M, R + W) each
                tokens, log_q, nodes = self._mixed(context, depth, logits, expected, beam.match_nodes)
            else:
                scores = self.scores(context, depth, logits).float()
                log_q, columns = scores.log_softmax(-1).topk(self._fanout, dim=-1)  # (B, M, R)
                tokens = self._tokens_in(columns)
                nodes = torch.full_like(columns, -1)
            fanout = tokens.shape[2]
            tokens = tokens.flatten(1)
            log_q = log_q.nan_to_num(nan=WORST).clamp(WORST, 0)  # one NaN logit makes a whole softmax NaN
            values = (beam.path_logprob[..., None] + log_q).flatten(1)
            levels.append(
                (
                    tokens,
                    values,
                    beam.numbers.repeat_interleave(fanout, dim=1),
                    torch.full_like(tokens, depth),
                )
            )
            # The next beam: the best candidates of this depth.
            path_logprob, best = values.topk(min(self.beam, values.shape[1]), dim=1)
            if context.min_accept_prob > 0:  # what lies below less likely nodes would not be verified
                width = max(1, int((path_logprob.exp() >= context.min_accept_prob).sum(1).max()))
                path_logprob = path_logprob[:, :width]
                best = best[:, :width]
            parents = best // fanout
            parent_index = parents[..., None].expand(-1, -1, depth)
            above = beam.paths.gather(1, parent_index)
            beam = Beam(
                torch.cat([above, tokens.gather(1, best)[..., None]], dim=2),
                nodes.flatten(1).gather(1, best),
                path_logprob,
                num_candidates + best,
            )
            num_candidates += values.shape[1]
            if context.min_accept_prob > 0 and path_logprob[:, 0].exp().mean() < context.min_accept_prob:
                break
        if self.suffix_length > depth:  # `depth` is the last that was expanded
            levels.append(self._below_heads(expected, beam, num_candidates, depth))
        num_missing = self.num_nodes - 1 - sum(level_tokens.shape[1] for level_tokens, *_ in levels)
        if num_missing > 0:  # the loop ended early: fill up with candidates of probability 0
            root = context.root[:, None].expand(-1, num_missing)
            nothing = torch.full_like(root, -torch.inf, dtype=torch.float32)
            levels.append((root, nothing, torch.full_like(root, -1), torch.ones_like(root)))
        all_tokens, all_values, all_parents, all_depths = zip(*levels, strict=True)
        return (
            torch.cat(all_tokens, dim=1),
            torch.cat(all_values, dim=1),
            torch.cat(all_parents, dim=1),
            torch.cat(all_depths, dim=1),
        )

    def _tokens_in(self, columns: Tensor) -> Tensor:
        """The token ids of ``columns`` of the heads' logits, of any shape."""
        return columns if self.token_map is None else self.token_map[columns]

    def _mixed(
        self, context: DraftContext, depth: int, logits: Tensor, expected: Continuations, match_nodes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The candidates after each node of the beam, at a depth where a suffix match takes part: first the
        heads' R best tokens, then the W tokens that follow node ``match_nodes`` (B, M) of ``expected``.

        Returns their tokens, their log-probabilities in the mixture, and which nodes of ``expected`` they are
        (-1 for none), (B, M, R + W) each. Where fewer than W tokens are expected, the entries left over have
        probability 0.
        """
        width = expected.children.shape[2]
        row = torch.arange(len(match_nodes), device=match_nodes.device)[:, None]
        nodes = expected.children[row, match_nodes.clamp(min=0)]  # (B, M, W)
        nodes = nodes.masked_fill(match_nodes[..., None] < 0, 0)
        tokens = expected.tokens[row[..., None], nodes]
        weights = expected.shares[row[..., None], nodes] * (nodes > 0)
        columns = self._columns[tokens]
        is_scored = (nodes > 0) & (columns >= 0)  # expected tokens that the heads score too
        columns = columns.clamp(min=0)
        log_q = (logits.float() * context.sharpness(self.beta)).log_softmax(-1)
        of_heads = log_q.gather(2, columns).nan_to_num(nan=WORST).masked_fill(~is_scored, -torch.inf)
        # A token is one candidate: expected tokens are taken out of the heads' distribution.
        excluded = torch.full_like(of_heads, torch.inf).masked_fill(is_scored, -torch.inf)
        log_q = log_q.scatter_reduce(2, columns, excluded, "amin")
        # Mixture: an expected token has its weight plus the heads' share of it, the others the heads' share.
        share = torch.log1p(-weights.sum(2, keepdim=True))  # (B, M, 1): log of what is left to the heads
        of_match = torch.logaddexp(of_heads + share, weights.log())  # (B, M, W)
        if context.noise is not None:
            log_q = log_q + self.noise_of_columns(context.noise, depth, len(row))[:, None]
            of_match = of_match + context.noise.of_tokens(depth, tokens.flatten(1)).view_as(of_match)
            total = torch.logaddexp(log_q.logsumexp(-1, True) + share, of_match.logsumexp(-1, True))
            share = share - total
            of_match = of_match - total
        best, best_columns = log_q.topk(self._fanout, dim=-1)  # (B, M, R)
        all_nodes = torch.nn.functional.pad(nodes.masked_fill(nodes == 0, -1), (self._fanout, 0), value=-1)
        assert all_nodes.shape[2] == self._fanout + width
        return (
            torch.cat([self._tokens_in(best_columns), tokens], dim=2),
            torch.cat([best + share, of_match], dim=2),
            all_nodes,
        )

    def _below_heads(
        self,
        expected: Continuations,
        beam: Beam,
        num_candidates: int,
        beam_depth: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The continuations below the deepest head, in the form of :meth:`_candidates`: all nodes of
        ``expected`` but its root. Nodes that are not below the last beam get probability 0 and the root as
        parent.

        ``beam`` is that at ``beam_depth``. The returned candidates are numbered from ``num_candidates`` on.
        """
        rows, num_nodes = expected.tokens.shape
        # Move the beam's values and numbers to its nodes in `expected`; -1 goes to a column that is cut off.
        columns = beam.match_nodes.masked_fill(beam.match_nodes < 0, num_nodes)
        value = beam.path_logprob.new_full((rows, num_nodes + 1), -torch.inf)
        value = value.scatter(1, columns, beam.path_logprob)[:, :-1]
        first = num_candidates - 1  # the number of node 0, which is not returned
        number = torch.arange(first, first + num_nodes, device=columns.device).repeat(rows, 1)
        number = torch.nn.functional.pad(number, (0, 1)).scatter(1, columns, beam.numbers)[:, :-1]
        # Pass (value, depth) from the beam's nodes down to all nodes below them.
        parents = expected.parents
        in_beam = value > -torch.inf
        is_reached = in_beam
        value_and_depth = torch.stack([value, torch.full_like(value, beam_depth)])
        increment = torch.stack([expected.shares.log(), torch.ones_like(value)])
        parent_index = parents.expand(2, -1, -1)
        for _ in range(self.suffix_length - beam_depth):  # one level of `expected` each time
            is_next = is_reached.gather(1, parents) > is_reached
            of_children = value_and_depth.gather(2, parent_index) + increment
            value_and_depth = torch.where(is_next, of_children, value_and_depth)
            is_reached = is_reached | is_next
        is_excluded = in_beam | ~is_reached
        values = value_and_depth[0].masked_fill(is_excluded, -torch.inf)
        depth = value_and_depth[1].long().masked_fill(is_excluded, 1)
        parent_numbers = number.gather(1, parents).masked_fill(is_excluded, -1)
        return expected.tokens[:, 1:], values[:, 1:], parent_numbers[:, 1:], depth[:, 1:]


class DynamicHeadsDrafter(DynamicDrafter, HeadsDrafter):
    """Medusa heads in dynamic trees."""

    def __init__(self, heads: MedusaHeads, lm_head: nn.Module, tree: CandidateTree):
        self.has_kernels = isinstance(lm_head, PackedMatmul)
        self.trust = no_trust()
        HeadsDrafter.__init__(self, heads, lm_head, tree)

    @property
    def static_key(self) -> Hashable:
        return "dynamic", self.suffix_length, self.optional_nodes, super().static_key

    @property
    def num_columns(self) -> int:
        return self.heads.num_columns

    def logits_after_beam(self, context: DraftContext, paths: Tensor, parents: Tensor | None) -> Tensor:
        return self.logits_along(context, paths.shape[2] - 1, paths.shape[1], paths)


class DynamicAutoregressiveDrafter(DynamicDrafter, AutoregressiveDrafter):
    """An autoregressive head in dynamic trees: it runs only on the nodes of each beam, as a tree of their
    own."""

    def __init__(self, head: AutoregressiveHead, base: CausalLM, tree: CandidateTree):
        self.has_kernels = packed_as(base) is not None
        self.trust = no_trust()
        AutoregressiveDrafter.__init__(self, head, base, tree)
        self._parents = self._depths_run = torch.empty(0, dtype=torch.long)
        """(B, nodes run so far in this step) long each: their parents and depths in that tree."""

    @property
    def num_columns(self) -> int:
        return self.head.num_columns

    def logits_after_beam(self, context: DraftContext, paths: Tensor, parents: Tensor | None) -> Tensor:
        if parents is None:
            self._parents = self._depths_run = torch.zeros_like(context.root[:, None])
            self._level_start = 0
            return self.logits_after_root(context)
        first_node = self._parents.shape[1]
        depth = paths.shape[2] - 1
        self._parents = torch.cat([self._parents, self._level_start + parents], dim=1)
        self._depths_run = torch.cat([self._depths_run, torch.full_like(parents, depth)], dim=1)
        self._level_start = first_node
        topology = TreeTopology.from_parents(self._parents, self._depths_run, depth)
        return self.logits_after_nodes(paths[..., -1], topology, first_node)
