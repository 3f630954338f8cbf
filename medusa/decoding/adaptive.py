"""Adaptive drafting: before each step whether to draft, then how many nodes of the draft to verify.

A drafted step takes longer than a plain one and gives more tokens. Whether that pays depends on the text:
drafts of a translation are often wrong, drafts of a repetition often right, and one answer may hold both. So
the time that drafting has saved is kept as a balance, in plain steps: a drafted step adds its tokens and
subtracts its cost. When the balance has fallen by :data:`MAX_DEBT`, drafting stops, and now and then one
drafted step probes whether it pays again; the interval grows while probes lose. So drafting costs at most its
stake and its probes.

The cost of a drafted step is learnt from neighbouring steps: where a plain step follows a drafted one, both
are timed. Neighbours share the length of the text and the load of the machine, so their ratio is steadier
than either. The median of the last ratios counts, and a model keeps them from one request to the next.

Every node makes a pass longer too: by a tenth where the processor is busy, by nothing where it is not. The
cost of a node is learnt from neighbouring steps that verified different numbers of nodes. A node is worth
verifying where the probability that it is accepted, by the drafter's own estimate, is above the gain of
spending its time elsewhere: its cost times the tokens that come in the time of a pass. So an easy word gets a
deep tree and a hard one none, and the same rule serves long texts and full batches, where nodes are dear.

A suffix match costs next to nothing to look for. So where drafts may have any shape, a pause still drafts by
suffix matching, where at least :data:`FALLBACK_MATCH` tokens occurred before: a text that begins to repeat
itself ends the pause at once.

A batch pauses as a whole; its tokens are counted per row that still decodes. The tokens are the same whatever
is decided here.
"""

from __future__ import annotations

import math
import statistics

from torch import Tensor

from medusa.drafters.protocol import Drafter, PlainDrafter
from medusa.drafters.suffix import SuffixDrafter
from medusa.options import STEPS, StepKind

MAX_DEBT = 1.0
"""Largest loss before drafting stops, in plain steps."""
MAX_CREDIT = 4.0
"""Largest balance, in plain steps, so that a few hard words do not stop drafting."""
FIRST_INTERVAL, LAST_INTERVAL = 16, 256
"""Number of plain steps before the first probe, per plain step that a failed probe costs. It doubles after
each failed probe, up to LAST_INTERVAL. So the probes of a long pause cost 0.4 %, whatever a draft costs."""
FALLBACK_MATCH = 4
"""Tokens of a suffix match that is drafted in a pause."""
NUM_RATIOS, ENOUGH_RATIOS = 15, 3
"""Ratios that are kept, and without which nothing is paused."""
RATIO_INTERVAL, LAST_RATIO_INTERVAL = 8, 256
"""Take a plain step for timing every RATIO_INTERVAL x (known ratios) drafted steps; only every
LAST_RATIO_INTERVAL steps when the balance is full, since a better ratio would change nothing."""
NUM_NODE_COSTS, ENOUGH_NODE_COSTS = 31, 5
"""Costs of a node that are kept, and without which no node is left out, and nothing paused for it."""
NODE_COST_INTERVAL = 64
"""Steps without a new cost of a node after which a whole draft is verified, to learn another."""
LEARNING_PASS = 32
"""Largest number of nodes, over all rows, that is verified to learn the cost of a node."""
OPTIONAL_NODE_PROB = 0.5
"""Acceptance probability from which optional nodes are verified: node costs are learnt from smaller
passes."""
MEMORY = 0.98
"""Decay per step of the counts of tokens and time."""


