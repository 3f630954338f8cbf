"""One run from its configuration to its result, in the order that loses nothing: the heads are on the disk
before the last measurements begin."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.console import Console

import medusa
from medusa.base.causal_lm import CausalLM
from medusa.console import ProgressReporter, log_console
from medusa.files import locked
from medusa.heads.adapter import peft_library
from medusa.training.config import RunOptions, TrainingConfiguration
from medusa.training.data.dataset import Dataset, read_dataset, trained_on
from medusa.training.data.loading import LEGEND, coloured, load_data, tokenised
from medusa.training.recipes.joint import JointRecipe
from medusa.training.recipes.recipe import AutoregressiveRecipe, MedusaRecipe
from medusa.training.run.metrics import calibrated_tree, draw_training, table
from medusa.training.run.processes import StopSignal, new_accelerator, on_main_process
from medusa.training.run.run_directory import RunDirectory
from medusa.training.run.trainer import Trainer
from medusa.training.states.base import (
    DocumentStates,
    OnlineHiddenStates,
    check_documents,
    check_packing,
    frozen_base,
    live_states,
    load_tokenizer,
)
from medusa.training.states.served import ServedHiddenStates
from medusa.training.states.stored import CachedHiddenStates, HiddenStateSource

RECIPES = {
    "medusa": MedusaRecipe,
    "eagle3": AutoregressiveRecipe,
    "mtp": AutoregressiveRecipe,
    "joint": JointRecipe,
}
"""Every kind of training by its name."""


def train(configuration: TrainingConfiguration) -> bool:
    """Train as ``configuration`` says, on every process of the launch. Whether this process is the one that
    speaks for all of them.

    Raises:
        ValueError, OSError, ImportError, FloatingPointError, MemoryError: the run cannot go on; the message
            says why, and what to do.
        SystemExit: SIGTERM came; the same command goes on with ``resume`` auto.
    """
    if configuration.run.inspect:
        _inspect(configuration)
        return True
    _check_libraries(configuration)
    accelerator = new_accelerator(configuration.optimisation, configuration.run)
    console = log_console()
    console.quiet = not accelerator.is_main_process
    with StopSignal(), locked_run(configuration, accelerator) as (run, is_finished):
        console.print(f"medusa {medusa.__version__} from {Path(medusa.__file__).parent}", soft_wrap=True)
        if is_finished:
            console.print(
                f"the run in {run.path} is finished, and {run.heads} stays as it is; a higher limit, such as "
                "--max_steps, goes on from its end",
                soft_wrap=True,
            )
            return bool(accelerator.is_main_process)
        _start_tracker(configuration, accelerator, run)
        trainer = build_trainer(configuration, accelerator, console)
        if trainer is not None:
            try:
                _finish(trainer, trainer.train())
            finally:
                trainer.close()
    return bool(accelerator.is_main_process)


def _check_libraries(configuration: TrainingConfiguration) -> None:
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
def locked_run(
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
        is_finished = run.is_finished(configuration)
        if is_finished:
            return is_finished
        for removed in run.start(configuration):
            log_console().print(f"removed {removed} of an earlier run", soft_wrap=True)
        return False

    with ExitStack() as stack:
        yield run, on_main_process(accelerator, claim)


def _start_tracker(configuration: TrainingConfiguration, accelerator: Accelerator, run: RunDirectory) -> None:
    """Start the tracker, which takes a resumed run for the one that it continues."""
    options: RunOptions = configuration.run
    if options.tracker == "none":
        return
    values = {
        key: value if isinstance(value, int | float | str) else str(value)  # as every tracker takes it
        for key, value in configuration.as_dict().items()
    }
    identity = on_main_process(accelerator, run.tracker_id)
    settings = {"wandb": {"dir": options.output_dir, "id": identity, "resume": "allow"}}
    accelerator.init_trackers(options.project, values, settings)


def build_trainer(
    configuration: TrainingConfiguration, accelerator: Accelerator, console: Console
) -> Trainer | None:
    """The trainer with its data, its base and its new heads, after printing a description; None where the run
    ends with its stored states."""
    options = configuration.base
    run = configuration.run
    directory = Path(run.documents_dir or RunDirectory(run.output_dir).documents)

    def tokenise() -> Path:
        return tokenised(configuration.data, load_tokenizer(options), directory, log_console().print)

    data = read_dataset(on_main_process(accelerator, tokenise))
    console.print(data.summary(), soft_wrap=True)
    load = functools.cache(lambda: live_states(options, accelerator.device, run.timeout_minutes))
    is_stored = configuration.optimisation.cache_hidden_states
    is_whole = options.base_placement == "each" and not is_stored
    base = load().base if is_whole else frozen_base(options, accelerator.device, layers=False)
    for documents in (data.training, data.held_out):
        check_documents(base, documents, options.base)
    compute: Callable[[], DocumentStates] = load
    if options.states_from:
        compute = functools.partial(_served, configuration, base, console)
    stored = stored_states(configuration, accelerator, base, compute, data, console) if is_stored else {}
    if run.stop_after is not None:
        console.print(f"stopped after {run.stop_after}; --resume auto goes on from there", soft_wrap=True)
        return None
    states = HiddenStateSource(base, OnlineHiddenStates(base) if is_stored else load(), stored)
    if not is_stored:
        check_packing(states.live, data.training, configuration.data)
    recipe = RECIPES[configuration.kind](configuration, states, data.training)
    console.print(recipe.describe(data.training), soft_wrap=True)
    console.print(
        f"on {options.base} in {base.dtype}, {configuration.optimisation.precision} products, "
        f"{accelerator.num_processes} x {accelerator.device.type}",
        soft_wrap=True,
    )
    return Trainer(recipe, accelerator, data, console)


def _served(configuration: TrainingConfiguration, base: CausalLM, console: Console) -> ServedHiddenStates:
    """The states that ``states_from`` has."""
    options = configuration.base
    return ServedHiddenStates(
        base,
        options.states_from,
        options.states_layers,
        deletes_read=options.delete_read_states,
        timeout_minutes=configuration.run.timeout_minutes,
        say=lambda text: console.print(text, soft_wrap=True),
    )


def stored_states(
    configuration: TrainingConfiguration,
    accelerator: Accelerator,
    base: CausalLM,
    load: Callable[[], DocumentStates],
    data: Dataset,
    console: Console,
) -> dict[str, CachedHiddenStates]:
    """The states of the "training" and the "held-out" documents that the configured heads read, stored by all
    processes, each its own shards.

    ``base`` needs only embeddings and configuration; ``load`` returns what computes states, and is called
    only by processes that have shards to write, or by all where they share the base. So the whole base is in
    memory only while states are missing.

    Raises:
        BlockingIOError: another run has stored states there for too long.
        ValueError, OSError: see :class:`medusa.training.states.stored.CachedHiddenStates`.
    """
    options = configuration.optimisation
    run = configuration.run
    stored = dict[str, CachedHiddenStates]()
    layers = configuration.heads_config(base).fused_layers
    rank = accelerator.process_index
    count = accelerator.num_processes
    directory = Path(run.states_dir or RunDirectory(run.output_dir).states)
    parts = {"training": trained_on(data.training, configuration.data), "held-out": data.held_out}
    for name, documents in parts.items():
        if not len(documents):
            continue
        with accelerator.autocast():
            states = CachedHiddenStates(
                directory / name,
                base,
                documents,
                configuration.heads.num_heads,
                options.cache_dtype,
                layers,
                configuration.heads_type.reads_features,
                "vLLM" if configuration.base.states_from else None,
            )
            stored[name] = states
        with (
            ProgressReporter("hidden states", console, accelerator.is_main_process) as line,
            ExitStack() as stack,
        ):

            def begin() -> list[int]:
                """Other runs may share the states: they wait, and reuse them."""
                seconds = 30 * run.timeout_minutes  # the other processes wait too, twice as long
                stack.enter_context(locked(directory, seconds, line.say))
                return states.open(run.overwrite, line)  # noqa: B023

            missing = on_main_process(accelerator, begin)
            present = [shard for shard in range(len(states.ends)) if shard not in missing]
            damaged = gather_object(states.damaged(present[rank::count]))
            on_main_process(accelerator, lambda: states.remove(damaged, line))  # noqa: B023
            missing = sorted({*missing, *dict(damaged)})
            mine = missing[rank::count]
            if mine or (missing and configuration.base.is_shared):
                with accelerator.autocast():
                    states.compute(mine, load(), configuration.data, line)
            accelerator.wait_for_everyone()
            states.check([shard for shard in dict(damaged) if shard % count == rank])
            accelerator.wait_for_everyone()
    return stored


def _finish(trainer: Trainer, measured: dict[str, float]) -> None:
    """Give the heads, which are written, their tree and their metrics, and say what came out."""
    console = trainer.console
    run = trainer.run
    recipe = trainer.recipe
    tree = None
    states = trainer.held_out_states()
    heads = trainer.gathered_heads()
    if heads is not None:
        num_nodes = trainer.configuration.run.tree_nodes
        held_out = trainer.data.held_out
        tree = calibrated_tree(trainer.base, heads, held_out, num_nodes, states)
    trainer.save(run.heads, heads, measured, tree, is_finished=True)
    console.print(table("held_out", measured))
    report = recipe.closing_report(measured)
    if report is not None:
        console.print(report, soft_wrap=True)
    console.print(f"{recipe.result} written to {run.heads}", soft_wrap=True)
    if trainer.accelerator.is_main_process and draw_training(run.logged_metrics(), run.picture):
        console.print(f"picture: {run.picture}", soft_wrap=True)


def _inspect(configuration: TrainingConfiguration) -> None:
    """Show what became of the data, and some documents with the tokens trained on in colour."""
    tokenizer = load_tokenizer(configuration.base)
    console = log_console()
    data = load_data(configuration.data, tokenizer)
    for document in map(data.training.__getitem__, data.training.spread(3)):
        console.rule(f"{len(document.tokens)} tokens")
        console.print(coloured(document, tokenizer))
    console.rule()
    console.print(LEGEND)
    console.print(data.summary())
