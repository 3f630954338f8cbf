"""Who answers in a benchmark: the ways in which ``transformers`` generates, llama.cpp, and our own.

Our own systems are plain decoding, a drafter (``suffix``), a drafter under an acceptance rule (``early-exit x
block``), or other heads of the same base (``LABEL=HEADS``). A foreign system that cannot run here (no
compiler, a mode that takes one row only) is left out with its reason, and so is a drafter with a rule that
would be biased; a failure of our own is an error.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import CompileConfig, PreTrainedModel

from medusa.acceptance.rules import rule_named
from medusa.base.causal_lm import end_ids, lm_head, vocab_size
from medusa.base.gguf_file import begins_as_gguf
from medusa.drafters.protocol import Drafter
from medusa.drafters.registry import (
    DEFAULT_DRAFTER,
    DrafterFactory,
    drafter_of_heads,
    part_names,
    uses_model_heads,
)
from medusa.engine.libraries import INSTALL_COMPILER
from medusa.engine.optimized_heads import optimized_heads
from medusa.engine.views import packed_as
from medusa.engine.weights.load import load_base
from medusa.heads.checkpoint import HeadsCheckpoint, check_heads_fit, load_heads
from medusa.heads.protocol import Heads
from medusa.measurement.llama_cpp import LlamaCpp, answered_by, llama_cpp_unsupported_reason
from medusa.model import MedusaModel
from medusa.options import DrafterSettings
from medusa.trees.candidate_tree import CandidateTree

THEIRS = TRANSFORMERS, STATIC, LOOKUP, ASSISTED = (
    "transformers",
    "transformers-static",
    "prompt-lookup",
    "assisted",
)
LLAMA_CPP = "llama.cpp"
"""Every GGUF file of the base; with a dash and the end of a file's name, only that file."""
PLAIN, HEADS, DEFAULT = "plain", "heads", "default"
"""The heads in their tuned tree; "default" is ``generate`` with neither a tree nor a drafter named."""
ALL_DRAFTERS = "drafters"
"""Every drafter that works here, and the unions that are worth a try."""
EXACT, TYPICAL = "exact", "typical"
"""The rules that compare a candidate only with the base, so that any drafter will do."""
LOOKUP_TOKENS = 10
"""The value of prompt_lookup_num_tokens in the documentation of ``transformers``."""
CPU_COMPILERS = ("g++", "clang++", "c++", "cl")
WORKS_ON_ONE_ROW = (LOOKUP, ASSISTED)


@dataclass(frozen=True)
class System:
    """One way to answer."""

    name: str
    answer: Callable[..., Any]
    """Takes the arguments of ``generate``, ours a seed too; the result has ``sequences``."""
    is_compiled: bool = False
    """Whether the first call of a shape compiles, so that warming up takes full answers."""

    @property
    def is_ours(self) -> bool:
        return is_ours(self.name)

    def refusal(self, num_rows: int) -> str | None:
        """Why it cannot answer ``num_rows`` rows at once; None when it can."""
        if num_rows > 1 and self.name in WORKS_ON_ONE_ROW:
            return "transformers offers it for one row at a time"
        if num_rows > 1 and _is_llama_cpp(self.name):
            return "llama.cpp is compared on one row at a time"
        return None


# ------------------------------------------------------------------ names


def _is_llama_cpp(name: str) -> bool:
    """Whether llama.cpp answers under this name."""
    return name == LLAMA_CPP or name.startswith(f"{LLAMA_CPP}-")


def is_ours(name: str) -> bool:
    """Whether it is a drafter of ours, or plain decoding."""
    return name not in THEIRS and not _is_llama_cpp(name)


def pair_name(drafter: str, rule: str) -> str:
    """The name of a drafter under a rule: just the drafter's name under the exact rule."""
    return drafter if rule == EXACT else f"{drafter} x {rule}"


def drafter_and_rule(name: str) -> tuple[str, str]:
    """The inverse of :func:`pair_name`."""
    drafter, _, rule = name.partition(" x ")
    return drafter, rule or EXACT