class DraftCost:
    """How long drafted steps take: learnt from requests of one kind, kept between them."""

    def __init__(self) -> None:
        self._ratios: tuple[tuple[int, float], ...] = ()  # nodes of a drafted step, its time in plain steps
        self._node_costs: tuple[float, ...] = ()
        self._plain_seconds: tuple[float, ...] = ()
        self.node: float | None = None
        """The time that one more node adds to a drafted step, as a fraction of a step with the root only;
        None while unknown."""
        self._tokens = 1.0  # of the last drafted steps, decayed
        self._time = 1.0  # theirs
        self.num_drafted = 0
        """Drafted steps since a ratio was taken."""
        self.num_since_node = 0
        """Drafted steps since the cost of a node was taken."""

    @property
    def min_accept_prob(self) -> float | None:
        """The acceptance probability from which a node pays; None while unknown."""
        return None if self.node is None else self.node * self._tokens / self._time

    @property
    def plain_seconds(self) -> float | None:
        """The time of a step that drafts nothing; None while unknown."""
        return statistics.median(self._plain_seconds) if self._plain_seconds else None

    def plain_steps(self, num_nodes: int = 1) -> float | None:
        """The time of a drafted step of ``num_nodes`` nodes, in plain steps; None while unknown."""
        if len(self._ratios) < ENOUGH_RATIOS:
            return None
        alone = statistics.median(ratio / self.relative(nodes) for nodes, ratio in self._ratios)
        return alone * self.relative(num_nodes)

    def relative(self, num_nodes: int) -> float:
        """The time of a drafted step of ``num_nodes`` nodes relative to one with the root only."""
        return 1 + (self.node or 0.0) * (num_nodes - 1)

    def wants_plain_step(self, is_certain: bool) -> bool:
        """Whether to take a plain step now; ``is_certain`` says that another ratio would change nothing."""
        known = len(self._ratios)
        if known < ENOUGH_RATIOS:
            return True
        return self.num_drafted >= (LAST_RATIO_INTERVAL if is_certain else RATIO_INTERVAL * known)

    def learn(self, drafted_seconds: float, plain_seconds: float, num_nodes: int = 1) -> None:
        """Record a plain step right after a drafted one of ``num_nodes`` nodes."""
        if plain_seconds > 0:
            self._ratios = (*self._ratios[1 - NUM_RATIOS :], (num_nodes, drafted_seconds / plain_seconds))
            self._plain_seconds = (*self._plain_seconds[1 - NUM_RATIOS :], plain_seconds)
            self.num_drafted = 0

    def learn_node(self, first: tuple[int, float], second: tuple[int, float]) -> None:
        """Two drafted steps have followed each other: nodes and seconds of both."""
        if first[0] == second[0]:
            return
        node = (second[1] - first[1]) / (second[0] - first[0])
        alone = first[1] - node * (first[0] - 1)
        if alone > 0:
            self._node_costs = (*self._node_costs[1 - NUM_NODE_COSTS :], node / alone)
            self.num_since_node = 0
            if len(self._node_costs) >= ENOUGH_NODE_COSTS:
                self.node = max(0.0, statistics.median(self._node_costs))

    def count(self, tokens_per_row: float, num_nodes: int) -> None:
        """Count a drafted step of ``num_nodes`` nodes that gave ``tokens_per_row`` tokens a row."""
        self.num_drafted += 1
        self.num_since_node += 1
        self._tokens = MEMORY * self._tokens + tokens_per_row
        self._time = MEMORY * self._time + self.relative(num_nodes)


class DraftCosts:
    """The costs of drafted steps that a model has learnt, by step kind and number of rows."""

    def __init__(self) -> None:
        self.known: dict[tuple[StepKind, int], DraftCost] = {}

    def plain_seconds(self, num_rows: int) -> float | None:
        """The time of a step of ``num_rows`` rows that drafts nothing, of whatever kind; None while
        unknown."""
        for (_, rows), cost in self.known.items():
            if rows == num_rows and cost.plain_seconds is not None:
                return cost.plain_seconds
        return None

    def adaptive(
        self, drafter: Drafter, in_float32: bool, step: StepKind, num_rows: int
    ) -> AdaptiveDrafting | None:
        """The policy for a request of ``num_rows`` rows whose text does not depend on drafts.

        None where drafting must not stop: in lower precision than float32 (``in_float32`` is False) a pass
        over several nodes rounds differently, and the text must not depend on how long steps took."""
        if not in_float32 or drafter.max_depth == 0:
            return None
        cost = self.known.setdefault((step, num_rows), DraftCost())
        fallback = SuffixDrafter(min_match=FALLBACK_MATCH) if STEPS[step].has_any_shape else None
        return AdaptiveDrafting(cost, fallback)


