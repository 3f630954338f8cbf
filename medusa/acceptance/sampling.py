"""Logits to tokens, as a deterministic function of (logits, seed, position).

    next token = argmax(scores + G(seed, position))

``scores`` are the logits after every logits processor (temperature, top-k, penalties, ...) and G is Gumbel
noise, so the token is distributed exactly as softmax(scores) (the Gumbel-max trick). The noise is a hash, not
a stream: it has no state, and two draws of a row differ only by the position of the chosen token. Greedy
decoding is G = 0.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from medusa.acceptance.grammar import GrammarProcessor
from medusa.engine.kernels import are_loaded
from medusa.hardware import sent
from medusa.trees.candidate_tree import TreeTopology


class OccurrencePenalty(LogitsProcessor):
    """OpenAI's ``frequency_penalty`` and ``presence_penalty``.

    A token's score loses ``frequency`` for each of its occurrences in the answer, and ``presence`` once if it
    occurs. The first ``prompt_length`` tokens of a text do not count.
    """

    def __init__(self, prompt_length: int, frequency: float = 0.0, presence: float = 0.0):
        self.prompt_length = prompt_length
        self.frequency = frequency
        self.presence = presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids (B, T) long, scores (B, V) -> (B, V)."""
        answer_ids = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add(
            1, answer_ids, torch.ones_like(answer_ids, dtype=scores.dtype)
        )
        return scores - self.frequency * counts - self.presence * (counts > 0)


# These read nothing but the logits, not even which token each is of, and leave at least one.
WARPERS = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
)
# These read no token of the path, so all nodes go through in one call.
PATH_FREE_PROCESSORS = (
    *WARPERS,
    hf.SuppressTokensLogitsProcessor,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
)
# These are functions of one row's tokens. Padding is no text, so they are not shown it.
TEXT_PROCESSORS = (
    hf.RepetitionPenaltyLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor,
    hf.SequenceBiasLogitsProcessor,
    hf.NoBadWordsLogitsProcessor,
    OccurrencePenalty,
    GrammarProcessor,
)
# These are functions of one row's length, and the lengths that they compare it with count the padding.
LENGTH_PROCESSORS = (
    hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor,
    hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor,
    hf.ExponentialDecayLengthPenalty,
    hf.SuppressTokensAtBeginLogitsProcessor,
)
# All others may keep state, know rows by index or fail on a forbidden path: see medusa.acceptance.exact.
NODE_PROCESSORS = (*PATH_FREE_PROCESSORS, *TEXT_PROCESSORS, *LENGTH_PROCESSORS)


def row_seeds(seed: Any, num_rows: int, device: torch.device) -> Tensor:
    """One noise stream per row, (B,) long: row r of an int seed s gets s + r, so any row can be reproduced in
    a batch of its own.

    Integers of numpy and torch will do. ``None`` draws a seed from torch's global generator, as
    ``transformers`` sampling does.

    Raises:
        ValueError: ``seed`` is no integer, nor one for each row.
    """
    if seed is None:
        return torch.randint(2**62, (num_rows,)).to(device)
    try:
        if not hasattr(seed, "__len__") or getattr(seed, "ndim", 1) == 0:  # one number, or a tensor of one
            seeds = [index(seed) + row for row in range(num_rows)]
        else:
            seeds = [index(row_seed) for row_seed in seed]
    except TypeError:
        raise ValueError(f"seed must be an int or one int per row, got {seed!r}") from None
    if len(seeds) != num_rows:
        raise ValueError(f"seed must be an int or one int per row: {num_rows} rows, got {len(seeds)} seeds")
    return sent([row_seed & (2**63 - 1) for row_seed in seeds], device)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int, tokens: Tensor | None = None) -> Tensor:
    """Standard Gumbel noise, a pure function of (seed, position, token id).

    seeds (B,) long, positions (B, L) long -> (B, L, V) float32; or (B, L, C) of ``tokens`` (B, C) long alone.
    Made of :func:`hashed_bits`; the upper tail, which decides the argmax, keeps float32's relative precision
    down to 2**-32. Two logarithms are taken, and libraries may round those otherwise in the last bit.
    """
    bits = hashed_bits(seeds, positions, vocab_size, tokens)
    minus_uniform = (bits.float() + 0.5).mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1)
    return minus_uniform.log1p_().neg_().log_().neg_()


