"""The heads directory: written by training, loaded for decoding.

    config.json         the format version, the kind of heads (a key of KINDS), its configuration, the base
                        model's name and fingerprint; the type of the weights, where they are whole numbers
    model.safetensors   the weights, names as in the module's state_dict()
    tree.json           the candidate tree, as rank paths, and where it came from; under "tuned", the trees
                        that were timed for a device and batch size (see medusa.trees.tuned_trees)
    provenance.json     how the heads were made: command, configuration, versions, measurements
    adapter/            of joint training only, and config.json says so: the base's LoRA adapter, as peft's

Loading is strict: an unknown or missing key, a tensor that is missing, left over, of another shape, cut short
or not finite is an error that names the file and the fault. Shapes are compared on the meta device, so no
memory is allocated that the files do not fill. Writing goes to a temporary name beside the target and is
renamed at the end, so a failed write leaves the old directory.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from medusa.assets import DEFAULT_HEADS, shipped_heads
from medusa.base.causal_lm import CausalLM, hidden_size, vocab_size
from medusa.base.known_models import heads_for
from medusa.base.loading import BaseSource
from medusa.files import Layout, digest_of, has_keys, read_json, replaced_directory, write_json
from medusa.heads.adapter import Adapter, apply_adapter, check_carries
from medusa.heads.draft_vocab import checked_token_map
from medusa.heads.eagle3 import Eagle3Head
from medusa.heads.fingerprint import BaseFingerprint, warn_of_another_base
from medusa.heads.medusa_heads import MedusaHeads
from medusa.heads.mtp import MtpHead
from medusa.heads.protocol import Heads, check_tree_fits
from medusa.heads.stored_types import ROW_BYTES, GroupType, is_grouped, stored, widened
from medusa.heads.tensor_files import check_finite, check_tensors, read_tensors
from medusa.hub import hub_directory
from medusa.trees.candidate_tree import CandidateTree
from medusa.trees.tuned_trees import TunedTree, tree_from_json, tuned_from_json

_FORMAT_VERSION = 2
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
TREE_FILE = "tree.json"
PROVENANCE_FILE = "provenance.json"
_ADAPTER = "adapter"
ADAPTER_CONFIG_FILE = f"{_ADAPTER}/adapter_config.json"
_ADAPTER_WEIGHTS_FILE = f"{_ADAPTER}/adapter_model.safetensors"
HEADS_FILES = (
    CONFIG_FILE,
    WEIGHTS_FILE,
    TREE_FILE,
    PROVENANCE_FILE,
    ADAPTER_CONFIG_FILE,
    _ADAPTER_WEIGHTS_FILE,
)
"""All files of a heads directory."""
FINGERPRINT = "base_fingerprint"
TEMPLATE = "template_options"
HEADS_LAYOUT = Layout(
    "a heads directory",
    HEADS_FILES,
    lambda directory: has_keys(directory / CONFIG_FILE, "format_version", "base_model"),
)
KINDS: dict[str, type[Any]] = {module.kind: module for module in (MedusaHeads, Eagle3Head, MtpHead)}
"""Every kind of heads by its name."""
OWN_HEADS = MtpHead.kind
"""Names the heads that the base comes with."""
_CONTEXT = "context"
"""Key of an earlier version: the sizes of a causal layer under Medusa heads; null in all others."""
_WEIGHTS_TYPE = "weights_type"
"""Key of heads whose matrices stand in their file as whole numbers: the type."""
_HEADER_KEYS = (
    "format_version",
    "kind",
    "base_model",
    FINGERPRINT,
    TEMPLATE,
    _ADAPTER,
    _CONTEXT,
    _WEIGHTS_TYPE,
)
"""Keys of config.json that are no part of a module's configuration."""


@dataclass
class HeadsCheckpoint:
    """Everything a heads directory holds."""

    heads: Heads
    base_model: str
    """Name or path of the base the heads were trained on, as the user gave it."""
    tree: CandidateTree | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    tuned: tuple[TunedTree, ...] = ()
    """Trees for the runtimes and batch sizes that were timed; ``tree`` serves everywhere else."""
    adapter: Adapter | None = None
    """The adapter that was trained with the heads: they belong to the base that carries it."""
    tree_origin: Mapping[str, Any] = field(default_factory=dict)
    """Where ``tree`` came from, in plain JSON values; empty where it is not recorded."""
    fingerprint: BaseFingerprint | None = None
    """Fingerprint of the heads' base, without the adapter; None if unknown."""
    template_options: Sequence[Mapping[str, Any]] = ()
    """The chat template options (besides messages and tools) of the training conversations: every different
    set; empty if unknown."""

    def __post_init__(self) -> None:
        if self.fingerprint is None and self.adapter is not None:
            self.fingerprint = self.adapter.fingerprint

    def fit_to(self, base: CausalLM, is_shared: bool) -> None:
        """Have ``base`` be what these heads belong to: it gets their adapter, if they have one.

        Warns where heads without an adapter were trained on another model.

        Raises:
            ImportError: there is an adapter and peft is not installed.
            ValueError: heads, adapter and base do not belong together; a base that ``is_shared`` with the
                caller is not changed, so it must carry the adapter already.
        """
        if self.adapter is None:
            warn_of_another_base(self.fingerprint, base, self.base_model)
        else:
            check_heads_fit(self.heads, base)
            if is_shared:
                check_carries(base, self.adapter)
            else:
                apply_adapter(base, self.adapter)


