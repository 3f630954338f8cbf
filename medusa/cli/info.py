"""``medusa info``: describes a heads directory or a base model, or both where they have one name."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

import torch
from rich.table import Table
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache

from medusa.assets import shipped_heads
from medusa.base.architecture_check import check_decodable, is_tested
from medusa.base.gguf_file import GGUFFile, is_gguf, type_name
from medusa.base.known_models import learned_for, shipped_for
from medusa.base.loading import (
    BaseSource,
    explained_kind,
    find_base,
    is_held_quantised,
    load_tokenizer,
    quantised_directory,
    source_arguments,
)
from medusa.base.quantised_directory import described_settings
from medusa.base.recurrent import is_recurrent, kind_of_layer
from medusa.base.text_part import auto_class, text_part
from medusa.cli.option_types import InfoOptions
from medusa.cli.options import answer_command, command
from medusa.console import counted, megabytes, output_console
from medusa.decoding.prefix_store import prefix_home, stored_bytes
from medusa.engine.weights.load import load_base
from medusa.heads.checkpoint import PROVENANCE_FILE, HeadsCheckpoint, check_heads_fit, load_heads
from medusa.heads.fingerprint import kinship_of
from medusa.heads.mtp import num_mtp_layers

LONGEST_CELL = 600
"""Characters of a provenance entry that are shown."""


def info(options: InfoOptions) -> list[str]:
    """Print the description of a base or of heads; both descriptions where a base and heads have the name."""
    name = options.heads
    if options.base is not None:
        checkpoint = load_heads(name)
        fit = describe_fit(checkpoint, options.base)
        described = describe_heads(checkpoint) | fit
        _print_all({f"Heads in {name}": described}, described if options.json else None)
        if fit["fit"].startswith("none"):
            return [command("learn", options.base)]
        return [command("chat", "--base", options.base, "--heads", name)]
    if name in shipped_heads() and not Path(name).is_dir():
        return _info_of_both(name, options.json)
    source = _base_source(name)
    if source is None:
        described = describe_heads(load_heads(name))
        _print_all({f"Heads in {name}": described}, described if options.json else None)
        can_be_tuned = not described["tuned_trees"] and Path(name).is_dir()
        return [command("tune" if can_be_tuned else "chat", "--heads", name)]
    described, tokenizer = _described_source(name, source)
    _print_all({f"Base {name}": described}, described if options.json else None)
    can_answer = tokenizer is not None and not described["decodes"].startswith("no")
    return [answer_command(tokenizer, "--base", name)] if can_answer else []


def _info_of_both(name: str, as_json: bool) -> list[str]:
    """The same for heads that ship, whose name is their base's too. In JSON the base is an entry of the
    heads: null where it has not been fetched."""
    heads = describe_heads(load_heads(name))
    try:
        base = _described_source(name, find_base(name))[0]
    except FileNotFoundError:
        base = None
    absent = {"here": f"no: `medusa fetch {name}` fetches it"}
    titles = {f"Base {name}": base or absent, f"Heads that ship for {name}": heads}
    _print_all(titles, {**heads, "base": base} if as_json else None)
    return [command("fetch", name) if base is None else command("chat", "--base", name)]


def _described_source(name: str, source: BaseSource) -> tuple[dict[str, Any], Any]:
    """The description of a base, and its tokenizer; None where it has none."""
    described = describe_base(source.config)
    if source.gguf is not None:
        described["weights"] = describe_weights(source.gguf)
    elif is_held_quantised(source):
        described |= describe_directory(source)
    shipped = shipped_for(name)
    learned = learned_for(name)
    version = None if learned is None else learned.version
    used = "which are used for this base"
    described["shipped_heads"] = "none" if shipped is None else shipped if version else f"{shipped}, {used}"
    described["learned_heads"] = (
        "none: `medusa learn` makes some"
        if learned is None or version is None
        else f"version {version.number} of {version.made[:10]}, {version.tokens_per_step:.2f} tokens a step, "
        f"{used}: {learned.in_use}"
    )
    described["stored_prefixes"] = (
        f"{megabytes(stored_bytes())} of all models in {prefix_home()}; --prefix-store-mib bounds it"
    )
    try:
        tokenizer = load_tokenizer(source)
    except (OSError, ValueError) as error:
        described["chat_template"] = f"no tokenizer: {str(error).splitlines()[0]}"
        return described, None
    described["chat_template"] = "none: it continues text" if tokenizer.chat_template is None else "yes"
    return described, tokenizer


def _print_all(described_by_title: dict[str, dict[str, Any]], as_json: dict[str, Any] | None) -> None:
    """Print a table for each title, or ``as_json`` in a line where there is that."""
    if as_json is not None:
        sys.stdout.write(json.dumps(as_json) + "\n")
        return
    for title, described in described_by_title.items():
        table = Table(title=title, show_header=False, title_justify="left")
        for key, value in described.items():
            if key != "provenance":
                table.add_row(key, _in_words(key, value))
        for key, value in described.get("provenance", {}).items():
            text = _made_in_words(value)
            table.add_row(f"made: {key}", text if len(text) <= LONGEST_CELL else text[:LONGEST_CELL] + " ...")
        output_console().print(table)


def _base_source(name: str) -> BaseSource | None:
    """The base called ``name``; None where heads are called so, or nothing is."""
    if Path(name, PROVENANCE_FILE).exists():
        return None
    try:
        return find_base(name)
    except FileNotFoundError:  # the message of heads that are not there says more
        if PurePath(name).suffix == ".gguf":
            raise
        return None
    except ValueError as error:
        if is_gguf(name) or ":" in name or str(error).startswith("base "):
            raise
        return None  # a directory of another kind, such as heads


def describe_weights(file: GGUFFile) -> str:
    """What a GGUF file holds, and in which types."""
    sizes: Counter[str] = Counter()
    for entry in file.tensors.values():
        sizes[type_name(entry.type)] += entry.num_bytes
    count = sum(math.prod(entry.shape) for entry in file.tensors.values())
    types = ", ".join(f"{megabytes(size)} of {name}" for name, size in sizes.most_common())
    return f"{types}: {8 * file.num_bytes / count:.2f} bits a weight, {megabytes(file.num_bytes)} in all"


def describe_directory(source: BaseSource) -> dict[str, Any]:
    """The form of the weights of a quantised directory, and the reason where it cannot be decoded on a CPU.
    The weights of a repository on the hub are not fetched: its settings are told."""
    if not Path(source.name).is_dir():
        return {"weights": described_settings(source.config)}
    try:
        directory = quantised_directory(source)
        directory.quantised_layers(directory.empty_model(**source_arguments(source.arguments)))
    except ValueError as error:
        return {"weights": described_settings(source.config), "decodes": f"no: {error}"}
    return {"weights": directory.described}


def describe_base(config: PreTrainedConfig) -> dict[str, Any]:
    """The features of a base of this configuration, in plain values. No weights are read: a type that the
    tests do not cover is checked when it is loaded."""
    with torch.device("meta"), explained_kind(str(config.name_or_path)):
        base: Any = text_part(auto_class(config).from_config(config))
    try:
        check_decodable(base)
        decodes = "yes" if is_tested(base) else "tried when it is loaded"
    except ValueError as error:
        decodes = f"no: {error}"
    return {
        "model_type": base.config.model_type,
        "model": type(base).__name__,
        "num_parameters": base.num_parameters(),
        "layers": dict(Counter(map(kind_of_layer, DynamicCache(config=config).layers))),
        "decodes": decodes,
        "mtp_layers": num_mtp_layers(config),
        "steps": "general, compiled" if is_recurrent(base) else "general, static, compiled, captured",
    }


def describe_heads(checkpoint: HeadsCheckpoint) -> dict[str, Any]:
    """The content of a checkpoint, in plain values."""
    heads = checkpoint.heads
    tree = checkpoint.tree
    return {
        "kind": heads.kind,
        "base_model": checkpoint.base_model,
        **asdict(heads.config),
        "num_parameters": sum(parameter.numel() for parameter in heads.parameters()),
        "adapter": None if checkpoint.adapter is None else checkpoint.adapter.summary(),
        "tree": None
        if tree is None
        else {"num_nodes": tree.num_nodes, "width_by_depth": tree.width_by_depth},
        "tuned_trees": [
            {
                **asdict(entry.runtime),
                "step": entry.step,
                "batch_size": entry.batch_size,
                "num_nodes": entry.tree.num_nodes,
            }
            for entry in checkpoint.tuned
        ],
        "provenance": checkpoint.provenance,
    }


def describe_fit(checkpoint: HeadsCheckpoint, name: str) -> dict[str, str]:
    """How well heads fit the base called ``name``, in a sentence, and what is known of their worth."""
    source = find_base(name)
    base = load_base(source, "auto" if is_held_quantised(source) else "eager", layers=False)
    try:
        check_heads_fit(checkpoint.heads, base)
    except ValueError as error:
        return {"fit": f"none: {error}"}
    described = {"fit": f"{name} is {kinship_of(checkpoint.fingerprint, base).described}"}
    measured = checkpoint.provenance.get("metrics", {}).get("held_out/tokens_per_step")
    if measured is not None:
        described["worth"] = (
            f"{measured:.2f} tokens a step on text that {checkpoint.base_model} wrote and they were not "
            f"trained on; `medusa benchmark` measures it here"
        )
    return described


def _in_words(name: str, value: Any) -> str:
    if name == "num_parameters":
        return f"{value:,}"
    if name == "mtp_layers":
        return f"{value}, which draft where no heads ship" if value else "none"
    if name == "layers":
        return ", ".join(f"{count} {kind}" for kind, count in value.items())
    if name == "base_config":
        return f"of type {value['model_type']}"
    if name == "tree":
        if value is None:
            return "none: a chain of the best guesses is used"
        nodes = counted(value["num_nodes"], "node")
        widths = value["width_by_depth"]
        best = ", ".join(f"the best {width} at depth {depth}" for depth, width in enumerate(widths, start=1))
        return f"{nodes}: the root, and guesses among {best}" if best else f"{nodes}, just the root"
    if name == "tuned_trees":
        return _tuned_in_words(value)
    if name == "adapter":
        return _adapter_in_words(value)
    return str(value)


def _made_in_words(value: Any) -> str:
    """An entry of the provenance: `name value` for each part of a mapping, numbers with three digits."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_made_in_words(each)}" for name, each in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _tuned_in_words(entries: list[dict[str, Any]]) -> str:
    lines = [
        f"{counted(entry['num_nodes'], 'node')} at batch size {entry['batch_size']} on {entry['device']}, "
        f"{entry['dtype']}, {entry['engine']}, {entry['step']} steps"
        for entry in entries
    ]
    return "\n".join(lines) or "none: the tree above serves everywhere; `medusa tune` finds others"


def _adapter_in_words(value: dict[str, Any] | None) -> str:
    if value is None:
        return "none: the text is the base model's own"
    return (
        f"LoRA of rank {value['rank']}, alpha {value['alpha']}, on {value['num_layers']} layers "
        f"({', '.join(value['targets'])}), {value['num_parameters']:,} parameters, trained with the heads: "
        "the text is the adapted model's"
    )
