"""Logits to tokens, as a deterministic function of (logits, seed, position).

    next token = argmax(scores + G(seed, position))

``scores`` are the logits after every logits processor (temperature, top-k, penalties, ...) and G is
Gumbel noise, so the token is distributed exactly as softmax(scores) (the Gumbel-max trick). The
noise is a hash, not a stream: it has no state, and the position of the token being chosen is all
that tells two draws of a row apart. Greedy decoding is G = 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from medusa.trees.candidate_tree import TreeTopology

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
)
# These compare the path's length with the padded prompt's.
LENGTH_PROCESSORS = (
    hf.MinNewTokensLengthLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor,
    hf.ExponentialDecayLengthPenalty,
    hf.SuppressTokensAtBeginLogitsProcessor,
)
# These call a model or keep state between calls, which a tree of alternatives cannot honour.
REFUSED_PROCESSORS = (
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    hf.SynthIDTextWatermarkLogitsProcessor,
)
# These hold the prompts of the whole batch, and cannot tell which of them a path continues.
SINGLE_ROW_PROCESSORS = (
    hf.EncoderRepetitionPenaltyLogitsProcessor,
    hf.EncoderNoRepeatNGramLogitsProcessor,
)


def row_seeds(seed: int | Sequence[int] | None, num_rows: int, device: torch.device) -> Tensor:
    """One noise stream per row, (B,) long: row r of an int seed s gets s + r, so any row can be run alone.

    ``None`` draws a seed from torch's global generator, as ``transformers`` sampling does.
    """
    if seed is None:
        return torch.randint(2**62, (num_rows,)).to(device)
    seeds = [seed + row for row in range(num_rows)] if isinstance(seed, int) else list(seed)
    if len(seeds) != num_rows:
        raise ValueError(f"seed must be an int or one int per row: {num_rows} rows, got {len(seeds)} seeds")
    return torch.tensor([s & (2**63 - 1) for s in seeds], device=device)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, a pure function of (seed, position, token id).

    seeds (B,) long, positions (B, L) long -> (B, L, V) float32. Thirty-one hashed bits a value; the
    upper tail, which decides the argmax, keeps float32's relative precision down to 2**-32.
    """
    low, high = _as_int32(seeds), _as_int32(seeds >> 32)
    at = _as_int32(positions)
    first = _mix(at ^ _mix(low ^ _mix(high + _GOLDEN))[:, None])  # (B, L)
    second = _mix(first + _GOLDEN)
    tokens = torch.arange(vocab_size, dtype=torch.int32, device=seeds.device)
    bits = _mix(_mix(tokens + first[..., None]) ^ second[..., None]) & 0x7FFFFFFF  # (B, L, V)
    uniform = (bits.float() + 0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def choose(scores: Tensor, noise: Tensor | None) -> Tensor:
    """argmax(scores + noise) over the last dimension: (..., V) -> (...) long."""
    return (scores if noise is None else scores + noise).argmax(dim=-1)


@dataclass(frozen=True)
class NodePaths:
    """What a processor may ask of a node: the tokens before it. Rows are stored without padding."""

    prefix: Tensor
    """(B, S) long: each row's tokens before the root token, its length in ``prefix_lengths``."""
    prefix_lengths: Tensor
    """(B,) long."""
    padding: list[int]
    """How much left padding each row's prompt had in the user's batch."""
    tokens: Tensor
    """(B, N) long: the tree's tokens."""
    topology: TreeTopology
    rows: list[int]
    """Which row of the user's batch each row is."""
    pad_id: int = 0

    def input_ids(self, row: int, nodes: Tensor, depth: int, padded: bool) -> Tensor:
        """The sequences that end in ``nodes`` of one row, all at ``depth``: (M, length) long."""
        before = self.prefix[row, : self._prefix_lengths[row]]
        if padded:
            before = torch.cat([before.new_full((self.padding[row],), self.pad_id), before])
        lineage = self.topology.lineage[row if self.topology.lineage.shape[0] > 1 else 0]
        path = self.tokens[row][lineage[nodes, : depth + 1]]  # (M, depth + 1)
        return torch.cat([before.expand(len(nodes), -1), path], dim=1)

    @functools.cached_property
    def _prefix_lengths(self) -> list[int]:
        """On the host, asked for only by a processor that reads a path."""
        return self.prefix_lengths.tolist()


def process_node_logits(logits: Tensor, processors: LogitsProcessorList, paths: NodePaths) -> Tensor:
    """Scores of every node: logits (B, N, V) -> (B, N, V) float32.

    Each processor sees each node with that node's own path as ``input_ids``, exactly as if the path
    had been generated token by token. The caller's own processors see the caller's left padding too, as
    ``transformers`` shows it; those of ``transformers`` do not, so that a row is what it is alone.
    """
    num_rows, num_nodes, vocab_size = logits.shape
    scores = logits.to(torch.float32, copy=True)
    for processor in processors:
        if type(processor) in PATH_FREE_PROCESSORS:
            flat = scores.view(-1, vocab_size)
            no_path = cast(torch.LongTensor, paths.tokens.reshape(-1, 1))
            scores = processor(no_path, flat).view(num_rows, num_nodes, vocab_size)
        elif isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
            scores = _process_allowed_paths(scores, processor, paths)
        else:
            scores = _process_path_by_path(scores, processor, paths)
    return scores


def warp_logits(logits: Tensor, processors: LogitsProcessorList) -> Tensor:
    """Scores (..., V') float32 of logits (..., V') after the warpers among ``processors``, in their order.

    The columns may stand for any V' tokens. Every row keeps a token that it had.
    """
    flat = logits.to(torch.float32, copy=True).reshape(-1, logits.shape[-1])
    no_path = cast(torch.LongTensor, flat.new_zeros(len(flat), 1, dtype=torch.long))
    for processor in processors:
        if type(processor) in WARPERS:
            flat = processor(no_path, cast(torch.FloatTensor, flat))
    return flat.view(logits.shape)


def check_processors(processors: LogitsProcessorList, num_rows: int) -> None:
    """Raise ValueError for a processor that cannot be evaluated per tree node of ``num_rows`` rows."""
    for processor in processors:
        if isinstance(processor, SINGLE_ROW_PROCESSORS) and num_rows > 1:
            raise ValueError(
                f"{type(processor).__name__} works with batch size 1, got {num_rows} rows; decode them one "
                "by one"
            )
        if isinstance(processor, REFUSED_PROCESSORS):
            raise ValueError(
                f"{type(processor).__name__} keeps state between calls, so it cannot score a tree of "
                "alternatives; remove it, or decode with transformers' own generate"
            )


def _process_path_by_path(scores: Tensor, processor, paths: NodePaths) -> Tensor:
    """One call per row and depth, since paths of one depth have one length.

    The caller's own processors get one path per call: many are written for a batch of one.
    """
    is_callers_own = type(processor).__module__ != hf.__name__
    padded = is_callers_own or isinstance(processor, LENGTH_PROCESSORS)
    one_by_one = is_callers_own or isinstance(processor, SINGLE_ROW_PROCESSORS)
    processed = torch.empty_like(scores)
    depths = paths.topology.depths.expand(scores.shape[0], -1).tolist()
    for row, row_depths in enumerate(depths):
        for depth in sorted(set(row_depths)):
            at_depth = [node for node, d in enumerate(row_depths) if d == depth]
            for group in [[node] for node in at_depth] if one_by_one else [at_depth]:
                nodes = torch.tensor(group, device=scores.device)
                ids = paths.input_ids(row, nodes, depth, padded)
                processed[row, nodes] = processor(ids, scores[row, nodes])
    return processed


def _process_allowed_paths(
    scores: Tensor, processor: hf.PrefixConstrainedLogitsProcessor, paths: NodePaths
) -> Tensor:
    """Node by node: the caller's function is told the row, and never asked about a path it has forbidden."""
    allowed_after = processor._prefix_allowed_tokens_fn
    processed = scores.clone()
    parents = paths.topology.parents.expand(len(scores), -1).tolist()
    depths = paths.topology.depths.expand(len(scores), -1).tolist()
    for row, tokens in enumerate(paths.tokens.tolist()):
        told_row = functools.partial(_ask_about_row, allowed_after, paths.rows[row])
        constraint = hf.PrefixConstrainedLogitsProcessor(told_row, num_beams=1)
        is_allowed = [True] * len(tokens)
        for node, token in enumerate(tokens):
            parent = parents[row][node]
            if node > 0:
                is_allowed[node] = is_allowed[parent] and bool(processed[row, parent, token] > -torch.inf)
            if is_allowed[node]:
                index = torch.tensor([node], device=scores.device)
                ids = paths.input_ids(row, index, depths[row][node], padded=True)
                processed[row, index] = constraint(ids, scores[row, index])
    return processed


def _ask_about_row(
    allowed_after: Callable[[int, Tensor], list[int]], row: int, _node: int, ids: Tensor
) -> list[int]:
    return allowed_after(row, ids)


_GOLDEN = -1640531527  # 2**32 / golden ratio, as int32


def _as_int32(values: Tensor) -> Tensor:
    """The low 32 bits, reinterpreted as int32."""
    low = values & 0xFFFFFFFF
    return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer finaliser with full avalanche (constants "lowbias32", C. Wellons, 2018)."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -2073254261  # 0x846CA68B as int32
    return x ^ ((x >> 16) & 0xFFFF)
