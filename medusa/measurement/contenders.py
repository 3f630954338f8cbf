"""Who answers in a benchmark: the ways in which ``transformers`` generates, llama.cpp, and our own.

A contender of others that cannot run here (no compiler, a mode that takes one row only) is left out with its
reason; one of ours that fails is an error.
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

from medusa.base.causal_lm import CausalLM, end_ids, vocab_size
from medusa.base.loading import load_base
from medusa.drafters.registry import (
    DrafterSettings,
    draft_sources,
    draft_with_heads,
    part_names,
    source_named,
)
from medusa.measurement.llama_cpp import LlamaCpp, answered_by, missing_llama_cpp
from medusa.model import MedusaModel
from medusa.trees.candidate_tree import CandidateTree

TRANSFORMERS, STATIC, LOOKUP, ASSISTED = (
    "transformers",
    "transformers-static",
    "prompt-lookup",
    "assisted",
)
THEIRS = (TRANSFORMERS, STATIC, LOOKUP, ASSISTED)
LLAMA_CPP = "llama.cpp"
"""Every GGUF file of the base; with a dash and what one of them is called after, only that file."""
PLAIN, HEADS, DEFAULT = "plain", "heads", "default"
"""The heads in their tuned tree; "default" is ``generate`` with neither a tree nor a drafter named."""
LOOKUP_TOKENS = 10
"""What the documentation of ``transformers`` shows for prompt_lookup_num_tokens."""
COMPILERS = ("g++", "clang++", "c++", "cl")
WORKS_ON_ONE_ROW = (LOOKUP, ASSISTED)

Answer = Callable[..., Any]
"""``answer(**inputs, **arguments)`` as for ``generate``; the result has ``sequences``."""


@dataclass(frozen=True)
class Contender:
    """One way to answer."""

    name: str
    answer: Answer
    is_compiled: bool = False
    """Whether the first call of a shape compiles, so that warming up takes full answers."""

    @property
    def is_ours(self) -> bool:
        return is_ours(self.name)

    def refusal(self, num_rows: int) -> str | None:
        """Why it cannot answer ``num_rows`` rows at once; None when it can."""
        if num_rows > 1 and self.name in WORKS_ON_ONE_ROW:
            return "transformers offers it for one row at a time"
        if num_rows > 1 and is_llama_cpp(self.name):
            return "llama.cpp is compared on one row at a time"
        return None


def is_llama_cpp(name: str) -> bool:
    """Whether llama.cpp answers under this name."""
    return name == LLAMA_CPP or name.startswith(f"{LLAMA_CPP}-")


def is_ours(name: str) -> bool:
    """Whether it is a drafter of ours, or plain decoding."""
    return name not in THEIRS and not is_llama_cpp(name)


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError when a name is no contender's, nor a drafter's, nor a union of drafters."""
    for name in names:
        if is_ours(name) and name != DEFAULT:
            try:
                part_names(name)
            except ValueError as error:
                others = ", ".join((*THEIRS, LLAMA_CPP, DEFAULT))
                raise ValueError(f"contender {name!r} is not one of {others}, and {error}") from error


def default_names(model: MedusaModel) -> list[str]:
    """Those that a user would ask about: the others, plain decoding, the heads, our default.

    On a processor the compiled one takes a minute or more to compile a small model, so it must be named.
    """
    theirs = [name for name in THEIRS if name != STATIC or model.device.type != "cpu"]
    return [*theirs, LLAMA_CPP, PLAIN, *([HEADS, DEFAULT] if model.heads is not None else [])]


def needs_heads(names: Iterable[str] | None) -> bool:
    """Whether to load heads for these contenders; by default they take part."""
    return names is None or any(
        name == DEFAULT or (is_ours(name) and draft_with_heads(name)) for name in names
    )


def missing(name: str, model: MedusaModel, settings: DrafterSettings) -> str | None:
    """Why a contender of ``transformers`` cannot run with this model on this machine; None when it can."""
    if name == ASSISTED and settings.draft_model is None:
        return "it needs a smaller model; give --draft-model"
    if name == STATIC:
        if model.device.type == "cpu" and not any(map(shutil.which, COMPILERS)):
            return f"torch.compile needs a C++ compiler on a CPU ({', '.join(COMPILERS)}), none is installed"
        if model.device.type == "cpu" and not hasattr(CompileConfig, "_compile_all_devices"):
            return "this transformers compiles on graphics cards only"
        if not getattr(model.base, "_can_compile_fullgraph", True):
            return f"transformers cannot compile {type(model.base).__name__}"
    return None


def llama_cpp_files(model: MedusaModel, given: Sequence[Path] | None) -> dict[str, Path]:
    """Contender -> its GGUF file: those given, else those in the base's directory.

    A contender is called after the end of its file's name: ``llama.cpp-q8_0`` is MODEL-q8_0.gguf.

    Raises:
        ValueError: two would have one name.
    """
    found = sorted(Path(model.base.name_or_path).glob("*.gguf")) if given is None else given
    files: dict[str, Path] = {}
    for path in found:
        name = f"{LLAMA_CPP}-{re.split('[.-]', path.stem)[-1].lower()}"
        if name in files:
            raise ValueError(
                f"llama_cpp names {files[name]} and {path}, both {name}; rename one, or leave it out"
            )
        files[name] = path
    return files


