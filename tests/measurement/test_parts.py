"""Long measurements in parts: nothing that was measured is lost, whatever happens to the rest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from medusa.measurement import parts
from medusa.measurement.parts import DEVICE_LOST, Case, Part, Record, Skipped, run_cases, run_in_processes

CPU = torch.device("cpu")


def show(cases, console):
    console.print(" ".join(f"{name}={found['value']}" for name, found in cases.items()))


def part_of(cases=(), **options) -> Part:
    return Part(7, "numbers", 1.0, lambda lab: iter(cases), show, **options)


def measured(record: Record, *cases: Case, seconds: float = 100.0) -> int:
    return run_cases(record, cases, CPU, time.monotonic() + seconds)


def number(value) -> Case:
    return Case(str(value), lambda: {"value": value})


def broken() -> dict:
    raise RuntimeError("no such luck\nat all")


def missing() -> dict:
    raise Skipped("it needs a moon")


def test_a_case_that_fails_leaves_its_traceback_and_does_not_cost_the_others_theirs(tmp_path, capsys):
    record = Record(part_of(), tmp_path)
    assert measured(record, number(1), Case("broken", broken), Case("moon", missing), number(2)) == 1
    assert "Traceback" in (said := capsys.readouterr().err) and "def broken" not in said
    known = json.loads((tmp_path / "7-numbers.json").read_text())
    assert {name: found["value"] for name, found in known["cases"].items()} == {"1": 1, "2": 2}
    assert known["failed"] == {"broken": "RuntimeError: no such luck"}
    assert known["skipped"] == {"moon": "it needs a moon"}
    assert known["running"] is None and known["complete"] is False
    text = (tmp_path / "7-numbers.txt").read_text()
    assert "1=1 2=2" in text and "failed: broken: RuntimeError: no such luck" in text


def test_the_results_lie_on_the_disk_before_the_next_case_begins(tmp_path):
    seen = []

    def look() -> dict:
        seen.append(json.loads((tmp_path / "7-numbers.json").read_text()))
        return {"value": 0}

    measured(Record(part_of(), tmp_path), number(1), Case("look", look))
    assert list(seen[0]["cases"]) == ["1"] and seen[0]["running"] == "look"


def test_a_second_run_measures_only_what_is_missing(tmp_path):
    measured(Record(part_of(), tmp_path), number(1), Case("broken", broken))
    record = Record.of(part_of(), tmp_path)
    record.begin(again=False)
    runs = []
    again = Case("1", lambda: runs.append(1) or {"value": 1})
    assert measured(record, again, Case("broken", lambda: {"value": 3})) == 0
    assert runs == [] and record.complete and record.cases["broken"]["value"] == 3
    record.begin(again=True)
    measured(record, again)
    assert runs == [1] and list(record.cases) == ["1"]


def test_an_open_ended_part_begins_again_when_it_was_finished(tmp_path):
    record = Record(part_of(is_open_ended=True), tmp_path)
    measured(record, number(1))
    record.begin(again=False)
    assert record.cases == {} and not record.complete


def test_what_the_time_does_not_hold_is_left_out_and_said(tmp_path):
    record = Record(part_of(), tmp_path)
    assert measured(record, Case("long", lambda: {"value": 1}, minutes=2.0), number(2), seconds=60) == 0
    assert record.left_out == {"long": "takes about 2 minutes, and 1.0 were left"}
    assert list(record.cases) == ["2"] and not record.complete
    assert "left out: long" in (tmp_path / "7-numbers.txt").read_text()


def test_a_device_that_answers_no_more_ends_the_process_and_not_the_part(tmp_path, monkeypatch):
    def wait_for(device):
        raise RuntimeError("an illegal memory access was encountered")

    record = Record(part_of(), tmp_path)
    measured(record, number(1))
    monkeypatch.setattr(parts, "wait_for", wait_for)
    assert measured(record, number(1), number(2), number(3)) == DEVICE_LOST
    assert list(record.failed) == ["2"] and "illegal memory access" in record.failed["2"]
    monkeypatch.undo()
    assert measured(record, number(1), number(2), number(3)) == 1
    assert list(record.cases) == ["1", "3"]


WORK = """
import json, os, signal, sys, time
path = sys.argv[1]
known = json.load(open(path))
def keep(**changes):
    known.update(changes)
    json.dump(known, open(path, "w"))
cases, failed = known["cases"], known["failed"]
print("a process", flush=True)
if not cases:
    keep(cases={"1": {"value": 1}}, running="%s")
    %s
    time.sleep(60)
keep(cases={**cases, "3": {"value": 3}})
sys.exit(1)
"""


@pytest.mark.parametrize(
    ("way", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("os._exit(1)", 1),
        ("pass", -signal.SIGKILL),
    ],
    ids=["crashes", "ends", "hangs"],
)
def test_a_process_that_dies_or_hangs_in_a_case_is_started_again_without_it(
    tmp_path, monkeypatch, way, status
):
    monkeypatch.setattr(parts, "GRACE_SECONDS", 0 if way == "pass" else 20)
    record = Record(part_of(), tmp_path)
    record.begin(again=False)
    given = []

    def command(seconds):
        given.append(seconds)
        if way == "pass" and len(given) == 1:  # the first process gets little time, the second what is left
            monkeypatch.setattr(parts, "GRACE_SECONDS", -seconds + 1.5)
        elif way == "pass":
            monkeypatch.setattr(parts, "GRACE_SECONDS", 20)
        return [sys.executable, "-c", WORK % ("2", way), str(record.json)]

    run_in_processes(record, command, time.monotonic() + 40)
    assert len(given) == 2 and list(record.cases) == ["1", "3"]
    assert f"(status {status})" in record.failed["2"] and "7-numbers.log" in record.failed["2"]
    assert record.log.read_text().count("a process") == 2
    assert Record.of(record.part, tmp_path).failed == record.failed


def test_a_process_that_ends_outside_of_any_case_is_not_started_for_ever(tmp_path):
    record = Record(part_of(), tmp_path)
    record.begin(again=False)
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    run_in_processes(record, lambda seconds: command, time.monotonic() + 40)
    assert "its process ended with status 3" in record.failed["the part"]


def test_without_time_nothing_is_started_and_that_is_said(tmp_path):
    record = Record(part_of(), tmp_path)
    record.begin(again=False)
    run_in_processes(record, lambda seconds: pytest.fail("started"), time.monotonic() - 1)
    assert record.left_out == {"what is not listed": "no time was left"}


def test_a_program_that_is_told_to_end_ends_what_it_has_started(tmp_path, monkeypatch):
    started, popen = [], subprocess.Popen

    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    before = signal.getsignal(signal.SIGTERM)

    def tell() -> None:
        while not started:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell, daemon=True).start()
    with pytest.raises(SystemExit):
        parts.run_process([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", 50)
    assert started[0].poll() == -signal.SIGKILL
    assert signal.getsignal(signal.SIGTERM) is before
