"""Bounds for measured numbers: the device, the heads, and the base's own choices.

The device: a step must read the weights, the heads and the cache once, and multiply every weight with every
node. t_floor = max(bytes / bandwidth, operations / rate), and f_hw = t_floor / step time is 1 where nothing
is wasted. The heads: f_tree = tokens per step over the expected value of their best tree of the same size.

The base: bfloat16 and float16 promise no identical tokens, because a pass over N rows rounds differently from
one over a single row, and near-ties flip. So an answer is read again in one pass, and every token is compared
with the base's likeliest token there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from medusa.base.causal_lm import CausalLM, embedding_weight, lm_head
from medusa.base.passes import cache_bytes, hidden_states
from medusa.decoding.statistics import DecodingStatistics
from medusa.engine.weights.products import JoinedLinear, PackedMatmul
from medusa.hardware import DeviceRates
from medusa.heads.draft_vocab import GatheredRows
from medusa.model import MedusaModel
from medusa.trees.rank_counts import RankCounts


def f_hw(
    model: MedusaModel,
    rates: DeviceRates,
    num_nodes: int,
    counted: DecodingStatistics,
    num_prompt_tokens: float,
    step_seconds: float,
) -> float:
    """The least time that the device needs for a step, over the time that it took.

    ``counted`` is of the steps that were timed; their rows had ``num_prompt_tokens`` tokens before them.
    """
    num_rows = counted.num_steps / counted.num_passes  # rows that finish leave the batch
    num_cached = num_prompt_tokens + counted.num_tokens / counted.num_rows / 2
    floor = step_floor_seconds(model, rates, num_nodes, num_rows, num_cached, with_heads=num_nodes > 1)
    return floor / step_seconds


def step_floor_seconds(
    model: MedusaModel,
    rates: DeviceRates,
    num_nodes: int,
    num_rows: float,
    num_cached: float,
    with_heads: bool,
) -> float:
    """The least time in which ``rates`` allow a step: N nodes for B rows of ``num_cached`` tokens each."""
    num_bytes, num_weights = pass_cost(model.engine_base)
    per_token, per_row = cache_bytes(model.engine_base)
    num_bytes += num_rows * (num_cached * per_token + per_row)
    num_operations = 2.0 * num_weights * num_nodes * num_rows
    if with_heads:
        head_bytes, head_operations = heads_cost(model)
        num_bytes = num_bytes + head_bytes
        num_operations = num_operations + head_operations * num_rows
    return rates.floor_seconds(num_bytes, num_operations)


def pass_cost(runner: CausalLM) -> tuple[float, int]:
    """Bytes of weights that a forward pass reads, and the number of weights that it multiplies each node
    with.

    An input embedding counts only if it is also the LM head and no packed copy replaces it there: otherwise
    only the rows of the tokens are read.
    """
    rows_only = runner.get_input_embeddings()
    output = lm_head(runner)
    is_read_whole = rows_only.weight is embedding_weight(output) and not isinstance(output, PackedMatmul)
    return _read_whole(runner, leave_out=None if is_read_whole else rows_only)


def _read_whole(model: nn.Module, leave_out: nn.Module | None = None) -> tuple[float, int]:
    """Bytes and number of the weights that ``model`` computes with: packed ones in their packed form, each
    tensor once. A product also holds, for other code, the weight that it was made of and rows to look up."""
    weights: dict[int, Tensor] = {}
    num_bytes, num_weights = 0.0, 0
    for module in model.modules():
        if module is leave_out or isinstance(module, JoinedLinear):
            continue
        names = dict(module.named_parameters(recurse=False))
        if isinstance(module, PackedMatmul):
            names.pop("weight", None)
            packed = (each for name, each in module.named_buffers(recurse=False) if name != "rows")
            num_bytes += sum(each.nbytes for each in packed)
            num_weights += module.width * module.num_inputs
        weights |= {id(each): each for each in names.values()}
    tensors = weights.values()
    return num_bytes + sum(each.nbytes for each in tensors), num_weights + sum(map(Tensor.numel, tensors))


def heads_cost(model: MedusaModel) -> tuple[float, float]:
    """Bytes the heads read in a step, as the engine computes them, and operations they do for a row."""
    heads = model.optimized_heads
    assert heads is not None, "asked only with heads"
    scorer: Any = heads.scorer
    num_bytes, num_weights = (heads.reads_per_chain * each for each in _read_whole(heads, leave_out=scorer))
    if heads.scores_base_rows:  # read once, by all heads
        if isinstance(scorer, GatheredRows):
            row_bytes = float(scorer.rows.nbytes)
            row_weights = scorer.rows.numel()
        else:
            row_bytes, row_weights = _read_whole(lm_head(model.engine_base) if scorer is None else scorer)
        num_bytes = num_bytes + row_bytes
        num_weights = num_weights + row_weights * heads.num_heads
    return float(num_bytes), 2.0 * num_weights


def best_expected_tokens(counts: RankCounts, num_nodes: int) -> float:
    """1 + the sum of the ``num_nodes`` - 1 largest calibrated path products: the most a tree should give."""
    values = sorted(counts.path_values().values(), reverse=True)
    return 1 + sum(values[: num_nodes - 1])


# ------------------------------------------------------------------ the base's own choices


@torch.no_grad()
def _gaps_to_likeliest(base: CausalLM, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """(T,): the largest logit minus the logit of each token of ``answer``, given all tokens before it."""
    if not answer:
        return torch.zeros(0)
    ids = torch.tensor([[*prompt, *answer]], device=base.device)
    states = hidden_states(base, ids)[0, len(prompt) - 1 : -1]
    embedding = lm_head(base)
    gaps = []
    for part, tokens in zip(states.split(256), ids[0, len(prompt) :].split(256), strict=True):
        logits = embedding(part).float()  # (T', V)
        gaps.append(logits.max(dim=-1).values - logits.gather(1, tokens[:, None]).squeeze(1))
    return torch.cat(gaps).cpu()


def divergence(
    base: CausalLM, answers: Iterable[tuple[Sequence[int], Sequence[int]]], most: int = 16
) -> dict[str, Any]:
    """How many tokens of greedy answers are not the base's likeliest one, and by how much at most.

    Read are the first ``most`` of ``answers``, pairs of prompt and answer.
    """
    gaps = torch.cat([torch.zeros(0), *(_gaps_to_likeliest(base, *pair) for pair in islice(answers, most))])
    num_diverging = int((gaps > 0).sum())
    return {
        "rate": num_diverging / max(1, len(gaps)),
        "num_tokens": len(gaps),
        "num_diverging": num_diverging,
        "largest_gap": float(gaps.max()) if len(gaps) else 0.0,
    }
