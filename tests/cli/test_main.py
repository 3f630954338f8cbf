import io
import json

import pytest
from tiny_chat import chat_heads, save_chat_model, wide_tree

import medusa
from medusa import CandidateTree, HeadsCheckpoint, save_heads
from medusa.cli.main import main
from medusa.trees.tuned_trees import Runtime, TunedTree


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    base, heads = save_chat_model(tmp_path_factory.mktemp("model"))
    return ["--base", base, "--heads", heads]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["chat", "--help"], ["generate", "--help"], ["info", "--help"]]
)
def test_help_teaches_by_example(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "medusa" in text
    if len(arguments) > 1:
        assert f"\n    medusa {arguments[0]} " in text


def test_chat_answers_piped_questions_and_logs_version_and_path_first(saved, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/stats\n/exit\nnever asked\n"))
    report = tmp_path / "deep" / "session.json"
    assert main(["chat", *saved, "--max-new-tokens", "9", "--json", str(report)]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith(f"medusa {medusa.__version__} from ")
    assert "> Hello\n" in printed.out
    assert "9 tokens in" in printed.out
    assert "never asked" not in printed.out
    assert json.loads(report.read_text())["num_answers"] == 1


def test_chat_answers_a_prompts_file_one_conversation_a_row(saved, capsys, tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"turns": ["One", "Two"]}\n{"prompt": "Three"}\n{"prompt": "Four"}\n')
    assert main(["chat", *saved, "--prompts", str(prompts), "--limit", "2", "--max-new-tokens", "5"]) == 0
    asked = [line for line in capsys.readouterr().out.splitlines() if line.startswith("> ")]
    assert asked == ["> One", "> Two", "> Three"]


def test_generate_prints_the_answer_alone_on_standard_output(saved, capsys, monkeypatch):
    assert main(["generate", *saved, "--max-new-tokens", "12", "Hello"]) == 0
    with_heads = capsys.readouterr()
    assert "tokens per step" in with_heads.err
    assert main(["generate", *saved, "--max-new-tokens", "12", "--plain", "Hello"]) == 0
    assert capsys.readouterr().out == with_heads.out
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    assert main(["generate", *saved, "--max-new-tokens", "12", "-"]) == 0
    assert capsys.readouterr().out == with_heads.out


@pytest.mark.parametrize("drafter", ["suffix", "heads", "heads+suffix", "dynamic-heads"])
def test_another_drafter_gives_the_same_text(saved, capsys, drafter):
    assert main(["generate", *saved, "--max-new-tokens", "24", "--plain", "Hello Hello Hello"]) == 0
    expected = capsys.readouterr().out
    arguments = ["generate", *saved, "--max-new-tokens", "24", "--drafter", drafter, "Hello Hello Hello"]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out == expected
    assert ("no heads" in printed.err) == (drafter == "suffix")


def test_chat_talks_with_another_drafter(saved, capsys, monkeypatch):
    answers = []
    for extra in (["--drafter", "heads"], ["--draft-length", "5", "--color-depth"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
        assert main(["chat", *saved, "--max-new-tokens", "12", *extra]) == 0
        answers.append(capsys.readouterr().out)
    assert "depth 5" in answers[1], "a chain of five draft tokens beside the heads' tree of three"
    assert answers[0].splitlines()[1] in answers[1]


def test_generate_raw_leaves_the_chat_template_out(saved, capsys):
    outputs = []
    for extra in ([], ["--raw"], ["--system", "Be brief."]):
        assert main(["generate", *saved, "--max-new-tokens", "12", *extra, "Hello"]) == 0
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 3


def test_info_says_what_a_heads_directory_holds(saved, capsys):
    assert main(["info", saved[3]]) == 0
    table = capsys.readouterr().out
    assert "num_heads" in table
    assert "nodes, guesses looked at" in table
    assert main(["info", "--json", saved[3]]) == 0
    assert json.loads(capsys.readouterr().out)["num_heads"] == 3


def test_info_lists_the_places_that_trees_were_tuned_at(capsys, tmp_path):
    tuned = (TunedTree(Runtime("a card", "bfloat16", "eager"), 8, CandidateTree.chain(2), step="captured"),)
    heads = save_heads(HeadsCheckpoint(chat_heads(), "tiny", wide_tree(), tuned=tuned), tmp_path / "heads")
    assert main(["info", "--json", str(heads)]) == 0
    place = {"device": "a card", "dtype": "bfloat16", "engine": "eager"}
    listed = json.loads(capsys.readouterr().out)["tuned_trees"]
    assert listed == [{**place, "step": "captured", "batch_size": 8, "num_nodes": 3}]
    assert main(["info", str(heads)]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "3 nodes at batch size 8 on a card, bfloat16, eager, captured steps" in printed


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["info", "./nowhere"], "no heads directory at './nowhere'"),
        (["generate", "  "], "the prompt is empty"),
        (["generate", "--top-p", "0.9", "x"], "--top-p goes with sampling, and --temperature is 0"),
        (["generate", "--drafter", "nobody", "x"], "drafter 'nobody' is unknown; there are "),
        (
            ["generate", "--plain", "--drafter", "suffix", "x"],
            "--plain guesses nothing, and --drafter suffix",
        ),
        (["chat", "--drafter", "draft-model"], "drafter 'draft-model' needs "),
        (["generate", "--raw", "--system", "x", "y"], "--system goes with the chat template"),
        (["chat", "--prompts", "nowhere.jsonl"], "prompts file 'nowhere.jsonl' does not exist"),
    ],
)
def test_errors_are_one_sentence_on_standard_error(saved, capsys, arguments, complaint):
    model = saved if arguments[0] != "info" else []
    assert main([arguments[0], *model, *arguments[1:]]) == 1
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert "Traceback" not in printed.err
    assert not printed.out


def test_traceback_shows_where_an_error_arose(capsys):
    assert main(["info", "./nowhere", "--traceback"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_missing_default_says_what_makes_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("medusa.cli.flags.EMBEDDED_BASE", tmp_path / "none")
    monkeypatch.setattr("medusa.cli.program.EMBEDDED_BASE", tmp_path / "none")
    assert main(["generate", "Hello"]) == 1
    assert "run `make models`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "rule"),
    [
        ("--max-new-tokens", "0", "at least 1, got 0"),
        ("--temperature", "-1", "at least 0, got -1"),
        ("--limit", "x", "invalid"),
    ],
)
def test_a_flag_out_of_range_is_refused_with_its_rule(saved, capsys, flag, value, rule):
    with pytest.raises(SystemExit):
        main(["chat", *saved, flag, value])
    assert rule in capsys.readouterr().err
