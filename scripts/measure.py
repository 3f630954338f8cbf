"""Run the experiments behind MEASUREMENTS.md and the README, and write both from what they found.

    make measure                       # those that were not run with today's code
    make measure ONLY=speed-float32    # this one, run or not
    python scripts/measure.py --write  # the pages alone, from what was found before

The experiments stand in ``measurements/experiments.yaml``: what each asks, its command, and the parts of the
code that its answer depends on. Each leaves ``measurements/NAME.json``, so that an interrupted run goes on
where it stopped. One runs at a time; leave the machine alone meanwhile.

``mt_bench.jsonl`` must lie in the folder of ``--prompts``: MEASUREMENTS.md tells where it comes from. A model
that an experiment needs is brought by ``medusa fetch NAME --output models/NAME``.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import itertools
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import jinja2
import torch
import transformers

import medusa
from medusa.cli.main import exit_status
from medusa.cli.options import parse
from medusa.console import ProgressReporter, log_console
from medusa.files import read_json, read_yaml, replaced_file, write_json
from medusa.hardware import device_name
from medusa.plots import BLUE, FAINT, INK, ORANGE

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "measurements"
IMAGES = ROOT / "docs" / "images"
OLDER = ", **older than the code**"
"""Marks an experiment whose code has changed since it ran."""
START, END = "<!-- measured: see measurements/ -->", "<!-- end of what is measured -->"
"""What README.md has between these is written by this program."""
SHOWN_FIRST = ("speed-float32", "speed-int8", "guesses-8")
"""Experiments without which there are no pages."""
SECONDS_TO_START = 600
"""For a server, compiling included."""


@dataclass(frozen=True)
class MeasureOptions:
    """The options of this program."""

    only: tuple[str, ...] = ()
    """Names of experiments to run, whether they were run before or not; none are those that are due."""
    write: bool = False
    """Run nothing, and write the pages from what was found."""
    prompts: Path = ROOT / "runs" / "prompts"
    """The folder that holds mt_bench.jsonl."""


@dataclass(frozen=True)
class Experiment:
    """What is measured, and how."""

    name: str
    asks: str
    command: str
    """Ends with one JSON object on standard output; ``{prompts}`` and ``{empty}`` stand for the folder of
    prompts and for an empty one."""
    code: tuple[str, ...]
    """Folders that the answer depends on."""
    minutes: float
    """About what it takes on two cores."""
    before: tuple[str, ...] = ()
    """Commands that make what this one measures; what they print is not kept."""
    needs: tuple[str, ...] = ()
    """Files and directories that nothing here makes; without them it does not run."""
    machine: str = ""
    """Words of :func:`where`; on another machine it does not run."""
    servers: Mapping[str, str] = field(default_factory=dict)
    """Commands of servers that run meanwhile, by name; the command gets ``--servers NAME=URL ...``."""

    @property
    def commands(self) -> tuple[str, ...]:
        """All of them."""
        return (self.command, *self.before, *self.servers.values())

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.json"

    def record(self) -> dict[str, Any] | None:
        """What was found, with where and when; None before it ran."""
        return read_json(self.path) if self.path.exists() else None

    def digest(self) -> str:
        """Changes with the code that the answer depends on, and not with its comments and docstrings."""
        digest = hashlib.sha256()
        for part in map(ROOT.joinpath, self.code):
            for file in sorted(each for each in part.rglob("*") if each.is_file() and each.suffix != ".pyc"):
                text = file.read_bytes()
                digest.update(statements(text) if file.suffix == ".py" else text)
        return digest.hexdigest()

    def missing(self) -> str:
        """What it does not run for; empty where nothing is missing."""
        missing = [need for need in self.needs if not (ROOT / need).exists()]
        if self.machine not in where():
            missing.append(f"a machine {self.machine!r}")
        return ", ".join(missing)

    @property
    def is_due(self) -> bool:
        record = self.record()
        return record is None or record["code"] != self.digest()


@functools.cache
def statements(module: bytes) -> bytes:
    """The code of a module without comments, docstrings and layout; many experiments depend on the same."""
    tree = ast.parse(module)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [each for each in node.body if not is_text(each)]
    return ast.dump(tree).encode()


def is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def experiments() -> dict[str, Experiment]:
    """All of them, by name, in the order in which they run."""
    listed = read_yaml(FOLDER / "experiments.yaml")
    lists = ("code", "before", "needs")
    return {
        name: Experiment(name, **{**each, **{key: tuple(each[key]) for key in lists if key in each}})
        for name, each in listed.items()
    }


def to_argv(command: str) -> list[str]:
    """The command of a document as this Python runs it, behind the variables that it sets. Another program
    is named by a variable of the environment.

    Raises:
        ValueError: that variable is not set.
    """
    words = shlex.split(command)
    variables = list(itertools.takewhile(lambda word: "=" in word, words))
    program, *rest = words[len(variables) :]
    runs = {"python": [sys.executable], "medusa": [sys.executable, "-m", "medusa"]}
    if program.startswith("$"):
        name = program.removeprefix("$")
        if name not in os.environ:
            raise ValueError(f"{name} must name the program that is measured beside: {command}")
        runs[program] = shlex.split(os.environ[name])
    return [*(["env", *variables] if variables else []), *runs[program], *rest]


@contextlib.contextmanager
def served(commands: Mapping[str, str]) -> Iterator[list[str]]:
    """Servers by those commands, ready; NAME=URL of each."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    urls = []
    try:
        for name, command in commands.items():
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            running[name] = subprocess.Popen([*to_argv(command), "--port", str(port)], cwd=ROOT)
            urls.append(f"{name}=http://127.0.0.1:{port}")
            give_up = time.monotonic() + SECONDS_TO_START
            while not is_ready(f"http://127.0.0.1:{port}/health"):
                if running[name].poll() is not None or time.monotonic() > give_up:
                    raise ValueError(f"the server {name!r} did not start: {command}")
                time.sleep(1)
        yield urls
    finally:
        for server in running.values():
            server.terminate()
            server.wait()


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url).status_code == 200
    return False


