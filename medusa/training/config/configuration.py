"""What a training run is told: a YAML file, overridden by the command line.

Keys are flat and the same in both: ``learning_rate: 1e-3`` in the file is ``--learning_rate 1e-3``. The
file is turned into arguments and goes before those of the command line, so one parser (transformers'
``HfArgumentParser``) checks and converts both.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml
from transformers import HfArgumentParser

from medusa.training.config.options import (
    BaseOptions,
    DataOptions,
    HeadOptions,
    JointOptions,
    ObjectiveOptions,
    OptimisationOptions,
    RunOptions,
)
from medusa.training.data.batching import BatchOptions

FOLLOWS_THE_BASE = ("kl", "lk")
"""Objectives whose target is the base's own distribution alone."""


class ConfigurationError(ValueError):
    """The configuration cannot be used; the message says which key, the rule, and what arrived."""


@dataclass(frozen=True)
class TrainingConfiguration:
    """All options of a run, checked."""

    base: BaseOptions
    heads: HeadOptions
    data: DataOptions
    loss: ObjectiveOptions
    joint: JointOptions
    optimisation: OptimisationOptions
    run: RunOptions

    def __post_init__(self) -> None:
        self.heads.heads_config(hidden_size=2 * max(1, self.heads.num_attention_heads), vocab_size=2**20)
        self.data.filter_options()
        self.loss.loss_options()
        self.batch_options()
        if not self.data.data:
            raise ConfigurationError("data must name at least one file or hub id; pass --data FILE")
        limits = ("num_epochs", "max_steps", "max_minutes")
        if all(getattr(self.optimisation, name) is None for name in limits):
            raise ConfigurationError(f"one of {', '.join(limits)} must say how long to train, got none")
        values = self.as_dict()
        for name in _AT_LEAST_ONE:
            if values[name] is not None and values[name] < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {values[name]}")
        for name in _ABOVE_ZERO:
            if values[name] is not None and values[name] <= 0:
                raise ConfigurationError(f"{name} must be above 0, got {values[name]}")
        for name in _OF_THE_OTHER_KIND[self.heads.head_kind]:
            if values[name] != default_of(name):
                raise ConfigurationError(
                    f"{name} does not go with head_kind={self.heads.head_kind}, got {values[name]!r}; "
                    "leave it out"
                )
        for name in _OF_THE_OTHER_WEIGHTING[self.loss.depth_weighting]:
            if values[name] != default_of(name):
                raise ConfigurationError(
                    f"{name} does not go with depth_weighting={self.loss.depth_weighting}, got "
                    f"{values[name]!r}; leave it out"
                )
        if self.data.train_on == "everything" and self.loss.objective not in FOLLOWS_THE_BASE:
            raise ConfigurationError(
                f"train_on=everything goes with objective {' or '.join(FOLLOWS_THE_BASE)}, got "
                f"{self.loss.objective!r}, which would learn to write prompts; choose one of those, or "
                "train_on=answers"
            )
        self._check_joint(values)
        if self.run.overwrite and self.run.resume:
            raise ConfigurationError("overwrite and resume exclude each other, got both")

    def _check_joint(self, values: Mapping[str, Any]) -> None:
        for name in (each.name for each in dataclasses.fields(JointOptions)):
            if not self.joint.joint and values[name] != default_of(name):
                raise ConfigurationError(f"{name} goes with joint=true, got {values[name]!r} without it")
        if self.joint.joint and self.heads.head_kind != "medusa":
            raise ConfigurationError(
                f"joint=true goes with head_kind=medusa, got {self.heads.head_kind!r}: the sizes of features "
                "that such a head works with are measured once, and joint training moves them"
            )
        if self.joint.joint and self.optimisation.cache_hidden_states:
            raise ConfigurationError(
                "cache_hidden_states and joint exclude each other, got both: stored states are those of a "
                "base that stays as it is, and the adapter changes them; leave cache_hidden_states out"
            )

    def batch_options(self) -> BatchOptions:
        return BatchOptions(self.optimisation.tokens_per_batch, self.data.packing, self.data.max_length)

    def as_dict(self) -> dict[str, Any]:
        """All keys and values, flat, in the order of ``--help``."""
        groups = (getattr(self, field.name) for field in dataclasses.fields(self))
        return {key: value for group in groups for key, value in dataclasses.asdict(group).items()}

    def as_yaml(self) -> str:
        """A file that ``--config`` reads back as this configuration."""
        return yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True)


GROUPS = (
    BaseOptions,
    HeadOptions,
    DataOptions,
    ObjectiveOptions,
    JointOptions,
    OptimisationOptions,
    RunOptions,
)
FIELDS = {field.name: field for group in GROUPS for field in dataclasses.fields(group)}


def default_of(name: str) -> Any:
    """The value of a key that nobody gives; MISSING where somebody must."""
    field = FIELDS[name]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


