"""Losses of all kinds of training: targets, objectives, and a fused loss that never holds all logits.

Each label token of a document is a target, of all depths. The target at position j is predicted by head d
from the hidden state at j - 1 - d of the same document; depth 0 is the base model's own LM head. All depths
share their targets, and so the *teacher* too: the base's distribution p for each target, from which heads
learn by KL(p || q).

    L = sum over depths d of (sum over targets of w_d * loss_d) / num_scored_d

The memory of logits does not grow with the targets, the depths or the vocabulary. Targets are taken block by
block, and in each the depths one by one: forward, loss and backward of one block of logits (C, V') happen
before the next block exists, and only the gradients stay. To autograd (and to what wraps the module: DDP,
accelerate) it is one function of the hidden states and the parameters.

If the heads are sharded over processes, all blocks of one depth come before the blocks of the next, so that
one head is gathered at a time. The teacher then runs on each block once per depth.

``num_scored``, the number of targets of the whole optimiser step, is given from outside. So the gradients of
micro-batches and processes add up to exactly the gradient of one large batch.

Shapes beside those of :mod:`medusa`: P hidden states, S targets, C targets of a block, U label tokens without
a column, V' columns of the heads' logits (the vocabulary, or fewer with a token map).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from medusa.base.causal_lm import CausalLM, embedding_weight, hidden_size, lm_head
from medusa.base.passes import logits_of_states
from medusa.heads.draft_vocab import GatheredRows
from medusa.heads.medusa_heads import MedusaHeads
from medusa.training.config import LossOptions


@dataclass(frozen=True)
class Alignment:
    """The targets of one micro-batch, and the hidden state that each depth predicts them from."""

    columns: Tensor
    """(S,) long: the logits column of each target."""
    sources: Tensor
    """(K + 1, S) long: row d holds the index in [0, P) of the state from which depth d predicts each target;
    -1 where that position is before the document. Row 0 belongs to the base's own LM head."""
    preceding: Tensor
    """(K, S) long: row d - 1 holds the token d positions before each target (undefined before the start of
    the document). The first d rows are the tokens between head d's state and the target, nearest first."""
    unmapped: Tensor
    """(K, U) long: the sources of the U label tokens that have no column, without the row of depth 0; -1 as
    above."""

    @property
    def num_heads(self) -> int:
        return self.sources.shape[0] - 1

    @property
    def num_unmapped(self) -> Tensor:
        """(K,) long: by depth, label tokens without a column for which there is a state."""
        return (self.unmapped >= 0).sum(1)

    def to(self, device: torch.device) -> Alignment:
        parts = (self.columns, self.sources, self.preceding, self.unmapped)
        return Alignment(*(each.to(device, non_blocking=True) for each in parts))

    def path(self, depth: int, targets: slice) -> Tensor:
        """(C, depth) long: the tokens between the state that ``depth`` predicts from and each target, in the
        order of the text."""
        return self.preceding[:depth, targets].flip(0).T


def align(
    tokens: Tensor,
    is_label: Tensor,
    positions: Tensor,
    num_heads: int,
    column_of: Tensor | None = None,
) -> Alignment:
    """The targets of documents that are laid out one after the other.

    Args:
        tokens: (P,) long.
        is_label: (P,) bool; padding is never a label.
        positions: (P,) long, counted from 0 at the start of each document.
        num_heads: K.
        column_of: (V,) long, the logits column of each token and -1 for tokens without one. None: the
            token id is the column.
    """
    # No state predicts the first token of a document.
    targets = (is_label & (positions > 0)).nonzero().flatten()
    columns = tokens[targets] if column_of is None else column_of[tokens[targets]]
    depths = torch.arange(num_heads + 1)[:, None]
    sources = targets - 1 - depths  # (K + 1, S)
    preceding = tokens[sources[:-1].clamp(min=0)]  # (K, S)
    inside = positions[targets] - 1 >= depths
    sources = sources.masked_fill(~inside, -1)
    has_column = columns >= 0
    unmapped = sources[1:, ~has_column]
    return Alignment(columns[has_column], sources[:, has_column], preceding[:, has_column], unmapped)


def needed_states(is_label: Tensor, positions: Tensor, num_heads: int) -> Tensor:
    """(P,) bool: the positions from whose hidden state some depth, 0 included, predicts a label."""
    needed = torch.zeros_like(is_label)
    targets = (is_label & (positions > 0)).nonzero().flatten()
    for depth in range(num_heads + 1):
        needed[targets[positions[targets] - 1 >= depth] - 1 - depth] = True
    return needed


