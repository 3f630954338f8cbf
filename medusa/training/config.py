"""The options of a training run, checked, and the keys that a resumed run may change.

Each group of options is a frozen dataclass; the line under a field is its help on the command line. Keys are
flat and the same in the YAML file and on the command line: ``learning_rate: 1e-3`` in the file is
``--learning_rate 1e-3``.
"""

from __future__ import annotations

import dataclasses
import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import yaml

from medusa.base.causal_lm import CausalLM, hidden_size, vocab_size
from medusa.base.passes import logit_scale
from medusa.heads.checkpoint import KINDS
from medusa.heads.eagle3 import Eagle3Config
from medusa.heads.medusa_heads import HeadsConfig, Unembedding
from medusa.heads.mtp import MtpConfig
from medusa.options import TemplateOptions, check_above, check_at_least, check_within, differences

ObjectiveName = Literal["ce", "kl", "blend"]
HeadKind = Literal["medusa", "eagle3", "mtp"]
"""The kinds of heads, keys of :data:`medusa.heads.checkpoint.KINDS`; the options of each are the field of
:class:`TrainingConfiguration` that is called as it is."""


@dataclass(frozen=True)
class BaseOptions:
    """The base model, which stays as it is."""

    base: str
    """Base model: a path, a GGUF file or a hub id, as owner/name, owner/name@revision or, for a GGUF file
    there, owner/name:Q4_K_M."""
    tokenizer: str | None = None
    """Tokenizer, as the base is named; none is the base's own."""
    trust_remote_code: bool = False
    """Run the code that the base's repository comes with, which can do anything."""
    base_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the base's weights; auto is float32 on a CPU, and the type they were saved in elsewhere."""
    attention: str | None = None
    """Attention implementation of the base in training, such as sdpa, flash_attention_2 or flex_attention;
    transformers chooses by default. Decoding has its own."""
    base_placement: Literal["each", "auto", "tensor_parallel", "fsdp"] = "each"
    """Placement of the base's layers. each: complete on the device of each process. auto: over all devices of
    one process. tensor_parallel, fsdp: split among all processes; each loads only its part."""
    states_from: list[str] = field(default_factory=list)
    """Take the base's hidden states from vLLM: addresses of servers that extract them, as
    http://localhost:8000/v1, and directories of files that they wrote. No layer of the base is loaded here.
    With cache_hidden_states."""
    states_layers: list[int] | None = None
    """Layers of these states, in the order of vLLM's eagle_aux_hidden_state_layer_ids; by default those of
    fused_layers and the number of layers, in ascending order."""
    delete_read_states: bool = False
    """Delete files from the directories of states_from once what was read of them is stored."""

    @property
    def is_shared(self) -> bool:
        """Whether several processes hold the base together."""
        return self.base_placement in ("tensor_parallel", "fsdp")


@dataclass(frozen=True)
class HeadOptions:
    """The heads to train, whatever their kind."""

    head_kind: HeadKind = "medusa"
    """medusa: one head for each depth. eagle3: one transformer layer that drafts on its own states (EAGLE-3),
    which other engines serve. mtp: the layers for multi-token prediction that the base comes with, trained
    further."""
    num_heads: int = 4
    """Heads; head d guesses the token d places after the next one. eagle3 and mtp: the depth of training."""
    token_map_size: int | None = None
    """Tokens that token_map heads, eagle3 or mtp can guess: the most frequent answer tokens of the training
    data."""
    fused_layers: list[int] | None = None
    """Auxiliary hidden-state layers. medusa: default none, e.g. 8 16 24 of 30; more guesses are right, and
    stored states take more room. eagle3: default 2, L // 2, L - 3, which other engines expect."""
    start_from: str | None = None
    """Heads to start from, of the same options: a directory, a hub id or the name of heads that ship. A token
    map is taken from the new data all the same, of any size; fused_layers and more num_layers
    may be added. Lower the learning_rate too, to 2e-4 or so: else the heads forget more than they learn."""


class KindOptions:
    """The options of one kind of heads, and the configuration that they make."""

    def check(self, heads: HeadOptions) -> None:
        """Raise ValueError for heads that no base could have; by default there are none."""

    @abstractmethod
    def heads_config(self, heads: HeadOptions, base: CausalLM) -> Any:
        """The heads of these options on ``base``, as their ``config_type``.

        Raises:
            ValueError: there are no such heads.
        """


