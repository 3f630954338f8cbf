"""The options of a training run, one group a class; the line under each field is its ``--help``."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeVar, dataclass_transform

from medusa.heads.eagle import EagleConfig
from medusa.heads.medusa_heads import HeadsConfig, Unembedding
from medusa.training.data.filtering import FilterOptions
from medusa.training.losses.depth_weights import DepthWeighting
from medusa.training.losses.loss import LossOptions
from medusa.training.losses.objectives import ObjectiveName
from medusa.training.states.stored_states import StateType

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def options(title: str) -> Callable[[type[T]], type[T]]:
    """A frozen dataclass whose fields carry the docstrings below them as the ``help`` that parsers read.

    ``title`` heads the group in ``--help``.
    """

    def decorate(cls: type[T]) -> type[T]:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(definition, ast.ClassDef)
        documented: Any = dataclass(frozen=True)(cls)
        helps = dict(zip(definition.body, definition.body[1:], strict=False))
        by_name = {each.name: each for each in dataclasses.fields(documented)}
        for statement, below in helps.items():
            if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = inspect.cleandoc(ast.literal_eval(below.value)).replace("%", "%%")
                by_name[ast.unparse(statement.target)].metadata = MappingProxyType({"help": text})
        documented._argument_group_name = title  # read by HfArgumentParser
        return documented

    return decorate


@options("base model")
class BaseOptions:
    """The model that stays as it is."""

    base: str
    """Base model: a path or a hub id."""
    base_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the base's weights; auto is the type they were saved in."""
    attention: str | None = None
    """Attention implementation of the base; transformers chooses without it."""


@options("heads")
class HeadOptions:
    """The heads to train."""

    head_kind: Literal["medusa", "eagle"] = "medusa"
    """medusa: one head for each depth. eagle: one transformer layer that runs ahead on predicted features."""
    num_heads: int = 4
    """Heads; head d guesses the token d places after the next one. Of eagle: how deep it learns to draft."""
    num_attention_heads: int = 8
    """Attention heads of an eagle layer; a divisor of the base's hidden size."""
    intermediate_size: int = 0
    """Size of an eagle layer's feed-forward part; 0 is 4 times the base's hidden size."""
    num_layers: int = 1
    """Residual blocks of each head."""
    unembedding: Unembedding = "shared"
    """shared: the base's output embedding. full: a trained copy per head (V x D parameters each).
    token_map: the base's rows of the most frequent tokens."""
    token_map_size: int | None = None
    """Tokens that token_map heads, or an eagle head, can guess: the most frequent answer tokens of the
    training data."""
    reads_path: bool = True
    """Head d also reads the d tokens before the one it guesses (Hydra): far more guesses hit. false: the
    heads of the Medusa paper, which other engines can serve."""
    fused_layers: list[int] | None = None
    """The heads also read the base's states after these decoder layers, such as 8 16 24 of 30 (EAGLE-3): more
    guesses hit, and stored states take as many times the room."""
    start_from: str | None = None
    """Heads to go on from, of the same options: a directory, a hub id or the name of heads that ship. A token
    map is taken from the new data all the same; fused_layers may be added."""

    def heads_config(self, hidden_size: int, vocab_size: int) -> HeadsConfig | EagleConfig:
        """The heads of these options on a base of these sizes."""
        if self.head_kind == "eagle":
            return EagleConfig(
                hidden_size,
                vocab_size,
                self.num_attention_heads,
                self.intermediate_size,
                self.num_heads,
                self.token_map_size,
            )
        return HeadsConfig(
            hidden_size,
            vocab_size,
            self.num_heads,
            self.num_layers,
            self.unembedding,
            self.token_map_size,
            self.reads_path,
            tuple(self.fused_layers or ()),
        )


@options("data")
class DataOptions:
    """What to train on."""

    data: list[str] = field(default_factory=list)
    """Data: .jsonl, .json or .parquet files and hub ids, one or several."""
    data_split: str = "train"
    """Split to read of a hub data set."""
    max_length: int = 1024
    """Longest document in tokens; what lies behind is cut off."""
    train_on: Literal["answers", "everything"] = "answers"
    """answers: the tokens that the model wrote. everything: prompts too, for objectives that follow the base
    and not the text (kl, lk)."""
    packing: bool = False
    """Pack several documents into rows of max_length tokens, kept apart."""
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
    """Seed of the held-out split and of the order of documents."""

    def filter_options(self) -> FilterOptions:
        return FilterOptions(
            self.max_length, self.max_repeated_fraction, self.drop_duplicates, self.near_duplicate_similarity
        )


