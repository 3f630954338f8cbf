"""The installed package, away from any checkout: every command that a user needs, in an environment of its
own that has what the wheel asks for and no other library.

These libraries are links to those of the tests, so that nothing is downloaded but the base model;
where that cannot be reached, the checkout's copy stands in.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable
from importlib.metadata import distribution, distributions
from pathlib import Path

import pytest
from conftest import REAL_BASE
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from wheels import built_wheel

import medusa

pytestmark = pytest.mark.slow
Run = Callable[..., subprocess.CompletedProcess]
BASE = "smollm2-135m-instruct"


def link_requirements(name: str, packages: Path, extras: Iterable[str] = (), seen: set | None = None) -> None:
    """Link into ``packages`` what the distribution ``name`` there requires, and what that requires."""
    seen = set() if seen is None else seen
    found = next(iter(distributions(name=name, path=[str(packages)])))
    for required in map(Requirement, found.requires or ()):
        marker = required.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        if (key := (canonicalize_name(required.name), *sorted(required.extras))) in seen:
            continue
        seen.add(key)
        if not any(distributions(name=required.name, path=[str(packages)])):
            source = distribution(required.name)
            for top in {file.parts[0] for file in source.files or ()} - {"..", "__pycache__"}:
                (packages / top).symlink_to(Path(str(source.locate_file(top))))
        link_requirements(required.name, packages, required.extras, seen)


def variables(place: Path) -> dict[str, str]:
    """The environment variables of a user whose home is ``place``."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return inherited | {"HOME": str(place), "MEDUSA_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with a virtual environment that has the wheel installed, and nothing of the checkout."""
    place = tmp_path_factory.mktemp("elsewhere")
    python = place / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(place / "venv")], check=True)
    wheel = built_wheel(tmp_path_factory.mktemp("source"))
    pip = [str(python), "-m", "pip", "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, env=variables(place), check=True, capture_output=True)
    (packages,) = (place / "venv" / "lib").glob("python*/site-packages")
    link_requirements("medusa-heads", packages)
    return place


@pytest.fixture(scope="module")
def run(place) -> Run:
    """Runs a command of that environment in ``place``, and shows what it said when it ends in another way."""

    def run(*words: str, status: int = 0, stdin: str = "") -> subprocess.CompletedProcess:
        binaries = place / "venv" / "bin"
        done = subprocess.run(
            [str(binaries / words[0]), *words[1:]],
            cwd=place,
            env=variables(place),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert done.returncode == status, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done

    return run


@pytest.fixture(scope="module")
def fetched(place, run) -> None:
    """The embedded base, in the cache of this environment."""
    assert "medusa fetch smollm2-135m-instruct" in run("medusa", "generate", "Hello", status=1).stderr
    home = place / "cache" / "models" / BASE
    done = subprocess.run(
        [str(place / "venv/bin/medusa"), "fetch", BASE],
        cwd=place,
        env=variables(place),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        assert "pip could not download" in done.stderr, done.stderr
        assert not home.exists()
        if not REAL_BASE.exists():
            pytest.skip("the base model can neither be fetched here nor copied from the checkout")
        shutil.copytree(REAL_BASE, home)
    assert (home / "config.json").exists()
    assert f"already there: {home}" in run("medusa", "fetch", BASE).stderr


@pytest.fixture(scope="module")
def heads(place, run, fetched) -> str:
    """Heads trained in this environment, from prompts of its own to the result."""
    answering = ("--output", "answers.jsonl", "--max-new-tokens", "24", "--limit", "8")
    run("medusa", "distill", "--prompts", "demo_prompts", *answering)
    data = ("--config", "smollm2_demo", "--data", "answers.jsonl", "--held_out_fraction", "0.3")
    settings = ("--output_dir", "mine", "--max_steps", "3", "--reads_path", "false")
    said = run("medusa", "train", *data, *settings).stderr
    assert "heads written to mine/heads" in said
    assert json.loads((place / "mine/heads/config.json").read_text())["base_model"] == BASE
    return "mine/heads"


def test_the_package_comes_from_the_wheel_and_answers_at_once(place, run):
    shown = run("python", "-c", "import medusa; print(medusa.__file__)").stdout
    assert shown.startswith(str(place / "venv"))
    run("medusa", "--version")
    began = time.process_time(), os.times().children_user
    assert run("medusa", "--version").stdout == f"medusa {medusa.__version__}\n", "built where git is not"
    assert os.times().children_user - began[1] < 1, "seconds of work; it takes a quarter of one"


def test_only_what_the_wheel_asks_for_is_there(run):
    for name in ("pytest", "peft", "openai"):
        assert f"No module named '{name}'" in run("python", "-c", f"import {name}", status=1).stderr


def test_configurations_are_found_by_name(place, run):
    listed = run("medusa", "configs").stdout
    assert {"smollm2", "smollm2_demo", "accelerate_ddp", "demo_prompts"} <= {
        line.split()[0] for line in listed.splitlines()
    }
    path = Path(run("medusa", "configs", "smollm2").stdout.strip())
    assert path.is_file() and (place / "venv") in path.parents
    wrong = run("medusa", "train", "--config", "smollm2_dmo", status=2).stderr
    assert "did you mean 'smollm2_demo'?" in wrong


def test_it_chats_and_generates_with_the_base_that_was_fetched(run, fetched):
    chatted = run("medusa", "chat", "--max-new-tokens", "8", stdin="Hello\n")
    assert "> Hello" in chatted.stdout and "8 tokens in" in chatted.stderr
    question = ("--max-new-tokens", "8", "Name three rivers.")
    answer = run("medusa", "generate", *question).stdout
    assert answer.strip()
    assert run("medusa", "generate", "--plain", "--base", BASE, *question).stdout == answer


def test_it_serves_until_told_to_stop(place, run, fetched):
    command = [str(place / "venv/bin/medusa"), "serve", "--port", "0"]
    server = subprocess.Popen(command, cwd=place, env=variables(place), stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        address = next(found[1] for line in server.stderr if (found := re.search(r"ready: (\S+)", line)))
        messages = [{"role": "user", "content": "Name three rivers."}]
        asked = json.dumps({"messages": messages, "max_tokens": 8, "temperature": 0}).encode()
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/v1/chat/completions", asked, kind)
        with urllib.request.urlopen(request, timeout=300) as reply:
            said = json.load(reply)["choices"][0]["message"]["content"]
        assert said == run("medusa", "generate", "--max-new-tokens", "8", "Name three rivers.").stdout.strip()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()


@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "--plot", "evaluation.png"),
        ("tune", "--sizes", "2", "--rounds", "1", "--plot", "tree.png"),
        ("benchmark", "--systems", "heads", "--plot", "benchmark.png"),
        ("evaluate", "--rounds", "0", "--sizes", "4", "--plot", "heads.png"),
        ("benchmark", "--systems", "suffix", "--draft-length", "2", "--show", "--plot", "drafters.png"),
    ],
    ids=lambda words: words[-1],
)
def test_it_measures_the_heads_that_it_trained(place, run, heads, words):
    done = run("medusa", words[0], "--heads", heads, "--limit", "2", "--max-new-tokens", "8", *words[1:])
    assert json.loads(done.stdout.splitlines()[-1])
    assert all((place / word).read_bytes().startswith(b"\x89PNG") for word in words if word.endswith(".png"))


def test_it_exports_the_heads_and_holds_them_to_their_consumer(place, run, heads):
    said = run("medusa", "export", heads, "--to", "vllm-medusa", "--output", "vllm").stderr
    served = Path(re.search(r"--base (\S+)", said)[1])
    assert served.is_dir(), "another project knows no name of ours"
    check = ("--as", "vllm-medusa", "--base", BASE, "--limit", "2", "--max-new-tokens", "16")
    done = run("python", "-m", "medusa", "check", "vllm", *check, status=1)
    assert "an untrained one" in done.stderr, "three steps teach nothing"
