"""The commands and the Python of the README and of training, and after them those of each guide, run as they
are written.

Commands get flags that cut them short. What needs a network, a server, another program or more machines is
left out, by the words in :data:`ELSEWHERE`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import CHECKOUT, REAL_BASE, needs_kernels

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
TRAINING = "docs/guides/own-model.md"
GUIDES = ("decoding", "serving", "deploy", "hub", "measuring", "recurrent", "joint-training")
PAGES = (*(f"docs/guides/{name}.md" for name in GUIDES), "docs/concepts/trees.md")
ELSEWHERE = re.compile(
    r"://|Qwen/|vicuna|1_8b|Llama|me/smollm2-heads(@|\")|\b(make|serve|pip|lm_eval|accelerate)\b|convert_hf"
    r"|torchrun|llama-cpp|medusa check|model\.gguf"
)
"""`medusa check` because it refuses heads that were trained for three steps."""
SHORTER = r"""
set -euo pipefail
medusa() {
    case $1 in
        distill) set -- "$@" --limit 12 --max-new-tokens 24 ;;
        train) set -- "$@" --max_steps 3 --tokens_per_batch 256 --max_length 128 --replayed_documents 2 ;;
        tune | evaluate | benchmark) set -- "$@" --limit 2 --max-new-tokens 12 ;;
        generate) set -- "$@" --max-new-tokens 12 ;;
    esac
    case $1 in distill | tune | evaluate | benchmark | generate | chat) set -- "$@" --step general ;; esac
    "$PYTHON" -m medusa "$@" </dev/null
}
"""


def blocks(page: str, language: str) -> list[str]:
    """The code of a page that runs anywhere."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", (CHECKOUT / page).read_text(), re.S | re.M)
    return [textwrap.dedent(code) for _, code in found if not ELSEWHERE.search(code)]


def run(page: str, folder: Path, before: str, names: dict) -> str:
    """Run a page in ``folder``; returns what it sets in the shell."""
    commands, settings = (
        blocks(page, "sh"),
        {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(CHECKOUT)},
    )
    script = ["bash", "-c", "\n".join([SHORTER, before, *commands])]
    done = subprocess.run(script, cwd=folder, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, f"{page}: {done.stderr[-2000:]}"
    for code in blocks(page, "python"):
        exec(compile(code.replace(HUB_ID, str(REAL_BASE)), page, "exec"), names)
    return "".join(line for code in commands for line in re.findall(r"^[A-Z]+=.*\n", code, re.M))


@pytest.fixture(scope="module")
def after_training(tmp_path_factory) -> tuple[Path, str, dict]:
    """The folder after the examples of the README and of training, and what they set in the shell and in
    Python."""
    if not REAL_BASE.exists():
        pytest.skip("`make models` fetches the base")
    folder, names = tmp_path_factory.mktemp("place"), {"__name__": "examples"}
    (folder / "models").symlink_to(REAL_BASE.parent)
    run("README.md", folder, "", names)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, run(TRAINING, folder, "", names), names


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run_after_those_of_training(page, after_training, monkeypatch):
    folder, before, names = after_training
    monkeypatch.chdir(folder)
    assert blocks(page, "sh") or blocks(page, "python")
    run(page, folder, before, {**names, "inputs": names["ids"], "base": names["model"].base})
