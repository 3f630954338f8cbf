"""scripts/on_gpu.py: every question is asked, no answer is lost, and nothing has to be installed for it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from conftest import CHECKOUT, program

BARE = ("tyro", "gguf", "fastapi", "uvicorn", "prometheus_client", "peft", "datasets", "matplotlib")
"""Of what pyproject.toml names, what images with torch and transformers do not have."""


@pytest.fixture
def on_gpu():
    return program("scripts/on_gpu.py")


def answers(capsys) -> dict[str, dict]:
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len({each["question"] for each in found}) == len(found)
    return {each.pop("question"): each for each in found}


def test_a_dry_run_answers_every_question_on_a_cpu(on_gpu, capsys, monkeypatch):
    monkeypatch.setattr(on_gpu, "triton_unsupported_reason", lambda device: "no triton")  # see the next test
    assert on_gpu.main(["--dry-run"]) == 0
    found = answers(capsys)
    assert list(found) == [name for name, _ in on_gpu.questions(on_gpu.Card("cpu", True))]
    assert all("answer" in each for each in found.values())
    assert {each["answer"]["same"][-1] for name, each in found.items() if name.startswith("exact")} == {1.0}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_dry_run_answers_the_questions_about_kernels_in_triton_by_its_interpreter(on_gpu, capsys):
    assert on_gpu.main(["--dry-run", "--only", "packed"]) == 0
    found = answers(capsys)
    assert list(found) == [name for name, _ in on_gpu.packed_questions(on_gpu.Card("cpu", True))]
    assert len(found) > 14 and all("answer" in each for each in found.values())
    kernels = [each["answer"]["difference"] for name, each in found.items() if "kernel:" in name]
    assert len(kernels) == 4 and max(kernels) < 1e-5


def test_what_fails_is_an_answer_and_the_others_are_asked(on_gpu, capsys, monkeypatch):
    monkeypatch.setattr(on_gpu, "noise", lambda card: [][1])
    monkeypatch.setattr(on_gpu, "versions", lambda card: "good")
    assert on_gpu.main(["--dry-run", "--only", "versions", "noise", "theirs"]) == 1
    found = answers(capsys)
    assert found["versions"]["answer"] == "good"
    assert found["noise"]["error"] == "IndexError: list index out of range"
    assert found["theirs: as it is"]["answer"]["ms"] > 0


def test_a_text_that_is_not_exact_is_a_failure(on_gpu, monkeypatch):
    monkeypatch.setattr(on_gpu, "agreement", lambda card, dtype, *given: {"same": [1.0, 0.9]})
    assert on_gpu.main(["--dry-run", "--only", "same: static, heads"]) == 0
    assert on_gpu.main(["--dry-run", "--only", "exact: static, heads"]) == 1


def test_no_question_is_begun_when_the_time_is_up(on_gpu, capsys):
    assert on_gpu.main(["--dry-run", "--minutes", "-1", "--only", "versions"]) == 0
    assert answers(capsys) == {"versions": {"left": "the time was up"}}


def test_without_a_card_it_says_so(on_gpu, capsys, monkeypatch):
    monkeypatch.setattr(on_gpu.torch.cuda, "is_available", lambda: False)
    assert on_gpu.main([]) == 1
    assert "device must be one that torch sees, got 'cuda', and it sees no CUDA" in capsys.readouterr().err


def test_it_starts_where_torch_and_transformers_alone_are_installed():
    """transformers brings safetensors, huggingface_hub, httpx, yaml and rich."""
    code = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({BARE!r}))\n"
        "sys.argv = ['on_gpu.py', '--dry-run', '--only', 'versions', 'exact: static, heads']\n"
        f"runpy.run_path({str(CHECKOUT / 'scripts' / 'on_gpu.py')!r}, run_name='__main__')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 3
