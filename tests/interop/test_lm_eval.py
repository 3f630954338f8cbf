"""The real lm-evaluation-harness, whose `hf` model decodes with our heads, gets the answers of the base.

It needs a Python with lm_eval and this package, for example an environment of its own:

    python3 -m venv lm-eval && lm-eval/bin/pip install . lm_eval
    LM_EVAL_PYTHON=$PWD/lm-eval/bin/python pytest -m slow tests/interop/test_lm_eval.py
"""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from conftest import CHECKOUT, REAL_BASE

from medusa.cli.main import main

PYTHON = os.environ.get("LM_EVAL_PYTHON")
TASK = """
task: sums
dataset_path: json
dataset_kwargs:
  data_files: {test: sums.jsonl}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
generation_kwargs: {until: ["Question:", "<|im_end|>"], max_gen_toks: 64, do_sample: false}
"""
QUESTIONS = {
    "A shop sells pens at 3 euros each. What do 17 pens cost?": "51",
    "Tom has 12 marbles and loses 5. Then he finds 9. How many has he now?": "16",
    "A train covers 240 kilometres in 3 hours. How far does it go in 5 hours at that speed?": "400",
    "A baker makes 24 rolls from 3 kilograms of dough. How many from 5 kilograms?": "40",
    "Ann reads 15 pages a day. How many days does she need for 180 pages?": "12",
    "A garden is 8 metres long and 6 metres wide. What is its area?": "48",
}


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="LM_EVAL_PYTHON names no Python with lm_eval")
@pytest.mark.skipif(not REAL_BASE.exists(), reason="`make models` fetches the base")
def test_the_harness_gets_the_answers_of_the_base(tmp_path):
    repository = tmp_path / "repository"
    assert main(["push", "smollm2-135m-instruct", "me/heads", "--dry-run", str(repository)]) == 0
    rows = [json.dumps({"question": each, "answer": answer}) for each, answer in QUESTIONS.items()]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    (tmp_path / "sums.yaml").write_text(TASK)
    plain = answers(tmp_path, "plain")
    assert answers(tmp_path, "heads", f"custom_generate={repository}", "trust_remote_code=True") == plain
    assert len(plain) == len(QUESTIONS)
    assert len({len(each) for each in plain}) > 1, "they would be alike if all were cut at the same place"
    wrong = answers(tmp_path, "wrong", f"custom_generate={tmp_path}", "trust_remote_code=True", fails=True)
    assert "does not contain a `custom_generate` subdirectory" in wrong, "the argument reaches transformers"


def answers(directory, name, *generation, fails=False):
    """What the harness's model answered to each question; standard error where it must fail."""
    words = ["--model", "hf", "--model_args", f"pretrained={REAL_BASE},dtype=float32", "--device", "cpu"]
    words += ["--tasks", "sums", "--include_path", ".", "--batch_size", "2", "--log_samples"]
    words += ["--output_path", name, *(["--gen_kwargs", *generation] if generation else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": str(CHECKOUT),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(directory),
    }
    done = subprocess.run(
        [PYTHON, "-m", "lm_eval", "run", *words],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
    )
    if fails:
        assert done.returncode != 0
        return done.stderr
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (directory / name).rglob("samples_sums_*.jsonl")
    entries = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda entry: entry["doc_id"])
    return [entry["resps"][0][0] for entry in entries]