@dataclass(frozen=True)
class MedusaOptions(KindOptions):
    """Medusa heads."""

    num_layers: int = 1
    """Residual blocks of each head."""
    unembedding: Unembedding = "shared"
    """shared: the base's LM head. full: a trained copy per head (V x D parameters each).
    token_map: the base's rows of the most frequent tokens."""
    reads_path: bool = True
    """Head d also reads the d tokens before the one it guesses (Hydra), which makes far more guesses right.
    false: the heads of the Medusa paper, which other engines can serve."""
    path_rank: int | None = None
    """Read these tokens in so many dimensions, 256 of a few thousand: fewer parameters, and as many guesses
    are right. None reads them in all."""

    def check(self, heads: HeadOptions) -> None:
        self._config(heads, hidden_size=1, vocab_size=heads.token_map_size or 1)

    def heads_config(self, heads: HeadOptions, base: CausalLM) -> HeadsConfig:
        return self._config(heads, hidden_size(base), vocab_size(base), logit_scale(base))

    def _config(
        self, heads: HeadOptions, hidden_size: int, vocab_size: int, logit_scale: float = 1.0
    ) -> HeadsConfig:
        """Heads on a base of these sizes."""
        return HeadsConfig(
            hidden_size,
            vocab_size,
            heads.num_heads,
            self.num_layers,
            self.unembedding,
            token_map_size=heads.token_map_size,
            reads_path=self.reads_path,
            path_rank=self.path_rank,
            fused_layers=tuple(heads.fused_layers or ()),
            logit_scale=logit_scale,
        )


@dataclass(frozen=True)
class Eagle3Options(KindOptions):
    """An EAGLE-3 head. Its attention heads and rotary embedding are like the base's."""

    intermediate_size: int = 0
    """Size of the layer's feed-forward part; 0 is the base's own."""
    fc_norm: bool = False
    """EAGLE-3.1: norm the state of each fused layer before they are joined."""
    norm_output: bool = False
    """EAGLE-3.1: feed the normed output back, and not the sum before the norm."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "intermediate_size")

    def heads_config(self, heads: HeadOptions, base: CausalLM) -> Eagle3Config:
        return Eagle3Config.of_base(
            base,
            fused_layers=heads.fused_layers,
            max_depth=heads.num_heads,
            token_map_size=heads.token_map_size,
            **dataclasses.asdict(self),
        )


@dataclass(frozen=True)
class MtpOptions(KindOptions):
    """The layers that the base comes with, which leave nothing to choose."""

    def check(self, heads: HeadOptions) -> None:
        if heads.fused_layers is not None:
            raise ValueError(
                f"fused_layers goes with head_kind=medusa or eagle3, got {heads.fused_layers!r} with mtp, "
                "which reads only the last states; leave it out"
            )

    def heads_config(self, heads: HeadOptions, base: CausalLM) -> MtpConfig:
        return MtpConfig.of_base(base, max_depth=heads.num_heads, token_map_size=heads.token_map_size)


@dataclass(frozen=True)
class DataOptions(TemplateOptions):
    """Training data and batching."""

    data: list[str] = field(default_factory=list)
    """Data, one or several: .jsonl, .json, .jsonl.gz, .json.gz, .parquet or .arrow files, patterns of file
    names, as 'answers/*.jsonl', directories, and hub ids."""
    data_split: str = "train"
    """Split to read of a hub data set, or of a directory whose file names tell of several."""
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
    """Drop answers with more than this fraction of repeated 8-token runs (loops); 0.3 is sensible."""
    drop_duplicates: bool = False
    """Drop documents that are equal to an earlier one, token for token."""
    held_out_fraction: float = 0.05
    """Fraction of the prompts to measure on instead of training."""
    max_held_out: int = 256
    """Documents held out at most."""
    seed: int = 0
    """Seed of the held-out split, of the order of documents and of new heads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 2, "max_length")
        check_at_least(self, 1, "tokens_per_batch")
        check_at_least(self, 0, "max_held_out", "seed")
        check_within(self, "[0, 1)", "held_out_fraction")
        check_within(self, "(0, 1]", "max_repeated_fraction")


@dataclass(frozen=True)
class LossOptions:
    """The loss."""

    objective: ObjectiveName = "ce"
    """ce: the text's own tokens. kl: the base's distribution. blend: both."""
    kl_weight: float = 0.5
    """Part of kl in blend, 0 to 1."""
    decay: float = 0.8
    """Weight of depth d is decay ** d."""
    block_elements: int = 2**24
    """Logits held at a time (elements, 4 bytes each); lower it to save memory."""

    def __post_init__(self) -> None:
        if self.objective not in get_args(ObjectiveName):
            raise ValueError(f"objective must be one of {get_args(ObjectiveName)}, got {self.objective!r}")
        check_within(self, "[0, 1]", "kl_weight")
        check_within(self, "(0, 1]", "decay")
        check_at_least(self, 1, "block_elements")

    @property
    def needs_teacher(self) -> bool:
        return self.objective != "ce"


