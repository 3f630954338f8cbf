"""The record of a round of learning outlives the commands that were stopped."""

import os

import pytest

from medusa.training.data.material import Material
from medusa.training.round import Round

ASKED = {"minutes": 20.0}


def test_minutes_count_until_a_command_was_killed_and_not_until_the_next_began(tmp_path):
    begun = Round.begun_in(tmp_path / "round", ASKED, 1, Material())
    assert begun.minutes_taken < 0.1
    saved = (begun.directory / "plan.json").stat().st_mtime
    run = begun.directory / "run"
    run.mkdir()
    (run / "checkpoint").touch()
    for path in begun.directory.rglob("*"):
        os.utime(path, (saved - 9000, saved - 9000))  # all of it is long ago
    os.utime(run / "checkpoint", (saved - 9000 + 600, saved - 9000 + 600))
    stopped = Round.stopped_in(begun.directory, ASKED)
    assert stopped.minutes_taken == pytest.approx(10, abs=0.1)
    stopped.save()
    assert Round.stopped_in(begun.directory, ASKED).minutes_taken == pytest.approx(10, abs=0.1)
