"""The flags of every program that decodes, each defined once, so that it means the same everywhere.

One list of flags, with nothing in it to split: over 300 lines.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import get_args

import torch

from medusa.choices import StepKind
from medusa.engine import Engine

CHECKOUT = Path(__file__).resolve().parents[2]
EMBEDDED_BASE = CHECKOUT / "models" / "smollm2-135m-instruct"
EMBEDDED_HEADS = "smollm2-135m-instruct"
"""The heads that ship for the embedded base."""
EMBEDDED_PROMPTS = CHECKOUT / "configs" / "demo_heldout.jsonl"
DTYPES = ("float32", "bfloat16", "float16")


class ProgramOptions(argparse.Namespace):
    """The flags that all programs share, parsed."""

    base: str
    heads: str
    prompts: Path | None
    limit: int | None
    max_new_tokens: int
    seed: int
    temperature: float
    json: Path | None
    device: str
    engine: Engine
    step: StepKind
    dtype: str | None
    traceback: bool


class DrafterOptions(ProgramOptions):
    """The flags of programs that let the user choose a drafter, parsed."""

    draft_length: int | None
    draft_width: int
    draft_model: str | None
    exit_layer: int | None
    eagle: str | None


class CutOptions(ProgramOptions):
    """The flags that leave unlikely tokens out when sampling, parsed."""

    top_k: int | None
    top_p: float | None
    min_p: float | None


class TreeOptions(ProgramOptions):
    """The flags of programs that can decode with another tree than the heads', parsed."""

    tree_nodes: int | None
    calibrate_on: Path | None


class PlotOptions(ProgramOptions):
    """The flags of programs that draw a picture, parsed."""

    plot: Path


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which model to load, and how."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--base",
        default=str(EMBEDDED_BASE),
        metavar="MODEL",
        help="base model: a directory or a hub id (default: the one that `make models` fetches, %(default)s)",
    )
    group.add_argument(
        "--heads",
        default=EMBEDDED_HEADS,
        metavar="HEADS",
        help="heads trained on that base: a directory, a hub id, or the name of heads that ship (default: "
        "%(default)s, which ship)",
    )
    group.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda, cuda:1, ... (default here: %(default)s)",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="precision of the base (default: float32 on a CPU, the checkpoint's own elsewhere). Only "
        "float32 promises the very tokens of plain decoding; lower precision can flip near-ties",
    )
    group.add_argument(
        "--engine",
        choices=get_args(Engine),
        default="auto",
        help="packed: weights packed once for this CPU, in float32, for twice the memory; int8: faster, with "
        "linear layers in int8, which is another model with a text of its own; int8_weights and int4_weights "
        "(the quant extra): such models with activations as loaded, on any device and in bfloat16 on a CUDA "
        "device; eager: as loaded; auto: packed where it applies (default: %(default)s)",
    )
    group.add_argument(
        "--step",
        choices=get_args(StepKind),
        default="general",
        help="static: steps of fixed shapes that never wait for the host, for heads and plain decoding; "
        "compiled: those by torch.compile; captured: those as CUDA graphs (default: %(default)s)",
    )
    group.add_argument("--traceback", action="store_true", help="show where in the code an error arose")


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """What to answer, and where the report goes."""
    group = parser.add_argument_group("prompts and report")
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSON lines, each with `prompt`, `turns` or `messages`, and `category` if you like",
    )
    group.add_argument("--limit", type=positive_int, metavar="N", help="take the first N prompts of the file")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the closing JSON line to FILE too")


def add_tree_flags(parser: argparse.ArgumentParser) -> None:
    """Another tree than the one that the heads come with."""
    group = parser.add_argument_group("tree")
    group.add_argument(
        "--tree-nodes",
        type=positive_int,
        metavar="N",
        help="decode with the best tree of N nodes, root included, on the conversations of --calibrate-on "
        "(default: the heads' own tree)",
    )
    group.add_argument(
        "--calibrate-on",
        type=Path,
        metavar="FILE",
        help="what to choose that tree on: JSON lines as for --prompts, other ones; `messages` that end with "
        "an answer are read as they are, everything else is answered first; 50 rows are plenty",
    )


def add_plot_flag(parser: argparse.ArgumentParser, name: str) -> None:
    """Where the picture goes that the program called ``name`` draws."""
    parser.add_argument(
        "--plot",
        type=Path,
        default=Path(f"runs/plots/{name}.png"),
        metavar="FILE",
        help="where the picture goes (default: %(default)s)",
    )


def add_answer_flags(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """How to answer."""
    group = parser.add_argument_group("answers")
    group.add_argument(
        "--max-new-tokens",
        type=positive_int,
        default=max_new_tokens,
        metavar="N",
        help="longest answer, in tokens (default: %(default)s)",
    )
    group.add_argument(
        "--temperature",
        type=not_negative_float,
        default=0.0,
        metavar="T",
        help="0 is greedy; above, tokens are sampled (default: %(default)s)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of sampling: the same seed gives the same tokens, with heads or without (default: %(default)s)",
    )


def program_parser(description: str, max_new_tokens: int = 128) -> argparse.ArgumentParser:
    """A parser with all shared flags; ``description`` is the program's docstring, shown as it stands."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_flags(parser)
    add_prompt_flags(parser)
    add_answer_flags(parser, max_new_tokens)
    return parser


def add_drafter_flags(parser: argparse.ArgumentParser) -> None:
    """What drafters other than heads need to know; ``medusa.drafters.registry`` has their names."""
    group = parser.add_argument_group("drafters")
    group.add_argument(
        "--draft-length",
        type=positive_int,
        metavar="G",
        help="draft tokens of a chain (default: the drafter's own; in programs that compare, what this "
        "machine's step times ask for); heads keep their own tree, and are a chain only for rules that take "
        "nothing else",
    )
    group.add_argument(
        "--draft-width",
        type=positive_int,
        default=1,
        metavar="K",
        help="chains side by side, where the rule takes a tree (default: %(default)s)",
    )
    group.add_argument(
        "--draft-model", metavar="MODEL", help="for draft-model: a smaller model with the same tokenizer"
    )
    group.add_argument(
        "--exit-layer", type=positive_int, metavar="K", help="for early-exit: layers of the base to run"
    )
    group.add_argument(
        "--eagle", metavar="HEADS", help="for eagle: a heads directory or hub id of an EAGLE-style head"
    )


def add_cut_flags(parser: argparse.ArgumentParser) -> None:
    """Which tokens sampling leaves out; by default, in a chat what the model's own configuration says."""
    group = parser.add_argument_group("what sampling leaves out")
    group.add_argument("--top-k", type=positive_int, metavar="K", help="sample from the K likeliest tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest that add up to P")
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens below P times the likeliest one")


def positive_int(text: str) -> int:
    """An ``argparse`` type: at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def not_negative_int(text: str) -> int:
    """An ``argparse`` type: at least 0."""
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


def positive_ints(text: str) -> tuple[int, ...]:
    """An ``argparse`` type: numbers of at least 1 with commas between, each once, growing."""
    return tuple(sorted({positive_int(part) for part in text.split(",")}))


def positive_float(text: str) -> float:
    """An ``argparse`` type: above 0 and finite."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def not_negative_float(text: str) -> float:
    """An ``argparse`` type: at least 0 and finite."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value