Teacher = Callable[[Tensor], Tensor]
"""Hidden states (C, D) -> the base's own logits (C, V') in the heads' columns."""


@dataclass(frozen=True)
class TeacherRows:
    """The base model's distribution p for C targets."""

    probabilities: Tensor
    """(C, V')."""
    log_probabilities: Tensor
    """(C, V')."""
    entropy: Tensor
    """(C,): -sum p log p."""

    @classmethod
    def of_logits(cls, logits: Tensor) -> TeacherRows:
        """The softmax of logits (C, V')."""
        log_p = logits.log_softmax(-1, dtype=torch.float32)
        p = log_p.exp()
        return cls(p, log_p, -expected(p, log_p))

    def part(self, rows: slice) -> TeacherRows:
        """The teacher's rows for some of the targets."""
        return TeacherRows(self.probabilities[rows], self.log_probabilities[rows], self.entropy[rows])


def expected(probabilities: Tensor, values: Tensor) -> Tensor:
    """(C,): the mean of values (C, V') under probabilities (C, V'), row by row; not rounded by autocast."""
    with torch.autocast(probabilities.device.type, enabled=False):
        return torch.einsum("cv,cv->c", probabilities, values)


def teacher_of(base: CausalLM, token_map: Tensor | None = None) -> Teacher:
    """A function: hidden states (C, D) -> the base's logits (C, V'), if given only of the tokens in
    ``token_map`` (V',) long.

    Some architectures scale or cap the output of their LM head. A trial finds out whether this one does; if
    so, the model's own code computes the logits.
    """
    embedding = lm_head(base)
    probe = torch.randn(3, hidden_size(base), generator=torch.Generator().manual_seed(0))
    probe = 100 * probe.to(base.device, embedding_weight(embedding).dtype)  # large enough to meet a cap
    with torch.no_grad():
        is_plain = torch.allclose(logits_of_states(base, probe), embedding(probe), rtol=1e-3)
    if not is_plain and token_map is None:
        return lambda states: logits_of_states(base, states)
    if not is_plain:
        return lambda states: logits_of_states(base, states)[:, token_map]
    if token_map is None:
        return lambda states: embedding(states.to(embedding_weight(embedding).dtype))
    return GatheredRows(embedding, token_map)


S = TypeVar("S", bound=tuple)  # a tuple of sums, such as LossSums
_TILE_ELEMENTS = 2**18
"""Logits that a CPU processes at a time, so that intermediate results stay in its caches."""


class LossSums(NamedTuple):
    """Sums over targets by depth, (K,) each; not means, so that micro-batches and processes add up."""

    loss: Tensor
    weighted: Tensor  # the objective: each loss times the weight of its target
    top1: Tensor  # long; targets that were the first guess
    top5: Tensor  # long; targets among the first five guesses
    num_labels: Tensor  # long; label tokens, with a column or without: the denominator of a hit rate
    num_scored: Tensor  # long; those with a column: the denominator of the loss

    @classmethod
    def zeros(cls, num_depths: int, device: torch.device | str = "cpu") -> LossSums:
        counts = (torch.zeros(num_depths, dtype=torch.long, device=device) for _ in range(4))
        sums = (torch.zeros(num_depths, device=device) for _ in range(2))
        return cls(*sums, *counts)

    def objective(self, num_scored: Tensor) -> Tensor:
        """The weighted loss, a scalar, where ``num_scored`` (K,) targets are scored in all."""
        return (self.weighted / num_scored.clamp(min=1)).sum()

    def metrics(self, name: str) -> dict[str, float]:
        """``name/loss``, the total, and by depth d ``name/loss_d``, ``name/top1_d``, ``name/top5_d``.

        Empty if there are no labels. A label token without a column counts as a miss in the hit rates, and
        not in the loss.
        """
        if not int(self.num_labels.sum()):
            return {}
        metrics = {f"{name}/loss": float(self.objective(self.num_scored))}
        columns = {
            "loss": (self.loss / self.num_scored.clamp(min=1)).tolist(),
            "top1": (self.top1 / self.num_labels.clamp(min=1)).tolist(),
            "top5": (self.top5 / self.num_labels.clamp(min=1)).tolist(),
        }
        for key, values in columns.items():
            metrics |= {f"{name}/{key}_{depth}": value for depth, value in enumerate(values, start=1)}
        return metrics


