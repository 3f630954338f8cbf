"""What followed last time: the longest suffix that occurred before, in prompt or answer, is continued.

A suffix automaton per row finds that suffix in constant time a token (SAM-Decoding, arXiv 2411.10666);
with short suffixes this is prompt lookup. It costs no model call and shines where text repeats.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from medusa.drafters.protocol import Draft, DraftContext, StatelessDrafter
from medusa.drafters.source import DrafterSettings, DraftHost, DraftSource, NamedDrafter
from medusa.trees.candidate_tree import CandidateTree


@dataclass
class SuffixAutomaton:
    """All substrings of the tokens seen so far, and where the longest repeated suffix ended before."""

    tokens: list[int] = field(default_factory=list)
    transitions: list[dict[int, int]] = field(default_factory=lambda: [{}])
    links: list[int] = field(default_factory=lambda: [-1])
    longest: list[int] = field(default_factory=lambda: [0])
    """Length of the longest substring of each state."""
    ends: list[int] = field(default_factory=lambda: [0])
    """Where a substring of each state ended first: the index after its last token."""
    last: int = 0
    matched: int = 0
    """The state of the longest suffix that occurred before."""
    match_length: int = 0

    def extend(self, token: int) -> None:
        """Append one token: follow the match first, then add the token (Blumer et al. 1985)."""
        self._follow(token)
        self.tokens.append(token)
        state = self._new_state({}, self.longest[self.last] + 1, len(self.tokens))
        before = self.last
        while before != -1 and token not in self.transitions[before]:
            self.transitions[before][token] = state
            before = self.links[before]
        if before == -1:
            self.links[state] = 0
        else:
            self.links[state] = self._state_of_length(before, token)
        self.last = state

    def continuation(self, length: int, min_match: int) -> list[int]:
        """Up to ``length`` tokens that followed the matched suffix; none if that is under ``min_match``."""
        if self.match_length < min_match:
            return []
        end = self.ends[self.matched]
        return self.tokens[end : end + length]

    def _follow(self, token: int) -> None:
        while self.matched and token not in self.transitions[self.matched]:
            self.matched = self.links[self.matched]
            self.match_length = self.longest[self.matched]
        if token in self.transitions[self.matched]:
            self.matched = self.transitions[self.matched][token]
            self.match_length += 1

    def _state_of_length(self, before: int, token: int) -> int:
        """The state of ``before`` + ``token``, split off if it holds longer strings too."""
        target = self.transitions[before][token]
        if self.longest[before] + 1 == self.longest[target]:
            return target
        clone = self._new_state(dict(self.transitions[target]), self.longest[before] + 1, self.ends[target])
        self.links[clone] = self.links[target]
        self.links[target] = clone
        if self.matched == target and self.match_length <= self.longest[clone]:
            self.matched = clone
        while before != -1 and self.transitions[before].get(token) == target:
            self.transitions[before][token] = clone
            before = self.links[before]
        return clone

    def _new_state(self, transitions: dict[int, int], longest: int, end: int) -> int:
        self.transitions.append(transitions)
        self.links.append(-1)
        self.longest.append(longest)
        self.ends.append(end)
        return len(self.longest) - 1


class SuffixDrafter(StatelessDrafter):
    """Drafts a chain of up to ``length`` tokens, the continuation of a suffix of at least ``min_match``.

    Rows without a match draft their root token over and over, which is harmless; when no row has one,
    nothing is drafted.
    """

    def __init__(self, length: int = 8, min_match: int = 2):
        if length < 1 or min_match < 1:
            raise ValueError(f"length and min_match must be at least 1, got {length} and {min_match}")
        self.length, self.min_match = length, min_match
        self.max_depth = length
        self._automata: list[SuffixAutomaton] = []

    def begin(self, num_rows: int) -> None:
        self._automata = [SuffixAutomaton() for _ in range(num_rows)]

    def keep_rows(self, rows: Tensor) -> None:
        self._automata = [self._automata[row] for row in rows.tolist()]

    def draft(self, context: DraftContext) -> Draft:
        drafted = [
            self._continue(automaton, row[:length])
            for automaton, row, length in zip(
                self._automata, context.tokens.tolist(), context.lengths.tolist(), strict=True
            )
        ]
        depth = max(len(tokens) for tokens in drafted)
        root = context.root[:, None].tolist()
        filled = [first + new + first * (depth - len(new)) for first, new in zip(root, drafted, strict=True)]
        tokens = torch.tensor(filled, device=context.root.device)
        return Draft(tokens, CandidateTree.chain(depth).topology(tokens.device))

    def _continue(self, automaton: SuffixAutomaton, row: list[int]) -> list[int]:
        for token in row[len(automaton.tokens) :]:
            automaton.extend(token)
        return automaton.continuation(self.length, self.min_match)


def suffix_source(host: DraftHost, settings: DrafterSettings) -> DraftSource:
    """Nothing to prepare; a draft costs no model call, so it is longer than most."""
    return DraftSource(
        "suffix", lambda tree: SuffixDrafter(tree.depth), draft_length=settings.draft_length or 8
    )


SUFFIX = NamedDrafter("suffix", suffix_source, "what followed the same words earlier in the text")