class UpcomingNoise:
    """The noise of the positions after the root, computed where it is asked for: logarithms of 152,000 tokens
    take a millisecond a position on a CPU.

    Args:
        seeds, first: (B,) long, the seeds of the rows and the position after the root.
        is_sampled: (B,) bool, which rows have noise, 0 in the others; None for all of them.
    """

    def __init__(self, seeds: Tensor, first: Tensor, vocab_size: int, is_sampled: Tensor | None = None):
        self._seeds = seeds
        self._first = first
        self._vocab_size = vocab_size
        self._is_sampled = is_sampled
        self._drawn: Tensor | None = None

    def until(self, depth: int) -> Tensor:
        """Of all tokens, 1 .. ``depth`` positions after the root: (B, at least ``depth``, V)."""
        if self._drawn is None:
            self._drawn = self._noise(0, depth)
        elif self._drawn.shape[1] < depth:
            self._drawn = torch.cat([self._drawn, self._noise(self._drawn.shape[1], depth)], dim=1)
        return self._drawn

    def of_tokens(self, depth: int, tokens: Tensor | None) -> Tensor:
        """Of ``tokens`` (B, C) long, ``depth`` positions after the root: (B, C); of all of them (B, V) if
        None."""
        if tokens is not None and _runs_on_kernels(tokens):
            return self._noise(depth - 1, depth, tokens)[:, 0]
        noise = self.until(depth)[:, depth - 1]  # on a card fewer operators than anew at each depth
        return noise if tokens is None else noise.gather(1, tokens)

    def chosen(self, scores: Tensor, depth: int, rows: Sequence[int] | None = None) -> Tensor:
        """:func:`choose` from scores (R, V) of ``rows``, or of all, ``depth`` positions after the root: (R,)
        long.

        With the kernels the noise of few tokens is computed to its last bits: of those that can be chosen.
        """
        if scores.dtype != torch.float32 or not _runs_on_kernels(scores):
            return choose(scores, self.until(depth)[slice(None) if rows is None else rows, depth - 1])
        index = torch.arange(len(scores)) if rows is None else torch.tensor(rows)
        positions = self._first[index] + (depth - 1)
        chosen = torch.ops.medusa.noisy_argmax(scores, self._seeds[index], positions)
        if self._is_sampled is not None:
            chosen = torch.where(self._is_sampled[index], chosen, choose(scores, None))
        for place in (chosen < 0).nonzero().flatten().tolist():
            of_row = gumbel_noise(self._seeds[index[[place]]], positions[[place], None], self._vocab_size)
            chosen[place] = choose(scores[place], of_row[0, 0])
        return cast(Tensor, chosen)

    def _noise(self, first: int, last: int, tokens: Tensor | None = None) -> Tensor:
        positions = self._first[:, None] + torch.arange(first, last, device=self._first.device)
        noise = gumbel_noise(self._seeds, positions, self._vocab_size, tokens)
        return noise if self._is_sampled is None else torch.where(self._is_sampled[:, None, None], noise, 0.0)


def hashed_bits(seeds: Tensor, positions: Tensor, vocab_size: int, tokens: Tensor | None = None) -> Tensor:
    """Thirty-one bits for each (seed, position, token id): (B, L, V) int32, at least 0; or (B, L, C) of
    ``tokens`` (B, C) long alone.

    Only shifts, exclusive ors and products of 32-bit integers: the same on every device. The kernels, if
    loaded, take a tenth of the time.
    """
    ids = None if tokens is None else tokens.int()
    if _runs_on_kernels(seeds):
        return cast(Tensor, torch.ops.medusa.hashed_bits(seeds, positions, vocab_size, ids))
    low, high = _halves(seeds)
    at, _ = _halves(positions)
    first = _mix(at ^ _mix(low ^ _mix(high + _GOLDEN))[:, None])  # (B, L)
    second = _mix(first + _GOLDEN)
    if ids is None:
        ids = torch.arange(vocab_size, dtype=torch.int32, device=seeds.device)[None]
    mixed = _mix(_mix(ids[:, None] + first[..., None]).bitwise_xor_(second[..., None]))
    return mixed.bitwise_and_(0x7FFFFFFF)  # (B, L, V)