def add_metrics(first: S, second: S) -> S:
    """Both sums together; sums are named tuples of tensors, or of such tuples."""
    pairs: Any = zip(first, second, strict=True)
    return type(first)(*(a + b if isinstance(a, Tensor) else add_metrics(a, b) for a, b in pairs))


def to_lists(sums: tuple) -> list[Any]:
    """``sums`` as nested lists, which JSON can hold."""
    return [each.tolist() if isinstance(each, Tensor) else to_lists(each) for each in sums]


def from_lists(zeros: S, saved: list[Any]) -> S:
    """The inverse of :func:`to_lists`; types and device are taken from ``zeros``."""
    pairs: Any = zip(zeros, saved, strict=True)
    return type(zeros)(*(a.new_tensor(b) if isinstance(a, Tensor) else from_lists(a, b) for a, b in pairs))


def _loss_and_gradient(
    log_q: Tensor, columns: Tensor, teacher: TeacherRows | None, kl_weight: float
) -> tuple[Tensor, Tensor]:
    """The loss of each target, (C,): kl_weight * KL(p || q) + (1 - kl_weight) * cross-entropy; and its
    gradient with respect to the logits, (C, V').

    Args:
        log_q: (C, V'), overwritten by the gradient: a block is the largest tensor of training, so there is
            only one of its size.
        columns: (C,) long, the targets.
        teacher: p; needed if ``kl_weight`` is above 0.
    """
    targets = columns[:, None]
    ce_weight = 1 - kl_weight
    loss = ce_weight * -log_q.gather(1, targets)[:, 0]
    if kl_weight:
        assert teacher is not None
        loss += kl_weight * (-teacher.entropy - expected(teacher.probabilities, log_q))
    gradient = log_q.exp_()  # q - (kl_weight * p + ce_weight * one_hot(target))
    if kl_weight:
        assert teacher is not None
        gradient.sub_(teacher.probabilities, alpha=kl_weight)
    if ce_weight:
        gradient.scatter_add_(1, targets, gradient.new_full(targets.shape, -ce_weight))
    return loss, gradient


