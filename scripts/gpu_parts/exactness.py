"""Part 1: are the tokens those of plain decoding, whatever drafts and however steps run?

In: SmolLM2 with its heads, and prompts that ship. Out, for each case, how many answers and tokens are those
expected. In float32 all must be. In bfloat16 near-ties flip, so it is counted how often, and what neighbours
in a batch change. The GPU-marked tests and the noise of sampled decoding have cases of their own.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from rich.console import Console

from gpu_parts.lab import Lab
from medusa import HeadsCheckpoint, MedusaModel
from medusa.acceptance.sampling import gumbel_noise, hashed_bits
from medusa.base.causal_lm import end_ids
from medusa.choices import StepKind
from medusa.cli.program import encode_prompts
from medusa.drafters.protocol import Drafter, host_bound_parts
from medusa.drafters.registry import DrafterSettings, drafter_named
from medusa.drafters.self_draft import early_exit
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head
from medusa.measurement.benchmark import same_as
from medusa.measurement.bounds import Divergence, total_divergence
from medusa.measurement.parts import GRACE_SECONDS, Case, Part, Results, Skipped
from medusa.measurement.timing import Tokens, new_tokens
from medusa.places import checkout
from medusa.prompts import padded_batch, read_prompts
from medusa.tables import number, print_table

STATIC_DRAFTERS = ("plain", "heads", "dynamic-heads", "suffix", "heads+suffix", "dynamic-heads+suffix")
HOST_DRAFTERS = ("early-exit", "draft-model", "eagle3", "low-precision")
NEIGHBOURS = 8
"""Rows of a batch in bfloat16."""

Answers = dict[int, Tokens]
"""[prompt] = the new tokens of its answer."""


def cases(lab: Lab) -> Iterator[Case]:
    scale = lab.scale
    model = functools.cache(lambda: lab.model("float32"))
    half = functools.cache(lambda: lab.model("bfloat16"))
    asked = functools.cache(
        lambda: Questions.of(model(), "demo_heldout", scale.num_prompts, scale.new_tokens)
    )
    expected = functools.cache(
        lambda rows, is_sampled: asked().answers("plain", rows=rows, is_sampled=is_sampled)
    )

    def against_plain(name: str, step: StepKind) -> Results:
        found = []
        for rows, is_sampled in product((1, scale.num_prompts), (False, True)):
            given = asked().answers(name, step, rows, is_sampled)
            row = compared(expected(rows, is_sampled), given, rows, is_sampled)
            if not is_sampled and row["num_answers"] < row["of_answers"]:
                row["gap"] = asked().divergence(given).largest_gap
            found.append(row)
        return {"drafter": name, "step": step, "rows": found}

    def case(name: str, step: StepKind, minutes: float) -> Case:
        return Case(f"float32, {name}, {step}", lambda: against_plain(name, step), minutes)

    kinds: tuple[StepKind, ...] = ("static", "general")
    if lab.device.type == "cuda":
        kinds = ("captured", *kinds)
    yield Case("noise is the same on both devices", lambda: noise_on_both(lab.device), 0.1)
    for step, name in product(kinds, STATIC_DRAFTERS):
        if (step, name) != ("general", "plain"):
            yield case(name, step, 0.2)
    yield Case("GPU-marked tests", lambda: marked_tests(lab), 2.5)
    yield Case("float32, a growing cache", lambda: growing(model(), scale.growing_tokens, kinds), 0.5)
    yield Case(
        "float32, transformers' generate", lambda: against_transformers(asked(), expected(1, False)), 0.2
    )
    yield Case("bfloat16, near-ties", lambda: near_ties(lab, half()), 1.5)
    yield Case("bfloat16, neighbours", lambda: neighbours(lab, half()), 1.0)
    for name in HOST_DRAFTERS:
        yield case(name, "general", 0.3)


# ------------------------------------------------------------------ asking


@dataclass(frozen=True)
class Questions:
    """Prompts that a model is to answer."""

    model: MedusaModel
    prompts: Sequence[Mapping[str, Any]]
    """Encoded one by one."""
    num_tokens: int
    """New tokens of each answer, at most."""

    @classmethod
    def of(cls, model: MedusaModel, name: str, count: int, num_tokens: int) -> Questions:
        """The first of the prompts that ship under this name."""
        return cls(model, encode_prompts(model, read_prompts(name, count), num_tokens), num_tokens)

    def answers(
        self, drafter: str, step: StepKind = "general", rows: int = 1, is_sampled: bool = False
    ) -> Answers:
        """The answers, ``rows`` at a time; sampled rows keep the seeds that they have alone.

        Raises:
            Skipped: the drafter lacks something here.
        """
        model, found = self.model, dict[int, Tokens]()
        for start in range(0, len(self.prompts), rows):
            inputs: Mapping[str, Any] = padded_batch(self.prompts[start : start + rows])
            count, width = inputs["input_ids"].shape
            made = new_drafter(drafter, model)
            if step != "general" and host_bound_parts(made):
                raise Skipped(f"{type(made).__name__} works on the host: general steps alone run it")
            how: dict[str, Any] = {"do_sample": False}
            if is_sampled:
                how = {"do_sample": True, "temperature": 0.8, "seed": list(range(start, start + count))}
            said: Any = model.generate(
                **inputs, **how, drafter=made, step=step, max_new_tokens=self.num_tokens
            )
            found |= enumerate(new_tokens(said.tolist(), width, end_ids(model.base)), start)
        return found

    def divergence(self, answers: Answers) -> Divergence:
        """How greedy answers compare with the base's likeliest tokens, in a pass over each."""
        pairs = [(self.prompts[index]["input_ids"][0].tolist(), tokens) for index, tokens in answers.items()]
        return total_divergence(self.model.base, pairs, most=len(pairs))