def where() -> str:
    """The device in words, and of a processor the instructions that kernels may use."""
    if torch.cuda.is_available():
        return device_name(torch.device("cuda"))
    has_tiles = torch.cpu._is_amx_tile_supported()
    vectors = torch.backends.cpu.get_cpu_capability()
    return f"{device_name(torch.device('cpu'))}, {vectors} {'and' if has_tiles else 'without'} AMX"


def run(experiment: Experiment, prompts: Path) -> None:
    """Run it and keep what it found.

    Raises:
        ValueError: it failed; what it said stands above.
    """
    began, digest = time.monotonic(), experiment.digest()
    for command in experiment.before:
        said_by(experiment, to_argv(command))
    with served(experiment.servers) as urls, tempfile.TemporaryDirectory() as empty:
        words = to_argv(experiment.command.format(prompts=prompts, empty=empty))
        said = said_by(experiment, words + (["--servers", *urls] if urls else []))
    versions = {each.__name__: each.__version__ for each in (medusa, torch, transformers)}
    record = {
        "commit": commit(),
        "date": date.today().isoformat(),
        "device": where(),
        "versions": {**versions, "python": platform.python_version()},
        "minutes": round((time.monotonic() - began) / 60, 1),
        "code": digest,
        "found": json.loads(said.splitlines()[-1]),
    }
    write_json(experiment.path, record)


def said_by(experiment: Experiment, words: list[str]) -> str:
    """What a command of the experiment writes to standard output."""
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ValueError(f"{experiment.name} failed; the others are kept: {shlex.join(words)}")
    return done.stdout


def commit() -> str:
    """Of the checkout, with a "+" where files differ from it."""
    git = ("git", "-C", str(ROOT))
    head = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    changed = subprocess.check_output([*git, "status", "--porcelain", "--", "medusa"], text=True)
    return head + ("+" if changed.strip() else "")


def pages(known: Mapping[str, Experiment]) -> dict[Path, str]:
    """MEASUREMENTS.md and README.md as the records have them; what was not measured is left out."""
    records = {name: each.record() for name, each in known.items()}
    page = records[SHOWN_FIRST[0]]
    assert page is not None, "the first of those that are shown has run"

    def measured(name: str) -> str:
        """Which experiment, when, where it was another machine, and whether it still stands."""
        record, mark = records[name], OLDER if known[name].is_due else ""
        assert record is not None, "the templates leave out what has not run"
        elsewhere = "" if record["device"] == page["device"] else f", {record['device']}"
        return f"`make measure ONLY={name}`, {record['date']}, commit {record['commit']}{elsewhere}{mark}"

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "device": page["device"],
        "versions": page["versions"],
        "measured": measured,
        "command": lambda name: (
            known[name].command.replace("{prompts}/", "").replace("{empty}", "/tmp/empty")
        ),
        "minutes": sum(each.minutes for each in known.values()),
        "found": {name: record["found"] for name, record in records.items() if record is not None},
    }
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    before, _, rest = readme.partition(START)
    _, _, after = rest.partition(END)
    table = environment.get_template("readme.md.j2").render()
    return {
        ROOT / "MEASUREMENTS.md": environment.get_template("measurements.md.j2").render(),
        ROOT / "README.md": f"{before}{START}\n{table}{END}{after}",
    }


def draw_pictures(known: Mapping[str, Experiment]) -> None:
    """The pictures of the pages, of what has been measured."""
    draw_speed(known, IMAGES / "speed.png")
    if known["hybrids"].record() is not None:
        draw_hybrids(known, IMAGES / "hybrids.png")


