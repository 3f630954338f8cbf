"""Storing hidden states by all processes of a launch, each its own shards; and a base without its layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from medusa.base import loading
from medusa.base.architecture_check import check_decodable
from medusa.base.causal_lm import CausalLM
from medusa.files import locked
from medusa.progress import ProgressReporter
from medusa.training.config.configuration import TrainingConfiguration
from medusa.training.config.options import BaseOptions, ConfigurationError
from medusa.training.data.documents import Documents
from medusa.training.run.processes import on_main_process
from medusa.training.states.live import LiveStates
from medusa.training.states.stored_states import StateFile


def stored_states(
    configuration: TrainingConfiguration,
    accelerator: Accelerator,
    base: CausalLM,
    load: Callable[[], LiveStates],
    documents: Documents,
    name: str,
    console: Console,
) -> StateFile:
    """The states of ``documents`` that the configured heads read, stored under ``name`` by all processes.

    Of ``base`` its embeddings and configuration are enough; ``load`` gives what computes states, and is
    called only by processes that have shards to write, or by all where they share the base.

    Raises:
        BlockingIOError: another run has stored states there for too long.
        ConfigurationError, OSError: see :class:`medusa.training.states.stored_states.StateFile`.
    """
    options, run = configuration.optimisation, configuration.run
    config = configuration.heads_config(base)
    num_heads, layers = configuration.heads.num_heads, config.fused_layers
    directory = Path(run.states_dir or Path(run.output_dir) / "states") / name
    with accelerator.autocast():
        states = StateFile(
            directory, base, documents, num_heads, options.cache_dtype, layers, configuration.reads_text
        )
    with (
        ProgressReporter("hidden states", console, accelerator.is_main_process) as line,
        ExitStack() as stack,
    ):

        def begin() -> list[int]:
            """Other runs may share the states: they wait, and find what was stored meanwhile."""
            seconds = 30 * run.timeout_minutes  # the other processes wait too, twice as long
            stack.enter_context(locked(directory.parent, seconds, line.say))
            return states.begin(run.overwrite, line)

        missing = on_main_process(accelerator, begin)
        if run.stop_after == "plan":
            return states
        mine = missing[accelerator.process_index :: accelerator.num_processes]
        if mine or (missing and configuration.base.is_shared):
            with accelerator.autocast():
                states.compute(mine, load(), configuration.data, line)
        accelerator.wait_for_everyone()
    present = [shard for shard in range(len(states.ends)) if shard not in missing]
    states.check(present[accelerator.process_index :: accelerator.num_processes])
    accelerator.wait_for_everyone()
    states.begin_reading()
    return states


def load_without_layers(options: BaseOptions, device: torch.device) -> CausalLM:
    """The base with its embeddings, its final norm and no decoder layer: what training from stored states
    reads. Nothing else of its files is read.

    Raises:
        FileNotFoundError: there is no such model.
        ConfigurationError: the architecture cannot be built so.
    """
    name, source = loading.found(options.base, {"trust_remote_code": options.trust_remote_code})
    config = AutoConfig.from_pretrained(name, **source)
    text = config.get_text_config(decoder=True)
    count, whole = text.num_hidden_layers, copy.deepcopy(text.__dict__)
    for key, value in whole.items():
        if isinstance(value, list | tuple) and len(value) == count:
            setattr(text, key, type(value)())
    text.num_hidden_layers = 0
    kwargs: dict[str, Any] = {} if options.attention is None else {"attn_implementation": options.attention}
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # the layers that are left out are no surprise
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=options.base_dtype,
            output_loading_info=True,
            **source,
            **kwargs,
        )
    except (ValueError, RuntimeError, IndexError, TypeError, ZeroDivisionError) as error:
        raise ConfigurationError(
            f"{options.base!r} cannot be loaded without its layers ({type(error).__name__}: {error}), which "
            "cache_hidden_states and base_placement need; leave them out"
        ) from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    base, info = loaded
    if info["missing_keys"]:
        raise ConfigurationError(
            f"{options.base!r} without its layers lacks {sorted(info['missing_keys'])}; leave "
            "cache_hidden_states and base_placement out"
        )
    base.config = copy.deepcopy(base.config)  # its modules keep theirs, which knows of no layers
    kept = base.config.get_text_config(decoder=True)
    for key, value in whole.items():  # the model is still called what it is
        if not key.startswith("_"):
            setattr(kept, key, value)
    check_decodable(base, attends_here=False)
    return base.to(device).requires_grad_(False).eval()
