import pytest

from medusa.training.distillation.distill import AnswerFile, configuration_path


def test_a_very_long_torn_line_is_cut_and_nothing_else(tmp_path):
    path = tmp_path / "rows.jsonl"
    with AnswerFile(path, {}) as answers:
        answers.append({"index": 0, "messages": [], "finish_reason": "stop", "note": "é" * 50_000})
    kept = path.read_bytes()
    path.write_bytes(kept + b'{"index": 1, "text": "' + b"y" * 200_000)
    with AnswerFile(path, {}):
        assert path.read_bytes() == kept


def test_an_output_that_one_run_fills_is_refused_to_another(tmp_path):
    path = tmp_path / "rows.jsonl"
    with AnswerFile(path, {}) as answers:
        with pytest.raises(BlockingIOError, match=r"rows.jsonl' is being filled by another run.*wait until"):
            AnswerFile(path, {"seed": 1})
        answers.append({"index": 0, "messages": [], "finish_reason": "stop"})
    with AnswerFile(path, {}) as answers:
        assert len(list(answers.rows())) == 1


def test_an_output_of_another_configuration_is_refused_by_the_option_that_differs(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"index": 0, "messages": [], "finish_reason": "stop"}
    with AnswerFile(path, {"seed": 0, "temperatures": (0.0,)}) as answers:
        answers.append(row)
    with AnswerFile(path, {"seed": 0, "temperatures": (0.0,)}):
        pass
    with pytest.raises(ValueError, match=r"seed was 0 and is 1.*choose another output"):
        AnswerFile(path, {"seed": 1, "temperatures": (0.0,)})
    configuration_path(path).unlink()
    with pytest.raises(ValueError, match=r"rows\.config\.json is missing"):
        AnswerFile(path, {"seed": 0, "temperatures": (0.0,)})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"index": 0\n{"a": 1}\n', r"row 1 is not valid JSON .*; remove that line"),
        (b"\xff\xfe\n", r"row 1 is not valid JSON"),
        (b"[" * 100_000 + b"\n", r"row 1 is not valid JSON"),
        (b'{"a": 1}\n', r"row 1 must hold index, a number, messages, a list, and finish_reason, got"),
        (b'{"index": "0", "messages": [], "finish_reason": "stop"}\n', r"row 1 must hold index, a number"),
        (b'{"index": 0, "messages": 7, "finish_reason": "stop"}\n', r"row 1 must hold index, a number"),
    ],
    ids=lambda each: str(each[:12]),
)
def test_a_damaged_row_in_the_output_is_named(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    with AnswerFile(path, {}) as answers:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"rows\.jsonl {message}"):
            list(answers.rows())
