"""Decode state: the request and the running rows.

No model is called here; :mod:`medusa.decoding.step` moves the state forward.

Arguments and attributes called ``known`` repeat a tensor's numbers on the host, where the caller has them:
reading the tensor would wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from medusa.acceptance.exact import Acceptance, LockstepBatch
from medusa.acceptance.protocol import DraftKind, VerificationRule
from medusa.acceptance.row_settings import RowSettings
from medusa.acceptance.rules import rule_named
from medusa.acceptance.sampling import UpcomingNoise
from medusa.base.cache import TreeCache
from medusa.drafters.references import References
from medusa.hardware import sent

NO_REFERENCES = References()


@dataclass(frozen=True)
class DecodeRequest:
    """The prompts and the options of decoding. B rows, stored from column 0 without padding."""

    tokens: Tensor
    """(B, P) long: prompts; row r holds ``lengths[r]`` tokens, the rest is ignored."""
    lengths: Tensor
    """(B,) long."""
    max_new_tokens: int
    seeds: Tensor | None = None
    """(B,) long: one noise stream per row; None decodes greedily."""
    temperature: float = 1.0
    """For drafters; on the base's logits it is one of ``processors``."""
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    """Called after every token of every row. End-of-sequence and length have their own fields."""
    in_lockstep: bool = False
    """Rows advance together, and processors and criteria are called as ``transformers`` calls them: see
    :mod:`medusa.acceptance.exact`. If False, all processors are of the types in ``NODE_PROCESSORS``."""
    rows_end_alone: bool = True
    """Each row ends by itself. If False (only with ``in_lockstep``), all rows go on until each has ended."""
    eos_ids: frozenset[int] = frozenset()
    pad_id: int = 0
    """Fills rows that have ended."""
    padding: tuple[Tensor, ...] = ()
    """The tokens that padded each row on the left in the caller's batch, (P,) long each; () for none."""
    num_logprobs: int | None = None
    """Report the base's log-probability of each token, and of this number of likeliest ones; None reports
    nothing."""
    references: tuple[References, ...] = ()
    """Reference texts of each row; () for none."""
    known_prompts: tuple[list[int], ...] | None = None
    """The prompts, where the host has them: see :attr:`prompts`."""
    acceptance: str = "exact"
    """"exact", "typical" (lossy), or the name of a rule in ``medusa.acceptance.rules``."""

    @cached_property
    def prompts(self) -> tuple[list[int], ...]:
        """The prompts on the host; waits for the device if they were not given."""
        if self.known_prompts is not None:
            return self.known_prompts
        rows = zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)
        return tuple(tokens[:length] for tokens, length in rows)

    def lockstep_batch(self) -> LockstepBatch:
        """The batch as the caller gave it."""
        prompts = [tokens[: len(prompt)] for tokens, prompt in zip(self.tokens, self.prompts, strict=True)]
        if self.padding:
            prompts = [torch.cat(each) for each in zip(self.padding, prompts, strict=True)]
        return LockstepBatch(
            torch.stack(prompts),
            self.processors,
            self.criteria,
            self.max_new_tokens,
            self.eos_ids,
            self.pad_id,
            self.rows_end_alone,
        )

    @property
    def rule(self) -> VerificationRule | None:
        """The rule for sampled drafts that was asked for. Greedily all of them are the exact rule."""
        if self.acceptance in ("exact", "typical") or self.seeds is None:
            return None
        return rule_named(self.acceptance)

    @property
    def is_exact(self) -> bool:
        """Whether the text is the same whatever is drafted."""
        return is_exact(self.acceptance, samples=self.seeds is not None)


def is_exact(acceptance: str, samples: bool) -> bool:
    """Whether this rule gives the same text whatever is drafted. Greedily, all but ``typical`` do."""
    return acceptance == "exact" or (acceptance != "typical" and not samples)


@dataclass(eq=False)
class Row:
    """One row of a request and its answer so far."""

    request: DecodeRequest
    """A request of one row where others may join."""
    tag: Any = None
    """The caller's own identifier."""
    owner: Hashable = None
    """The owner: the prefix cache is never shared between owners."""
    tokens: list[int] = field(default_factory=list)
    """The answer; a token that ended it included."""
    finish_reason: str | None = None
    """"stop": a token or criterion ended it; "length": ``max_new_tokens``; "cancelled"; "error"."""
    error: Exception | None = None
    num_reused: int = 0
    """Prompt tokens found in the prefix cache."""
    num_read: int = 0
    """Prompt tokens in the cache so far, during prefill (vLLM's ``num_computed_tokens``)."""
    num_overtaken: int = 0
    """How often a later row has overtaken it because this one did not fit."""
    order: int = -1
    """How many rows joined the batch before it; the last ones are preempted first."""
    index: int = 0
    """Its index in the request."""

    @property
    def prompt(self) -> list[int]:
        return self.request.prompts[self.index]

    @property
    def length(self) -> int:
        """Tokens of its prompt and its answer so far."""
        return len(self.prompt) + len(self.tokens)

    @property
    def padding(self) -> Tensor | None:
        """The tokens (P,) long that padded it on the left in the caller's batch."""
        return self.request.padding[self.index] if self.request.padding else None

    @property
    def references(self) -> References:
        """The texts that it may be drafted from."""
        return self.request.references[self.index] if self.request.references else NO_REFERENCES

    def take_error(self) -> Exception:
        """The exception that made the row fail, which the row then drops: the traceback knows the pass, its
        cache and this row, and such a cycle stays in memory until the next full garbage collection."""
        error = self.error
        assert error is not None
        self.error = None
        return error


