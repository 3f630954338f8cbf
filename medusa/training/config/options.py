"""The options of a training run, one frozen dataclass a group.

The line under a field is its help on the command line. Each group checks its own values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from medusa.base.causal_lm import CausalLM, hidden_size, vocab_size
from medusa.heads.causal_layer import LayerConfig
from medusa.heads.eagle3 import Eagle3Config
from medusa.heads.medusa_heads import HeadsConfig, Unembedding
from medusa.training.losses.objectives import ObjectiveName, objective_named

Resume = Literal["never", "always", "auto"]


class ConfigurationError(ValueError):
    """The configuration cannot be used; the message says which key, the rule, and what arrived."""


def _check(options: Any, rule: str, is_kept: Any, names: Sequence[str]) -> None:
    """Raise ConfigurationError for the first of ``names`` that is given and does not keep the rule, or is not
    finite."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not (is_kept(value) and math.isfinite(value)):
            raise ConfigurationError(f"{name} must be {rule}, got {value}")


def _at_least(least: float, options: Any, *names: str) -> None:
    _check(options, f"at least {least:g}", lambda value: value >= least, names)
    _check(options, "below 2**63", lambda value: value < 2**63, names)  # what arrays and generators take


def _above_0(options: Any, *names: str) -> None:
    _check(options, "above 0", lambda value: value > 0, names)


def _at_least_0_below_1(options: Any, *names: str) -> None:
    _check(options, "at least 0 and below 1", lambda value: 0 <= value < 1, names)


@dataclass(frozen=True)
class BaseOptions:
    """The base model, which stays as it is."""

    base: str
    """Base model: a path or a hub id, as owner/name or owner/name@revision."""
    trust_remote_code: bool = False
    """Run the code that the base's repository comes with, which can do anything."""
    base_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the base's weights; auto is the type they were saved in."""
    attention: str | None = None
    """Attention implementation of the base in training, such as sdpa, flash_attention_2 or flex_attention;
    transformers chooses by default. Decoding has its own."""
    base_placement: Literal["each", "auto", "tensor_parallel", "fsdp"] = "each"
    """Where the base's layers are. each: whole on the device of each process. auto: over all devices of one
    process. tensor_parallel, fsdp: split among all processes, each of which loads only its part."""

    @property
    def is_shared(self) -> bool:
        """Whether several processes hold the base together."""
        return self.base_placement in ("tensor_parallel", "fsdp")


@dataclass(frozen=True)
class HeadOptions:
    """The heads to train, whatever their kind."""

    head_kind: Literal["medusa", "eagle3"] = "medusa"
    """medusa: one head for each depth. eagle3: one transformer layer that runs ahead on its own states
    (EAGLE-3), which other engines serve."""
    num_heads: int = 4
    """Heads; head d guesses the token d places after the next one. Of eagle3: how deep it learns to draft."""
    token_map_size: int | None = None
    """Tokens that token_map heads, or an eagle3 head, can guess: the most frequent answer tokens of the
    training data."""
    fused_layers: list[int] | None = None
    """The base's states after these decoder layers are read too. Of medusa, such as 8 16 24 of 30: more
    guesses are right, and stored states take more room; by default none. Of eagle3, by default 2, L // 2 and
    L - 3 of L, which other engines expect."""
    start_from: str | None = None
    """Heads to start from, of the same options: a directory, a hub id or the name of heads that ship. A token
    map is taken from the new data all the same, of any size; fused_layers, context_layers and more num_layers
    may be added. Lower the learning_rate too, to 2e-4 or so: else the heads forget more than they learn."""


@dataclass(frozen=True)
class MedusaOptions:
    """Medusa heads."""

    num_layers: int = 1
    """Residual blocks of each head."""
    unembedding: Unembedding = "shared"
    """shared: the base's output embedding. full: a trained copy per head (V x D parameters each).
    token_map: the base's rows of the most frequent tokens."""
    reads_path: bool = True
    """Head d also reads the d tokens before the one it guesses (Hydra), which makes far more guesses right.
    false: the heads of the Medusa paper, which other engines can serve."""
    context_layers: int = 0
    """1: all heads read the text through a causal layer of the base's sizes, run once on the tokens of each
    step. It wants much data; and steps of fixed shape (static, captured) cannot draft with it."""

    def __post_init__(self) -> None:
        if self.context_layers not in (0, 1):
            raise ConfigurationError(f"context_layers must be 0 or 1, got {self.context_layers}")

    def heads_config(self, heads: HeadOptions, base: CausalLM) -> HeadsConfig:
        """The heads for ``base``."""
        config = self.heads_of_size(heads, hidden_size(base), vocab_size(base))
        return replace(config, context=LayerConfig.of_base(base)) if self.context_layers else config

    def heads_of_size(self, heads: HeadOptions, hidden_size: int, vocab_size: int) -> HeadsConfig:
        """The heads on a base of these sizes."""
        return HeadsConfig(
            hidden_size,
            vocab_size,
            heads.num_heads,
            self.num_layers,
            self.unembedding,
            token_map_size=heads.token_map_size,
            reads_path=self.reads_path,
            fused_layers=tuple(heads.fused_layers or ()),
        )