def save_heads(
    checkpoint: HeadsCheckpoint,
    directory: str | Path,
    overwrite: bool = False,
    dtype: torch.dtype | GroupType | None = None,
) -> Path:
    """Write a heads directory and return its path.

    ``dtype`` is the type in which the weights are written, their own by default: a float type, or "Q8_0" or
    "Q4_0", which take a quarter and a seventh of the bytes of float32 (:mod:`medusa.heads.stored_types`).
    :func:`load_heads` gives float32 whatever it was.

    Raises:
        FileExistsError: ``directory`` holds something and ``overwrite`` is false.
        OSError: the disk refused; the old content of ``directory`` is untouched.
        ValueError: a weight is not finite, in ``dtype`` where one is given; nothing is written.
    """
    state = checkpoint.heads.state_dict()
    check_finite(state, "the heads to save")  # of whole numbers nobody could tell
    state = stored(state, dtype)
    check_finite(state, "the heads to save")
    with replaced_directory(directory, overwrite) as partial:
        config = {
            "format_version": _FORMAT_VERSION,
            "kind": checkpoint.heads.kind,
            "base_model": checkpoint.base_model,
            **asdict(checkpoint.heads.config),
        }
        if isinstance(dtype, str):
            config[_WEIGHTS_TYPE] = dtype
        if checkpoint.fingerprint is not None:
            config[FINGERPRINT] = checkpoint.fingerprint.as_json()
        if checkpoint.template_options:
            config[TEMPLATE] = list(checkpoint.template_options)
        if checkpoint.adapter is not None:
            config[_ADAPTER] = {"type": "lora"}
            _write_adapter(partial, checkpoint.adapter)
        write_json(partial / CONFIG_FILE, config)
        save_file(state, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        if checkpoint.tree is not None:
            save_tree(partial, checkpoint.tree, checkpoint.tuned, **checkpoint.tree_origin)
        write_json(partial / PROVENANCE_FILE, checkpoint.provenance)
    return Path(directory)


def load_heads(
    source: str | Path, device: str = "cpu", base_name: str | None = None, **hub: Any
) -> HeadsCheckpoint:
    """Read a heads directory; ``source`` may also name shipped heads, or a hub id to download, as
    ``owner/name`` or ``owner/name@revision``.

    Weights are returned in float32, in whatever type they were written.

    Args:
        base_name: the name of the base, for ``source="default"``: the heads that ship for it.
        hub: ``token``, ``cache_dir`` and ``local_files_only``, as in ``from_pretrained`` of ``transformers``.

    Raises:
        FileNotFoundError: no such directory, or it is not a heads directory.
        ValueError: the files contradict each other or are damaged; the message names the tensor or key.
    """
    if source == DEFAULT_HEADS:
        source = heads_for(base_name)
    directory = heads_directory(source, **hub)
    raw = _read_config(directory)
    heads = _read_module(directory, raw, device)
    tree, tuned, tree_origin = _read_trees(directory, heads)
    options = raw.get(TEMPLATE, [])
    if not isinstance(options, list) or not all(isinstance(option_set, dict) for option_set in options):
        raise ValueError(
            f"{directory / CONFIG_FILE}: {TEMPLATE} must be a list of objects, got {reprlib.repr(options)}"
        )
    provenance_path = directory / PROVENANCE_FILE
    return HeadsCheckpoint(
        heads=heads,
        base_model=raw.get("base_model", ""),
        tree=tree,
        provenance=read_json(provenance_path) if provenance_path.exists() else {},
        tuned=tuned,
        adapter=_read_adapter(directory, raw, device),
        tree_origin=tree_origin,
        fingerprint=_read_fingerprint(directory, raw),
        template_options=options,
    )


def save_tree(
    directory: str | Path, tree: CandidateTree, tuned: Sequence[TunedTree] = (), **origin: Any
) -> Path:
    """Write ``tree`` into a heads directory, and ``tuned`` for the runtimes they were timed on.

    The old content of the file is replaced, tuned trees included: ``tree`` is then used everywhere else.
    ``origin`` records the source of ``tree``, in plain JSON values.
    """
    path = Path(directory) / TREE_FILE
    entries = {"tuned": [entry.as_json() for entry in tuned]} if tuned else {}
    write_json(path, {"paths": [list(rank_path) for rank_path in tree.paths], **origin, **entries})
    return path


def check_heads_fit(heads: Heads, base: CausalLM) -> None:
    """Raise ValueError unless ``heads`` can sit on a base of these sizes."""
    advice = "load the base model that the heads were trained on"
    check_sizes(base, heads.config.hidden_size, heads.config.vocab_size, "heads were trained", advice)


def check_heads_fit_source(heads: Heads, source: BaseSource) -> None:
    """As :func:`check_heads_fit`, for a base that is not loaded: what its configuration does not say is not
    compared."""
    for name in ("hidden_size", "vocab_size"):
        heads_size = getattr(heads.config, name)
        base_size = getattr(source, name)
        if None not in (heads_size, base_size) and heads_size != base_size:
            raise ValueError(
                f"heads were trained for {name}={heads_size}, base model {source.name!r} has {base_size}; "
                "load the base model that the heads were trained on, or give heads=None (--heads none)"
            )


def check_sizes(base: CausalLM, size: int, vocabulary: int | None, subject: str, advice: str) -> None:
    """Raise ValueError unless heads of these sizes can sit on ``base``; None are heads without rows. The
    message begins with ``subject`` and ends with ``advice``."""
    for name, heads_size, base_size in (
        ("hidden_size", size, hidden_size(base)),
        ("vocab_size", vocabulary, vocab_size(base)),
    ):
        if heads_size is not None and heads_size != base_size:
            raise ValueError(
                f"{subject} for {name}={heads_size}, base model {base.name_or_path!r} has {base_size}; "
                f"{advice}"
            )


def heads_directory(source: str | Path, **hub: Any) -> Path:
    """Where the files of heads are: see :func:`load_heads`.

    Raises:
        FileNotFoundError: there are none.
    """
    shipped = shipped_heads()
    if not Path(source).is_dir() and str(source) in shipped:
        return shipped[str(source)]
    advice = (
        "train one with `medusa train`, or give a hub id of the form owner/name, or one of those that ship: "
        + ", ".join(shipped)
    )
    return hub_directory(source, HEADS_FILES, "heads directory", advice, **hub)


def weights_digest(source: str | Path) -> str:
    """SHA-256 of the weights file of heads: which heads a report is about."""
    return digest_of(heads_directory(source) / WEIGHTS_FILE)


def _read_config(directory: Path) -> dict[str, Any]:
    """config.json, of a format that this version reads."""
    path = directory / CONFIG_FILE
    raw = read_json(path)
    if "model_type" in raw and "format_version" not in raw:
        raise ValueError(
            f"{directory} is a base model of type {reprlib.repr(raw['model_type'])}, and heads are meant; "
            "name a directory that `medusa train` wrote"
        )
    if raw.get("format_version") != _FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version={reprlib.repr(raw.get('format_version'))}, this version of medusa "
            f"reads {_FORMAT_VERSION}; is it a heads directory written by `medusa train`?"
        )
    if not isinstance(raw.get("base_model", ""), str):
        raise ValueError(f"{path}: base_model must be text, got {reprlib.repr(raw['base_model'])}")
    return raw


