"""One run from its configuration to its result, in the order that loses nothing: the heads are on the disk
before the last measurements begin."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console

import medusa
from medusa.base.causal_lm import CausalLM
from medusa.files import locked
from medusa.heads.adapter import peft_library
from medusa.progress import log_console
from medusa.training.config.configuration import TrainingConfiguration
from medusa.training.config.options import RunOptions
from medusa.training.data import loading
from medusa.training.data.documents import trained_on
from medusa.training.data.tokenised import read_set
from medusa.training.recipes.registry import new_recipe
from medusa.training.run import metrics, processes, result
from medusa.training.run.base import load_base, load_live, load_tokenizer
from medusa.training.run.curve import draw_training
from medusa.training.run.fitness import check_documents, check_packing
from medusa.training.run.run_directory import RunDirectory
from medusa.training.run.storing import load_without_layers, stored_states
from medusa.training.run.trainer import Trainer
from medusa.training.states.live import LiveStates
from medusa.training.states.stored_states import StateFile


def train(configuration: TrainingConfiguration) -> bool:
    """Train as ``configuration`` says, on every process of the launch. Whether this process is the one that
    speaks for all of them.

    Raises:
        ValueError, OSError, ImportError, FloatingPointError, MemoryError: the run cannot go on; the message
            says why, and what to do.
        SystemExit: SIGTERM came; the same command goes on with ``resume`` auto.
    """
    if configuration.run.inspect:
        inspect(configuration)
        return True
    check_libraries(configuration)
    accelerator = processes.new_accelerator(configuration.optimisation, configuration.run)
    console = log_console()
    console.quiet = not accelerator.is_main_process
    with processes.StopSignal(), claimed(configuration, accelerator) as (run, is_finished):
        console.print(f"medusa {medusa.__version__} from {Path(medusa.__file__).parent}", soft_wrap=True)
        if is_finished:
            console.print(
                f"the run in {run.path} is finished, and {run.heads} stays as it is; a higher limit, such as "
                "--max_steps, goes on from its end",
                soft_wrap=True,
            )
            return bool(accelerator.is_main_process)
        start_tracker(configuration, accelerator, run)
        trainer = prepared(configuration, accelerator, console)
        if trainer is not None:
            try:
                finish(trainer, trainer.train())
            finally:
                trainer.close()
    return bool(accelerator.is_main_process)


def check_libraries(configuration: TrainingConfiguration) -> None:
    """Raise ImportError when a library that the run needs is missing, before any work."""
    if configuration.joint.joint:
        peft_library()
    tracker = configuration.run.tracker
    if tracker != "none" and importlib.util.find_spec(tracker) is None:
        raise ImportError(
            f"tracker={tracker} needs {tracker}, which is not installed: pip install {tracker}, or leave "
            "tracker out; metrics.jsonl has the same values"
        )


@contextmanager
def claimed(
    configuration: TrainingConfiguration, accelerator: Accelerator
) -> Iterator[tuple[RunDirectory, bool]]:
    """The output directory, checked and locked by the main process for all of them, and whether the run in it
    is finished; else it is begun.

    Raises:
        OSError, ValueError: it holds something else, or another process works in it.
    """
    run = RunDirectory(configuration.run.output_dir)

    def claim() -> bool:
        run.check(configuration)
        stack.enter_context(locked(run.path))
        run.check(configuration)  # another run may have ended meanwhile
        if is_finished := run.is_finished(configuration):
            return is_finished
        for removed in run.begin(configuration):
            log_console().print(f"removed {removed} of an earlier run", soft_wrap=True)
        return False

    with ExitStack() as stack:
        yield run, processes.on_main_process(accelerator, claim)


def start_tracker(configuration: TrainingConfiguration, accelerator: Accelerator, run: RunDirectory) -> None:
    """Start the tracker, which takes a resumed run for the one that it continues."""
    options: RunOptions = configuration.run
    if options.tracker == "none":
        return
    values = {key: _plain(value) for key, value in configuration.as_dict().items()}
    identity = processes.on_main_process(accelerator, run.tracker_id)
    settings = {"wandb": {"dir": options.output_dir, "id": identity, "resume": "allow"}}
    accelerator.init_trackers(options.project, values, settings)


def _plain(value: Any) -> int | float | str | bool:
    """``value`` as every tracker takes it."""
    return value if isinstance(value, int | float | str | bool) else str(value)


def prepared(
    configuration: TrainingConfiguration, accelerator: Accelerator, console: Console
) -> Trainer | None:
    """The trainer with its data, its base and its new heads, which it says what they are; None where the run
    ends with its stored states."""
    directory = Path(configuration.run.documents_dir or RunDirectory(configuration.run.output_dir).documents)
    data = loading.TrainingData(
        *read_set(
            processes.on_main_process(
                accelerator,
                lambda: loading.tokenised(configuration.data, load_tokenizer(configuration.base), directory),
            )
        )
    )
    console.print(", ".join(f"{count:,} {name}" for name, count in data.counts.items()), soft_wrap=True)
    options, is_stored = configuration.base, configuration.optimisation.cache_hidden_states
    is_whole = options.base_placement == "each" and not is_stored
    base = (load_base if is_whole else load_without_layers)(options, accelerator.device)
    for documents in (data.training, data.held_out):
        check_documents(base, documents, options.base)
    stored, live = dict[str, StateFile](), LiveStates(base)
    if is_stored:
        stored = all_stored(configuration, accelerator, base, data, console)
    elif not is_whole:
        live = load_live(options, accelerator.device, configuration.run.timeout_minutes)
    if (stop_after := configuration.run.stop_after) is not None:
        console.print(f"stopped after {stop_after}; --resume auto goes on from there", soft_wrap=True)
        return None
    if not is_stored:
        check_packing(live, data.training, configuration.data)
    recipe = new_recipe(configuration, base, data.training, stored.get("training"), live)
    console.print(recipe.describe(data.training), soft_wrap=True)
    console.print(
        f"on {configuration.base.base} in {base.dtype}, {configuration.optimisation.precision} products, "
        f"{accelerator.num_processes} x {accelerator.device.type}",
        soft_wrap=True,
    )
    return Trainer(configuration, accelerator, recipe, data, console, stored)


def all_stored(
    configuration: TrainingConfiguration,
    accelerator: Accelerator,
    base: CausalLM,
    data: loading.TrainingData,
    console: Console,
) -> dict[str, StateFile]:
    """The stored states of the training and of the held-out documents.

    The whole base is in memory only while states are missing; ``base`` is all that training needs of it.
    """
    timeout = configuration.run.timeout_minutes
    load = functools.cache(lambda: load_live(configuration.base, accelerator.device, timeout))
    documents = {"training": trained_on(data.training, configuration.data), "held-out": data.held_out}
    return {
        name: stored_states(configuration, accelerator, base, load, each, name, console)
        for name, each in documents.items()
        if len(each)
    }


def finish(trainer: Trainer, measured: dict[str, float]) -> None:
    """Give the heads, which are written, their tree and their metrics, and say what came out."""
    console, run, recipe = trainer.console, trainer.run, trainer.recipe
    tree, states = None, trainer.held_out_states()
    if (heads := trainer.gathered_heads()) is not None:
        num_nodes, held_out = trainer.configuration.run.tree_nodes, trainer.data.held_out
        tree = result.calibrated_tree(trainer.base, heads, held_out, num_nodes, states)
    trainer.save(run.heads, measured, tree, is_finished=True)
    console.print(metrics.table("held_out", measured))
    if (report := recipe.closing_report(measured)) is not None:
        console.print(report, soft_wrap=True)
    console.print(f"{recipe.result} written to {run.heads}", soft_wrap=True)
    if trainer.accelerator.is_main_process and draw_training(run.logged_metrics(), run.picture):
        console.print(f"picture: {run.picture}", soft_wrap=True)


def inspect(configuration: TrainingConfiguration) -> None:
    """Show what became of the data, and some documents with the tokens trained on in colour."""
    tokenizer = load_tokenizer(configuration.base)
    data = loading.load_data(configuration.data, tokenizer)
    console = log_console()
    for document in map(data.training.__getitem__, data.training.spread(3)):
        console.rule(f"{len(document.tokens)} tokens")
        console.print(loading.coloured(document, tokenizer))
    console.rule()
    console.print(loading.legend())
    console.print(", ".join(f"{count:,} {name}" for name, count in data.counts.items()))
