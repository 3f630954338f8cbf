"""How heads of another project do in the loop that verifies a chain, as those who serve them do.

Heads whose tensors went astray on the way still load, and then guess as untrained heads do: the text stays
right, and only the speed is gone. So what they guess is measured, and held against untrained heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from medusa.decoding.statistics import DecodingStatistics
from medusa.heads.calibration import AnsweredTokens, calibrate_each
from medusa.heads.medusa_heads import HeadsConfig, MedusaHeads
from medusa.model import MedusaModel
from medusa.trees.candidate_tree import CandidateTree


@dataclass(frozen=True)
class ChainCheck:
    """What heads did on some prompts, greedily."""

    statistics: DecodingStatistics
    """Of decoding with a chain of each head's best guess."""
    top1: list[float]
    """[d-1] = how often the best guess of head d is right, over the same answers."""
    untrained_top1: list[float]
    """The same of heads that were never trained: they guess the base's next token again."""

    @property
    def is_trained(self) -> bool:
        """Whether the first head is right more often than an untrained one."""
        return self.top1[0] > self.untrained_top1[0]


def check_chain(
    model: MedusaModel, prompts: Iterable[Mapping[str, Tensor]], max_new_tokens: int
) -> ChainCheck:
    """Decode ``prompts`` (``input_ids`` and ``attention_mask`` (1, T)) with a chain as deep as the heads
    guess.

    Raises:
        ValueError: no answer is longer than a token.
    """
    heads = model.heads
    assert heads is not None, "a format is read into heads"
    statistics, answers = DecodingStatistics(), []
    for inputs in prompts:
        tensors: dict[str, Any] = dict(inputs)
        output: Any = model.generate(
            **tensors,
            tree=CandidateTree.chain(heads.num_heads),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
        statistics += output.statistics
        length = inputs["input_ids"].shape[1]
        answers.append(AnsweredTokens.after_prompt(output.sequences[0].tolist(), length))
    config = heads.config
    untrained = MedusaHeads(HeadsConfig(config.hidden_size, config.vocab_size, heads.num_heads))
    sets = [heads, untrained.to(next(heads.parameters()).device)]
    ours, theirs = calibrate_each(model.base, sets, answers, max_rank=1)
    return ChainCheck(statistics, ours.top_k_accuracy(1), theirs.top_k_accuracy(1))