@options("loss")
class ObjectiveOptions:
    """What to minimise."""

    objective: ObjectiveName = "ce"
    """ce: the text's own tokens. kl: the base's distribution. blend: both. lk: -log of the overlap."""
    kl_weight: float = 0.5
    """Part of kl in blend, 0 to 1."""
    depth_weighting: DepthWeighting = "decay"
    """What depths count. decay: by decay. dpace: by what each target adds to the expected number of accepted
    tokens while the heads are as good as they are (a quarter more work in the heads)."""
    decay: float = 0.8
    """Weight of depth d is decay ** d."""
    dpace_smoothing: float = 0.5
    """Of dpace, 0 to 1: above 0, later depths count while earlier ones are still bad; the paper has 0.5."""
    block_elements: int = 2**24
    """Logits held at a time (elements, 4 bytes each); lower it to save memory."""
    feature_weight: float = 10.0
    """Of eagle: weight of the regression on the base's features; the objective weighs 1."""

    def loss_options(self) -> LossOptions:
        return LossOptions(**dataclasses.asdict(self))


@options("joint training (Medusa-2)")
class JointOptions:
    """Training a LoRA adapter on the base together with the heads. The base then writes other text."""

    joint: bool = False
    """Train heads alone first, then heads and a LoRA adapter on the base together."""
    joint_warmup_fraction: float = 0.3
    """Part of the run in which the heads are trained alone, 0 to 1."""
    base_objective: Literal["kl", "ce"] = "kl"
    """What the adapted base is held to. kl: its own distribution with the adapter switched off
    (self-distillation). ce: the text's own tokens."""
    heads_weight: float | None = None
    """Weight of the heads' loss against the base's; without it 0.01 with kl and 0.2 with ce."""
    head_learning_rate_multiplier: float = 4.0
    """The heads' learning rate, as a multiple of learning_rate, which is the adapter's."""
    lora_rank: int = 32
    """Rank of the adapter."""
    lora_alpha: float = 16
    """Its output is scaled by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Dropout on the adapter's input."""
    lora_targets: list[str] = field(default_factory=list)
    """Linear layers that get an adapter, by the ends of their names (q_proj v_proj); all of the transformer
    without it."""

    def __post_init__(self) -> None:
        for name, lowest, highest in (("joint_warmup_fraction", 0, 1), ("lora_dropout", 0, 1)):
            value = getattr(self, name)
            if not lowest <= value < highest:
                raise ValueError(f"{name} must be at least {lowest} and below {highest}, got {value}")
        for name in ("heads_weight", "head_learning_rate_multiplier", "lora_rank", "lora_alpha"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")

    @property
    def lambda_0(self) -> float:
        """The weight of the heads' loss, chosen as in arXiv 2401.10774 where the user did not."""
        default = {"kl": 0.01, "ce": 0.2}[self.base_objective]
        return default if self.heads_weight is None else self.heads_weight


@options("optimisation")
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
    tokens_per_batch: int = 4096
    """Tokens of a micro-batch per process, padding included."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per process and optimiser step."""
    num_epochs: int | None = None
    """Passes over the training data."""
    max_steps: int | None = None
    """Optimiser steps."""
    max_minutes: float | None = None
    """Minutes of optimisation; loading, caching hidden states and the last evaluation come on top."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of matrix products, in the heads and in the base's pass; weights, losses and the optimiser
    stay float32. Where nothing is given, what `accelerate launch --mixed_precision` says."""
    cache_hidden_states: bool = False
    """Compute the base's hidden states once, store them in output_dir, and train from there."""
    cache_dtype: StateType = "float32"
    """Type of stored hidden states."""


@options("run")
class RunOptions:
    """What the run leaves behind and says on the way."""

    output_dir: str
    """Directory of the run; the heads are written to output_dir/heads."""
    overwrite: bool = False
    """Replace an earlier run in output_dir."""
    resume: bool = False
    """Go on from the latest checkpoint in output_dir."""
    inspect: bool = False
    """Print a sample of documents, the tokens trained on in colour, and stop."""
    logging_steps: int = 10
    """Steps between log entries."""
    evaluation_steps: int | None = None
    """Steps between evaluations on held-out documents; one at the end always."""
    replayed_documents: int = 32
    """Held-out documents whose decoding each evaluation replays, for tokens per step; 0 for none."""
    checkpoint_steps: int | None = None
    """Steps between checkpoints; none without it."""
    keep_checkpoints: int = 2
    """Checkpoints kept."""
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    """Experiment tracker that gets every log entry."""
    project: str = "medusa-heads"
    """Project name for the tracker."""
    tree_nodes: int = 16
    """Nodes of the candidate tree that is calibrated on held-out documents at the end."""