_AT_LEAST_ONE = (
    "num_epochs",
    "max_steps",
    "gradient_accumulation_steps",
    "logging_steps",
    "evaluation_steps",
    "checkpoint_steps",
    "keep_checkpoints",
    "tree_nodes",
)
_ABOVE_ZERO = ("max_minutes", "learning_rate", "max_grad_norm")
_OF_THE_OTHER_KIND = {
    "eagle": ("num_layers", "unembedding", "reads_path", "fused_layers"),
    "medusa": ("num_attention_heads", "intermediate_size", "feature_weight"),
}
_OF_THE_OTHER_WEIGHTING = {"decay": ("dpace_smoothing",), "dpace": ("decay",)}
_LAUNCHED_PRECISIONS = {"no": "fp32", "bf16": "bf16"}
FREE_TO_CHANGE = frozenset(
    ("num_epochs", "max_steps", "max_minutes", "block_elements", "cache_hidden_states")
) | {field.name for field in dataclasses.fields(RunOptions)}
"""Keys that a resumed run may change: how long, how fast, and what it says on the way."""


def read_configuration(arguments: Sequence[str], description: str = "") -> TrainingConfiguration:
    """The configuration that command-line ``arguments`` and the file named by ``--config`` give.

    ``--key none`` takes back an optional key of the file. ``--help`` prints and exits.

    Raises:
        FileNotFoundError: the configuration file is not there.
        ValueError: an unknown key (the nearest one is suggested) or a value that cannot be used.
    """
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    files.add_argument("--config")
    chosen, given = files.parse_known_args(arguments)
    for word in given:
        if word.startswith("--"):
            _check_known(word[2:].partition("=")[0].replace("-", "_"), "command line")
    in_file = {} if chosen.config is None else _read_file(Path(chosen.config))
    given = _take_back(given, in_file)
    launched = ["--precision", launched_precision()]
    from_file = [word for key, value in in_file.items() for word in _as_arguments(key, value, chosen.config)]
    *parsed, unused = _parser(description).parse_args_into_dataclasses(
        [*launched, *from_file, *given], look_for_args_file=False, return_remaining_strings=True
    )
    if unused:
        raise ConfigurationError(f"{unused[0]!r} belongs to no key; write --key value, lists as --key a b")
    return TrainingConfiguration(*parsed[: len(GROUPS)])


def launched_precision() -> str:
    """The precision that ``accelerate launch`` was asked for; fp32 without it.

    Raises:
        ConfigurationError: one that is not trained in here.
    """
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if asked not in _LAUNCHED_PRECISIONS:
        raise ConfigurationError(
            f"accelerate launch --mixed_precision must be {' or '.join(_LAUNCHED_PRECISIONS)} here, got "
            f"{asked!r}; launch with --mixed_precision bf16 or no"
        )
    return _LAUNCHED_PRECISIONS[asked]


def changed_keys(earlier: dict[str, Any], now: TrainingConfiguration) -> list[str]:
    """``key: earlier -> now`` for every key that a resumed run must not change and does."""
    ours = now.as_dict()
    earlier = {key: default_of(key) for key in FIELDS} | earlier  # some keys came later
    keys = [key for key in ours if key not in FREE_TO_CHANGE and earlier.get(key) != ours[key]]
    return [f"{key}: {earlier.get(key)!r} -> {ours[key]!r}" for key in keys]


class _Parser(HfArgumentParser):
    """Raises where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; --help lists every key")


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, keeps the line breaks of the description."""


def _parser(description: str) -> HfArgumentParser:
    parser = _Parser(
        cast(Any, GROUPS),
        usage="%(prog)s --config FILE [--key value ...]",
        description=description,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help="Show this and stop.")
    parser.add_argument("--config", help="YAML file with any of these keys; the command line overrides it.")
    return parser


def _read_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"configuration file {str(path)!r} does not exist; configs/ holds examples")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} must hold keys and values, got {type(values).__name__}")
    for key in values:
        _check_known(str(key), str(path))
    return values


def _check_known(key: str, where: str) -> None:
    known = [*FIELDS, "config", "help"]
    if key in known:
        return
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    advice = f"did you mean {nearest[0]!r}?" if nearest else "--help lists every key"
    raise ConfigurationError(f"unknown key {key!r} in {where}; {advice}")


def _take_back(given: list[str], in_file: dict[str, Any]) -> list[str]:
    """``given`` without each ``--key none`` and what named that key before it, in ``in_file`` too."""
    words = [part for word in given for part in (word.split("=", 1) if word.startswith("--") else [word])]
    kept: list[str] = []
    for word in words:
        key = kept[-1][2:].replace("-", "_") if kept and kept[-1].startswith("--") else ""
        if word.lower() not in ("none", "null") or key not in FIELDS or FIELDS[key].default is not None:
            kept.append(word)
            continue
        in_file.pop(key, None)
        flags = (f"--{key}", f"--{key.replace('_', '-')}")
        while at := next((i for i, each in enumerate(kept) if each in flags), -1) + 1:
            del kept[at - 1 : at + 1]  # optional keys take one value each
    return kept


def _as_arguments(key: str, value: Any, where: str) -> list[str]:
    """The file's ``key: value`` as command-line words."""
    if (value is None and FIELDS[key].default is None) or value == default_of(key) == []:
        return []
    if value is None or isinstance(value, dict):
        raise ConfigurationError(f"{key} in {where} must have a plain value, got {value!r}")
    values = value if isinstance(value, list) else [value]
    return [f"--{key}", *(str(each) for each in values)]
