"""``make measure``: experiments that are due run once, and the pages say what they found."""

from __future__ import annotations

import json

import conftest
import pytest

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[-1])), Healthy).serve_forever()
"""


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """The program in a checkout of its own: two experiments, and the code that the first depends on."""
    program = conftest.program("scripts/measure.py")
    folder = tmp_path / "measurements"
    folder.mkdir()
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "code.py").write_text("one = 1")
    questions = [{"category": "math", "turns": [f"{number}?"]} for number in range(10)]
    (tmp_path / "mt_bench.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    (tmp_path / "count.py").write_text(
        "import json, os, sys\n"
        "open('runs', 'a').write(sys.argv[1])\n"
        "assert sys.argv[1] != 'b' or open('runs').read().count('b') > 1, 'fails the first time'\n"
        "print('a table')\n"
        "kept = os.listdir(os.environ['KEPT']) if 'KEPT' in os.environ else None\n"
        "rows = len(open(sys.argv[2]).readlines())\n"
        "print(json.dumps({'rows': rows, 'words': sys.argv[3:], 'kept': kept}))\n"
    )
    (tmp_path / "server.py").write_text(SERVER)
    (folder / "experiments.yaml").write_text(
        "a: {asks: 'A?', command: 'KEPT={empty} python count.py a {prompts}/mt_bench_16.jsonl', "
        "code: [library], minutes: 1}\n"
        "b: {asks: 'B?', command: 'python count.py b {prompts}/mt_bench.jsonl', code: [measurements/none], "
        "minutes: 1, before: [python count.py c README.md], servers: {one: python server.py}}\n"
    )
    (folder / "measurements.md.j2").write_text("{{ found.a.rows }} ({{ measured('a') }})\n")
    (folder / "readme.md.j2").write_text("{{ found.b.rows }} rows\n")
    (tmp_path / "README.md").write_text(f"# Read\n{program.START}\nold\n{program.END}\nmore\n")
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(program, "FOLDER", folder)
    monkeypatch.setattr(program, "SHOWN_FIRST", ("a", "b"))
    monkeypatch.setattr(program, "commit", lambda: "abc1234")
    monkeypatch.setattr(program, "draw_pictures", lambda known: None)
    return program


def test_what_is_due_runs_once_an_interrupted_run_goes_on_and_the_pages_follow(measure, tmp_path):
    options = measure.MeasureOptions(prompts=tmp_path)
    with pytest.raises(ValueError, match=r"b failed; the others are kept: .*count.py b"):
        measure.measure(options)
    assert not (tmp_path / "MEASUREMENTS.md").exists()
    measure.measure(options)
    measure.measure(options)
    assert (tmp_path / "runs").read_text() == "acbcb", "what was found is not looked for again"
    assert (tmp_path / "MEASUREMENTS.md").read_text().startswith("2 (`make measure ONLY=a`, 20")
    assert (tmp_path / "README.md").read_text() == (
        f"# Read\n{measure.START}\n10 rows\n{measure.END}\nmore\n"
    )
    first, found = (
        json.loads((tmp_path / "measurements" / f"{name}.json").read_text())["found"] for name in "ab"
    )
    assert first["kept"] == [], "a variable of the command names an empty folder"
    assert found["words"][0] == "--servers" and found["words"][1].startswith("one=http://127.0.0.1:")


def test_an_experiment_is_older_than_the_code_when_that_has_changed_and_then_due(measure, tmp_path):
    with pytest.raises(ValueError, match="b failed"):
        measure.measure(measure.MeasureOptions(prompts=tmp_path))
    measure.measure(measure.MeasureOptions(prompts=tmp_path))
    page = tmp_path / "MEASUREMENTS.md"
    assert "abc1234)" in page.read_text()
    (tmp_path / "library" / "code.py").write_text('"""One."""\none = 1  # the same')
    measure.measure(measure.MeasureOptions(write=True))
    assert "abc1234)" in page.read_text(), "a comment is no change"
    (tmp_path / "library" / "code.py").write_text("one = 2")
    measure.measure(measure.MeasureOptions(write=True))
    assert "abc1234, **older than the code**)" in page.read_text()
    measure.measure(measure.MeasureOptions(prompts=tmp_path))
    assert (tmp_path / "runs").read_text() == "acbcba" and "abc1234)" in page.read_text()


def test_what_an_experiment_needs_is_named_where_it_is_missing_and_the_others_run(measure, tmp_path, capsys):
    experiments = tmp_path / "measurements" / "experiments.yaml"
    experiments.write_text(experiments.read_text().replace("a: {", "a: {needs: [heads], "))
    measure.measure(measure.MeasureOptions(only=("a",), prompts=tmp_path))
    assert "a is left out: heads is missing" in capsys.readouterr().err
    assert not (tmp_path / "measurements" / "a.json").exists()
    (tmp_path / "heads").touch()
    measure.measure(measure.MeasureOptions(only=("a",), prompts=tmp_path))
    assert (tmp_path / "measurements" / "a.json").exists()
    rows = (tmp_path / "mt_bench.jsonl").read_text().splitlines()
    assert (tmp_path / "mt_bench_16.jsonl").read_text().splitlines() == rows[::5]
    assert (tmp_path / "mt_bench_40.jsonl").read_text().splitlines() == rows[::2]


def test_an_experiment_about_another_machine_is_left_out(measure, tmp_path, capsys, monkeypatch):
    experiments = tmp_path / "measurements" / "experiments.yaml"
    experiments.write_text(experiments.read_text().replace("a: {", "a: {machine: without AMX, "))
    for device, is_run in {"cpu: X, AVX512 and AMX": False, "cpu: X, AVX512 without AMX": True}.items():
        monkeypatch.setattr(measure, "where", lambda device=device: device)
        measure.measure(measure.MeasureOptions(only=("a",), prompts=tmp_path))
        assert (tmp_path / "measurements" / "a.json").exists() == is_run
    assert "a is left out: a machine 'without AMX' is missing" in capsys.readouterr().err


def test_names_and_prompts_that_are_not_there_are_refused(measure, tmp_path):
    with pytest.raises(ValueError, match=r"only must name experiments \(a, b\), got c"):
        measure.measure(measure.MeasureOptions(only=("c",), prompts=tmp_path))
    with pytest.raises(FileNotFoundError, match=r"mt_bench\.jsonl is missing; MEASUREMENTS.md tells where"):
        measure.measure(measure.MeasureOptions(prompts=tmp_path / "elsewhere"))


def test_prompts_are_wanted_by_experiments_that_read_them_alone(measure, tmp_path):
    experiments = tmp_path / "measurements" / "experiments.yaml"
    experiments.write_text(experiments.read_text().replace("{prompts}/mt_bench_16.jsonl", "README.md"))
    measure.measure(measure.MeasureOptions(only=("a",), prompts=tmp_path / "elsewhere"))
    assert (tmp_path / "measurements" / "a.json").exists()


def test_the_pages_are_what_the_experiments_found():
    """But for the marks of experiments whose code has changed since: ``make measure`` sets them."""
    program = conftest.program("scripts/measure.py")
    for path, text in program.pages(program.experiments()).items():
        written = path.read_text(encoding="utf-8")
        assert written.replace(program.OLDER, "") == text.replace(program.OLDER, ""), path


def test_another_program_is_named_by_a_variable(monkeypatch):
    program = conftest.program("scripts/measure.py")
    monkeypatch.setenv("OTHER_SERVER", "serve --fast")
    assert program.to_argv("A=1 $OTHER_SERVER -m x") == ["env", "A=1", "serve", "--fast", "-m", "x"]
    monkeypatch.delenv("OTHER_SERVER")
    with pytest.raises(ValueError, match="OTHER_SERVER must name the program"):
        program.to_argv("$OTHER_SERVER -m x")
