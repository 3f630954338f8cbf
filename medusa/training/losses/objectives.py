"""Losses on one block of logits, each with its gradient written out.

Every objective takes log q (C, V), the target columns (C,) long and the rows of the teacher, and
returns the loss of each row (C,) and its gradient with respect to the logits (C, V). The gradient may
overwrite log q: a block is the largest thing training holds, so it is held once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from torch import Tensor

from medusa.training.losses.teacher import TeacherRows, expected

ObjectiveName = Literal["ce", "kl", "blend"]
Objective = Callable[[Tensor, Tensor, TeacherRows | None], tuple[Tensor, Tensor]]
"""(log q, columns, teacher) -> (loss, gradient); no teacher where :func:`needs_teacher` says so."""


def objective_named(name: ObjectiveName, kl_weight: float) -> Objective:
    """The objective ``name``; ``kl_weight`` is the part of KL in ``blend``."""
    if name not in get_args(ObjectiveName):
        raise ValueError(f"objective must be one of {get_args(ObjectiveName)}, got {name!r}")
    if not 0 <= kl_weight <= 1:
        raise ValueError(f"kl_weight must be in [0, 1], got {kl_weight}")
    if name == "blend":
        return lambda log_q, columns, teacher: _blend(log_q, columns, teacher, kl_weight)
    return {"ce": _cross_entropy, "kl": _divergence}[name]


def needs_teacher(name: ObjectiveName) -> bool:
    return name != "ce"


def _cross_entropy(log_q: Tensor, columns: Tensor, _teacher: TeacherRows | None) -> tuple[Tensor, Tensor]:
    loss = -log_q.gather(1, columns[:, None])[:, 0]
    gradient = log_q.exp_()
    gradient.scatter_add_(1, columns[:, None], gradient.new_full((len(columns), 1), -1.0))
    return loss, gradient


def _divergence(log_q: Tensor, _columns: Tensor, teacher: TeacherRows | None) -> tuple[Tensor, Tensor]:
    """KL(p || q) to the base's distribution p."""
    assert teacher is not None
    p = teacher.probabilities
    loss = -teacher.entropy - expected(p, log_q)
    return loss, log_q.exp_().sub_(p)


def _blend(
    log_q: Tensor, columns: Tensor, teacher: TeacherRows | None, kl_weight: float
) -> tuple[Tensor, Tensor]:
    """kl_weight * KL + (1 - kl_weight) * cross-entropy."""
    assert teacher is not None
    p, hard_weight = teacher.probabilities, 1 - kl_weight
    hard = -log_q.gather(1, columns[:, None])[:, 0]
    soft = -teacher.entropy - expected(p, log_q)
    gradient = log_q.exp_().sub_(p, alpha=kl_weight)
    gradient.scatter_add_(1, columns[:, None], gradient.new_full((len(columns), 1), -hard_weight))
    return kl_weight * soft + hard_weight * hard, gradient