def _read_module(directory: Path, raw: Mapping[str, Any], device: str) -> Heads:
    """The module that ``raw``, the config.json, describes, with the weights of the directory."""
    config_path = directory / CONFIG_FILE
    path = directory / WEIGHTS_FILE
    kind = raw.get("kind", MedusaHeads.kind)
    if kind not in list(KINDS):  # a value from a file may not be hashable
        known = " or ".join(map(repr, KINDS))
        raise ValueError(f"{config_path} says kind={kind!r}, this version of medusa reads {known}")
    if raw.get(_CONTEXT) is not None:
        raise ValueError(
            f"{config_path} has a causal layer over the text ({_CONTEXT}), which this version of medusa "
            "does not run any more; train the heads again without context_layers"
        )
    module = KINDS[kind]
    config = _strict_config(module.config_type, raw, config_path)
    with torch.device("meta"):
        heads: Heads = module(config)
    shapes = {name: tensor.shape for name, tensor in heads.state_dict().items()}
    weights = {
        name: tensor.to(device, torch.float32 if tensor.is_floating_point() else None)
        for name, tensor in _read_weights(path, raw, shapes).items()
    }
    _check_counts(heads, weights, config_path)
    check_tensors(weights, shapes, heads.weights_name, path)
    if config.token_map_size is not None:
        try:
            weights["token_map"] = checked_token_map(
                config.vocab_size, config.token_map_size, weights["token_map"]
            )
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    heads.load_state_dict(weights, assign=True)
    return heads


