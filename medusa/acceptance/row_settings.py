"""The sampling settings of rows as tensors, for steps whose host reads nothing and whose rows come and go.

``transformers`` has an object for each setting of a request, with its number inside. A graph with these would
hold for one mixture of requests alone. Here a processor is a function of scores and of one number for each
row, and a number that changes nothing stands for a row without it. On a CPU the scores are those of
``transformers`` bit for bit. On a card ``transformers`` divides by a number of the host as by its inverse, so
that the last bit may differ.

Shapes beside those of :mod:`medusa`: K of the processors of :data:`ROW_PROCESSORS`, M of the N nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from medusa.acceptance.sampling import NodePaths
from medusa.hardware import sent


@dataclass(frozen=True)
class RowProcessor:
    """A logits processor of ``transformers`` that is one number."""

    kind: type
    number_of: Callable[[Any], float | None]
    """The number of such an object; None where it has further settings."""
    neutral: float
    """The number that changes no score."""
    process: Callable[[Tensor, Tensor, NodePaths, int], Tensor]
    """Scores (B, M, V) after it, from scores (B, M, V), the numbers (B, 1, 1), the text before each node, and
    :attr:`Program.most_top_k`."""


def _penalise(scores: Tensor, penalty: Tensor, paths: NodePaths, _: int) -> Tensor:
    """Tokens of the text so far are less likely."""
    tokens = paths.prefix
    beyond = scores.shape[-1]
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    before = torch.where(columns < paths.prefix_lengths[:, None], tokens, beyond)
    occurs = torch.zeros(len(tokens), 1, beyond + 1, dtype=torch.bool, device=tokens.device)
    occurs.scatter_(2, before[:, None], True)
    occurs = occurs.repeat(1, scores.shape[1], 1)
    lineage = paths.topology.lineage.expand(len(tokens), -1, -1)
    path = paths.tokens.gather(1, lineage.flatten(1)).view(lineage.shape)
    occurs = occurs.scatter_(2, path, True)[..., :beyond]
    return torch.where(occurs, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def _divide(scores: Tensor, temperature: Tensor, *_: Any) -> Tensor:
    return scores / temperature


def _keep_likeliest(scores: Tensor, top_k: Tensor, _: NodePaths, most: int) -> Tensor:
    best = scores.topk(min(most, scores.shape[-1]), dim=-1).values
    last = (top_k.clamp(max=best.shape[-1]).long() - 1).expand(-1, scores.shape[1], -1)
    edge = torch.where(top_k <= scores.shape[-1], best.gather(2, last), -torch.inf)
    return scores.masked_fill(scores < edge, -torch.inf)


def _keep_nucleus(scores: Tensor, share_left_out: Tensor, *_: Any) -> Tensor:
    ordered, tokens = scores.sort(dim=-1)
    is_left_out = ordered.softmax(dim=-1).cumsum(dim=-1) <= share_left_out
    is_left_out[..., -1:] = False
    return scores.masked_fill(is_left_out.scatter(2, tokens, is_left_out), -torch.inf)


def _keep_near_best(scores: Tensor, min_p: Tensor, *_: Any) -> Tensor:
    probabilities = scores.softmax(dim=-1)
    is_left_out = probabilities < min_p * probabilities.amax(dim=-1, keepdim=True)
    is_left_out.scatter_(2, probabilities.argmax(dim=-1, keepdim=True), False)
    return scores.masked_fill(is_left_out, -torch.inf)


def _penalty(processor: hf.RepetitionPenaltyLogitsProcessor) -> float | None:
    return processor.penalty if processor.prompt_ignore_length is None else None


def _unless_bounded(number: Callable[[Any], float]) -> Callable[[Any], float | None]:
    """``number`` of a processor that leaves one token at least, and leaves others out for good."""

    def number_of(processor: Any) -> float | None:
        is_usual = processor.min_tokens_to_keep == 1 and processor.filter_value == -math.inf
        return number(processor) if is_usual else None

    return number_of


ROW_PROCESSORS = (
    RowProcessor(hf.RepetitionPenaltyLogitsProcessor, _penalty, 1.0, _penalise),
    RowProcessor(hf.TemperatureLogitsWarper, lambda processor: processor.temperature, 1.0, _divide),
    RowProcessor(
        hf.TopKLogitsWarper, _unless_bounded(lambda processor: processor.top_k), math.inf, _keep_likeliest
    ),
    RowProcessor(
        hf.TopPLogitsWarper, _unless_bounded(lambda processor: 1 - processor.top_p), -1.0, _keep_nucleus
    ),
    RowProcessor(
        hf.MinPLogitsWarper, _unless_bounded(lambda processor: processor.min_p), 0.0, _keep_near_best
    ),
)
"""The processors that rows may have with numbers of their own, in the order in which ``transformers`` calls
them."""
TOP_K = next(place for place, processor in enumerate(ROW_PROCESSORS) if processor.kind is hf.TopKLogitsWarper)
LEAST_TOP_K = 64
"""The likeliest tokens are looked for in powers of two from here on, so that few graphs are captured."""


def row_numbers(processors: LogitsProcessorList) -> list[float] | None:
    """The number of each of :data:`ROW_PROCESSORS` for a row with ``processors``; None where they cannot be
    said in such numbers: others are among them, or they come in another order."""
    numbers = [processor.neutral for processor in ROW_PROCESSORS]
    kinds = [processor.kind for processor in ROW_PROCESSORS]
    last = -1
    for processor in processors:
        place = kinds.index(type(processor)) if type(processor) in kinds else -1
        number = ROW_PROCESSORS[place].number_of(processor) if place > last else None
        if number is None:
            return None
        numbers[place] = number
        last = place
    return numbers


@dataclass(frozen=True)
class Program:
    """The computation for rows with some settings; a graph is captured for one."""

    samples: bool = False
    """Whether some row is sampled."""
    used: tuple[int, ...] = ()
    """The places of the processors that some row has."""
    most_top_k: int = 0
    """Tokens among which the likeliest of each row are."""

    @classmethod
    def of(cls, numbers: Sequence[Sequence[float]], samples: bool) -> Program:
        """The program of rows with these :func:`row_numbers`."""
        used = [
            place
            for place, processor in enumerate(ROW_PROCESSORS)
            if any(of_row[place] != processor.neutral for of_row in numbers)
        ]
        counts = [int(of_row[TOP_K]) for of_row in numbers if of_row[TOP_K] < math.inf]
        most = max(LEAST_TOP_K, 1 << (max(counts) - 1).bit_length()) if counts else 0
        return cls(samples, tuple(used), most)


@dataclass
class RowSettings:
    """The settings of B rows."""

    numbers: Tensor
    """(B, K) float32: the number of each processor."""
    is_sampled: Tensor
    """(B,) bool."""
    temperature: Tensor
    """(B,) float32, for drafters; 0 in greedy rows."""
    program: Program = Program()

    @classmethod
    def neutral(cls, num_rows: int, device: torch.device) -> RowSettings:
        """The settings of ``num_rows`` greedy rows."""
        numbers = sent([processor.neutral for processor in ROW_PROCESSORS], device)
        return cls(
            numbers.repeat(num_rows, 1),
            torch.zeros(num_rows, dtype=torch.bool, device=device),
            torch.zeros(num_rows, device=device),
        )

    def load(
        self, numbers: Sequence[Sequence[float]], are_sampled: list[bool], temperatures: list[float]
    ) -> None:
        """Have the first rows, as many as there are ``numbers``, take these settings; the others keep
        theirs."""
        count = len(numbers)
        device = self.numbers.device
        self.numbers[:count].copy_(sent(torch.tensor(numbers, dtype=torch.float32), device))
        self.is_sampled[:count].copy_(sent(are_sampled, device))
        self.temperature[:count].copy_(sent(torch.tensor(temperatures, dtype=torch.float32), device))
        self.program = Program.of(numbers, any(are_sampled))

    def first(self, num_rows: int) -> RowSettings:
        """The first rows; views."""
        return RowSettings(
            self.numbers[:num_rows], self.is_sampled[:num_rows], self.temperature[:num_rows], self.program
        )

    def scores(self, logits: Tensor, paths: NodePaths) -> Tensor:
        """Scores (B, N, V) float32: logits (B, N, V) after the processors of each row."""
        scores = logits.float()
        for place in self.program.used:
            numbers = self.numbers[:, place, None, None]
            scores = ROW_PROCESSORS[place].process(scores, numbers, paths, self.program.most_top_k)
        return scores
