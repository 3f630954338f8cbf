"""The heads directory: what training leaves behind and decoding loads.

    config.json         the kind of heads ("medusa", the default, or "eagle"), its HeadsConfig or EagleConfig,
                        the base model's name, the format version
    model.safetensors   the weights, names as in the module's state_dict()
    tree.json           the candidate tree, as rank paths, and where it came from; under "tuned", the trees of
                        places and batch sizes that were timed (see medusa.trees.tuned_trees)
    provenance.json     how the heads were made: command, configuration, versions, measurements
    adapter/            of joint training only, and config.json says so: the base's LoRA adapter, as peft's

Loading is strict: a tensor that is missing, left over, of another shape or cut short is an error.
Writing goes to a temporary name beside the target and is renamed at the end, so a failed write
leaves what was there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import save_file

from medusa.files import read_json, replaced_directory, write_json
from medusa.heads.adapter import Adapter
from medusa.heads.eagle import EagleHead, Heads
from medusa.heads.strict_loading import heads_holding, read_weights
from medusa.pretrained import shipped_heads
from medusa.trees.candidate_tree import CandidateTree
from medusa.trees.tuned_trees import TunedTree, tree_from_json, tuned_from_json

FORMAT_VERSION = 1
CONFIG_FILE, WEIGHTS_FILE, TREE_FILE, PROVENANCE_FILE = (
    "config.json",
    "model.safetensors",
    "tree.json",
    "provenance.json",
)
ADAPTER = "adapter"
ADAPTER_CONFIG_FILE = f"{ADAPTER}/adapter_config.json"
ADAPTER_WEIGHTS_FILE = f"{ADAPTER}/adapter_model.safetensors"


@dataclass
class HeadsCheckpoint:
    """Everything a heads directory holds."""

    heads: Heads
    base_model: str
    """Name or path of the base the heads were trained on, as the user gave it."""
    tree: CandidateTree | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    tuned: tuple[TunedTree, ...] = ()
    """Trees for the places and batch sizes where they were timed; ``tree`` serves everywhere else."""
    adapter: Adapter | None = None
    """What the heads were trained together with: they belong to the base that carries it."""
    tree_origin: Mapping[str, Any] = field(default_factory=dict)
    """Where ``tree`` came from, in plain JSON values; empty where nobody said."""


def save_heads(
    checkpoint: HeadsCheckpoint,
    directory: str | Path,
    overwrite: bool = False,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a heads directory and return its path.

    ``dtype`` is the type in which the weights are written, their own by default; :func:`load_heads` gives
    float32 whatever it was.

    Raises:
        FileExistsError: ``directory`` holds something and ``overwrite`` is false.
        OSError: the disk refused; what was in ``directory`` before is untouched.
    """
    with replaced_directory(directory, overwrite) as partial:
        config = {
            "format_version": FORMAT_VERSION,
            "kind": kind_of(checkpoint.heads),
            "base_model": checkpoint.base_model,
            **asdict(checkpoint.heads.config),
        }
        if checkpoint.adapter is not None:
            config[ADAPTER] = {"type": "lora", "base_sample": list(checkpoint.adapter.base_sample)}
            _write_adapter(partial, checkpoint.adapter)
        write_json(partial / CONFIG_FILE, config)
        state = {
            name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).detach().contiguous()
            for name, tensor in checkpoint.heads.state_dict().items()
        }
        save_file(state, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        if checkpoint.tree is not None:
            save_tree(partial, checkpoint.tree, checkpoint.tuned, **checkpoint.tree_origin)
        write_json(partial / PROVENANCE_FILE, checkpoint.provenance)
    return Path(directory)


def load_heads(source: str | Path, device: str = "cpu") -> HeadsCheckpoint:
    """Read a heads directory; ``source`` may also name shipped heads, or a hub id to download.

    Weights come back in float32, in whatever type they were written.

    Raises:
        FileNotFoundError: no such directory, or it is not a heads directory.
        ValueError: the files contradict each other or are damaged; the message names the tensor or key.
    """
    directory = _local_directory(source)
    raw = read_json(directory / CONFIG_FILE)
    if raw.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{directory / CONFIG_FILE} has format_version={raw.get('format_version')!r}, this version of "
            f"medusa reads {FORMAT_VERSION}; is it a heads directory written by train/train_heads.py?"
        )
    weights = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in read_weights(directory / WEIGHTS_FILE, device).items()
    }
    heads = heads_holding(weights, raw, directory / CONFIG_FILE, directory / WEIGHTS_FILE)
    tree, tuned, tree_origin = _read_trees(directory, heads.num_heads)
    return HeadsCheckpoint(
        heads=heads,
        base_model=raw.get("base_model", ""),
        tree=tree,
        provenance=read_json(directory / PROVENANCE_FILE) if (directory / PROVENANCE_FILE).exists() else {},
        tuned=tuned,
        adapter=_read_adapter(directory, raw, device),
        tree_origin=tree_origin,
    )


