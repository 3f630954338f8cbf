"""llama.cpp's own program of measurements, beside ours."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch


def llama_bench(
    program: Sequence[str],
    path: str | Path,
    prompt_lengths: Sequence[int],
    new_tokens: int,
    repeats: int = 1,
) -> dict[tuple[int, int], float]:
    """Milliseconds that llama.cpp's ``llama-bench``, or a relative's, takes with as many threads as torch.

    Args:
        program: it and its flags.
        path: a GGUF file.
        prompt_lengths: prompts that are read, each alone.
        new_tokens: tokens that are decoded, without a prompt; 0 for none.

    Returns:
        By tokens read and tokens decoded, one of which is 0: the mean of ``repeats`` runs.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    lengths = ",".join(map(str, prompt_lengths)) or "0"
    sizes = ["-p", lengths, "-n", str(new_tokens), "-r", str(repeats), "-t", str(torch.get_num_threads())]
    command = [*program, "-m", str(path), *sizes, "-o", "json"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    runs = json.loads(printed[printed.index("[") :])  # some builds say something before it
    return {(run["n_prompt"], run["n_gen"]): run["avg_ns"] / 1e6 for run in runs}
