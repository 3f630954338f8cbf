"""What nobody has a graphics card for in these tests: it runs on a pretended one, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from conftest import CHECKOUT

TESTS = CHECKOUT / "tests"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ and the headers of torch")
@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_a_card_gives_the_tokens_and_losses_of_the_cpu_and_waits_no_more_than_it_did(marked):
    """``pretended_card`` changes torch for good, and must be imported before it. See its tests there."""
    path = os.pathsep.join([str(TESTS), str(CHECKOUT)])
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "pretended_card", "-p", "no:cacheprovider", "-p", "no:xdist",
         "-x", "-m", marked, str(TESTS / "pretended_card" / "on_a_card.py")],
        cwd=CHECKOUT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
