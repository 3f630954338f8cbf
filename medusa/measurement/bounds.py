"""What measured numbers are held against: the device, the heads, and the base's own choices.

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
from torch import Tensor

from medusa.base.causal_lm import CausalLM, embedding_weight, hidden_states, lm_head
from medusa.decoding.statistics import DecodingStatistics
from medusa.engine import QUANTISED
from medusa.engine.kernels import narrowest_dtype
from medusa.hardware import DeviceRates
from medusa.heads.autoregressive_head import AutoregressiveHead
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
    weights = read_weights(model.base)
    num_bytes = sum(_stored_bytes(model, weight) for weight in weights)
    num_bytes += num_rows * num_cached * cache_bytes(model.base)
    num_operations = 2.0 * sum(weight.numel() for weight in weights) * num_nodes * num_rows
    if with_heads:
        head_bytes, head_operations = heads_cost(model)
        num_bytes, num_operations = num_bytes + head_bytes, num_operations + head_operations * num_rows
    return rates.floor_seconds(num_bytes, num_operations)


def _stored_bytes(model: MedusaModel, weight: Tensor) -> float:
    """What a pass reads for a parameter of the base, as the engine holds it."""
    engine = model.runtime.engine
    if weight.dim() != 2 or engine == "eager":
        return weight.nbytes
    return weight.numel() * (1 if engine in QUANTISED else narrowest_dtype(weight.detach()).itemsize)


def read_weights(base: CausalLM) -> list[Tensor]:
    """What a forward pass reads whole: every parameter once, an input embedding of its own left out.

    If the input embedding is not also the LM head, only the rows of the tokens are read.
    """
    rows_only = base.get_input_embeddings().weight
    if rows_only is embedding_weight(lm_head(base)):
        return list(base.parameters())
    return [parameter for parameter in base.parameters() if parameter is not rows_only]


def cache_bytes(base: CausalLM) -> int:
    """Bytes of keys and values that one token of one row holds, in the base's precision."""
    config = base.config.get_text_config(decoder=True)
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * num_heads * width * base.dtype.itemsize


def heads_cost(model: MedusaModel) -> tuple[float, float]:
    """Bytes the heads read in a step, and operations they do for a row."""
    heads = model.heads
    assert heads is not None, "asked only with heads"
    runs = (
        heads.num_heads / heads.num_layers if isinstance(heads, AutoregressiveHead) else 1
    )  # once for each depth of a chain
    num_bytes = runs * sum(parameter.nbytes for parameter in heads.parameters())
    num_weights = runs * sum(parameter.numel() for parameter in heads.parameters())
    if heads.scores_base_rows:
        rows = embedding_weight(lm_head(model.base))  # read once, by all heads
        scored = rows if heads.token_map is None else rows[: len(heads.token_map)]
        num_bytes += scored.nbytes
        num_weights += scored.numel() * heads.num_heads
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