def draw_speed(known: Mapping[str, Experiment], path: Path) -> None:
    """The picture of README.md: how long a token takes, in float32 and in 8 bits."""
    import matplotlib.pyplot as plt

    names = {
        "default": "medusa",
        "plain": "medusa, plain decoding",
        "llama.cpp-f32": "llama.cpp",
        "llama.cpp-q8_0": "llama.cpp",
        "transformers": "transformers",
    }
    colors = {"default": ORANGE, "plain": BLUE}
    shown = {"float32": ("speed-float32", "llama.cpp-q8_0"), "8 bits": ("speed-int8", "llama.cpp-q4_0")}
    figure, axes = plt.subplots(2, 1, figsize=(6, 3.4), sharex=True, height_ratios=[4, 3])
    for ax, (title, (name, left_out)) in zip(axes, shown.items(), strict=True):
        record = known[name].record()
        assert record is not None, "drawn from what was found"
        taken = record["found"]["by_setting"][0]["milliseconds_per_token"]
        bars = sorted(((each, ms) for each, ms in taken.items() if each != left_out), key=lambda bar: bar[1])
        draw_bars(ax, title, {names[each]: (ms, colors.get(each, FAINT)) for each, ms in bars})
    axes[1].set_xlabel("milliseconds per token")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_bars(ax: Any, title: str, bars: Mapping[str, tuple[float, str]]) -> None:
    """Milliseconds and a color by name, from top to bottom."""
    milliseconds, colors = zip(*bars.values(), strict=True)
    ax.bar_label(ax.barh([*bars], milliseconds, color=colors), fmt="%.1f", padding=4, color=INK)
    ax.set_title(title, loc="left", color=INK)
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.spines[["top", "right"]].set_visible(False)


def draw_hybrids(known: Mapping[str, Experiment], path: Path) -> None:
    """The picture of bases that keep a state: what a token takes with right and wrong guesses."""
    import matplotlib.pyplot as plt

    record = known["hybrids"].record()
    assert record is not None, "drawn from what was found"
    bars = {
        "all guesses right": ("predicted_ms_per_token", ORANGE),
        "plain decoding": ("ms_per_token", BLUE),
        "all guesses wrong": ("wrong_ms_per_token", FAINT),
    }
    shapes = record["found"]["shapes"]
    figure, axes = plt.subplots(len(shapes), 1, figsize=(6, 1.5 * len(shapes)), sharex=True)
    for ax, (shape, each) in zip(axes, shapes.items(), strict=True):
        ours = each["contenders"]["file Q4_K_M"]
        draw_bars(ax, shape, {name: (ours[key], color) for name, (key, color) in bars.items()})
    axes[-1].set_xlabel("milliseconds per token")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write() -> None:
    """Write the pages and the pictures, once what the README shows has run."""
    known = experiments()
    if missing := [name for name in SHOWN_FIRST if known[name].record() is None]:
        log_console().print(f"the pages wait for {', '.join(missing)}")
        return
    draw_pictures(known)
    for path, text in pages(known).items():
        with replaced_file(path) as partial:
            partial.write_text(text, encoding="utf-8")
        log_console().print(f"wrote {path}", soft_wrap=True)


def prepare(prompts: Path) -> None:
    """16 and 40 questions of MT-bench beside all of them, as many of each category.

    Raises:
        FileNotFoundError: they are not there.
    """
    source = prompts / "mt_bench.jsonl"
    if not source.exists():
        raise FileNotFoundError(f"{source} is missing; MEASUREMENTS.md tells where it comes from")
    rows = source.read_text(encoding="utf-8").splitlines(keepends=True)
    for count, step in ((16, 5), (40, 2)):
        (prompts / f"mt_bench_{count}.jsonl").write_text("".join(rows[::step]), encoding="utf-8")


def measure(options: MeasureOptions) -> None:
    """Run what is asked for or due, and write the pages."""
    known = experiments()
    if unknown := sorted({*options.only} - known.keys()):
        raise ValueError(f"only must name experiments ({', '.join(known)}), got {', '.join(unknown)}")
    due = [each for each in known.values() if (each.name in options.only if options.only else each.is_due)]
    due = [] if options.write else due
    for each in list(due):
        if missing := each.missing():
            log_console().print(f"{each.name} is left out: {missing} is missing", soft_wrap=True)
            due.remove(each)
    if any("{prompts}" in command for each in due for command in each.commands):
        prepare(options.prompts)
    with ProgressReporter("measuring") as progress:
        total, done = sum(each.minutes for each in due), 0.0
        for each in due:
            progress.say(f"{each.name}: {each.asks} About {each.minutes:g} minutes.")
            run(each, options.prompts)
            done += each.minutes
            progress.show(done / total, each.name)
    write()


if __name__ == "__main__":
    given = parse(MeasureOptions, description=__doc__)
    sys.exit(exit_status(lambda: measure(given), False))