def new_drafter(name: str, model: MedusaModel) -> Drafter:
    """The drafter called ``name``; models that it needs are made of the base, untrained.

    Raises:
        Skipped: it lacks something here.
    """
    num_layers = model.base.config.num_hidden_layers
    settings = DrafterSettings(draft_length=3, exit_layer=max(1, 2 * num_layers // 3))
    if name == "draft-model":
        settings = replace(settings, draft_model=early_exit(model.base, max(1, num_layers // 3)))
    if name == "eagle3":
        torch.manual_seed(0)
        layers = sorted({1, max(1, num_layers // 2), num_layers})
        config = Eagle3Config.of_base(model.base, intermediate_size=576, fused_layers=layers)
        head = Eagle3Head(config).to(model.device)
        settings = replace(settings, eagle3=HeadsCheckpoint(head, "the same base"))
    try:
        return drafter_named(name, model, settings)
    except ValueError as error:
        raise Skipped(str(error)) from error


def compared(expected: Answers, given: Answers, rows: int = 1, is_sampled: bool = False) -> Results:
    """A row of the table: how the answers were asked for, and how many are the same."""
    return {"rows": rows, "sampled": is_sampled, **same_as(expected, given)}


# ------------------------------------------------------------------ the other cases


def noise_on_both(device: torch.device) -> Results:
    """The noise of a thousand (row, position) pairs here and on the CPU: bits, values, and choices."""
    seeds, positions = torch.arange(8) * 2**40 + 5, torch.arange(125).expand(8, -1)
    there, here = (gumbel_noise(seeds.to(each), positions.to(each), 4096).cpu() for each in (device, "cpu"))
    bits = [hashed_bits(seeds.to(each), positions.to(each), 4096).cpu() for each in (device, "cpu")]
    apart = ((there - here).abs() / here.abs().clamp(min=1)).max()
    return {
        "values": here.numel(),
        "equal bits": int((bits[0] == bits[1]).sum()),
        "equal values": int((there == here).sum()),
        "most apart": float(apart),
        "equal choices": int((there.argmax(-1) == here.argmax(-1)).sum()),
        "choices": here[..., 0].numel(),
    }


def marked_tests(lab: Lab) -> Results:
    """The tests that need a CUDA device, in a process of their own."""
    root = checkout()
    if root is None or not (root / "tests").exists():
        raise Skipped("they are in tests/ of a checkout, and this is none")
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"they need {' and '.join(missing)}: pip install {' '.join(missing)}")
    files = [
        str(path) for path in sorted((root / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()
    ]
    lab.folder.mkdir(parents=True, exist_ok=True)
    line = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-m", "gpu", "-p", "no:cacheprovider"]
    line += ["-rfEs", f"--junitxml={lab.folder / 'tests.xml'}", *files]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    seconds = max(60.0, 60 * lab.minutes_left - GRACE_SECONDS)
    done = subprocess.run(line, cwd=root, env=environment, capture_output=True, text=True, timeout=seconds)
    lab.log.print(done.stdout + done.stderr, markup=False, soft_wrap=True)
    lines = [each for each in done.stdout.splitlines() if each.strip()]
    if done.returncode not in (0, 5):  # 5: none was there to be run
        raise RuntimeError(f"{lines[-1] if lines else done.stderr[-300:]}; their tracebacks stand in the log")
    return {"tests": lines[-1] if lines else "none"}


def growing(model: MedusaModel, num_tokens: int, steps: Sequence[StepKind]) -> Results:
    """An answer that outgrows its cache several times, in every kind of step."""
    asked = Questions.of(model, "demo_heldout", 1, num_tokens)
    generation = model.base.generation_config
    ends, generation.eos_token_id = generation.eos_token_id, None
    try:
        expected = asked.answers("plain")
        rows = [{"step": step, **compared(expected, asked.answers("heads", step))} for step in steps]
    finally:
        generation.eos_token_id = ends
    return {"drafter": "heads", "step": "all", "rows": rows}


def against_transformers(asked: Questions, expected: Answers) -> Results:
    """Our plain decoding, greedy, one row, and ``transformers``' own."""
    base, given = asked.model.base, dict[int, Tokens]()
    for index, inputs in enumerate(asked.prompts):
        out: Any = base.generate(**inputs, do_sample=False, max_new_tokens=asked.num_tokens)
        (given[index],) = new_tokens(out.tolist(), inputs["input_ids"].shape[1], end_ids(base))
    return {"drafter": "transformers", "step": "-", "rows": [compared(expected, given)]}


def near_ties(lab: Lab, model: MedusaModel) -> Results:
    """For each thousand tokens of greedy answers, those that are not the base's likeliest when it reads the
    answer in one pass; and how many answers are those of plain decoding."""
    asked = Questions.of(model, "demo_prompts", lab.scale.num_plain, 2 * lab.scale.new_tokens)
    plain, found = asked.answers("plain"), {}
    for name, step in product(("plain", "heads"), ("general", lab.graphs)):
        given = plain if (name, step) == ("plain", "general") else asked.answers(name, step)
        strayed = asked.divergence(given)
        found[f"{name}, {step}"] = {
            "flips per thousand": 1000 * strayed.rate,
            **strayed.as_dict(),
            "same as plain": same_as(plain, given),
        }
    return {"near_ties": found}


def neighbours(lab: Lab, model: MedusaModel) -> Results:
    """Answers of rows in a batch against the same rows alone: with plain decoding, and with heads."""
    asked = Questions.of(model, "demo_prompts", lab.scale.num_plain, lab.scale.new_tokens)
    found = {}
    for name in ("plain", "heads"):
        alone, together = (asked.answers(name, lab.graphs, rows) for rows in (1, NEIGHBOURS))
        found[name] = same_as(alone, together)
    return {"neighbours": found}


# ------------------------------------------------------------------ tables


def tables(measured: Mapping[str, Results], console: Console) -> None:
    print_against_plain(measured, console)
    for each in measured.values():
        if "near_ties" in each:
            print_near_ties(each["near_ties"], console)
        if "neighbours" in each:
            rows = [[name, *same_in_words(found)] for name, found in each["neighbours"].items()]
            headers = ["bfloat16", "same answers", "tokens before the first other one"]
            print_table(console, "Eight rows together against each alone", headers, rows)
        if "tests" in each or "equal bits" in each:
            line = ", ".join(f"{name}: {value}" for name, value in each.items())
            console.print(line, markup=False, soft_wrap=True)


def print_against_plain(measured: Mapping[str, Results], console: Console) -> None:
    """Every drafter in every kind of step, alone and as a batch, greedy and sampled."""
    rows = [
        [
            each["drafter"],
            row.get("step", each["step"]),
            str(row["rows"]),
            "sampled" if row["sampled"] else "greedy",
            *same_in_words(row),
            number(row.get("gap"), ".1e"),
        ]
        for each in measured.values()
        for row in each.get("rows", ())
    ]
    if rows:
        headers = ["drafter", "step", "rows", "", "same answers", "tokens before the first other one", "gap"]
        note = "gap: where greedy answers differ, the most that one of their tokens lies below the likeliest."
        print_table(console, "Against plain decoding, float32", headers, rows, num_labels=4, note=note)


def print_near_ties(found: Mapping[str, Results], console: Console) -> None:
    """How often lower precision strays, and by how much."""
    rows = [
        [
            name,
            str(each["num_tokens"]),
            number(each["flips per thousand"]),
            number(each["largest_gap"], ".3f"),
            same_in_words(each["same as plain"])[0],
        ]
        for name, each in found.items()
    ]
    headers = ["bfloat16", "tokens", "flips per thousand", "largest gap", "same answers as plain"]
    note = "flips: tokens that are not the base's likeliest when it reads the answer in one pass."
    print_table(console, "Near-ties", headers, rows, note=note)


def same_in_words(found: Mapping[str, int]) -> list[str]:
    """Answers, and tokens, of those compared."""
    return [f"{found[f'num_{what}']} of {found[f'of_{what}']}" for what in ("answers", "tokens")]


PART = Part(1, "exactness", 9.5, cases, tables)
