"""What holds for tiny models holds at the widths that people have."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import CHECKOUT, needs_kernels, program

full_widths = program("scripts/full_widths.py")
pytestmark = needs_kernels
WIDE = full_widths._family("llama", 512, 2304, 4, 2, 102400, True, head_dim=128, rms_norm_eps=1e-5)
"""Wider than a loop of torch takes at once, over many tokens, in heads that share keys; small otherwise."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wide")
    full_widths.write_model(WIDE, directory)
    return directory


@pytest.mark.parametrize(
    ("engines", "steps"),
    [
        pytest.param(("packed",), ("general",), id="packed"),
        pytest.param(("packed",), ("compiled",), id="compiled", marks=pytest.mark.slow),
        pytest.param(("int8",), ("general",), id="int8", marks=pytest.mark.slow),
    ],
)
def test_every_draft_writes_the_plain_text_at_full_width(wide, engines, steps):
    tried = full_widths.Tried()
    full_widths.try_decoding(wide, tried, engines, steps)
    assert not tried.failed
    assert sum(tried.passed.values()) == sum(22 if engine == "packed" else 16 for engine in engines)


@pytest.mark.slow
def test_heads_that_read_their_path_and_score_all_tokens_draft_on_a_base_that_is_named(wide):
    tried = full_widths.Tried()
    full_widths.try_heads(wide, tried, kinds=[("shared", "with a path"), ("full", "with a path")])
    assert not tried.failed and tried.passed == {"kinds of heads": 10}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "fused"),
    [("packed", ()), ("int8", ()), ("packed", (1,))],
    ids=["packed", "int8", "fused layers"],
)
def test_every_kind_of_heads_drafts_with_every_unembedding_on_a_base_that_is_named(wide, engine, fused):
    tried = full_widths.Tried()
    full_widths.try_heads(wide, tried, engine, fused)
    assert not tried.failed and tried.passed == {"kinds of heads": 31}


def test_every_command_runs_at_full_width(wide):
    tried = full_widths.Tried()
    full_widths.try_commands(wide, tried)
    assert not tried.failed and tried.passed == {"commands": 7}


@pytest.mark.slow
@pytest.mark.parametrize("family", full_widths.FAMILIES)
def test_everything_runs_at_the_widths_of_a_family(family):
    command = [sys.executable, str(CHECKOUT / "scripts" / "full_widths.py"), "--only", family, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert json.loads(ran.stdout.splitlines()[-1])["failed"] == []