@dataclass(frozen=True)
class JointOptions:
    """Joint training (Medusa-2): heads and a LoRA adapter on the base, which then writes other text."""

    joint: bool = False
    """Train first only the heads, then heads and a LoRA adapter on the base together."""
    joint_warmup_fraction: float = 0.3
    """Fraction of the run in which only the heads are trained, 0 to 1."""
    base_objective: Literal["kl", "ce"] = "kl"
    """Regularisation loss of the adapted base. kl: its own distribution with the adapter switched off
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
        check_within(self, "[0, 1)", "joint_warmup_fraction", "lora_dropout")
        check_above(self, 0, "heads_weight", "head_learning_rate_multiplier", "lora_rank", "lora_alpha")

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
    cache_dtype: Literal["float32", "bfloat16", "float16", "float8"] = "float32"
    """Type of stored hidden states; float8 (e4m3) has a scale for each layer of each state."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_epochs", "max_steps", "gradient_accumulation_steps")
        check_above(self, 0, "max_minutes", "learning_rate", "max_grad_norm")
        check_at_least(self, 0, "warmup_steps", "weight_decay")
        check_within(self, "[0, 1)", "adam_beta2")
        check_within(self, "[0, 1]", "final_learning_rate")

    @property
    def has_limit(self) -> bool:
        """Whether a key says how long to train."""
        return any(getattr(self, name) is not None for name in LIMITS)


LIMITS = ("num_epochs", "max_steps", "max_minutes")
"""Keys that limit the length of training; one is required."""