@dataclass
class DecodeState:
    """The rows still decoding."""

    rows: list[Row]
    tokens: Tensor
    """(B, S) long: prompt and answer, root token included."""
    lengths: Tensor
    """(B,) long: tokens of each row, root token included."""
    hidden: Tensor
    """(B, (1 + A) * D): the hidden state that chose the root token, then those of the drafter's A layers."""
    cache: TreeCache
    seeds: Tensor | None = None
    """(B,) long: noise streams; None where every row is greedy, anything for a greedy row among others."""
    known: tuple[Tensor, list[int]] | None = None
    """``lengths``, and the same on the host: see :attr:`known_lengths`."""
    refuses_nan: bool = False
    """Whether a row fails if one of its tokens would be chosen by a NaN score."""
    lockstep_batch: LockstepBatch | None = None
    """The whole batch as processors and criteria see it, if rows advance in lockstep."""
    sampled: DraftKind | None = None
    """How the drafter draws candidates; None when it ranks them."""
    rule_state: Any = None
    """The state of a rule for sampled drafts."""
    settings: RowSettings | None = None
    """The sampling settings of the rows, where steps of fixed shape read them from tensors; None where they
    are read from the requests."""

    @property
    def request(self) -> DecodeRequest:
        """The request of all rows, or, in a shared batch, one with the same ``acceptance``."""
        return self.rows[0].request

    @property
    def padding(self) -> list[Tensor]:
        """As in a request, of these rows."""
        padding = [row.padding for row in self.rows]
        if all(tokens is None for tokens in padding):
            return []
        return [self.tokens[0, :0] if tokens is None else tokens for tokens in padding]

    @property
    def references(self) -> list[References]:
        """As in a request, of these rows."""
        references = [row.references for row in self.rows]
        return [] if all(texts is NO_REFERENCES for texts in references) else references

    @property
    def known_lengths(self) -> list[int]:
        """``lengths`` on the host; waits for the device only if a caller has set ``lengths``."""
        if self.known is None or self.known[0] is not self.lengths:
            self.known = self.lengths, self.lengths.tolist()
        return self.known[1]

    @property
    def sampled_rows(self) -> list[int]:
        """The rows that are sampled, known on the host."""
        return [index for index, row in enumerate(self.rows) if row.request.seeds is not None]

    @property
    def temperature(self) -> float | Tensor:
        """As :attr:`medusa.drafters.protocol.DraftContext.temperature`."""
        if self.seeds is None:
            return 1.0
        if self.settings is not None:
            return self.settings.temperature[:, None, None]
        temperatures = [0.0 if row.request.seeds is None else row.request.temperature for row in self.rows]
        if len(set(temperatures)) == 1:
            return temperatures[0]
        return torch.tensor(temperatures, device=self.lengths.device)[:, None, None]

    def noise(self, vocab_size: int) -> UpcomingNoise | None:
        """The noise that chooses the tokens after the root; 0 in greedy rows, None where all are."""
        seeds = self.seeds
        if seeds is None:
            return None
        is_sampled = None
        if self.settings is not None:
            is_sampled = self.settings.is_sampled
        elif len(self.sampled_rows) < len(self.rows):
            is_sampled = sent([row.request.seeds is not None for row in self.rows], seeds.device)
        return UpcomingNoise(seeds, self.lengths, vocab_size, is_sampled)

    def rows_by_processors(self, rows: list[int]) -> list[tuple[LogitsProcessorList, list[int]]]:
        """Logits processors, and the indices of the rows that share them; rows without any form one group."""
        groups: dict[int, tuple[LogitsProcessorList, list[int]]] = {}
        for index, row in enumerate(rows):
            processors = self.rows[row].request.processors
            _, members = groups.setdefault(id(processors) if processors else 0, (processors, []))
            members.append(index)
        return list(groups.values())

    def append(self, new_tokens: list[list[int]], on_device: tuple[Tensor, Tensor] | None = None) -> None:
        """Add each row's new tokens. ``on_device`` are the same tokens on the device, (B, L) long, and their
        number in each row, (B,) long; entries beyond that number are not read."""
        known_lengths = self.known_lengths
        counts = [len(new) for new in new_tokens]
        if on_device is None:
            filled = [[*new] + [0] * (max(counts) - len(new)) for new in new_tokens]
            on_device = self.tokens.new_tensor(filled), self.lengths.new_tensor(counts)
        tokens, num_new = on_device
        needed = max(known_lengths) + tokens.shape[1]
        if needed > self.tokens.shape[1]:
            self.tokens = torch.nn.functional.pad(self.tokens, (0, needed + 256 - self.tokens.shape[1]))
        columns = self.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.tokens.scatter_(1, columns, tokens)
        self.lengths = self.lengths + num_new
        self.known = (
            self.lengths,
            [length + count for length, count in zip(known_lengths, counts, strict=True)],
        )

    def commit(
        self,
        acceptance: Acceptance,
        hidden: Tensor,
        is_chain: bool = False,
        known: list[list[int]] | None = None,
    ) -> None:
        """Commit the accepted path, whose hidden states are in ``hidden`` (B, N, D), or as much of it as
        ``known`` has; ``is_chain`` and ``known`` as for :meth:`TreeCache.commit`."""
        path_hidden = hidden.gather(1, acceptance.path[..., None].expand(-1, -1, hidden.shape[2]))
        num_kept = acceptance.num_accepted + 1
        if known is not None and self.cache.keeps_states:  # else what is behind an end is of no interest
            num_kept = torch.tensor([*map(len, known)], device=num_kept.device)
        self.cache.commit(acceptance.path, num_kept, is_chain, known)
        self.hidden = path_hidden[:, -1]
        self.rule_state = acceptance.rule_state

    def keep_rows(self, kept: list[int]) -> None:
        """Drop the rows that are not in ``kept``."""
        index = sent(kept, self.lengths.device)
        self.rows = [self.rows[row] for row in kept]
        known = [self.known_lengths[row] for row in kept]
        self.tokens = self.tokens[index]
        self.lengths = self.lengths[index]
        self.hidden = self.hidden[index]
        self.known = self.lengths, known
        self.cache.keep_rows(index, kept)
        self.rule_state = None if self.rule_state is None else self.rule_state.rows(index)
        self.seeds = None if self.seeds is None or not self.sampled_rows else self.seeds[index]

    def join(self, other: DecodeState, most_rows: int = 0) -> None:
        """Take in the rows of ``other``, of the same base; ``most_rows`` as for :meth:`TreeCache.join`.

        Raises:
            ValueError: a request's rows must stay together, or its text depends on the draft.
        """
        for state in (self, other):
            if state.lockstep_batch is not None or not state.request.is_exact:
                raise ValueError(
                    "rows of several requests share passes only with acceptance='exact' and without "
                    "processors or criteria of the caller's own, which want the whole batch; decode this one "
                    "alone"
                )
        if self.seeds is not None or other.seeds is not None:
            seeds = [state.lengths * 0 if state.seeds is None else state.seeds for state in (self, other)]
            self.seeds = torch.cat(seeds)
        self.rows = self.rows + other.rows
        self.tokens = torch.cat(_as_wide(self.tokens, other.tokens))
        known = self.known_lengths + other.known_lengths
        self.lengths = torch.cat([self.lengths, other.lengths])
        self.known = self.lengths, known
        self.hidden = torch.cat([self.hidden, other.hidden])
        self.cache.join(other.cache, most_rows)

    def num_until_end(self, index: int, new: list[int]) -> tuple[int, bool]:
        """How many of the ``new`` tokens of row ``index`` belong to its answer, and whether the last of them
        ends it."""
        row = self.rows[index]
        request = row.request
        num_before = len(row.tokens)
        if self.lockstep_batch is not None:
            return len(new), self.lockstep_batch.has_ended(row.index)
        for count, token in enumerate(new, start=1):
            if num_before + count >= request.max_new_tokens or token in request.eos_ids:
                return count, True
            if request.criteria and self._criteria_met(index, new[:count]):
                return count, True
        return len(new), False

    def _criteria_met(self, index: int, new: list[int]) -> bool:
        """Ask the stopping criteria about one row, padded as the caller's batch was."""
        row = self.rows[index]
        so_far = self.tokens[index, : self.known_lengths[index]]
        parts = [*([] if row.padding is None else [row.padding]), so_far, so_far.new_tensor(new)]
        return bool(row.request.criteria(torch.cat(parts)[None], None).any())


def _as_wide(first: Tensor, second: Tensor) -> list[Tensor]:
    """Both (B, S, ...), the narrower one padded with zeros on the right."""
    missing = first.shape[1] - second.shape[1]
    fill = [0, 0] * (first.dim() - 2)
    widths = (max(0, -missing), max(0, missing))
    both = zip((first, second), widths, strict=True)
    return [each if not more else torch.nn.functional.pad(each, (*fill, 0, more)) for each, more in both]