def _is_drafter(name: str) -> bool:
    """Whether ``name`` is a drafter's, or a union's; not a group's, plain decoding's or other heads'."""
    return is_ours(name) and name not in (PLAIN, DEFAULT, ALL_DRAFTERS) and "=" not in name


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError unless each name is a system, a drafter, or a union of drafters."""
    for name in names:
        label, equals, heads = name.partition("=")
        if equals and (
            not label or not heads or label in (PLAIN, HEADS, DEFAULT) or not is_ours(label) or " x " in label
        ):
            raise ValueError(f"systems must be names, or LABEL=HEADS with a label of its own, got {name!r}")
        if _is_drafter(name):
            try:
                part_names(name)
            except ValueError as error:
                others = ", ".join((*THEIRS, LLAMA_CPP, DEFAULT, PLAIN, ALL_DRAFTERS, "LABEL=HEADS"))
                raise ValueError(f"system {name!r} is not one of {others}, and {error}") from error


def default_names(model: MedusaModel) -> list[str]:
    """The default systems: foreign ones, plain decoding, the heads if there are any, our default.

    On a processor the compiled one takes a minute or more to compile a small model, so it must be named.
    """
    theirs = [name for name in THEIRS if name != STATIC or model.device.type != "cpu"]
    return [*theirs, LLAMA_CPP, PLAIN, *([HEADS] if model.heads is not None else []), DEFAULT]


def needs_heads(names: Iterable[str] | None) -> bool:
    """Whether to load heads for these systems; by default they take part."""
    return names is None or any(
        name == DEFAULT or (_is_drafter(name) and uses_model_heads(name)) for name in names
    )


def _expanded(
    names: Iterable[str], model: MedusaModel, drafters: DrafterFactory, files: Iterable[str]
) -> list[str]:
    """``names``, each once, with :data:`LLAMA_CPP` (``files``) and :data:`ALL_DRAFTERS` expanded."""
    available = drafters.available()
    available += ["heads+suffix"] if HEADS in available else []
    available += [DEFAULT_DRAFTER] if model.heads is not None else []
    groups = {ALL_DRAFTERS: available, LLAMA_CPP: [*files] or [LLAMA_CPP]}
    return list(dict.fromkeys(each for name in names for each in groups.get(name, [name])))


# ------------------------------------------------------------------ our own


def _ours(
    name: str, rule: str, model: MedusaModel, drafters: DrafterFactory, is_greedy: bool
) -> System | str:
    """Our ``generate`` with a drafter under ``rule``, or with the heads in the tree of the batch size.

    Or the reason against the pair: drafts would be biased, or it equals another system.
    """
    only_chain = False
    if rule not in (EXACT, TYPICAL):
        if is_greedy:
            return "at temperature 0 it is the exact rule"
        if not _is_drafter(name):
            return "rules for sampled drafts are for drafters that are named"
        required = rule_named(rule)
        only_chain = required.only_chains
        drafter = drafters.make(name, only_chain=only_chain)
        try:
            kind = drafter.sampled_kind(required.draft_kinds[0])
            required.require(kind, drafter.context_only)
        except ValueError as reason:
            return str(reason)

    def answer(input_ids: Tensor, **call: Any) -> Any:
        choice: dict[str, Any] = {}
        if name == PLAIN:
            choice["tree"] = CandidateTree.chain(0)
        elif name == HEADS and rule in (EXACT, TYPICAL):
            choice["tree"] = model.tree_for(len(input_ids))
        elif name != DEFAULT:
            choice["drafter"] = drafters.make(name, num_rows=len(input_ids), only_chain=only_chain)
        return model.generate(input_ids=input_ids, acceptance=rule, **choice, **call)

    return System(pair_name(name, rule), answer)


def heads_drafter(model: MedusaModel, heads: Heads, tree: CandidateTree) -> Drafter:
    """Other heads on the model's base in ``tree``, computed as the engine computes the model's own."""
    return drafter_of_heads(optimized_heads(heads, lm_head(model.engine_base)), model.engine_base, tree)


def heads_without_adapter(source: str) -> HeadsCheckpoint:
    """The heads called ``source``.

    Raises:
        ValueError: they came with an adapter: its base gives other answers.
    """
    checkpoint = load_heads(source)
    if checkpoint.adapter is not None:
        raise ValueError(
            f"{source} was trained with an adapter, whose base gives other answers, so it cannot be compared "
            "on these; use `medusa evaluate` for each"
        )
    return checkpoint


def other_heads(name: str, model: MedusaModel) -> System:
    """The heads of ``LABEL=HEADS`` in the tree that they come with.

    Raises:
        ValueError: they do not fit the base, or have an adapter.
    """
    label, _, source = name.partition("=")
    checkpoint = heads_without_adapter(source)
    check_heads_fit(checkpoint.heads, model.base)
    tree = checkpoint.tree or CandidateTree.chain(checkpoint.heads.num_heads)
    drafter = heads_drafter(model, checkpoint.heads, tree)
    return System(label, lambda **call: model.generate(drafter=drafter, **call))


# ------------------------------------------------------------------ foreign systems


def _theirs(name: str, model: MedusaModel, settings: DrafterSettings) -> System | str:
    """A mode of ``transformers``, on the base as it was loaded; or the reason why it cannot run here."""
    base = model.base
    options = dict[str, Any]()
    if packed_as(base) is not None:
        return (
            "the base is held in its own bits, and transformers would widen it to four bytes a weight; to "
            "measure all systems on that, name it: --systems transformers"
        )
    if name == STATIC:
        if not getattr(base, "_can_compile_fullgraph", True):
            return f"transformers cannot compile {type(base).__name__}"
        options["cache_implementation"] = "static"
        if base.device.type == "cpu":  # elsewhere `generate` compiles by itself
            if not any(map(shutil.which, CPU_COMPILERS)):
                known = ", ".join(CPU_COMPILERS)
                return (
                    f"torch.compile needs a C++ compiler on a CPU ({known}), none is installed "
                    f"({INSTALL_COMPILER})"
                )
            if not hasattr(CompileConfig, "_compile_all_devices"):
                return "this transformers compiles on graphics cards only"
            options["compile_config"] = CompileConfig()
            options["compile_config"]._compile_all_devices = True
    elif name == LOOKUP:
        options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
    elif name == ASSISTED:
        draft_model = settings.draft_model
        if draft_model is None:
            return "it needs a smaller model; give --draft-model"
        if not isinstance(draft_model, PreTrainedModel):
            draft_model = load_base(str(draft_model), "eager", base.device, base.dtype)
        options["assistant_model"] = draft_model
    return System(name, lambda **call: base.generate(**call, **options), is_compiled=name == STATIC)


def llama_cpp_files(model: MedusaModel, paths: Sequence[Path] | None) -> dict[str, Path]:
    """System -> its GGUF file: those of ``paths``, else the base itself or the files in its directory.

    A system is named after the end of its file's name: ``llama.cpp-q8_0`` is MODEL-q8_0.gguf.

    Raises:
        ValueError: two would have one name.
    """
    base = Path(model.base.name_or_path)
    own = [base] if begins_as_gguf(base) else sorted(base.glob("*.gguf"))
    files: dict[str, Path] = {}
    for path in own if paths is None else paths:
        name = f"{LLAMA_CPP}-{re.split('[.-]', path.stem)[-1].lower()}"
        if name in files:
            raise ValueError(
                f"llama_cpp names {files[name]} and {path}, both {name}; rename one, or leave it out"
            )
        files[name] = path
    return files


def _by_llama_cpp(name: str, model: MedusaModel, files: Mapping[str, Path]) -> System | str:
    """llama.cpp with the file that is called so; or why it cannot take part."""
    if name not in files:
        known = f"; there are {', '.join(files)}" if files else ""
        return f"it needs a GGUF file of the base; give one with --llama-cpp{known}"
    if not model.profile.is_on_cpu:
        return f"it runs on the CPU here, and the base is on {model.device.type}"
    lacks = llama_cpp_unsupported_reason()
    if lacks is not None:
        return lacks
    return System(name, answered_by(LlamaCpp(files[name], vocab_size(model.base)), end_ids(model.base)))


# ------------------------------------------------------------------ all together


def make_systems(
    names: Iterable[str],
    model: MedusaModel,
    settings: DrafterSettings,
    gguf_files: Sequence[Path] | None = None,
    rules: Sequence[str] = (EXACT,),
    is_greedy: bool = True,
) -> tuple[dict[str, System], dict[str, str]]:
    """The systems by name, our own under each of ``rules``, and the reasons of systems that cannot run here.

    ``gguf_files`` are for :func:`llama_cpp_files`.

    Raises:
        ValueError: a name is unknown or given twice, one of our own drafters lacks something, heads do not
            fit, or a GGUF file is not one of this base.
    """
    files = llama_cpp_files(model, gguf_files)
    drafters = DrafterFactory(model, settings)
    names = _expanded(names, model, drafters, files)
    for name in filter(_is_drafter, names):
        drafters.make(name)  # refused, if at all, before anything is measured
    entries: list[tuple[str, System | str]] = []
    for name in names:
        if name in THEIRS:
            entries.append((name, _theirs(name, model, settings)))
        elif _is_llama_cpp(name):
            entries.append((name, _by_llama_cpp(name, model, files)))
        elif "=" in name:
            other = other_heads(name, model)
            entries.append((other.name, other))
        else:
            for rule in (EXACT,) if name == PLAIN else dict.fromkeys(rules):
                entries.append((pair_name(name, rule), _ours(name, rule, model, drafters, is_greedy)))
    if len(dict(entries)) < len(entries):
        raise ValueError(f"systems must have names of their own, got {[name for name, _ in entries]}")
    systems = {name: each for name, each in entries if isinstance(each, System)}
    return systems, {name: reason for name, reason in entries if isinstance(reason, str)}
