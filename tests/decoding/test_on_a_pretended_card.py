"""What nobody has a graphics card for in these tests: it runs on pretended ones, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from conftest import CHECKOUT

TESTS = CHECKOUT / "tests"
ON_A_CARD, STATIC = TESTS / "pretended_card" / "on_a_card.py", TESTS / "decoding" / "test_static.py"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ and the headers of torch")
@pytest.mark.parametrize(
    ("marked", "path"),
    [
        ("not slow", ON_A_CARD),
        pytest.param("slow", ON_A_CARD, marks=pytest.mark.slow),
        pytest.param("gpu", STATIC, marks=pytest.mark.slow),
    ],
)
def test_a_card_gives_the_tokens_and_losses_of_the_cpu_and_waits_no_more_than_it_did(marked, path):
    """``pretended_card`` changes torch for good, and must be imported before it. See its tests there."""
    places = [str(TESTS), str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    options = ["-p", "pretended_card", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marked]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(path)],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
