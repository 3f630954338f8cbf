"""`medusa info BASE` says what kind a base is, and what is possible with it."""

from __future__ import annotations

import json

import pytest
from conftest import tiny_model
from stateful_models import stateful_model, stateful_types

from medusa.cli.commands import InfoOptions
from medusa.cli.info import info


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (lambda: tiny_model("llama"), {"layers": {"attention": 2}, "decodes": "yes", "drafts": "trees"}),
        (
            lambda: stateful_model("lfm2"),
            {
                "layers": {"with a state": 1, "attention": 1},
                "decodes": "yes",
                "drafts": "chains: a state follows one path",
                "rows of a batch": "read one after the other",
            },
        ),
        (
            lambda: stateful_types.tiny_model("jamba"),
            {
                "decodes": "no: JambaForCausalLM reads several tokens at a time as if none stood before "
                "them, so no draft can be verified on it; use its own generate"
            },
        ),
    ],
)
def test_a_base_is_described_without_its_weights(base, expected, tmp_path, capsys):
    base().config.save_pretrained(tmp_path)
    following = info(InfoOptions(heads=str(tmp_path), json=True))
    described = json.loads(capsys.readouterr().out)
    assert {name: described[name] for name in expected} == expected
    assert bool(following) == (expected["decodes"] == "yes")


def test_a_base_is_described_in_a_table(tmp_path, capsys):
    stateful_model("falcon_h1").config.save_pretrained(tmp_path)
    info(InfoOptions(heads=str(tmp_path)))
    assert "2 attention beside a state" in capsys.readouterr().out