@dataclass(frozen=True)
class Eagle3Options:
    """An EAGLE-3 head. Its attention heads and rotary embedding are those of the base."""

    intermediate_size: int = 0
    """Size of the layer's feed-forward part; 0 is the base's own."""
    fc_norm: bool = False
    """EAGLE-3.1: norm the state of each fused layer before they are joined."""
    norm_output: bool = False
    """EAGLE-3.1: feed the normed output back, and not the sum before the norm."""

    def __post_init__(self) -> None:
        _at_least(0, self, "intermediate_size")

    def heads_config(self, heads: HeadOptions, base: CausalLM) -> Eagle3Config:
        """The head for ``base``."""
        return Eagle3Config.of_base(
            base,
            self.intermediate_size,
            fused_layers=heads.fused_layers,
            max_depth=heads.num_heads,
            token_map_size=heads.token_map_size,
            fc_norm=self.fc_norm,
            norm_output=self.norm_output,
        )


@dataclass(frozen=True)
class DataOptions:
    """What to train on, and in which batches."""

    data: list[str] = field(default_factory=list)
    """Data, one or several: .jsonl, .json, .jsonl.gz, .json.gz or .parquet files, patterns of file names, as
    'answers/*.jsonl', directories, and hub ids."""
    data_split: str = "train"
    """Split to read of a hub data set."""
    max_length: int = 1024
    """Longest document in tokens; the rest of a longer one is cut off."""
    train_on: Literal["answers", "everything"] = "answers"
    """answers: the tokens that the model wrote. everything: prompts too, for the objective that follows the
    base and not the text (kl)."""
    packing: bool = False
    """Pack several documents into rows of max_length tokens; they do not see each other."""
    tokens_per_batch: int = 4096
    """Tokens of a micro-batch per process, padding included; a longer document is one by itself."""
    max_repeated_fraction: float | None = None
    """Drop answers of which more than this fraction of 8-token runs occurred before (loops); 0.3 is
    sensible."""
    drop_duplicates: bool = False
    """Drop documents that are equal to an earlier one, token for token."""
    near_duplicate_similarity: float | None = None
    """Drop answers at least this similar (Jaccard, 0 to 1) to an earlier one; 0.8 is sensible."""
    held_out_fraction: float = 0.05
    """Fraction of the prompts to measure on instead of training."""
    max_held_out: int = 256
    """Documents held out at most."""
    seed: int = 0
    """Seed of the held-out split, of the order of documents and of new heads."""

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ConfigurationError(f"max_length must be at least 2 tokens, got {self.max_length}")
        _at_least(1, self, "tokens_per_batch")
        _at_least(0, self, "max_held_out", "seed")
        _at_least_0_below_1(self, "held_out_fraction")
        fractions = ("max_repeated_fraction", "near_duplicate_similarity")
        _check(self, "in (0, 1]", lambda value: 0 < value <= 1, fractions)


@dataclass(frozen=True)
class LossOptions:
    """What to minimise."""

    objective: ObjectiveName = "ce"
    """ce: the text's own tokens. kl: the base's distribution. blend: both."""
    kl_weight: float = 0.5
    """Part of kl in blend, 0 to 1."""
    decay: float = 0.8
    """Weight of depth d is decay ** d."""
    block_elements: int = 2**24
    """Logits held at a time (elements, 4 bytes each); lower it to save memory."""

    def __post_init__(self) -> None:
        objective_named(self.objective, self.kl_weight)
        _check(self, "in (0, 1]", lambda value: 0 < value <= 1, ("decay",))
        _at_least(1, self, "block_elements")


@dataclass(frozen=True)
class JointOptions:
    """Joint training (Medusa-2): heads and a LoRA adapter on the base, which then writes other text."""

    joint: bool = False
    """Train heads alone first, then heads and a LoRA adapter on the base together."""
    joint_warmup_fraction: float = 0.3
    """Part of the run in which the heads are trained alone, 0 to 1."""
    base_objective: Literal["kl", "ce"] = "kl"
    """What the adapted base is held to. kl: its own distribution with the adapter switched off
    (self-distillation). ce: the text's own tokens."""
    heads_weight: float | None = None
    """Weight of the heads' loss against the base's; by default 0.01 with kl and 0.2 with ce."""
    head_learning_rate_multiplier: float = 4.0
    """The heads' learning rate, as a multiple of learning_rate, which is the adapter's."""
    lora_rank: int = 32
    """Rank of the adapter."""
    lora_alpha: float = 16
    """The adapter's output is scaled by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Dropout on the adapter's input."""
    gradient_checkpointing: bool = False
    """Keep no activations inside of the base's layers and compute them again: far less memory, a third more
    time."""
    lora_targets: list[str] = field(default_factory=list)
    """Linear layers that get an adapter, by the ends of their names (q_proj v_proj); by default all of the
    transformer's."""

    def __post_init__(self) -> None:
        _at_least_0_below_1(self, "joint_warmup_fraction", "lora_dropout")
        _above_0(self, "heads_weight", "head_learning_rate_multiplier", "lora_rank", "lora_alpha")

    @property
    def lambda_0(self) -> float:
        """The weight of the heads' loss; arXiv 2401.10774 has the defaults."""
        default = {"kl": 0.01, "ce": 0.2}[self.base_objective]
        return default if self.heads_weight is None else self.heads_weight


