"""Finds the models of ``medusa serve --models``, and plans the memory of each before one is loaded."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import cast

import torch
from transformers.utils import CONFIG_NAME

from medusa.assets import DEFAULT_HEADS
from medusa.base.causal_lm import CausalLM
from medusa.base.gguf_file import GGUFFile, is_gguf
from medusa.base.loading import BaseSource, find_base, load_tokenizer
from medusa.base.profile import context_length
from medusa.base.text_part import empty_model
from medusa.cli.loading import chosen_device, learn_from_use, load_model
from medusa.cli.options import NO_HEADS, ModelOptions
from medusa.engine.weights.plan import SPARE_BYTES, held_bytes
from medusa.hardware import available_memory
from medusa.options import TemplateOptions
from medusa.serving.metrics import ServerMetrics
from medusa.serving.model_pool import ModelPool, ServedModel
from medusa.serving.service import Service
from medusa.serving.settings import PoolOptions, ServiceOptions
from medusa.serving.tokenized_model import TokenizedModel

log = logging.getLogger("medusa.serving")

CPU = torch.device("cpu")
MIB = 2**20
IDLE_MINUTES = 15.0
"""How long a model stays where nobody says."""
FREE_SHARE = 7 / 8
"""The part of the free memory that models may take where nobody says: the server and others take the rest."""
CACHE_SHARE = 1 / 8
"""The part of the memory of all models that is one model's, for the keys and values of running answers, where
nobody says."""
PREFIX_SHARE = 1 / 32
"""The same for texts that have ended."""
LEAST_CACHE_MIB = 64
"""A model that leaves less for both has no room."""
UNKNOWN_MEMORY_MIB = 4096
"""Free memory where the system does not report it."""


@dataclass(frozen=True)
class ServingPlan:
    """What the models of one server have in common."""

    model: ModelOptions
    template: TemplateOptions
    service: ServiceOptions
    num_owners: int
    budget_mib: int
    device: torch.device

    def planned(self, source: BaseSource) -> tuple[ServiceOptions, int]:
        """The options of the service of ``source``, with the sizes of its caches; and the bytes that it takes
        in all. Where the model leaves less for caches than they may take, they are smaller."""
        options = self.service
        num_bytes = held_bytes(source, self.model.engine) if self.device == CPU else _stored_bytes(source)
        fixed_mib = math.ceil(num_bytes / MIB) + SPARE_BYTES // MIB + options.suffix_cache_mib
        if options.learn:
            fixed_mib *= 2  # the process that learns loads the base too
        num_caches = 2 if options.allow_plain else 1  # plain answers have one of their own
        wanted = options.cache_mib or max(1, round(self.budget_mib * CACHE_SHARE))
        kept = round(self.budget_mib * PREFIX_SHARE) if options.prefix_mib is None else options.prefix_mib
        left = max(LEAST_CACHE_MIB, self.budget_mib - fixed_mib)
        share = min(1.0, left / (num_caches * wanted + kept))
        cache_mib = wanted if options.cache_mib else max(1, int(wanted * share))
        prefix_mib = kept if options.prefix_mib is not None else int(kept * share)
        sized = replace(options, cache_mib=cache_mib, prefix_mib=prefix_mib)
        return sized, MIB * (fixed_mib + num_caches * cache_mib + prefix_mib)

    def load(self, name: str, base: str, options: ServiceOptions, metrics: ServerMetrics) -> Service:
        """The service of ``base``, which clients call ``name``."""
        of_base = replace(self.model, base=base)
        model = load_model(of_base, template=self.template)
        if options.learn:
            learn_from_use(model, of_base, options.plain)
        named = replace(options, served_model_name=(name,))
        return Service(model, named, self.template.template_kwargs, self.num_owners, metrics)


def model_pool(
    options: PoolOptions,
    model: ModelOptions,
    template: TemplateOptions,
    service: ServiceOptions,
    num_owners: int,
) -> ModelPool:
    """The pool of ``options.models``; none of them is loaded.

    Raises:
        FileNotFoundError: there is no such model, or none in a directory.
        ValueError: one cannot be a base, or two have one name, or options do not go together.
    """
    _check_goes_together(model, service)
    device = chosen_device(model.device)
    budget_mib = options.memory_mib
    if budget_mib is None:
        budget_mib = int((available_memory(device) or UNKNOWN_MEMORY_MIB * MIB) * FREE_SHARE) // MIB
    plan = ServingPlan(model, template, service, num_owners, budget_mib, device)
    served = [served_model for text in options.models for served_model in _served_of(plan, text)]
    minutes = IDLE_MINUTES if options.idle_minutes is None else options.idle_minutes
    return ModelPool(served, service, MIB * budget_mib, 60 * minutes)


def _check_goes_together(model: ModelOptions, service: ServiceOptions) -> None:
    """Refuse options that are about one model."""
    for name, value, default in (
        ("base", model.base, None),
        ("tokenizer", model.tokenizer, None),
        ("served_model_name", service.served_model_name, ()),
    ):
        if value != default:
            raise ValueError(
                f"{name} is for one model, and models serves several, got {name}={value!r}; leave one of "
                "them out. --models NAME=BASE gives a name"
            )
    if model.heads not in (DEFAULT_HEADS, NO_HEADS):
        raise ValueError(
            f"heads must be default or none with models, since each base has its own, got {model.heads!r}; "
            "leave it out"
        )


def _served_of(plan: ServingPlan, text: str) -> Iterator[ServedModel]:
    """The models that ``text`` of ``--models`` means: of a directory all that can be a base.

    Raises:
        FileNotFoundError: there is no such model, or none in the directory.
        ValueError: what is named cannot be a base.
    """
    name, is_named, base = text.partition("=")
    if is_named and not Path(text).exists():
        if not name or not base:
            raise ValueError(f"models must be bases, or NAME=BASE, got {text!r}; give both a name and a base")
        yield _served(plan, name, base)
        return
    directory = Path(text)
    if not directory.is_dir() or (directory / CONFIG_NAME).exists():
        yield _served(plan, None, text)
        return
    num_served = 0
    for path in _bases_in(directory):
        try:
            yield _served(plan, None, str(path))
            num_served += 1
        except (OSError, ValueError) as error:
            log.warning("%s is left out: %s", path.name, error)
    if not num_served:
        raise FileNotFoundError(
            f"models must be bases, or directories with some, got {text!r}, in which there is no GGUF file "
            f"and no directory with {CONFIG_NAME} that can be one; name another"
        )


def _bases_in(directory: Path) -> Iterator[Path]:
    """The GGUF files of ``directory``, of a model in several parts the first, and the directories with a
    model; what reads images beside a model (mmproj) is none."""
    files = [path for path in directory.iterdir() if is_gguf(path) and "mmproj" not in path.name.lower()]
    firsts = {path for path in files if GGUFFile.first_part(path) == path}
    models = {path.parent for path in directory.glob(f"*/{CONFIG_NAME}")}
    yield from sorted(firsts | models)


def _served(plan: ServingPlan, name: str | None, base: str) -> ServedModel:
    """The model at ``base``, which clients call ``name``, else by its file's or directory's name."""
    source = find_base(base, trust_remote_code=plan.model.trust_remote_code)
    options, num_bytes = plan.planned(source)
    known = model_names(base, source.name)
    official = name or (PurePath(base).stem if is_gguf(base) else known[0])
    file = source.gguf
    return ServedModel(
        (official,),
        str(source.name if file is None else file.path),
        source.config.model_type,
        context_length(cast(CausalLM, source)),  # which reads the configuration alone
        num_bytes,
        known,
        partial(plan.load, official, base, options),
        lambda: TokenizedModel(load_tokenizer(source), source.vocab_size or 0),
    )


def model_names(base: str | None, path: str) -> tuple[str, ...]:
    """Names by which clients may call the model, the official one first: the last part of ``base``, ``base``
    as it was typed, and the name of the file or directory at ``path`` that is loaded for it, also without
    the ending ".gguf"."""
    of_path = PurePath(path or "model")
    names = [] if base is None else [PurePath(base).name, base]
    names.append(of_path.name)
    if of_path.suffix == ".gguf":
        names.append(of_path.stem)
    return tuple(dict.fromkeys(names))


def _stored_bytes(source: BaseSource) -> int:
    """Memory that the weights of ``source`` take on a card, about: two bytes each."""
    model = empty_model(source.config, bool(source.arguments.get("trust_remote_code")))
    return sum(2 * weight.numel() for weight in model.parameters())
