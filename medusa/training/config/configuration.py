"""What a training run is told: all options, checked against each other, and what a resumed run may change.

Keys are flat and the same in the YAML file and on the command line: ``learning_rate: 1e-3`` in the file is
``--learning_rate 1e-3``.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any

import yaml

from medusa.base.causal_lm import CausalLM
from medusa.heads.eagle3 import Eagle3Config
from medusa.heads.medusa_heads import HeadsConfig
from medusa.training.config.options import (
    BaseOptions,
    ConfigurationError,
    DataOptions,
    Eagle3Options,
    HeadOptions,
    JointOptions,
    LossOptions,
    MedusaOptions,
    OptimisationOptions,
    RunOptions,
)

KINDS = {"medusa": ("medusa",), "eagle3": ("eagle3",), "joint": ("medusa", "joint")}
"""The groups of options that each kind of training reads beside those that all do."""
_LAUNCHED_PRECISIONS = {"no": "fp32", "bf16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class TrainingConfiguration:
    """All options of a run, checked."""

    base: BaseOptions
    heads: HeadOptions = field(default_factory=HeadOptions)
    medusa: MedusaOptions = field(default_factory=MedusaOptions)
    eagle3: Eagle3Options = field(default_factory=Eagle3Options)
    joint: JointOptions = field(default_factory=JointOptions)
    data: DataOptions
    loss: LossOptions = field(default_factory=LossOptions)
    optimisation: OptimisationOptions
    run: RunOptions

    def __post_init__(self) -> None:
        if self.heads.head_kind == "medusa":  # refuses heads that no base could have
            self.medusa.heads_of_size(self.heads, 1, self.heads.token_map_size or 1)
        if not self.data.data:
            raise ConfigurationError("data must name at least one file or hub id; pass --data FILE")
        self._check_kind()
        if self.data.train_on == "everything" and self.loss.objective != "kl":
            raise ConfigurationError(
                f"train_on=everything goes with objective kl, got {self.loss.objective!r}, which would learn "
                "to write prompts; choose kl, or train_on=answers"
            )

        if self.run.stop_after is not None and not self.optimisation.cache_hidden_states:
            raise ConfigurationError(
                f"stop_after={self.run.stop_after} goes with cache_hidden_states=true, got false: there "
                "are no states to store; add --cache_hidden_states true"
            )

    def _check_kind(self) -> None:
        """Refuse options that the kind of training does not read, and combinations that cannot work."""
        if self.joint.joint and self.heads.head_kind != "medusa":
            raise ConfigurationError(
                f"joint=true goes with head_kind=medusa, got {self.heads.head_kind!r}: the recipe "
                "of Medusa-2 is one for Medusa heads"
            )
        if self.joint.joint and self.medusa.context_layers:
            raise ConfigurationError(
                f"context_layers={self.medusa.context_layers} and joint exclude each other, got both: joint "
                "training does not run the layer; train the heads alone"
            )
        if self.joint.joint and self.optimisation.cache_hidden_states:
            raise ConfigurationError(
                "cache_hidden_states and joint exclude each other, got both: stored states are those of a "
                "base that stays as it is, and the adapter changes them; leave cache_hidden_states out"
            )
        if self.joint.joint and self.base.base_placement != "each":
            raise ConfigurationError(
                f"base_placement={self.base.base_placement} and joint exclude each other, got both: the "
                "adapter sits in the base's layers, which each process must have whole; leave it out"
            )
        for name in {name for names in KINDS.values() for name in names} - set(KINDS[self.kind]):
            group = getattr(self, name)
            for each in dataclasses.fields(group):
                if (value := getattr(group, each.name)) != _default(each):
                    raise ConfigurationError(
                        f"{each.name} goes with {'joint=true' if name == 'joint' else f'head_kind={name}'}, "
                        f"got {value!r} without it; leave it out"
                    )

    @property
    def kind(self) -> str:
        """The kind of training, a key of :data:`KINDS`."""
        return "joint" if self.joint.joint else self.heads.head_kind

    @property
    def reads_text(self) -> bool:
        """Whether heads read all states of a text up to the one they guess from."""
        return self.kind == "eagle3" or bool(self.medusa.context_layers)

    def heads_config(self, base: CausalLM) -> HeadsConfig | Eagle3Config:
        """The heads that are asked for, on ``base``.

        Raises:
            ValueError: there are no such heads.
        """
        group: MedusaOptions | Eagle3Options = getattr(self, self.heads.head_kind)
        return group.heads_config(self.heads, base)

    def as_dict(self) -> dict[str, Any]:
        """All keys and values, flat."""
        groups = (getattr(self, each.name) for each in dataclasses.fields(self))
        return {key: value for group in groups for key, value in dataclasses.asdict(group).items()}

    def as_yaml(self) -> str:
        """A file that ``--config`` reads back as this configuration."""
        return yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True)


REMEDIES = (
    "learning_rate",
    "final_learning_rate",
    "max_grad_norm",
    "weight_decay",
    "precision",
    "base_dtype",
    "attention",
    "base_placement",
)
"""Keys that a resumed run may change since they mend one that diverged; the change is recorded."""
FREE_TO_CHANGE = frozenset(
    (
        "num_epochs",
        "max_steps",
        "max_minutes",
        "block_elements",
        "cache_hidden_states",
        "gradient_accumulation_steps",  # the checkpoint says whether a step still takes the same batches
        *REMEDIES,
    )
) | {each.name for each in dataclasses.fields(RunOptions)}
"""Keys that a resumed run may change: how long, how fast, what it reports, and :data:`REMEDIES`."""


def changed_keys(earlier: dict[str, Any], now: TrainingConfiguration) -> list[str]:
    """``key: earlier -> now`` for every key that differs from the ``earlier`` run's and may not."""
    groups: list[Any] = [getattr(now, each.name) for each in dataclasses.fields(now)]
    defaults = {each.name: _default(each) for group in groups for each in dataclasses.fields(group)}
    ours = now.as_dict()
    before = defaults | earlier  # some keys came later
    changed = [key for key in ours if key not in FREE_TO_CHANGE and before[key] != ours[key]]
    return [f"{key}: {before[key]!r} -> {ours[key]!r}" for key in changed]


def launched_precision() -> str:
    """The precision that ``accelerate launch`` was asked for; fp32 without it.

    Raises:
        ConfigurationError: training has no such precision.
    """
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if asked not in _LAUNCHED_PRECISIONS:
        raise ConfigurationError(
            f"accelerate launch --mixed_precision must be {' or '.join(_LAUNCHED_PRECISIONS)} here, got "
            f"{asked!r}; launch with --mixed_precision bf16 or no"
        )
    return _LAUNCHED_PRECISIONS[asked]


def _default(each: dataclasses.Field) -> Any:
    """The value of a key that nobody gives; MISSING where somebody must."""
    return each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
