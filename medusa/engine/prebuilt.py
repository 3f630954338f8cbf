"""The kernels that a wheel brings, compiled for several levels of instructions: which library this processor
runs.

A checkout, and what is installed from its source, brings none: there a compiler makes them at first use.
"""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path

import torch

from medusa.engine.building import CPP, levels_for, source_digest, uses_all_of
from medusa.engine.libraries import check_whole, sealed_facts
from medusa.hardware import processor_features

BINARIES = Path(__file__).with_name("binaries")
"""Where a wheel has its libraries, each with a file beside it that tells their content and source."""
FLAG_LINES = ("flags", "Features")
"""What ``/proc/cpuinfo`` calls the line of a processor's features, on x86-64 and on ARM."""


@functools.cache
def instruction_sets() -> frozenset[str]:
    """What every core of this processor has, by the names of ``/proc/cpuinfo``; empty where there is none."""
    lines = (line.partition(": ") for line in processor_features())
    by_core = [frozenset(values.split()) for name, _, values in lines if name in FLAG_LINES]
    return frozenset.intersection(*by_core) if by_core else frozenset()


def prebuilt_kernels(flags: tuple[str, ...], has_compiler: bool) -> Path | None:
    """The library of the wheel for this processor; None where it brings none, and where a compiler makes one
    that uses more of the processor's instructions or is of a source that was edited.

    Raises:
        ValueError: it is damaged, or of another source, or this torch is too old for it.

    Args:
        flags: what the kernels are compiled with on any processor.
        has_compiler: whether there is one.
    """
    features = instruction_sets()
    levels = levels_for(features, platform.machine())
    level = next((level for level in levels if (BINARIES / f"{level.name}.so").exists()), None)
    if level is None:
        return None
    path = BINARIES / f"{level.name}.so"
    facts = sealed_facts(path)
    is_same_source = facts.get("source") == source_digest(flags)
    if has_compiler and not (is_same_source and uses_all_of(level, features)):
        return None
    check_whole(path, "install medusa again")
    if not is_same_source:
        raise ValueError(
            f"{path} was compiled from another source than the one in {CPP}; install medusa again"
        )
    oldest = facts["torch"]
    if numbers_of(torch.__version__) < numbers_of(oldest):
        raise ValueError(
            f"{path} needs torch {oldest} or newer, got {torch.__version__}; install a newer one"
        )
    return path


def numbers_of(version: str) -> list[int]:
    """The first two numbers of a version."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]
