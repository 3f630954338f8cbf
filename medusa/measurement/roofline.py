"""How close a decode step comes to what the device allows, and a tree to what the heads allow.

A step must read the weights, the heads and the cache once, and multiply every weight with every node:
t_floor = max(bytes / bandwidth, operations / rate). f_hw = t_floor / step time is 1 where nothing is wasted.
f_tree = tokens per step over what the best tree of as many nodes is expected to give.
"""

from __future__ import annotations

from torch import Tensor

from medusa.base.causal_lm import CausalLM, embedding_weight, output_embedding
from medusa.engine import QUANTISED_BYTES
from medusa.hardware import DeviceRates
from medusa.heads.eagle import EagleHead
from medusa.model import MedusaModel
from medusa.trees.rank_counts import RankCounts


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
    num_bytes = sum(stored_bytes(model, weight) for weight in weights)
    num_bytes += num_rows * num_cached * cache_bytes(model.base)
    num_operations = 2.0 * sum(weight.numel() for weight in weights) * num_nodes * num_rows
    if with_heads:
        head_bytes, head_operations = heads_cost(model)
        num_bytes, num_operations = num_bytes + head_bytes, num_operations + head_operations * num_rows
    return rates.floor_seconds(num_bytes, num_operations)


def stored_bytes(model: MedusaModel, weight: Tensor) -> float:
    """What a pass reads for a parameter of the base, as the engine holds it."""
    engine = model.runtime.engine
    is_float = weight.dim() != 2 or engine not in QUANTISED_BYTES
    # Where weights alone are quantised, the output embedding is not.
    if is_float or (engine != "int8" and weight is embedding_weight(output_embedding(model.base))):
        return weight.nbytes
    return QUANTISED_BYTES[engine] * weight.numel()


def read_weights(base: CausalLM) -> list[Tensor]:
    """What a forward pass reads whole: every parameter once, an input embedding of its own left out.

    Of an input embedding that is not also the output embedding, only the rows of the tokens are read.
    """
    rows_only = base.get_input_embeddings().weight
    if rows_only is embedding_weight(output_embedding(base)):
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
    num_bytes = sum(parameter.nbytes for parameter in heads.parameters())
    num_weights = sum(parameter.numel() for parameter in heads.parameters())
    if isinstance(heads, EagleHead) or heads.config.unembedding != "full":
        rows = embedding_weight(output_embedding(model.base))  # read once, by all heads
        scored = rows if heads.token_map is None else rows[: len(heads.token_map)]
        num_bytes += scored.nbytes
        num_weights += scored.numel() * heads.num_heads
    return float(num_bytes), 2.0 * num_weights


def best_expected_tokens(counts: RankCounts, num_nodes: int) -> float:
    """1 + the sum of the ``num_nodes`` - 1 largest calibrated path products: the most a tree should give."""
    values = sorted(counts.path_values().values(), reverse=True)
    return 1 + sum(values[: num_nodes - 1])