def _runs_on_kernels(tensor: Tensor) -> bool:
    """Whether the kernels compute for this tensor. Traced code must run on any device, and their operators
    would not."""
    is_traced = torch.compiler.is_compiling() or type(tensor) is not Tensor
    return tensor.device.type == "cpu" and not is_traced and are_loaded()


CHUNK = 128
"""Scores whose largest is found first on a CPU, in whole vectors: torch's ``argmax`` reads one by one there,
and takes eight times as long for 49,152 scores."""


def choose(scores: Tensor, noise: Tensor | None) -> Tensor:
    """argmax(scores + noise) over the last dimension: (..., V) -> (...) long; the first of equals."""
    scores = scores if noise is None else scores + noise
    if scores.dtype == torch.float32 and _runs_on_kernels(scores):
        return cast(Tensor, torch.ops.medusa.argmax(scores))
    if scores.device.type != "cpu" or scores.shape[-1] % CHUNK:
        return scores.argmax(dim=-1)
    chunks = scores.unflatten(-1, (-1, CHUNK))
    chunk = chunks.amax(dim=-1).argmax(dim=-1)
    within = chunks.gather(-2, chunk[..., None, None].expand(*chunk.shape, 1, CHUNK))
    return chunk * CHUNK + within.squeeze(-2).argmax(dim=-1)


def choose_next(
    scores: Tensor, noise: UpcomingNoise | None, depth: int, rows: Sequence[int] | None = None
) -> Tensor:
    """The tokens ``depth`` positions after the root, from scores (R, V) of ``rows``, or of all: (R,) long."""
    return choose(scores, None) if noise is None else noise.chosen(scores, depth, rows)


@dataclass(frozen=True)
class NodePaths:
    """The text of each node, for processors: all tokens up to it. Rows are stored without padding."""

    prefix: Tensor
    """(B, S) long: each row's tokens before the root token, its length in ``prefix_lengths``."""
    prefix_lengths: Tensor
    """(B,) long."""
    padding: Sequence[Tensor]
    """The tokens that padded each row's prompt on the left in the caller's batch, (P,) long each; or none."""
    tokens: Tensor
    """(B, N) long: the tree's tokens."""
    topology: TreeTopology

    def input_ids(self, row: int, nodes: Tensor, depth: int, padded: bool) -> Tensor:
        """The sequences that end in ``nodes`` of one row, all at ``depth``: (M, length) long."""
        before = self.prefix[row, : self._prefix_lengths[row]]
        if padded and self.padding:
            before = torch.cat([self.padding[row], before])
        lineage = self.topology.lineage[row if self.topology.lineage.shape[0] > 1 else 0]
        path = self.tokens[row][lineage[nodes, : depth + 1]]  # (M, depth + 1)
        return torch.cat([before.expand(len(nodes), -1), path], dim=1)

    def of_rows(self, rows: Tensor) -> NodePaths:
        """The entries of ``rows`` (B',) long."""
        return NodePaths(
            prefix=self.prefix[rows],
            prefix_lengths=self.prefix_lengths[rows],
            padding=[self.padding[row] for row in rows.tolist()] if self.padding else (),
            tokens=self.tokens[rows],
            topology=self.topology.of_rows(rows),
        )

    @functools.cached_property
    def _prefix_lengths(self) -> list[int]:
        """The lengths on the host: only a processor that reads a path waits for them."""
        return self.prefix_lengths.tolist()


