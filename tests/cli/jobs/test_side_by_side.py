import json

import pytest
from tiny_chat import save_chat_model

from medusa.cli.jobs import side_by_side
from medusa.cli.main import main
from medusa.cli.options import parse


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("side_by_side")
    base, heads = save_chat_model(folder)
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n{"prompt": "[bold]Count[/bold] to three"}\n')
    return ["--base", base, "--heads", heads, "--prompts", str(prompts), "--max-new-tokens", "30"]


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_both_answers_are_the_same_and_the_report_says_so(flags, capsys, temperature):
    assert main(["side-by-side", *flags, "--temperature", temperature]) == 0
    printed = capsys.readouterr().out
    report = json.loads(printed.splitlines()[-1])
    assert report["identical"] is True
    assert report["num_prompts"] == 2
    assert report["num_tokens"] == 60
    assert report["tokens_per_step"] > 1
    assert report["speedup"] == pytest.approx(report["plain_seconds"] / report["heads_seconds"])
    assert "All 60 tokens are the same" in printed.replace("\n", " ")
    assert "[bold]Count[/bold] to three" in printed, "prompts are shown as they are"


def test_answers_that_differ_are_called_out_by_prompt():
    def answer(*tokens):
        return side_by_side.Answer(list(tokens), seconds=1.0, statistics=side_by_side.DecodingStatistics())

    def answers(plain, heads):
        return {side_by_side.PLAIN: plain, side_by_side.HEADS: heads}

    same, other = answers(answer(1, 2), answer(1, 2)), answers(answer(1, 2), answer(1, 3))
    tree = side_by_side.CandidateTree.chain(2)
    assert "answers to prompt 2 differ" in side_by_side.verdict([same, other], tree).plain
    assert "tokens are the same" in side_by_side.verdict([same, same], tree).plain
    assert side_by_side.make_report([same, other])["identical"] is False


def test_other_heads_answer_beside(flags, capsys):
    heads = flags[flags.index("--heads") + 1]
    assert main(["side-by-side", *flags, "--beside", f"others={heads}"]) == 0
    printed = capsys.readouterr().out
    report = json.loads(printed.splitlines()[-1])
    assert report["identical"] is True and "others" in printed
    assert "others, s" in printed and "…" not in printed, "no header is cut at 80 columns"
    assert report["beside"]["others"]["tokens_per_step"] == report["tokens_per_step"]
    assert report["beside"]["others"]["speedup"] == pytest.approx(
        report["plain_seconds"] / report["beside"]["others"]["seconds"]
    )


@pytest.mark.parametrize("text", ["heads", "=heads", "name=", "plain=heads"])
def test_other_heads_need_a_name_of_their_own(flags, capsys, text):
    with pytest.raises(SystemExit):
        main(["side-by-side", *flags, "--beside", text])
    assert f"must be NAME=HEADS with a name of its own, got '{text}'" in " ".join(
        capsys.readouterr().err.split()
    )


def test_heads_are_needed_to_compare_with(flags, capsys, tmp_path):
    missing = str(tmp_path / "no" / "such" / "heads")
    assert main(["side-by-side", *flags, "--heads", missing]) == 1
    assert f"no heads directory at '{missing}'" in capsys.readouterr().err.replace("\n", " ")


def test_whoever_goes_first_the_answers_keep_one_order(monkeypatch):
    monkeypatch.setattr(
        side_by_side,
        "timed_answer",
        lambda *_, **__: side_by_side.Answer([1], 1.0, side_by_side.DecodingStatistics()),
    )
    ways = {name: {} for name in ("plain", "with heads", "other")}
    orders = [list(side_by_side.answer_with_all(None, {}, None, ways, number)) for number in range(3)]
    assert orders == [list(ways)] * 3


def test_heads_beside_are_computed_as_the_models_own_are(flags):
    options = parse(side_by_side.SideBySideOptions, flags)
    model = side_by_side.load_model(options.model)
    ways = side_by_side.contenders(model, [f"others={options.model.heads}"])
    assert type(ways["others"]["drafter"].heads) is type(model.drafting_heads)