def load_adapter(source: str | Path, device: str = "cpu") -> Adapter | None:
    """The adapter of a heads directory or hub id, None when its heads belong to the base as it is.

    Raises:
        FileNotFoundError, ValueError: as :func:`load_heads`.
    """
    directory = _local_directory(source)
    return _read_adapter(directory, read_json(directory / CONFIG_FILE), device)


def kind_of(heads: Heads) -> str:
    """What ``config.json`` calls heads like these."""
    return "eagle" if isinstance(heads, EagleHead) else "medusa"


def save_tree(
    directory: str | Path, tree: CandidateTree, tuned: Sequence[TunedTree] = (), **origin: Any
) -> Path:
    """Write ``tree`` into a heads directory, and ``tuned`` for the places they were measured at.

    What the file held before is replaced, tuned trees included: ``tree`` is then used everywhere else.
    ``origin`` says where ``tree`` came from, in plain JSON values.
    """
    path = Path(directory) / TREE_FILE
    entries = {"tuned": [entry.as_json() for entry in tuned]} if tuned else {}
    write_json(path, {"paths": [list(p) for p in tree.paths], **origin, **entries})
    return path


def _local_directory(source: str | Path) -> Path:
    path, shipped = Path(source), shipped_heads()
    if path.is_dir():
        return path
    if str(source) in shipped:
        return shipped[str(source)]
    looks_like_path = path.is_absolute() or str(source).startswith((".", "~")) or str(source).count("/") != 1
    if looks_like_path:
        raise FileNotFoundError(
            f"no heads directory at {str(source)!r}; train one with train/train_heads.py, or give a hub id "
            f"of the form owner/name, or one of those that ship: {', '.join(shipped)}"
        )
    files = [CONFIG_FILE, WEIGHTS_FILE, TREE_FILE, PROVENANCE_FILE, ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE]
    try:
        return Path(snapshot_download(str(source), allow_patterns=files))
    except (RepositoryNotFoundError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"no heads directory at {str(source)!r}, and the hub gives no repository of that name: {error}"
        ) from error


def _write_adapter(directory: Path, adapter: Adapter) -> None:
    (directory / ADAPTER).mkdir()
    write_json(directory / ADAPTER_CONFIG_FILE, adapter.config)
    weights = {name: each.detach().cpu().contiguous() for name, each in adapter.weights.items()}
    save_file(weights, directory / ADAPTER_WEIGHTS_FILE, metadata={"format": "pt"})


def _read_adapter(directory: Path, raw: Mapping[str, Any], device: str) -> Adapter | None:
    """The adapter that ``raw``, the config.json, speaks of; the two must agree whether there is one."""
    said, is_there = raw.get(ADAPTER), (directory / ADAPTER).is_dir()
    if said is None and is_there:
        raise ValueError(
            f"{directory / ADAPTER} holds an adapter that {CONFIG_FILE} does not speak of; the files do not "
            "belong together"
        )
    if said is None:
        return None
    if not isinstance(said, dict) or said.get("type") != "lora" or "base_sample" not in said:
        raise ValueError(
            f"{directory / CONFIG_FILE} says {ADAPTER}={said!r}, this version of medusa reads type 'lora' "
            "with a base_sample"
        )
    config = read_json(directory / ADAPTER_CONFIG_FILE)
    if config.get("peft_type") != "LORA":
        raise ValueError(
            f"{directory / ADAPTER_CONFIG_FILE} must say peft_type='LORA', got {config.get('peft_type')!r}"
        )
    weights = read_weights(directory / ADAPTER_WEIGHTS_FILE, device)
    return Adapter(config, weights, tuple(said["base_sample"]))


def _read_trees(
    directory: Path, num_heads: int
) -> tuple[CandidateTree | None, tuple[TunedTree, ...], dict[str, Any]]:
    """The default tree, the tuned ones, the default's origin; None and none where there is no tree file."""
    path = directory / TREE_FILE
    if not path.exists():
        return None, (), {}
    raw = read_json(path)
    if "paths" not in raw:
        raise ValueError(f"{path} must hold 'paths', lists of ranks, got {sorted(raw)}")
    tree, tuned = tree_from_json(raw["paths"], str(path)), tuned_from_json(raw.get("tuned", []), str(path))
    for each in (tree, *(entry.tree for entry in tuned)):
        check_tree_fits(each, num_heads)
    return tree, tuned, {key: value for key, value in raw.items() if key not in ("paths", "tuned")}


def check_tree_fits(tree: CandidateTree, num_heads: int) -> None:
    """Raise ValueError when ``tree`` asks for more depths than the heads guess."""
    if tree.depth > num_heads:
        raise ValueError(
            f"tree has depth {tree.depth}, the heads are {num_heads}: a tree is at most as deep as they "
            f"guess; use tree.subtree({num_heads})"
        )