def missing_for_llama_cpp(name: str, model: MedusaModel, files: Mapping[str, Path]) -> str | None:
    """Why llama.cpp cannot take part under ``name``; None when it can."""
    if name not in files:
        known = f"; there are {', '.join(files)}" if files else ""
        return f"it needs a GGUF file of the base; give one with --llama-cpp{known}"
    if model.device.type != "cpu":
        return f"it runs on the CPU here, and the base is on {model.device.type}"
    return missing_llama_cpp()


def make_contenders(
    names: Iterable[str],
    model: MedusaModel,
    settings: DrafterSettings,
    seed: int,
    gguf_files: Sequence[Path] | None = None,
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The contenders by name, and the reasons of those that cannot run here.

    ``gguf_files`` are for :func:`llama_cpp_files`.

    Raises:
        ValueError: a name is unknown, one of our own drafters lacks something, or a GGUF file is not one of
            this base.
    """
    files = llama_cpp_files(model, gguf_files)
    names = list(
        dict.fromkeys(each for name in names for each in (files if name == LLAMA_CPP and files else [name]))
    )
    check_names(names)
    found = {
        name: missing_for_llama_cpp(name, model, files)
        if is_llama_cpp(name)
        else missing(name, model, settings)
        for name in names
    }
    skipped = {name: reason for name, reason in found.items() if reason is not None}
    parts = draft_sources([name for name in names if is_ours(name) and name != DEFAULT], model, settings)
    made = {}
    for name in names:
        if name in skipped:
            continue
        if name in THEIRS:
            made[name] = theirs(name, model, settings)
        elif name in files:
            made[name] = Contender(name, llama_cpp(files[name], model))
        elif name == PLAIN:
            made[name] = Contender(name, ours(model, seed, tree=CandidateTree.chain(0)))
        elif name == HEADS:
            made[name] = Contender(name, heads_alone(model, seed))
        elif name == DEFAULT:
            made[name] = Contender(name, ours(model, seed))
        else:
            source = source_named(name, parts)
            made[name] = Contender(name, drafted(model, seed, source))
    return made, skipped


def llama_cpp(path: Path, model: MedusaModel) -> Answer:
    """llama.cpp with the model in the GGUF file ``path``, ending where ``model`` does."""
    return answered_by(LlamaCpp(path, vocab_size(model.base)), end_ids(model.base))


def ours(model: MedusaModel, seed: int, **choice: Any) -> Answer:
    """Our ``generate``, with ``choice`` of its tree or drafter."""
    return lambda **call: model.generate(seed=seed, **choice, **call)


def heads_alone(model: MedusaModel, seed: int) -> Answer:
    """Our ``generate`` with the heads in the tree of the batch size."""

    def answer(input_ids: Tensor, **call: Any) -> Any:
        return model.generate(seed=seed, tree=model.tree_for(len(input_ids)), input_ids=input_ids, **call)

    return answer


def drafted(model: MedusaModel, seed: int, source: Any) -> Answer:
    """Our ``generate`` with another drafter than the model's own."""

    def answer(input_ids: Tensor, **call: Any) -> Any:
        drafter = source.drafter(num_rows=len(input_ids))
        return model.generate(seed=seed, drafter=drafter, input_ids=input_ids, **call)

    return answer


def theirs(name: str, model: MedusaModel, settings: DrafterSettings) -> Contender:
    """A contender of ``transformers``, on the base as it was loaded."""
    base = model.base
    if name == STATIC:
        options = {"cache_implementation": "static", **compiled_everywhere(base)}
        return Contender(name, lambda **call: base.generate(**call, **options), is_compiled=True)
    if name == LOOKUP:
        return Contender(name, lambda **call: base.generate(**call, prompt_lookup_num_tokens=LOOKUP_TOKENS))
    if name == ASSISTED:
        assistant = loaded_assistant(settings, base)
        return Contender(name, lambda **call: base.generate(**call, assistant_model=assistant))
    return Contender(name, lambda **call: base.generate(**call))


def compiled_everywhere(base: CausalLM) -> Mapping[str, Any]:
    """``generate`` compiles on graphics cards by itself; on a processor it must be told to."""
    if base.device.type != "cpu":
        return {}
    configuration = CompileConfig()
    configuration._compile_all_devices = True  # type: ignore[assignment]
    return {"compile_config": configuration}


def loaded_assistant(settings: DrafterSettings, base: CausalLM) -> CausalLM:
    """The smaller model, where and how the base is."""
    given = settings.draft_model
    if isinstance(given, PreTrainedModel):
        return given
    assistant: Any = load_base(str(given), dtype=base.dtype)
    return assistant.to(base.device)