@dataclass(frozen=True)
class RunOptions:
    """The output and the reports of a run."""

    output_dir: str
    """Directory of the run; the heads are written to output_dir/heads."""
    overwrite: bool = False
    """Replace an earlier run in output_dir."""
    resume: Literal["never", "always", "auto"] = "never"
    """always, or --resume alone: continue from the latest checkpoint in output_dir. auto: the same if there
    is one, else start; so one command starts a run and continues it. A finished run is not changed, unless a
    limit is higher now."""
    inspect: bool = False
    """Print a sample of documents, the tokens trained on in colour, and stop."""
    stop_after: Literal["states"] | None = None
    """states: store the hidden states, and stop. --resume auto goes on."""
    logging_steps: int = 10
    """Steps between log entries."""
    evaluation_steps: int | None = None
    """Steps between evaluations on held-out documents; the run always ends with one."""
    replayed_documents: int = 32
    """Held-out documents whose decoding each evaluation replays, for tokens per step; 0 for none."""
    checkpoint_minutes: float | None = 30.0
    """Minutes of optimisation between checkpoints; none for none. SIGTERM leaves one in any case."""
    checkpoint_steps: int | None = None
    """Steps between checkpoints, in addition to checkpoint_minutes."""
    keep_checkpoints: int = 2
    """Checkpoints kept."""
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    """Experiment tracker that gets every log entry; a resumed run goes on there as the same run. After a
    SIGKILL wandb may lack the entries of the last seconds; metrics.jsonl has them."""
    project: str = "medusa-heads"
    """Project name for the tracker."""
    states_dir: str | None = None
    """Directory of stored hidden states, for runs that share them; by default output_dir/states."""
    documents_dir: str | None = None
    """Directory of tokenised documents, for runs that share them; by default output_dir/documents."""
    timeout_minutes: float = 60.0
    """How long a process waits for the others before it gives up."""
    tree_nodes: int = 16
    """Nodes of the candidate tree that is calibrated on held-out documents at the end."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "logging_steps", "evaluation_steps", "checkpoint_steps")
        check_at_least(self, 1, "keep_checkpoints", "tree_nodes")
        check_at_least(self, 0, "replayed_documents")
        check_above(self, 0, "checkpoint_minutes", "timeout_minutes")
        if self.overwrite and self.resume != "never":
            raise ValueError("overwrite and resume exclude each other, got both")


_LAUNCHED_PRECISIONS = {"no": "fp32", "bf16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class TrainingConfiguration:
    """All options of a run, checked."""

    base: BaseOptions
    heads: HeadOptions = field(default_factory=HeadOptions)
    medusa: MedusaOptions = field(default_factory=MedusaOptions)
    eagle3: Eagle3Options = field(default_factory=Eagle3Options)
    mtp: MtpOptions = field(default_factory=MtpOptions)
    joint: JointOptions = field(default_factory=JointOptions)
    data: DataOptions
    loss: LossOptions = field(default_factory=LossOptions)
    optimisation: OptimisationOptions
    run: RunOptions

    def __post_init__(self) -> None:
        self._kind_options.check(self.heads)
        if not self.data.data:
            raise ValueError("data must name at least one file or hub id; pass --data FILE")
        if not (self.run.inspect or self.optimisation.has_limit):
            raise ValueError(f"one of {', '.join(LIMITS)} must say how long to train, got none")
        joint = self.joint.joint
        base_placement = self.base.base_placement
        for is_wrong, message in (
            (
                joint and self.heads.head_kind != "medusa",
                f"joint=true goes with head_kind=medusa, got {self.heads.head_kind!r}: the recipe of "
                "Medusa-2 is one for Medusa heads",
            ),
            (
                joint and self.optimisation.cache_hidden_states,
                "cache_hidden_states and joint exclude each other, got both: stored states belong to a "
                "base that does not change, and the adapter changes it; leave cache_hidden_states out",
            ),
            (
                joint and base_placement != "each",
                f"base_placement={base_placement} and joint exclude each other, got both: the adapter sits "
                "in the base's layers, which each process must have whole; leave it out",
            ),
            (
                bool(self.base.states_from) and not self.optimisation.cache_hidden_states,
                f"states_from={self.base.states_from} goes with cache_hidden_states=true, got false: what "
                "vLLM computed is read once and stored; add --cache_hidden_states true",
            ),
            (
                bool(self.base.states_from) and base_placement != "each",
                f"states_from and base_placement={base_placement} exclude each other, got both: no layers of "
                "the base are loaded; leave base_placement out",
            ),
            (
                not self.base.states_from
                and (self.base.states_layers is not None or self.base.delete_read_states),
                "states_layers and delete_read_states go with states_from, got none; add --states_from, or "
                "leave them out",
            ),
            (
                self.data.train_on == "everything" and self.loss.objective != "kl",
                f"train_on=everything goes with objective kl, got {self.loss.objective!r}, which would learn "
                "to write prompts; choose kl, or train_on=answers",
            ),
            (
                self.run.stop_after is not None and not self.optimisation.cache_hidden_states,
                f"stop_after={self.run.stop_after} goes with cache_hidden_states=true, got false: there are "
                "no states to store; add --cache_hidden_states true",
            ),
        ):
            if is_wrong:
                raise ValueError(message)
        for name in {*get_args(HeadKind), "joint"} - {self.heads.head_kind, self.kind}:
            group = dataclasses.asdict(getattr(self, name))
            for key, default in dataclasses.asdict(type(getattr(self, name))()).items():
                if group[key] != default:
                    raise ValueError(
                        f"{key} goes with {'joint=true' if name == 'joint' else f'head_kind={name}'}, got "
                        f"{group[key]!r} without it; leave it out"
                    )

    @property
    def kind(self) -> str:
        """The kind of training: "joint", or the kind of the heads."""
        return "joint" if self.joint.joint else self.heads.head_kind

    @property
    def heads_type(self) -> type[Any]:
        """The class of the heads, a subclass of :class:`medusa.heads.protocol.Heads`."""
        return KINDS[self.heads.head_kind]

    @property
    def _kind_options(self) -> KindOptions:
        return getattr(self, self.heads.head_kind)

    def heads_config(self, base: CausalLM) -> Any:
        """The configured heads, on ``base``: the configuration of their kind.

        Raises:
            ValueError: there are no such heads.
        """
        return self._kind_options.heads_config(self.heads, base)

    def as_dict(self) -> dict[str, Any]:
        """All keys and values, flat."""
        groups = (getattr(self, each.name) for each in dataclasses.fields(self))
        return {key: value for group in groups for key, value in dataclasses.asdict(group).items()}

    def as_yaml(self) -> str:
        """A file that ``--config`` reads back as this configuration."""
        return yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True)


REMEDY_KEYS = (
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
RESUMABLE_KEYS = frozenset(
    (
        *LIMITS,
        "block_elements",
        "cache_hidden_states",
        "states_from",
        "states_layers",
        "delete_read_states",
        "gradient_accumulation_steps",  # the checkpoint says whether a step still takes the same batches
        *REMEDY_KEYS,
    )
) | {each.name for each in dataclasses.fields(RunOptions)}
"""Keys that a resumed run may change: length, speed, reports, and :data:`REMEDY_KEYS`."""


def changed_keys(earlier: Mapping[str, Any], now: TrainingConfiguration) -> list[str]:
    """``key was X and is Y`` for every key that differs from the ``earlier`` run's and may not."""
    both = (earlier, now.as_dict())
    before, after = ({key: each[key] for key in each if key not in RESUMABLE_KEYS} for each in both)
    return differences(before, after)


def launched_precision() -> str:
    """The precision that ``accelerate launch`` was asked for; fp32 without it.

    Raises:
        ValueError: training has no such precision.
    """
    mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if mixed_precision not in _LAUNCHED_PRECISIONS:
        raise ValueError(
            f"accelerate launch --mixed_precision must be {' or '.join(_LAUNCHED_PRECISIONS)} here, got "
            f"{mixed_precision!r}; launch with --mixed_precision bf16 or no"
        )
    return _LAUNCHED_PRECISIONS[mixed_precision]
