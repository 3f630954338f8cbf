"""Learning runs while nothing is asked, stands still while something is, and leaves nothing behind."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_chat import chat_tokenizer
from tiny_server import wait_until

from medusa.learning import idle_learning
from medusa.learning.idle_learning import IdleLearning
from medusa.learning.learned_heads import LearnedHeads

TICKING = """
import time
while True:
    with open({path!r}, "a") as file:
        file.write(".")
    time.sleep(0.005)
"""
"""A round that shows when it runs."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(idle_learning, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(idle_learning, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(idle_learning, "ENOUGH_BYTES", 60)
    monkeypatch.setattr(idle_learning, "is_on_battery", lambda: False)


class Place:
    """A base that learns by running a line of Python."""

    def __init__(self, directory):
        self.learned = LearnedHeads(directory)
        with self.learned.locked():
            self.learned.begin("base")
        self.is_busy = False
        self.told = []
        self.ticks = directory / "ticks"
        self.learning = None
        self.num_answers = 0

    def start(self, code):
        command = [sys.executable, "-c", code.format(path=str(self.ticks))]
        self.learning = IdleLearning(
            self.learned, chat_tokenizer(), command, True, lambda: self.is_busy, self.told.append
        )
        self.learning.start()
        return self.learning

    def answer(self, text="an answer that is long enough"):
        """No two are the same."""
        self.num_answers += 1
        tokens = chat_tokenizer()(f"{self.num_answers:04} {text}", add_special_tokens=False)["input_ids"]
        self.learning.add(tokens[:4], tokens[4:])

    @property
    def num_ticks(self):
        return self.ticks.stat().st_size if self.ticks.exists() else 0

    def stands_still(self):
        before = self.num_ticks
        time.sleep(0.1)
        return self.num_ticks == before


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path / "learned")
    yield made
    if made.learning is not None:
        made.learning.close()


def test_a_round_begins_once_there_is_enough_and_nothing_is_asked(place):
    place.is_busy = True
    learning = place.start(TICKING)
    place.answer()
    time.sleep(0.15)
    assert learning.state == "collecting"
    place.is_busy = False
    wait_until(lambda: place.num_ticks)
    assert learning.state == "learning"
    assert os.getpriority(os.PRIO_PROCESS, learning._process.pid) == 19


def test_little_text_begins_no_round(place):
    place.start(TICKING)
    place.answer("short, but long")
    time.sleep(0.15)
    assert not place.num_ticks


def test_it_stands_still_from_the_moment_that_something_is_asked(place):
    learning = place.start(TICKING)
    place.answer()
    for _ in range(3):
        wait_until(lambda: not place.stands_still())
        place.is_busy = True
        learning.pause()
        assert place.stands_still() and learning.state == "paused"
        place.is_busy = False


def test_it_stands_still_on_a_battery_that_empties(place, monkeypatch):
    monkeypatch.setattr(idle_learning, "is_on_battery", lambda: True)
    place.start(TICKING)
    place.answer()
    time.sleep(0.15)
    assert not place.num_ticks


@pytest.mark.parametrize("is_paused", [False, True])
def test_closing_ends_the_round(place, is_paused):
    learning = place.start(TICKING)
    place.answer()
    wait_until(lambda: place.num_ticks)
    process = learning._process
    if is_paused:
        place.is_busy = True
        learning.pause()
    learning.close()
    assert process.returncode == -signal.SIGTERM and not learning._thread.is_alive()


def test_a_round_that_fails_is_told_with_what_it_said_and_waits_for_more_text(place, caplog):
    with caplog.at_level(logging.WARNING, "medusa.learning"):
        learning = place.start("open({path!r}, 'a').write('.'); raise SystemExit('no room for it')")
        place.answer()
        wait_until(lambda: caplog.records)
        assert "a round of learning has failed (exit 1; it said: no room for it" in caplog.text
        time.sleep(0.15)
        assert place.num_ticks == 1 and learning.state == "failed"
        for _ in range(4):
            place.answer()
        wait_until(lambda: place.num_ticks == 2)


def test_a_round_that_was_stopped_goes_on_without_new_text(place):
    (place.learned.round).mkdir()
    (place.learned.round / "plan.json").write_text("{}")
    place.start(TICKING)
    wait_until(lambda: place.num_ticks)


def test_other_heads_in_use_are_told_whoever_has_learned_them(place):
    learning = place.start(TICKING)
    record = place.learned.directory / "record.json"
    version = dict(made="now", learned_from=["secret"], is_private=True, num_tokens=1, minutes=1.0)
    versions = [{"number": number, "tokens_per_step": 1.5, "speedup": None, **version} for number in (1, 2)]
    expected = []
    for number in (1, 2, 1):
        record.write_text(json.dumps({"base": "base", "in_use": number, "versions": versions}))
        expected.append(place.learned.directory / f"heads-{number}")
        wait_until(lambda: place.told == expected)
    learning.follows = False
    record.write_text(json.dumps({"base": "base", "in_use": 2, "versions": versions}))
    wait_until(lambda: learning.version.number == 2)
    assert place.told == expected, "heads that were named stay"
    record.write_text(json.dumps({"base": "base", "in_use": 1, "versions": versions}))
    wait_until(lambda: learning.version.number == 1)
    report = learning.report()
    assert report["version"]["number"] == 1 and "secret" not in json.dumps(report)


def test_a_damaged_record_is_told_once(place, caplog):
    with caplog.at_level(logging.WARNING, "medusa.learning"):
        place.start(TICKING)
        (place.learned.directory / "record.json").write_text('{"in_use": 1, "versions": [{"number": 1}]}')
        wait_until(lambda: caplog.records)
        time.sleep(0.15)
    assert caplog.text.count("record.json is damaged") == 1 and place.learning._thread.is_alive()
    assert place.learning.report()["version"] is None, "what was read last"


def test_answers_go_on_where_nothing_can_be_kept(place, caplog):
    learning = place.start(TICKING)
    shutil.rmtree(place.learned.directory)
    with caplog.at_level(logging.WARNING, "medusa.learning"):
        for _ in range(2):
            place.answer()
    assert caplog.text.count("nothing more is kept to learn from") == 1 and learning.state == "off"


KILLED = """
import os, sys, time
from pathlib import Path
sys.path[:0] = {paths!r}
from medusa.learning import idle_learning
from medusa.learning.idle_learning import IdleLearning
from medusa.learning.learned_heads import LearnedHeads
idle_learning.IDLE_SECONDS = idle_learning.LOOK_SECONDS = 0.01
learned = LearnedHeads(Path({directory!r}))
busy = []
learning = IdleLearning(learned, None, [sys.executable, "-c", {code!r}], True, lambda: bool(busy), print)
learning.start()
while learning.state != "learning":
    time.sleep(0.01)
busy.append(1)
learning.pause()
print(learning._process.pid, flush=True)
time.sleep(60)
"""


def test_a_round_that_stands_still_does_not_outlive_its_server(place):
    place.learned.round.mkdir()
    (place.learned.round / "plan.json").write_text("{}")
    code = TICKING.format(path=str(place.ticks))
    script = KILLED.format(paths=sys.path, directory=str(place.learned.directory), code=code)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as server:
        number = int(server.stdout.readline())
        os.kill(number, 0)
        server.kill()

    def is_gone():
        path = Path(f"/proc/{number}/stat")
        return not path.exists() or ") Z " in path.read_text()

    wait_until(is_gone)
