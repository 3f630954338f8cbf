"""How far distributions are from float32's: by hand on small ones, and read with a model."""

import math

import pytest
import torch
from rich.console import Console
from tiny_chat import chat_base

from medusa.engine.engine_state import apply_engine
from medusa.heads.calibration import AnsweredTokens
from medusa.measurement.evaluation import add_fidelity_table, compared, distances, fidelity, reader_of
from medusa.measurement.report import Report

ROWS = [
    AnsweredTokens.after_prompt([5, 9, 2, 7, 1, 8, 3], prompt_length=4),
    AnsweredTokens.after_prompt([6, 4, 4, 0, 2], prompt_length=2),
]


def test_distances_are_those_of_the_definition():
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]]), torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.7, 0.2]])
    divergence, same, lead = distances(p.log() + 3, q.log() - 2).T.tolist()
    expected = [0.5 * math.log(5 / 2) + 0.3 * math.log(3 / 5) + 0.2 * math.log(2 / 3)]
    expected += [0.8 * math.log(8 / 7) + 0.1 * math.log(1 / 2)]
    assert divergence == pytest.approx(expected, abs=1e-6)
    assert same == [0, 1]
    assert lead == pytest.approx([math.log(5 / 3), math.log(8)], abs=1e-6)


@pytest.mark.parametrize("tokens_per_pass", [None, 1, 3])
def test_a_model_is_read_at_the_same_positions_whatever_is_read_in_one_pass(tokens_per_pass):
    base = chat_base()
    found = compared(reader_of(base), {"itself": reader_of(base, tokens_per_pass)}, ROWS)
    assert [len(row) for row in found["itself"]] == [3, 3], "the answered tokens"
    assert torch.cat(found["itself"])[:, 0].abs().max() < 1e-6
    with torch.no_grad():
        expected = base(input_ids=torch.tensor([ROWS[0].token_ids])).logits[0, 3:-1]
    lead = expected.log_softmax(dim=-1).topk(2, dim=-1).values
    assert found["itself"][0][:, 2].tolist() == pytest.approx((lead[:, 0] - lead[:, 1]).tolist(), abs=1e-4)


def test_int8_is_farther_from_float32_than_float32_itself():
    base = chat_base()
    try:
        others = {"packed": apply_engine(base, "packed"), "int8": apply_engine(base, "int8")}
    except ValueError as error:
        pytest.skip(str(error))
    found = compared(reader_of(base), {name: reader_of(each) for name, each in others.items()}, ROWS)
    kl = {name: fidelity(each)["kl"] for name, each in found.items()}
    assert kl["packed"] < 1e-6 < kl["int8"] < 1


def test_rows_add_up_to_means_over_tokens_with_intervals_over_rows():
    rows = [torch.tensor([[0.1, 1, 2.0], [0.5, 0, 0.1]]), torch.tensor([[0.2, 1, 0.1]])]
    report = fidelity(rows)
    assert report["num_tokens"] == 3
    assert report["kl"] == pytest.approx(0.8 / 3)
    assert report["same_choice"] == pytest.approx(2 / 3)
    assert report["same_clear_choice"] == 1.0, "of one clear choice"
    assert report["median_kl"] == pytest.approx(0.2)
    assert report["kl_interval"] == pytest.approx([0.2, 0.3]), "either row alone"
    console = Console(width=118, record=True)
    whole = Report({"engines": {"int8": report}, "num_answers": 2, "num_tokens": 3})
    add_fidelity_table(whole)
    whole.show(console)
    text = console.export_text()
    assert "0.26667" in text and "66.7%" in text and "2 answers, 3 tokens" in text
    assert fidelity([torch.tensor([[0.1, 1, 0.2]])])["kl_interval"] == [None, None]
    assert fidelity([torch.tensor([[0.1, 1, 0.2]])])["same_clear_choice"] is None
