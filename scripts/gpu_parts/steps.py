"""Part 2: what does a decode step cost, how much of it is overhead, and what does the host wait for?

In: the sizes of :class:`~gpu_parts.lab.StepOptions`; models of known shapes, random but for SmolLM2, with
random heads, since weights do not matter to time. Out, for each case, the times of a step, of its parts, or
of what the host does in it. Traces of the host's work lie in the part's folder.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any, NamedTuple

import torch
from rich.console import Console

from gpu_parts.lab import Lab
from medusa import DecodingStatistics, MedusaModel
from medusa.base.attention import GROUPED_ATTENTION
from medusa.base.causal_lm import CausalLM
from medusa.choices import Engine, StepKind
from medusa.cli.program import load_base_on
from medusa.decoding.static_loop import DEFAULT_HOST_SYNC_INTERVAL, rounded_slots
from medusa.measurement.host_waits import HostTraffic, host_waits
from medusa.measurement.parts import Case, Part, Results, Skipped, in_a_line
from medusa.measurement.steps import (
    endless,
    random_base,
    random_heads,
    random_prompts,
    step_parts,
    timed_steps,
    tree_of,
)
from medusa.tables import percent, print_table


class Setting(NamedTuple):
    """How steps run whose time is taken; its words are the name of the case."""

    shape: str
    engine: Engine
    step: StepKind
    attention: str
    batch_size: int
    context_length: int


def cases(lab: Lab) -> Iterator[Case]:
    options = lab.options.sizes
    uncompiled = [step for step in options.step if step != "compiled"]
    for shape in options.shapes:
        yield from timed(lab, shape, uncompiled, 0.4)
        yield Case(f"{shape}, parts of a step", functools.partial(parts_of, lab, shape), 0.5)
        for step in uncompiled:
            yield Case(
                f"{shape}, what the host waits for, {step}",
                functools.partial(waits_of, lab, shape, step),
                0.4,
            )
    for shape in options.shapes:
        yield from timed(lab, shape, [step for step in options.step if step == "compiled"], 3.0)


def timed(lab: Lab, shape: str, kinds: Sequence[StepKind], minutes: float) -> Iterator[Case]:
    """A case for every setting of a shape; another attention than the first only where it tells something."""
    options = lab.options.sizes
    for each in product(
        options.engines, kinds, options.attention, options.batch_sizes, options.context_lengths
    ):
        setting = Setting(shape, *each)
        is_first = setting.attention == options.attention[0]
        if is_first or (setting.step == "captured" and setting.engine == "eager"):
            measure = functools.partial(steps_of, lab, setting)
            yield Case(", ".join(map(str, setting)), measure, minutes)


# ------------------------------------------------------------------ models


def base_of(lab: Lab, shape: str) -> CausalLM:
    """The model of a shape, on the device; random but for SmolLM2, and never ending its answer."""
    dtype = lab.options.sizes.dtype

    def make() -> CausalLM:
        if shape == "smollm2":
            return endless(load_base_on(lab.device, lab.options.base, dtype))
        return random_base(shape, lab.device, getattr(torch, dtype))

    return lab.only_base(shape, make)


def stepping_model(lab: Lab, base: CausalLM, engine: Engine, step: StepKind) -> MedusaModel:
    """``base`` with random heads.

    Raises:
        Skipped: the engine, or such steps, do not run here.
    """
    try:
        return MedusaModel(
            base, random_heads(base, lab.options.sizes.token_map_size), engine=engine, step=step
        )
    except (ValueError, ImportError) as error:
        raise Skipped(in_a_line(error)) from error


# ------------------------------------------------------------------ measuring


def steps_of(lab: Lab, setting: Setting) -> Results:
    """Step time, overhead and f_hw at every size."""
    options, base = lab.options.sizes, base_of(lab, setting.shape)
    is_grouped = setting.attention == "grouped"
    if is_grouped:
        if base.config._attn_implementation != "sdpa":
            raise Skipped(f"it takes the place of sdpa, got {base.config._attn_implementation}")
        base.set_attn_implementation(GROUPED_ATTENTION)
    try:
        model = stepping_model(lab, base, setting.engine, setting.step)
        rates, sizes = lab.rates(base.dtype), (setting.batch_size, setting.context_length)
        times = timed_steps(model, rates, options.nodes, *sizes, options.rounds, options.steps)
        found = [{**setting._asdict(), **each} for each in times]
    finally:
        if is_grouped:
            base.set_attn_implementation("sdpa")
    return {"rates": asdict(rates), "steps": found}


def parts_of(lab: Lab, shape: str) -> Results:
    """How much of a captured step is the base's pass, at every size and batch, after the shortest context."""
    options, base = lab.options.sizes, base_of(lab, shape)
    model = stepping_model(lab, base, "eager", lab.graphs)
    found = []
    for nodes, rows in product([size for size in options.nodes if size > 1], options.batch_sizes):
        parts = step_parts(model, tree_of(nodes), random_prompts(base, rows, options.context_lengths[0]))
        found.append(
            {"shape": shape, "num_nodes": nodes, "batch_size": rows, "around": parts.around}
            | {name: 1000 * seconds for name, seconds in asdict(parts).items()}
        )
    return {"parts": found}


