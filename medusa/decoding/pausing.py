"""Guessing that does not pay, paused: before every step, whether to draft or to decode plainly.

A drafted step takes longer than a plain one and gives more tokens. Whether that pays depends on the text: a
translation is guessed badly, a repetition well, and one answer may hold both. So the time that guessing has
saved is kept as a balance, in plain steps: a drafted step adds its tokens and takes away what it costs. When
the balance has fallen by :data:`STAKE`, guessing pauses, and one drafted step in a while probes whether it
pays again; while probes lose, that while gets longer. So guessing costs at most its stake and its probes.

What a drafted step costs is learnt from neighbours: where a plain step follows a drafted one, both are timed.
Neighbours share the length of the text and the load of the machine, so their ratio is steadier than either.
The median of the last ratios counts, and a model keeps them from one request to the next.

A suffix match costs next to nothing to look for. So in the general loop a pause goes on guessing what
followed the last tokens, where at least :data:`RESTING_MATCH` of them occurred before: a text that begins to
repeat itself ends the pause at once.

A batch pauses as a whole; its tokens are counted per row that still decodes. The tokens are the same whatever
is decided here.
"""

from __future__ import annotations

import statistics

from medusa.drafters.plain import PlainDrafter
from medusa.drafters.protocol import Drafter

STAKE = 1.0
"""What guessing may lose before it pauses, in plain steps."""
RESERVE = 4.0
"""What it may put by while it wins, in plain steps: text that is hard for a few words does not stop it."""
FIRST_INTERVAL, LAST_INTERVAL = 16, 256
"""Plain steps before the first probe of a pause, for each plain step that a probe would lose; each that loses
doubles them, up to the second. So the probes of a long pause cost 0.4 %, whatever a draft costs."""
RESTING_MATCH = 4
"""Tokens of a suffix match that is drafted in a pause."""
NUM_RATIOS, ENOUGH_RATIOS = 15, 3
"""Ratios that are kept, and without which nothing is paused."""
RATIO_INTERVAL, LAST_RATIO_INTERVAL = 8, 256
"""A plain step is taken only to be timed after so many drafted ones for each ratio that is known; after the
second number of them where guessing has its whole reserve, and a better ratio would change nothing."""


class DraftCost:
    """How long a drafted step takes, in plain steps: learnt from requests of one kind, kept between them."""

    def __init__(self) -> None:
        self._ratios: tuple[float, ...] = ()
        self.num_drafted = 0
        """Drafted steps since a ratio was taken."""

    @property
    def plain_steps(self) -> float | None:
        """The median of the last ratios; None before there are enough."""
        return statistics.median(self._ratios) if len(self._ratios) >= ENOUGH_RATIOS else None

    def is_due(self, is_certain: bool) -> bool:
        """Whether to take a plain step now; ``is_certain`` says that another ratio would change nothing."""
        known = len(self._ratios)
        if known < ENOUGH_RATIOS:
            return True
        return self.num_drafted >= (LAST_RATIO_INTERVAL if is_certain else RATIO_INTERVAL * known)

    def learn(self, drafted_seconds: float, plain_seconds: float) -> None:
        """A plain step has followed a drafted one."""
        if plain_seconds > 0:
            self._ratios = (*self._ratios[1 - NUM_RATIOS :], drafted_seconds / plain_seconds)
            self.num_drafted = 0


class Pausing:
    """Whether the next step drafts, in one request.

    Args:
        cost: what is known from other requests; it learns from this one.
        resting: who drafts in the place of the drafter in a pause, if it has anything; at next to no cost.
    """

    def __init__(self, cost: DraftCost, resting: Drafter | None = None):
        self.cost, self.resting = cost, resting or PlainDrafter()
        self._nobody = PlainDrafter()
        self._balance = 0.0
        self._interval = FIRST_INTERVAL
        self._num_plain = 0  # steps to come that do not draft
        self._rests = True  # until a match was wrong, and again after the next probe
        self._is_first = True  # the first draft has the prompt to catch up with: its time tells nothing
        self._drafted_seconds: float | None = None  # of the last step, if it drafted

    @property
    def drafts(self) -> bool:
        """Whether the next step is to draft."""
        return self._num_plain == 0

    def chosen(self, drafter: Drafter) -> Drafter:
        """Who drafts the next step: ``drafter``, or in a pause :attr:`resting`, or nobody."""
        if self.drafts:
            return drafter
        return self.resting if self._rests else self._nobody

    def record(
        self, tokens_per_row: float, seconds: float | None, num_steps: int = 1, rested: bool = False
    ) -> None:
        """What the step that :attr:`drafts` spoke of gave; or ``num_steps`` of them at once, in all.

        ``seconds`` is None where something else than stepping took part, such as compiling. Steps at once
        count as one where steps are counted here, as every decision is then about as many. ``rested`` says
        that :attr:`resting` drafted: that tells nothing of costs.
        """
        if rested:
            self._drafted_seconds = None
            self._settle(tokens_per_row, num_steps)
            self._rests = self._balance > -STAKE
            if self._rests:
                self._num_plain = 0
        elif self.drafts:
            self._drafted(tokens_per_row, num_steps)
            self._drafted_seconds = None if self._is_first or seconds is None else seconds / num_steps
            self._is_first = False
        else:
            self._num_plain -= 1
            if seconds is not None and self._drafted_seconds is not None:
                self.cost.learn(self._drafted_seconds, seconds / num_steps)
            self._drafted_seconds = None

    def _settle(self, tokens_per_row: float, num_steps: int) -> None:
        """Add the tokens of ``num_steps`` steps that drafted to the balance, and take away what they cost."""
        price = self.cost.plain_steps
        if price is not None:
            balance = self._balance + tokens_per_row - price * num_steps
            self._balance = min(max(balance, -STAKE), RESERVE)
            if self._balance > 0:
                self._interval = FIRST_INTERVAL

    def _drafted(self, tokens_per_row: float, num_steps: int) -> None:
        cost, price, self._rests = self.cost, self.cost.plain_steps, True
        cost.num_drafted += 1
        if price is not None:
            self._settle(tokens_per_row, num_steps)
            if self._balance == -STAKE:
                self._num_plain = max(1, round(self._interval * (price - 1)))
                self._interval = min(2 * self._interval, LAST_INTERVAL)
        if self.drafts and not self._is_first and cost.is_due(is_certain=self._balance == RESERVE):
            self._num_plain = 1