@dataclass(frozen=True)
class TokenLogprobs:
    """The base's log-probabilities of a token and of the likeliest ones, before any logits processor."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    """(token, log-probability), the likeliest first."""


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of ``tokens`` (T,) long, each chosen from a row of logits (T, V), and of the
    ``num_top`` likeliest."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    likeliest = logprobs.topk(num_top, dim=-1)
    return [
        TokenLogprobs(token, logprob, list(zip(top_tokens, top_logprobs, strict=True)))
        for token, logprob, top_tokens, top_logprobs in zip(
            tokens.tolist(),
            chosen.tolist(),
            likeliest.indices.tolist(),
            likeliest.values.tolist(),
            strict=True,
        )
    ]


def process_node_logits(
    logits: Tensor, processors: LogitsProcessorList, paths: NodePaths, nodes: Tensor | None = None
) -> Tensor:
    """Scores of nodes: logits (B, M, V) -> (B, M, V) float32, by processors of ``NODE_PROCESSORS``.

    Each processor sees each node with that node's own path as ``input_ids``, exactly as if the path had been
    generated token by token, in a batch of one row.

    Args:
        nodes: (B, M) long, which ones of the tree; by default all of them.
    """
    scores = logits.to(torch.float32, copy=True)
    for processor in processors:
        if type(processor) in PATH_FREE_PROCESSORS:
            flat = scores.view(-1, scores.shape[2])
            no_path = cast(torch.LongTensor, paths.tokens.new_zeros(len(flat), 1))
            scores = _path_free(processor, no_path, flat).view(scores.shape)
        else:
            scores = _process_path_by_path(scores, processor, paths, nodes)
    return scores


def _path_free(processor: Any, no_path: Tensor, scores: Tensor) -> Tensor:
    """Scores (R, V) after a processor that reads nothing else, perhaps in their place; ``no_path`` (R, 1)
    gives the shape."""
    edge = edge_of_kept(scores, processor)
    if edge is None:
        return processor(no_path, scores)
    if scores.is_contiguous() and _runs_on_kernels(scores):
        torch.ops.medusa.cut_below(scores, edge.contiguous(), processor.filter_value)
        return scores
    return scores.masked_fill_(scores < edge, processor.filter_value)


LIKELIEST = 64, 1024
"""Tokens among which the nucleus of top-p is looked for before all are sorted: few, then more."""
NUCLEUS_ROUNDING = 2e-5
"""Sums of probabilities nearer than this to top_p may be rounded to either side of it."""


def edge_of_kept(scores: Tensor, processor: Any) -> Tensor | None:
    """The least score (R, 1) that ``transformers``' top-k or top-p keeps of scores (R, V); it leaves the same
    bits. Theirs take the largest by sorting, for top-p all with their numbers, 152,000 in 12 ms a row.

    None where scores are not enough: between equal scores the numbers decide, ``processor`` is another one,
    or nothing may be read on the host.
    """
    is_readable = scores.device.type == "cpu" and type(scores) is Tensor and not torch.compiler.is_compiling()
    if not is_readable or scores.shape[1] <= 4 * LIKELIEST[-1]:
        return None
    if type(processor) is hf.TopKLogitsWarper:
        return _largest(scores, min(processor.top_k, scores.shape[1]))[:, -1:]
    if type(processor) is not hf.TopPLogitsWarper:
        return None
    for count in LIKELIEST:
        edge = _edge_of_likeliest(scores, count, processor)
        if edge is not None:
            return edge
    return _edge_of_sorted(scores, processor)


def _largest(scores: Tensor, count: int) -> Tensor:
    """The ``count`` largest of scores (R, V), the largest first: (R, count)."""
    if scores.dtype == torch.float32 and _runs_on_kernels(scores):
        return cast(Tensor, torch.ops.medusa.largest(scores, count))
    return scores.topk(count, dim=1).values


def _edge_of_likeliest(scores: Tensor, count: int, processor: hf.TopPLogitsWarper) -> Tensor | None:
    """The least score (R, 1) that top-p keeps, looked for among the ``count`` likeliest; None if the nucleus
    is larger, or its edge is within rounding or between equal scores."""
    best = _largest(scores, count)  # (R, K), the largest first
    are_all = bool((best[:, -1] == -torch.inf).all())  # top-k has left no others
    shares = (best - (best if are_all else scores).logsumexp(1, keepdim=True)).double().exp()
    before = shares.cumsum(1) - shares  # (R, K): the probability of all that are likelier
    num_kept = (before < processor.top_p).sum(1).clamp(min=processor.min_tokens_to_keep)[:, None]
    if int(num_kept.max()) >= count:
        return None
    edge = best.gather(1, num_kept - 1)
    beyond = best.gather(1, num_kept)
    is_near = (before - processor.top_p).abs() < NUCLEUS_ROUNDING
    is_certain = not is_near.any() and not (edge == beyond).any() and before.isfinite().all()
    return edge if is_certain else None


def _edge_of_sorted(scores: Tensor, processor: hf.TopPLogitsWarper) -> Tensor | None:
    """The least score of :func:`_edge_of_likeliest`, with the sums that ``transformers`` computes; None
    between equal scores."""
    ordered = torch.from_numpy(np.sort(scores.detach().numpy(), axis=1))
    sums = ordered.softmax(dim=-1).cumsum(dim=-1)
    num_left_out = (sums <= 1 - processor.top_p).sum(1, keepdim=True)
    num_left_out = num_left_out.clamp(max=scores.shape[1] - processor.min_tokens_to_keep)
    edge = ordered.gather(1, num_left_out)
    beyond = ordered.gather(1, (num_left_out - 1).clamp(min=0))
    is_between_equals = (edge == beyond) & (num_left_out > 0)
    return None if is_between_equals.any() or not sums[:, -1].isfinite().all() else edge


def warp_logits(logits: Tensor, processors: LogitsProcessorList) -> Tensor:
    """Scores (..., V') float32 of logits (..., V') after the warpers among ``processors``, in their order.

    The columns may be any V' tokens. Every row keeps at least one token.
    """
    flat = logits.to(torch.float32, copy=True).reshape(-1, logits.shape[-1])
    no_path = cast(torch.LongTensor, flat.new_zeros(len(flat), 1, dtype=torch.long))
    for processor in processors:
        if type(processor) in WARPERS:
            flat = _path_free(processor, no_path, flat)
    return flat.view(logits.shape)


def _process_path_by_path(scores: Tensor, processor, paths: NodePaths, nodes: Tensor | None) -> Tensor:
    """The scores after ``processor``, in their place: it is called once per row and depth, since paths of one
    depth have one length."""
    padded = isinstance(processor, LENGTH_PROCESSORS)
    of_tree = paths.topology.depths.expand(scores.shape[0], -1)
    depths = (of_tree if nodes is None else of_tree.gather(1, nodes)).tolist()
    for row, row_depths in enumerate(depths):
        for depth in sorted(set(row_depths)):
            at_depth = [place for place, node_depth in enumerate(row_depths) if node_depth == depth]
            places = torch.tensor(at_depth, device=scores.device)
            input_ids = paths.input_ids(row, places if nodes is None else nodes[row, places], depth, padded)
            if len(at_depth) == len(row_depths):  # nothing is gathered
                scores[row] = processor(input_ids, scores[row])
            else:
                scores[row, places] = processor(input_ids, scores[row, places])
    return scores


_GOLDEN = -1640531527  # 2**32 / golden ratio, as int32


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """The low and the high 32 bits of each number of ``values`` (...) long, as int32: views of them."""
    halves = values.contiguous().view(torch.int32).unflatten(-1, (-1, 2)).unbind(-1)
    return (halves[0], halves[1]) if sys.byteorder == "little" else (halves[1], halves[0])


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer finaliser with full avalanche (constants "lowbias32", C. Wellons, 2018)."""
    # In place, which takes half the time: a vocabulary fills the second cache.
    x = (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x).mul_(0x7FEB352D)
    x = (x >> 15).bitwise_and_(0x1FFFF).bitwise_xor_(x).mul_(-2073254261)  # 0x846CA68B as int32
    return (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)