class SplitHeads:
    """Shards each head's parameters over the processes, by their rows; gathers one head at a time.

    The modules hold the shards, as DTensors, for the optimiser and checkpoints to see. All processes must
    enter :meth:`gathered` for the same head at the same time.
    """

    def __init__(self, heads: MedusaHeads, mesh: DeviceMesh):
        """Shard those parameters of ``heads`` that only one head reads. Their values are taken from the first
        process."""
        self._mesh = mesh
        self._places = [_places_of(heads, index) for index in range(heads.num_heads)]
        for places in self._places:
            for module, name in places:
                part = distribute_tensor(getattr(module, name).detach(), mesh, [Shard(0)])
                setattr(module, name, nn.Parameter(part))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The shards, as DTensors."""
        return [getattr(module, name) for places in self._places for module, name in places]

    @contextmanager
    def gathered(self, index: int, gradients: dict[Tensor, Tensor]) -> Iterator[dict[Tensor, Tensor]]:
        """Within this context the head at ``index`` (from 0) has its full parameters, and no other has.

        Yields a copy of the dict ``gradients`` (parameter -> its gradient), with an entry for each full
        parameter whose shard has one. At the end these are averaged over the processes, and added to the
        gradients of the shards.
        """
        shards = [(module, name, getattr(module, name)) for module, name in self._places[index]]
        full_gradients: dict[DTensor, Tensor] = {}
        inside = dict(gradients)
        for module, name, shard in shards:
            full = nn.Parameter(shard.detach().full_tensor())
            setattr(module, name, full)
            if shard in gradients:
                full_gradients[shard] = inside[full] = torch.zeros_like(full)
        try:
            yield inside
        finally:
            for module, name, shard in shards:
                setattr(module, name, shard)
        for shard, gradient in full_gradients.items():
            total = DTensor.from_local(gradient, self._mesh, [Partial()]).redistribute(placements=[Shard(0)])
            gradients[shard].add_(total, alpha=1 / self._mesh.size())


def _places_of(heads: MedusaHeads, index: int) -> list[tuple[nn.Module, str]]:
    """(module, attribute name) of each parameter of one head."""
    own = set(heads.parameters_of(index))
    return [
        (module, name)
        for module in heads.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter in own
    ]


class TargetBlock(NamedTuple):
    """A block of C targets, for one depth."""

    columns: Tensor  # (C,) long: the logits column of each target
    is_scored: Tensor  # (C,) bool; false where the depth has no state to predict the target from
    weights: Tensor  # (C,)
    teacher_rows: TeacherRows | None

    def part(self, rows: slice) -> TargetBlock:
        """Some of the targets."""
        teacher_rows = None if self.teacher_rows is None else self.teacher_rows.part(rows)
        return TargetBlock(self.columns[rows], self.is_scored[rows], self.weights[rows], teacher_rows)


@dataclass(kw_only=True)
class FusedLoss:
    """The loss of one micro-batch, with its gradients: a callable that is used once."""

    columns: Tensor
    """(S,) long: the logits column of each target."""
    sources: Tensor
    """(K, S) long: the state that each depth predicts each target from; -1 where there is none."""
    weights: Tensor
    """(K, S)."""
    num_scored: Tensor
    """(K,): by depth, targets of the whole optimiser step, all micro-batches and processes included."""
    kl_weight: float
    """The share of KL in the loss; the rest is cross-entropy."""
    block_elements: int
    """How many logits may be held at a time: C = block_elements / V', at least 1."""
    num_columns: int
    """V'."""
    logits_of: Callable[[int, slice, Tensor], Tensor]
    """(depth from 0, block of targets, states (C, D)) -> logits (C, V')."""
    parameters_of: Callable[[int], Sequence[nn.Parameter]] = lambda index: ()
    """The parameters that ``logits_of`` reads at a depth."""
    teacher: Teacher | None = None
    teacher_states: Callable[[slice], Tensor] | None = None
    """A block of targets -> the states (C, D) from which the base itself predicts them."""
    split: SplitHeads | None = None
    """The heads whose parameters ``logits_of`` reads, if they are sharded."""
    observe: Callable[[Tensor, TargetBlock], None] | None = None
    """Called with log q (C, V') and the targets, of every block or part of one."""
    num_unmapped: Tensor | int = 0
    """(K,): label tokens without a column, which are misses in the hit rates."""
    sums: LossSums = field(init=False)
    """The sums over the blocks done so far."""

    @classmethod
    def of_heads(
        cls,
        alignment: Alignment,
        options: LossOptions,
        teacher: Teacher | None,
        sources: Tensor | None = None,
        **fields: Any,
    ) -> FusedLoss:
        """The loss of heads on the targets of ``alignment``; depth d has the weight decay^d.

        ``sources`` (K, S) long are by default the alignment's; ``fields`` are the other fields.

        Raises:
            ValueError: the objective needs a teacher, and there is none.
        """
        if options.needs_teacher and teacher is None:
            raise ValueError(f"objective {options.objective!r} needs the base's logits: pass teacher")
        sources = alignment.sources[1:] if sources is None else sources
        depths = torch.arange(1, alignment.num_heads + 1, device=sources.device)
        return cls(
            columns=alignment.columns,
            sources=sources,
            weights=options.decay ** depths[:, None] * (sources >= 0),
            kl_weight={"ce": 0.0, "kl": 1.0, "blend": options.kl_weight}[options.objective],
            block_elements=options.block_elements,
            teacher=teacher if options.needs_teacher else None,
            num_unmapped=alignment.num_unmapped,
            **fields,
        )

    def __post_init__(self) -> None:
        self.sums = LossSums.zeros(len(self.sources), self.columns.device)
        self._block_size = max(1, self.block_elements // self.num_columns)

    def __call__(self, states: Tensor, parameters: Sequence[nn.Parameter] = ()) -> Tensor:
        """The loss, a scalar; autograd sees it as a function of states (P, D) and ``parameters``."""
        if torch.is_grad_enabled():
            return _Function.apply(self, states, *parameters)
        return self.run(states, {})

    def run(self, states: Tensor, gradients: dict[Tensor, Tensor]) -> Tensor:
        """The loss, a scalar, of states (P, D). ``gradients`` has a tensor for each input that requires grad
        (``states`` itself, parameters), to which its gradient is added; without any there is no backward."""
        depths = range(len(self.sources))
        if self.split is None:
            self._add(depths, states, gradients)
        else:
            for index in depths:
                self._add_alone(self.split, index, states, gradients)
        self.sums.num_labels.copy_(self.sums.num_scored + self.num_unmapped)
        return self.sums.objective(self.num_scored)

    def _add_alone(
        self, split: SplitHeads, index: int, states: Tensor, gradients: dict[Tensor, Tensor]
    ) -> None:
        """As :meth:`_add`, for one depth of sharded heads; gathered parameters do not outlive the call."""
        with split.gathered(index, gradients) as inside:
            self._add(range(index, index + 1), states, inside)

    def _add(self, depths: range, states: Tensor, gradients: dict[Tensor, Tensor]) -> None:
        """Forward and backward of all blocks at ``depths`` (from 0)."""
        for start in range(0, len(self.columns), self._block_size):
            block = slice(start, start + self._block_size)
            teacher_rows = None  # the same at every depth
            if self.teacher is not None and self.teacher_states is not None:
                with torch.no_grad():
                    teacher_rows = TeacherRows.of_logits(self.teacher(self.teacher_states(block)))
            for index in depths:
                self._add_block(index, block, states, teacher_rows, gradients)

    def _add_block(
        self,
        index: int,
        block: slice,
        states: Tensor,
        teacher_rows: TeacherRows | None,
        gradients: dict[Tensor, Tensor],
    ) -> None:
        """Forward and backward of one block at one depth."""
        sources = self.sources[index, block]
        weights = self.weights[index, block]
        targets = TargetBlock(self.columns[block], sources >= 0, weights, teacher_rows)
        sources = sources.clamp(min=0)
        block_states = states.detach()[sources].requires_grad_(states in gradients)  # (C, D)
        with torch.set_grad_enabled(bool(gradients)):
            logits = self.logits_of(index, block, block_states)
        gradient = self._scored(index, logits.detach(), targets)
        if not gradients:
            return
        parameters: list[Tensor] = [each for each in self.parameters_of(index) if each in gradients]
        inputs = [*parameters, block_states] if block_states.requires_grad else parameters
        block_gradients = torch.autograd.grad(logits, inputs, gradient)
        for parameter, part in zip(parameters, block_gradients, strict=False):  # the states' may follow
            gradients[parameter] += part
        if block_states.requires_grad:
            gradients[states].index_add_(0, sources, block_gradients[-1].to(states.dtype))

    def _scored(self, index: int, logits: Tensor, targets: TargetBlock) -> Tensor:
        """Add a block of logits (C, V') to the sums; returns the loss's gradient (C, V') with respect to it.

        Targets that are not scored count nowhere.
        """
        num_rows = max(1, _TILE_ELEMENTS // self.num_columns) if logits.is_cpu else len(logits)
        gradient = torch.empty_like(logits)
        for start in range(0, len(logits), num_rows):
            rows = slice(start, start + num_rows)
            gradient[rows] = self._scored_tile(index, logits[rows], targets.part(rows))
        return gradient

    def _scored_tile(self, index: int, logits: Tensor, targets: TargetBlock) -> Tensor:
        """As :meth:`_scored`, for some rows of a block."""
        is_as_good = logits >= logits.gather(1, targets.columns[:, None])  # (C, V'); a tie counts as a miss
        num_better = is_as_good.sum(-1, dtype=torch.int32) - 1  # int64 sums of booleans are ten times slower
        log_q = logits.log_softmax(-1, dtype=torch.float32)
        if self.observe is not None:
            self.observe(log_q, targets)
        loss, gradient = _loss_and_gradient(log_q, targets.columns, targets.teacher_rows, self.kl_weight)
        loss = loss.masked_fill(~targets.is_scored, 0.0)
        sums = self.sums
        sums.loss[index] += loss.sum()
        sums.weighted[index] += (loss * targets.weights).sum()
        sums.top1[index] += (targets.is_scored & (num_better < 1)).sum()
        sums.top5[index] += (targets.is_scored & (num_better < 5)).sum()
        sums.num_scored[index] += targets.is_scored.sum()
        return gradient.mul_((targets.weights / self.num_scored[index].clamp(min=1))[:, None])


class _Function(torch.autograd.Function):
    """A fused loss whose forward computes the gradients too; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, work: FusedLoss, *inputs: Tensor) -> Tensor:
        wanted = zip(inputs, ctx.needs_input_grad[1:], strict=True)
        gradients = {each: torch.zeros_like(each) for each, wants in wanted if wants}
        loss = work.run(inputs[0], gradients)
        ctx.save_for_backward(*(gradients.get(each) for each in inputs))
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # In place: these tensors become the parameters' gradients, without a second copy.
        return (None, *(None if each is None else each.mul_(upstream) for each in ctx.saved_tensors))