class AdaptiveDrafting:
    """Whether the next step drafts, in one request.

    Args:
        cost: measured costs, shared between requests and updated by this one.
        fallback: a drafter of negligible cost that drafts during a pause, where it finds anything.
    """

    def __init__(self, cost: DraftCost, fallback: Drafter | None = None):
        self.cost = cost
        self.fallback = fallback or PlainDrafter()
        self._no_drafter = PlainDrafter()
        self._balance = 0.0
        self._interval = FIRST_INTERVAL
        self._num_plain = 0  # steps to come that do not draft
        self._asks_fallback = True  # until a match was wrong, and again after the next probe
        self._is_learning = False  # the cost of a node
        self._is_first = True  # the first draft has the prompt to catch up with: its time tells nothing
        self._drafted_step: tuple[int, float] | None = None  # nodes and seconds of the last, if it drafted

    @property
    def drafts(self) -> bool:
        """Whether the next step is to draft."""
        return self._num_plain == 0

    def select_drafter(self, drafter: Drafter) -> Drafter:
        """The drafter of the next step: ``drafter``, or in a pause :attr:`fallback`, or one that drafts
        nothing."""
        if self.drafts:
            return drafter
        return self.fallback if self._asks_fallback else self._no_drafter

    @property
    def min_accept_prob(self) -> float:
        """The acceptance probability from which a node of the next draft is verified; 0 where nodes cost
        nothing, or where costs are being learnt."""
        known = self.cost.min_accept_prob
        return 0.0 if known is None or self._is_trial else known

    @property
    def _is_trial(self) -> bool:
        """Whether the whole next draft is verified, to learn the cost of a node again."""
        return self.cost.num_since_node >= NODE_COST_INTERVAL

    def num_nodes(self, path_logprob: Tensor, most: int) -> int:
        """The number of nodes to verify, the same in every row and at most ``most`` without optional nodes;
        ``path_logprob`` (B, N) is a field of :class:`medusa.drafters.protocol.Draft`."""
        if path_logprob.shape[1] == 1:
            return 1
        of_nodes = zip(*path_logprob.tolist(), strict=True)  # for each node, its log-probability in each row
        probabilities = [sum(map(math.exp, logprobs)) / len(logprobs) for logprobs in of_nodes]
        num_likely = sum(probability >= OPTIONAL_NODE_PROB for probability in probabilities)
        self._is_learning = self.cost.min_accept_prob is None
        tried = min(most, max(2, LEARNING_PASS // len(path_logprob)))
        if self._is_learning:  # some of two sizes, to learn from
            return tried if self.cost.num_since_node % 2 else tried // 2
        if self._is_trial:
            return tried
        num_paying = sum(probability >= self.min_accept_prob for probability in probabilities)
        return max(1, min(num_paying, max(most, num_likely)))

    def record(
        self,
        tokens_per_row: float,
        seconds: float | None,
        num_steps: int = 1,
        used_fallback: bool = False,
        num_nodes: int = 1,
    ) -> None:
        """Record the result of the step that :attr:`drafts` was asked about, or the sum over ``num_steps``
        steps.

        ``seconds`` is None where something else than stepping took part, such as compiling. A burst of steps
        counts as one decision. With ``used_fallback`` the :attr:`fallback` drafted, and nothing is learnt
        about costs. ``num_nodes`` counts the verified nodes, the root included; any
        number will do where all steps verify equally many.
        """
        step_seconds = None if seconds is None else seconds / num_steps
        last_drafted = self._drafted_step
        self._drafted_step = None
        if used_fallback:
            self._settle(tokens_per_row, num_steps, self.cost.plain_steps(num_nodes))
            self._asks_fallback = self._balance > -MAX_DEBT
            if self._asks_fallback:
                self._num_plain = 0
        elif self.drafts:
            self._record_drafted(tokens_per_row, step_seconds, num_steps, num_nodes, last_drafted)
        else:
            self._num_plain -= 1
            if step_seconds is not None and last_drafted is not None:
                nodes, drafted_seconds = last_drafted
                self.cost.learn(drafted_seconds, step_seconds / self.cost.relative(num_nodes), nodes)

    def _record_drafted(
        self,
        tokens_per_row: float,
        step_seconds: float | None,
        num_steps: int,
        num_nodes: int,
        last_drafted: tuple[int, float] | None,
    ) -> None:
        """Record drafted steps: count them, pause where they have cost too much, and learn from their time.
        ``last_drafted`` are nodes and seconds of the step before, if it drafted too."""
        self._asks_fallback = True
        self.cost.count(tokens_per_row / num_steps, num_nodes)
        price = self.cost.plain_steps(num_nodes)
        if price is not None:
            self._settle(tokens_per_row, num_steps, price)
            if self._balance == -MAX_DEBT:
                self._num_plain = max(1, round(self._interval * (price - 1)))
                self._interval = min(2 * self._interval, LAST_INTERVAL)
        if self._is_first:
            self._is_first = False
            return
        if self.drafts and self.cost.wants_plain_step(is_certain=self._balance == MAX_CREDIT):
            self._num_plain = 1
        if step_seconds is not None:
            self._drafted_step = num_nodes, step_seconds
            if last_drafted is not None:
                self.cost.learn_node(last_drafted, self._drafted_step)

    def _settle(self, tokens_per_row: float, num_steps: int, price: float | None) -> None:
        """Add the tokens of ``num_steps`` drafted steps to the balance, and subtract their cost."""
        if price is not None and not self._is_learning:
            balance = self._balance + tokens_per_row - price * num_steps
            self._balance = min(max(balance, -MAX_DEBT), MAX_CREDIT)
            if self._balance > 0:
                self._interval = FIRST_INTERVAL