@dataclass(frozen=True)
class OptimisationOptions:
    """How to minimise it, and for how long: until the first of the three limits."""

    learning_rate: float = 0.001
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.0
    """AdamW weight decay."""
    adam_beta2: float = 0.99
    """AdamW beta2."""
    max_grad_norm: float = 1.0
    """Largest gradient norm; longer gradients are scaled down."""
    warmup_steps: int = 20
    """Steps in which the learning rate rises from 0 to its peak."""
    final_learning_rate: float = 0.0
    """Where the cosine ends, as a fraction of the peak."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per process and optimiser step."""
    num_epochs: int | None = None
    """Passes over the training data."""
    max_steps: int | None = None
    """Optimiser steps."""
    max_minutes: float | None = None
    """Minutes of optimisation; loading, storing hidden states and the last evaluation come on top."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of matrix products, in the heads and in the base's pass; weights, losses and the optimiser
    stay float32. By default what `accelerate launch --mixed_precision` says."""
    cache_hidden_states: bool = False
    """Compute the base's hidden states once, store them in output_dir, and train from there."""
    cache_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of stored hidden states."""

    def __post_init__(self) -> None:
        _at_least(1, self, "num_epochs", "max_steps", "gradient_accumulation_steps")
        _above_0(self, "max_minutes", "learning_rate", "max_grad_norm")
        _at_least(0, self, "warmup_steps", "weight_decay")
        _at_least_0_below_1(self, "adam_beta2")
        _check(self, "from 0 to 1", lambda value: 0 <= value <= 1, ("final_learning_rate",))
        limits = ("num_epochs", "max_steps", "max_minutes")
        if all(getattr(self, name) is None for name in limits):
            raise ConfigurationError(f"one of {', '.join(limits)} must say how long to train, got none")


@dataclass(frozen=True)
class RunOptions:
    """What the run leaves behind and reports on the way."""

    output_dir: str
    """Directory of the run; the heads are written to output_dir/heads."""
    overwrite: bool = False
    """Replace an earlier run in output_dir."""
    resume: Resume = "never"
    """always, or --resume alone: continue from the latest checkpoint in output_dir. auto: the same where
    there is one, else start; so one command starts a run and continues it. A finished run stays as it is,
    unless a limit is higher now."""
    inspect: bool = False
    """Print a sample of documents, the tokens trained on in colour, and stop."""
    stop_after: Literal["plan", "states"] | None = None
    """states: store the hidden states, and stop. plan: say only which are to be stored, for another program
    to compute, and stop. --resume auto goes on."""
    logging_steps: int = 10
    """Steps between log entries."""
    evaluation_steps: int | None = None
    """Steps between evaluations on held-out documents; the run always ends with one."""
    replayed_documents: int = 32
    """Held-out documents whose decoding each evaluation replays, for tokens per step; 0 for none."""
    checkpoint_minutes: float | None = 30.0
    """Minutes of optimisation between checkpoints; none for none. SIGTERM leaves one in any case."""
    checkpoint_steps: int | None = None
    """Steps between checkpoints, beside those of checkpoint_minutes."""
    keep_checkpoints: int = 2
    """Checkpoints kept."""
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    """Experiment tracker that gets every log entry; a resumed run goes on there as the same run. After a
    SIGKILL wandb may lack what it was told in the last seconds; metrics.jsonl has it."""
    project: str = "medusa-heads"
    """Project name for the tracker."""
    states_dir: str | None = None
    """Directory of stored hidden states, for runs that share them; by default output_dir/states."""
    documents_dir: str | None = None
    """Directory of tokenised documents, for runs that share them; by default output_dir/documents."""
    timeout_minutes: float = 60.0
    """How long a process waits for the others before it gives up."""
    loader_workers: int = 2
    """Threads of each process that read micro-batches ahead of the loop; 0 reads them in the loop."""
    tree_nodes: int = 16
    """Nodes of the candidate tree that is calibrated on held-out documents at the end."""

    def __post_init__(self) -> None:
        steps = ("logging_steps", "evaluation_steps", "checkpoint_steps")
        _at_least(1, self, *steps, "keep_checkpoints", "tree_nodes")
        _at_least(0, self, "replayed_documents", "loader_workers")
        _above_0(self, "checkpoint_minutes", "timeout_minutes")
        if self.overwrite and self.resume != "never":
            raise ConfigurationError("overwrite and resume exclude each other, got both")
