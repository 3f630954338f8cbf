"""Heads out to a format of another project, in from one, and checked as one; every format by name.

**Adding a format**: a file in this folder with a :class:`medusa.interop.protocol.ForeignFormat`, a line in
:data:`FORMATS`, and, where heads can be written or checked as it, its name in :mod:`medusa.options`.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import medusa
from medusa.base.causal_lm import CausalLM
from medusa.decoding.statistics import DecodingStatistics
from medusa.files import Layout, read_json, replaced_directory, write_json
from medusa.heads.calibration import AnsweredTokens, calibrate_each
from medusa.heads.checkpoint import CONFIG_FILE, WEIGHTS_FILE, HeadsCheckpoint, save_heads
from medusa.heads.fingerprint import BaseFingerprint
from medusa.heads.medusa_heads import HeadsConfig, MedusaHeads
from medusa.heads.tensor_files import check_finite
from medusa.hub import hub_directory
from medusa.interop.eagle3 import SPECULATORS, VLLM_EAGLE3
from medusa.interop.plain_heads import MEDUSA, MEDUSA_FULL
from medusa.interop.protocol import ExportedFiles, ForeignFormat, ForeignHeads, ReadRequest, ToExport
from medusa.interop.vllm_medusa import VLLM_MEDUSA
from medusa.model import MedusaModel
from medusa.trees.candidate_tree import CandidateTree

FORMATS: dict[str, ForeignFormat] = {
    each.name: each for each in (VLLM_MEDUSA, VLLM_EAGLE3, SPECULATORS, MEDUSA, MEDUSA_FULL)
}
"""Every format that is read; formats with ``export`` are written too."""


def _is_export(directory: Path) -> bool:
    """Whether ``directory`` holds heads of a known format, and no base with them."""
    try:
        return not format_of(directory).holds_base
    except (ValueError, OSError):
        return False


EXPORT_LAYOUT = Layout("an export", ("config.json", "*.safetensors"), _is_export)


def format_of(directory: Path) -> ForeignFormat:
    """The format of a directory that someone else made.

    Raises:
        ValueError: it is none of those there are.
    """
    for foreign in FORMATS.values():
        if foreign.recognises is not None and foreign.recognises(directory):
            return foreign
    config = directory / "config.json"
    if config.exists() and "format_version" in read_json(config):
        raise ValueError(
            f"{directory} is a heads directory of this project, which needs no import; use it as --heads"
        )
    held = ", ".join(sorted(path.name for path in directory.iterdir())[:8]) or "nothing"
    raise ValueError(
        f"{directory} holds no heads of a known format. Known are medusa_lm_head.pt and "
        "medusa_lm_head.safetensors (FasterDecoding/Medusa), a config.json that "
        "says model_type 'medusa' (vLLM), draft_vocab_size (EAGLE-3) or speculators_model_type, and a model "
        f"with medusa_head.* among its weights; it holds {held}. Give the directory that holds the heads"
    )


_DOWNLOADED = (
    CONFIG_FILE,
    "medusa_lm_head.*",
    "model*.safetensors",
    "pytorch_model*.bin",
    "*.index.json",
)
"""The files of a hub repository that are read."""


def export_heads(request: ToExport, to: str, output: str | Path, overwrite: bool = False) -> ExportedFiles:
    """Write heads for another project into the directory ``output``, whole or not at all.

    Args:
        to: a name of :data:`medusa.interop.conversion.FORMATS` that has an export.

    Raises:
        FileExistsError: ``output`` holds something and ``overwrite`` is false.
        ValueError: the format is for heads of another kind, or has no place for these; or a weight is not
            finite in the type to write.
    """
    export = FORMATS[to].export
    if export is None:
        written = ", ".join(name for name, each in FORMATS.items() if each.export is not None)
        raise ValueError(f"heads are not written as {to!r}; choose one of {written}")
    _check_kind(request, FORMATS[to])
    files = export(request)
    weights = {
        name: each.detach()
        .cpu()
        .to(request.dtype if each.is_floating_point() else each.dtype, copy=True)
        .contiguous()
        for name, each in files.weights.items()
    }
    check_finite(weights, f"the heads in {request.dtype}")
    with replaced_directory(output, overwrite) as partial:
        write_json(partial / CONFIG_FILE, files.config)
        save_file(weights, partial / WEIGHTS_FILE, metadata={"format": "pt"})
    return files


def _check_kind(request: ToExport, foreign: ForeignFormat) -> None:
    """Raise ValueError unless the heads are of the kind that ``foreign`` holds."""
    heads = request.checkpoint.heads
    if isinstance(heads, foreign.holds):
        return
    formats = [
        f"--to {each.name}" for each in FORMATS.values() if each.export and isinstance(heads, each.holds)
    ]
    advice = f"export them {' or '.join(formats)}, or " if formats else ""
    raise ValueError(
        f"{request.source} holds heads of kind {heads.kind}, and {foreign.name} is for kind "
        f"{foreign.holds.kind}; {advice}train others with --head-kind {foreign.holds.kind} "
        f"{foreign.training_flags}".rstrip()
    )


def import_heads(
    request: ReadRequest,
    foreign: ForeignFormat,
    output: str | Path,
    *,
    source: str,
    base_name: str,
    overwrite: bool = False,
) -> tuple[HeadsCheckpoint, ForeignHeads]:
    """Read heads of another project and write them as a heads directory of ours, whole or not at all.

    They are written in the type that their file has.

    Args:
        source: where they come from, for the record.
        base_name: the base, as heads record it.

    Raises:
        FileExistsError: ``output`` holds something and ``overwrite`` is false.
        FileNotFoundError: a file is missing.
        ValueError: the files are damaged, contradict each other, or belong to another base.
    """
    foreign_heads = foreign.read(request)
    record = {
        "command": shlex.join(sys.orig_argv),
        "medusa_version": medusa.__version__,
        "imported_from": source,
        "format": foreign.name,
        "notes": list(foreign_heads.notes),
    }
    fingerprint = BaseFingerprint.of(request.base)
    checkpoint = HeadsCheckpoint(foreign_heads.heads, base_name, provenance=record, fingerprint=fingerprint)
    save_heads(
        checkpoint, output, overwrite, None if foreign_heads.dtype == torch.float32 else foreign_heads.dtype
    )
    return checkpoint, foreign_heads


def foreign_directory(source: str | Path) -> Path:
    """The directory ``source``, or the copy of a hub repository of that name.

    Raises:
        FileNotFoundError: there is neither.
    """
    return hub_directory(source, _DOWNLOADED, "heads", "give a directory, or a hub id of the form owner/name")


def save_base(base: CausalLM, tokenizer: Any, output: str | Path) -> None:
    """Write a base model and its tokenizer without the heads that its files hold, whole or not at all."""
    for key in ("medusa_num_heads", "medusa_num_layers"):
        if hasattr(base.config, key):
            delattr(base.config, key)
    with replaced_directory(output) as partial:
        base.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


@dataclass(frozen=True)
class ChainCheck:
    """The performance of heads on some prompts, greedily.

    Heads whose tensors went astray on the way still load, and then guess as untrained ones do: the text stays
    right, and only the speed is gone.
    """

    statistics: DecodingStatistics
    """Statistics of decoding with a chain of each head's best guess."""
    top1: list[float]
    """[d-1] = how often the best guess of head d is right, over the same answers."""
    untrained_top1: list[float]
    """The same of heads that were never trained: they guess the base's next token again."""

    @property
    def is_trained(self) -> bool:
        """Whether the first head is right more often than an untrained one."""
        return self.top1[0] > self.untrained_top1[0]


def check_chain(
    model: MedusaModel, prompts: Iterable[Mapping[str, Tensor]], max_new_tokens: int
) -> ChainCheck:
    """Decode ``prompts`` (``input_ids`` and ``attention_mask`` (1, T)) with a chain as deep as the heads
    guess.

    Raises:
        ValueError: no answer is longer than a token.
    """
    heads = model.heads
    assert heads is not None, "a format is read into heads"
    statistics = DecodingStatistics()
    answers = []
    for inputs in prompts:
        tensors: dict[str, Any] = dict(inputs)
        output: Any = model.generate(
            **tensors,
            tree=CandidateTree.chain(heads.num_heads),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
        statistics += output.statistics
        length = inputs["input_ids"].shape[1]
        answers.append(AnsweredTokens.after_prompt(output.sequences[0].tolist(), length))
    config = heads.config
    untrained = MedusaHeads(HeadsConfig(config.hidden_size, config.vocab_size, heads.num_heads))
    sets = [heads, untrained.to(next(heads.parameters()).device)]
    ours, theirs = calibrate_each(model.base, sets, answers, max_rank=1)
    return ChainCheck(statistics, ours.top_k_accuracy(1), theirs.top_k_accuracy(1))