def _check_counts(heads: Heads, weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Raise ValueError unless the names of ``weights`` tell the counts that the configuration in ``path``
    says."""
    for name, count in heads.counts_in(weights).items():
        if getattr(heads.config, name) != count:
            raise ValueError(
                f"{path} says {name}={getattr(heads.config, name)}, {WEIGHTS_FILE} holds {count}; "
                "the two files do not belong together"
            )


def _read_weights(
    path: Path, raw: Mapping[str, Any], shapes: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    """The tensors of a weights file as floats; ``raw``, the config.json, says whether they are floats
    there."""
    dtype = raw.get(_WEIGHTS_TYPE)
    if dtype is None:
        return read_tensors(path, integers=("token_map",))
    if dtype not in list(ROW_BYTES):  # a value from a file may not be hashable
        raise ValueError(
            f"{path.with_name(CONFIG_FILE)} says {_WEIGHTS_TYPE}={reprlib.repr(dtype)}, this version of "
            f"medusa reads {' and '.join(ROW_BYTES)}"
        )
    grouped = {name for name, shape in shapes.items() if is_grouped(shape)}
    tensors = read_tensors(path, integers={"token_map", *grouped})
    for name in grouped & tensors.keys():
        try:
            tensors[name] = widened(tensors[name], dtype, shapes[name])
        except ValueError as error:
            raise ValueError(f"{path}: tensor {name!r} {error}") from error
    check_finite(tensors, str(path))
    return tensors


def _strict_config(config_type: type[Any], raw: Mapping[str, Any], path: Path) -> Any:
    """The module's configuration in a config.json."""
    known = {each.name for each in fields(config_type)}
    values = {key: value for key, value in raw.items() if key not in _HEADER_KEYS}
    for key in values:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            advice = f"did you mean {nearest[0]!r}?" if nearest else f"known are {sorted(known)}"
            raise ValueError(f"{path} has unknown key {key!r}; {advice}")
    required = [each.name for each in fields(config_type) if each.default is MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(f"{path} must say {' and '.join(missing)}; copy or train it again")
    try:
        return config_type(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_fingerprint(directory: Path, raw: Mapping[str, Any]) -> BaseFingerprint | None:
    """The fingerprint of the base in ``raw``, the config.json; None where it holds none."""
    if raw.get(FINGERPRINT) is None:
        return None
    return BaseFingerprint.from_json(raw[FINGERPRINT], f"{directory / CONFIG_FILE}: {FINGERPRINT}")


def _write_adapter(directory: Path, adapter: Adapter) -> None:
    """Write ``adapter`` into a heads directory, as peft would."""
    (directory / _ADAPTER).mkdir()
    write_json(directory / ADAPTER_CONFIG_FILE, adapter.config)
    weights = {name: weight.detach().cpu().contiguous() for name, weight in adapter.weights.items()}
    save_file(weights, directory / _ADAPTER_WEIGHTS_FILE, metadata={"format": "pt"})


def _read_adapter(directory: Path, raw: Mapping[str, Any], device: str) -> Adapter | None:
    """The adapter that ``raw``, the config.json, speaks of; the two must agree whether there is one."""
    value = raw.get(_ADAPTER)
    if value is None and (directory / _ADAPTER).is_dir():
        raise ValueError(
            f"{directory / _ADAPTER} holds an adapter that {CONFIG_FILE} does not speak of; the files do not "
            "belong together"
        )
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") != "lora":
        raise ValueError(
            f"{directory / CONFIG_FILE} says {_ADAPTER}={reprlib.repr(value)}, this version of medusa reads "
            "type 'lora'"
        )
    config = read_json(directory / ADAPTER_CONFIG_FILE)
    if config.get("peft_type") != "LORA":
        raise ValueError(
            f"{directory / ADAPTER_CONFIG_FILE} must say peft_type='LORA', got {config.get('peft_type')!r}"
        )
    weights = read_tensors(directory / _ADAPTER_WEIGHTS_FILE)
    on_device = {name: weight.to(device) for name, weight in weights.items()}
    return Adapter(config, on_device, _read_fingerprint(directory, raw))


def _read_trees(
    directory: Path, heads: Heads
) -> tuple[CandidateTree | None, tuple[TunedTree, ...], dict[str, Any]]:
    """The default tree, the tuned ones, the default's origin; None and none where there is no tree file."""
    path = directory / TREE_FILE
    if not path.exists():
        return None, (), {}
    raw = read_json(path)
    if "paths" not in raw:
        raise ValueError(f"{path} must hold 'paths', lists of ranks, got {sorted(raw)}")
    tree = tree_from_json(raw["paths"], str(path))
    tuned = tuned_from_json(raw.get("tuned", []), str(path))
    for any_tree in (tree, *(entry.tree for entry in tuned)):
        try:
            check_tree_fits(any_tree, heads)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return tree, tuned, {key: value for key, value in raw.items() if key not in ("paths", "tuned")}
