"""``base.generate(..., custom_generate="user/repo", trust_remote_code=True)``: heads inside ``transformers``.

``transformers`` fetches the file ``custom_generate/generate.py`` of a repository or directory and calls its
``generate`` with everything that the caller passed. Ours is :data:`GENERATE_FILE`: it hands over to
:func:`custom_generate` here, which decodes as :meth:`medusa.MedusaModel.generate` does. So streamers, stop
strings and batches work as they do there, and so do ``seed``, ``drafter`` and that method's other arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from medusa.base.causal_lm import CausalLM
from medusa.decoding.statistics import MedusaOutput
from medusa.heads.checkpoint import HeadsCheckpoint, heads_directory, load_heads
from medusa.hub import HUB_ARGUMENTS
from medusa.model import MedusaModel

FOLDER = "custom_generate"
GENERATE_FILE = '''\
"""Decode with the Medusa heads of this repository: several tokens a forward pass, the same text.

    base.generate(**inputs, custom_generate="THIS REPOSITORY", trust_remote_code=True)

All code is in the package medusa-heads; this file hands over to it.
"""

try:
    from medusa import custom_generate as generate
except ImportError as error:
    raise ImportError(
        "these heads need the package medusa-heads, which is not on PyPI: pip install . in a checkout of it. "
        "The package medusa-llm has a module of the same name; both cannot be in one environment"
    ) from error
'''
REQUIREMENTS_FILE = "medusa-heads\n"
"""Without a version: heads that an installed version is too old for say so themselves."""

_LOADED: WeakKeyDictionary[CausalLM, dict[tuple[str, int], HeadsCheckpoint]] = WeakKeyDictionary()
"""Heads by the base that they were used with: a second call reads no files. They go when the base goes.

A ``MedusaModel`` would keep its base in memory, so each call makes one. It takes as long as one token of
SmolLM2-135M (25 ms on one core). Its steps are general unless the call says otherwise: what one call
captures, the next could not use."""


def custom_generate(
    model: CausalLM,
    inputs: Tensor | None = None,
    *,
    heads: str | Path | None = None,
    revision: str | None = None,
    **arguments: Any,
) -> Tensor | MedusaOutput:
    """The result of ``model.generate``, with the heads of the repository that ``custom_generate`` names.

    Args:
        model: the base, as the caller loaded it; its layers run as they are (``engine="eager"``).
        heads: a heads directory or hub id, instead of that repository.
        revision: of the repository, as given to ``model.generate``.
        arguments: as for :meth:`medusa.MedusaModel.generate`; ``token``, ``cache_dir`` and
            ``local_files_only`` as for ``from_pretrained``.

    Raises:
        FileNotFoundError: there are no heads.
        ValueError: they belong to another base, or to one that carries an adapter; or as ``generate`` raises.
    """
    source = str(heads or _named_by_caller(revision))
    hub = {key: arguments.pop(key) for key in HUB_ARGUMENTS if key in arguments}
    directory = heads_directory(source, **hub)
    stamp = (str(directory.resolve()), (directory / "model.safetensors").stat().st_mtime_ns)
    loaded = _LOADED.setdefault(model, {})
    if stamp not in loaded:
        loaded[stamp] = load_heads(directory)
    medusa_model = MedusaModel.from_pretrained(model, loaded[stamp], engine="eager", step="general")
    return medusa_model.generate(inputs, **arguments)


def _named_by_caller(revision: str | None) -> str:
    """The ``custom_generate`` of the ``transformers`` call two frames up.

    A repository's file is copied before it runs and does not know its origin; the method that calls it does.
    """
    named = sys._getframe(2).f_locals.get("custom_generate")
    if not isinstance(named, str):
        raise ValueError(
            "custom_generate was called by something else than transformers' generate, so there is no saying "
            "which heads are meant; name them: heads=DIRECTORY"
        )
    return f"{named}@{revision}" if revision and not Path(named).is_dir() else named