def waits_of(lab: Lab, shape: str, step: StepKind) -> Results:
    """What the host does and waits for in steps of the largest tree, after their prefill."""
    options, base = lab.options.sizes, base_of(lab, shape)
    model, tree = stepping_model(lab, base, "eager", step), tree_of(max(options.nodes))
    is_card = lab.device.type == "cuda"
    num_steps = 2 * DEFAULT_HOST_SYNC_INTERVAL if is_card else 2
    counted = DecodingStatistics()
    # Just past a whole number of slots, so that the cache has room for most of what is traced.
    prompts = random_prompts(base, 1, rounded_slots(options.context_lengths[0]) + 8)
    budget = 2 + 8 * num_steps * (tree.depth + 1)
    stream: Any = model.stream(
        **prompts, tree=tree, max_new_tokens=budget, do_sample=False, statistics=counted
    )

    def run() -> int:
        """So many steps; those that come in a burst count when the first of them is there."""
        before = counted.num_passes
        while counted.num_passes - before < num_steps:
            next(stream)
        return counted.num_passes - before

    run()  # compiles, captures
    set_up = counted.setup_seconds
    lab.folder.mkdir(parents=True, exist_ok=True)
    found = host_waits(run, lab.device, lab.folder / f"{shape}-{step}.trace.json.gz" if is_card else None)
    with HostTraffic(lab.device) as traffic:
        traffic_steps = run()
    stream.close()
    return {
        "waits": found,
        "setup_seconds": counted.setup_seconds - set_up,
        "traffic": {name: count / traffic_steps for name, count in traffic.found.items()},
        "shape": shape,
        "step": step,
    }


# ------------------------------------------------------------------ tables


def tables(measured: Mapping[str, Results], console: Console) -> None:
    print_steps(measured, console)
    print_parts(measured, console)
    for each in measured.values():
        if "waits" in each:
            print_waits(each, console)


def print_steps(measured: Mapping[str, Results], console: Console) -> None:
    """Every setting at every size, against the least time that the device needs."""
    rows = [
        [
            row["shape"],
            row["engine"],
            row["step"],
            row["attention"],
            *(str(row[key]) for key in ("batch_size", "context_length", "num_nodes")),
            *(f"{row[key]:.2f}" for key in ("step_milliseconds", "floor_milliseconds", "overhead", "f_hw")),
            f"{row['setup_seconds']:.1f}",
        ]
        for each in measured.values()
        for row in each.get("steps", ())
    ]
    if not rows:
        return
    rates = next(each["rates"] for each in measured.values() if "rates" in each)
    read, multiplied = rates["bytes_per_second"] / 1e9, rates["operations_per_second"] / 1e12
    headers = ["shape", "engine", "step", "attention", "rows", "context", "nodes"]
    headers += ["ms/step", "floor", "overhead", "f_hw", "set-up"]
    note = "floor: the least ms that the device needs for a step. set-up: seconds of compiling or capturing."
    title = f"Decode steps: {read:.0f} GB/s, {multiplied:.2f} TFLOP/s measured"
    print_table(console, title, headers, rows, num_labels=4, note=note)


def print_parts(measured: Mapping[str, Results], console: Console) -> None:
    """The pass of the base and the draft, beside the step that they are parts of."""
    rows = [
        [
            row["shape"],
            *(str(row[key]) for key in ("batch_size", "num_nodes")),
            *(f"{row[key]:.3f}" for key in ("step", "forward", "draft")),
            percent(row["around"]),
        ]
        for each in measured.values()
        for row in each.get("parts", ())
    ]
    if rows:
        headers = ["shape", "rows", "nodes", "step, ms", "forward", "draft", "around the forward"]
        print_table(console, "Parts of a step, each run alone", headers, rows)


def print_waits(found: Results, console: Console) -> None:
    """What the host did in a step, by driver call and by operation."""
    waits = found["waits"]
    rows = [
        [kind, name[:60], f"{each['calls']:.2f}", f"{each['milliseconds']:.3f}"]
        for kind in ("driver_calls", "operations")
        for name, each in list(waits[kind].items())[:6]
    ]
    title = (
        f"{found['shape']}, {found['step']}: what the host does in a step of {waits['milliseconds']:.2f} ms"
    )
    by_line = list(waits["synchronisations"].items())[:8]
    waited = ", ".join(f"{name} {count:.2f}" for name, count in by_line) or "none"
    busy = percent(waits["device_busy"])
    note = f"device busy: {busy}. Synchronisations by line, for each step: {waited}."
    print_table(console, title, ["", "name", "calls", "ms of the host"], rows, num_labels=2, note=note)


PART = Part(2, "steps", 9.5, cases, tables)
