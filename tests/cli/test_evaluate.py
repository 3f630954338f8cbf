"""`medusa evaluate` end to end on a tiny model: one set of heads, several, and an engine."""

import json

import pytest
from reported import ran, reported
from tiny_chat import chat_heads, perfect_heads, save_chat_model, wide_tree
from tiny_training import chat_tokenizer, counting_rows, write_rows

import medusa
from medusa import HeadsCheckpoint, MedusaModel, save_heads
from medusa.cli.main import main
from medusa.engine.kernels import kernels_unsupported_reason
from medusa.heads.checkpoint import weights_digest
from medusa.training.config import DataOptions
from medusa.training.data.loading import held_out_answers, load_data

TALK = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, two"}]
PROMPTS = [
    {"prompt": "Hello", "category": "greeting"},
    {"turns": ["Count to three", "And on"], "category": "counting"},
    {"messages": [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}]},
]


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """The folder that everything is in, and flags for the tiny model."""
    folder = tmp_path_factory.mktemp("evaluate")
    base, heads = save_chat_model(folder)
    record = {"training": {"steps": 40, "minutes": 2.0, "tokens": 7000}}
    save_heads(HeadsCheckpoint(perfect_heads(), base, provenance=record), folder / "other" / "heads")
    prompts = write_rows(folder / "prompts.jsonl", PROMPTS)
    flags = ["--base", base, "--heads", heads, "--prompts", str(prompts), "--max-new-tokens", "20"]
    return folder, [*flags, "--plot", str(folder / "picture.png")]


def test_evaluate_heads_prints_draws_and_writes_exactly_the_agreed_keys(setting, capsys):
    folder, flags = setting
    picture, report_file = folder / "plots" / "eval.png", folder / "reports" / "eval.json"
    report, out, said = reported(capsys, "evaluate", *flags, "--plot", picture, "--json", report_file)
    assert said.startswith(f"medusa {medusa.__version__} from ")
    assert report == json.loads(report_file.read_text())
    assert set(report) == {
        "tokens_per_step",
        "acceptance_rate",
        "conditional_acceptance_rate",
        "head_accuracy",
        "by_category",
        "num_prompts",
        "num_tokens",
        "made",
    }
    assert report["made"]["heads_sha256"] == weights_digest(flags[3])
    assert report["made"]["tree_nodes"] == wide_tree().num_nodes
    assert list(report["head_accuracy"]) == ["top1", "top2", "top3", "top5", "top10"]
    assert all(len(rates) == 3 for rates in report["head_accuracy"].values())
    assert len(report["acceptance_rate"]) == len(report["conditional_acceptance_rate"]) == wide_tree().depth
    assert set(report["by_category"]) == {"greeting", "counting", "uncategorised"}
    assert report["num_prompts"] == 3
    assert report["num_tokens"] == sum(entry["num_tokens"] for entry in report["by_category"].values())
    assert report["tokens_per_step"] == pytest.approx(1 + sum(report["acceptance_rate"]))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "top 10" in out

    card = folder / "repository" / "README.md"
    asked = ["--base", "me/base", "--evaluation", str(report_file), "--dry-run", str(card.parent)]
    assert main(["push", flags[3], "me/heads", *asked]) == 0
    assert f"| all | 3 | {report['num_tokens']} | {report['tokens_per_step']:.2f} |" in card.read_text()


def test_limit_takes_the_first_prompts_and_sampling_is_reproducible(setting, capsys):
    folder, flags = setting
    sampled = [*flags, "--limit", "2", "--temperature", "0.9", "--seed", "4", "--plot", str(folder / "p.png")]
    reports = [reported(capsys, "evaluate", *sampled)[0] for _ in range(2)]
    assert reports[0] == reports[1]
    assert reports[0]["num_prompts"] == 2


def test_evaluate_heads_takes_a_tree_of_another_size_and_more_temperatures(setting, capsys, tmp_path):
    _, flags = setting
    conversations = tmp_path / "conversations.jsonl"
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one two three four"}]
    rows = [{"messages": messages}, {"prompt": "And on"}]
    conversations.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = [*flags, "--plot", str(tmp_path / "p.png")]
    asked = ["--tree-nodes", "7", "--calibrate-on", str(conversations), "--also-at", "0", "1.3"]
    report, out, said = reported(capsys, "evaluate", *common, *asked)
    assert "tree of 7 nodes" in said
    same, hot = report["also_at"]
    assert (same["temperature"], same["share"]) == (0, 1.0)
    assert {key: same[key] for key in same if key in report}.items() <= report.items()
    assert hot["temperature"] == 1.3
    assert hot["share"] == hot["tokens_per_step"] / report["tokens_per_step"]
    assert "Live decoding by temperature" in out


def test_evaluate_asks_the_drafter_that_is_named(setting, capsys, monkeypatch, tmp_path):
    _, flags = setting
    common = ["evaluate", *flags, "--plot", str(tmp_path / "p.png")]
    asked, generate = [], MedusaModel.generate
    monkeypatch.setattr(
        MedusaModel, "generate", lambda *args, **given: asked.append(given) or generate(*args, **given)
    )
    report, _, _ = reported(capsys, *common, "--drafter", "dynamic-heads")
    assert report["made"]["drafter"] == "dynamic-heads"
    assert {given.get("drafter") for given in asked} == {"dynamic-heads"}

    assert main([*common, "--drafter", "guesser"]) != 0
    assert "drafter 'guesser' is unknown" in capsys.readouterr().err
    assert len(asked) == report["num_prompts"]


# ------------------------------------------------------------------ several sets of heads


def test_all_sets_are_asked_about_the_same_answers_and_held_against_the_first(setting, capsys):
    folder, flags = setting
    picture, written = folder / "plots" / "heads.png", folder / "heads.json"
    own = ["--sizes", "2,5", "--rounds", "2", "--step-nodes", "4", "--plot", str(picture)]
    sets = [f"mine={flags[3]}", str(folder / "other" / "heads")]
    report, out, _ = reported(capsys, "evaluate", *flags[:2], *flags[4:], *own, "--json", written, *sets)
    assert report == json.loads(written.read_text())
    assert report["against"] == "mine"
    assert report["num_answers"] == len(PROMPTS)
    mine, other = report["heads"]
    assert (mine["label"], other["label"]) == ("mine", "other")
    assert (mine["num_heads"], other["num_heads"]) == (3, 1)
    assert (len(mine["top1"]), len(other["top1"])) == (3, 1)
    assert mine["num_parameters"] == sum(each.numel() for each in chat_heads().parameters())
    assert list(mine["tokens_per_step"]) == ["2", "5"]
    assert mine["against_first"]["5"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert mine["training_milliseconds_per_step"] is None
    assert other["training_milliseconds_per_step"] == 3000.0
    assert all(0 < row["draft_milliseconds"] < row["step_milliseconds"] for row in (mine, other))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "optimisation" in out


def test_without_rounds_nothing_is_timed_and_sizes_ask_one_set_too(setting, capsys):
    _, flags = setting
    (row,) = reported(capsys, "evaluate", *flags, "--rounds", "0", "--sizes", "3")[0]["heads"]
    assert (row["heads"], row["step_milliseconds"]) == (flags[3], None)


# ------------------------------------------------------------------ an engine


@pytest.fixture
def flags(setting, tmp_path):
    """One prompt with an answer, one without."""
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"messages": TALK}, {"prompt": "abcabc"}])
    return [*setting[1][:4], "--prompts", str(prompts), "--max-new-tokens", "6"]


def test_int8_is_some_way_from_float32_and_a_packed_model_is_none(flags, capsys):
    if kernels_unsupported_reason() is not None:
        pytest.skip("torch is built without oneDNN")
    kl = {}
    for engine in ("packed", "int8"):
        asked = ["evaluate", "--fidelity", *flags, "--engine", engine, "--tokens-per-pass", "5"]
        report, out, _ = reported(capsys, *asked)
        assert list(report["engines"]) == [engine] and engine in out
        assert (report["num_answers"], report["num_tokens"]) == (2, 12)
        kl[engine] = report["engines"][engine]["kl"]
    assert kl["packed"] < 1e-6 < kl["int8"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--dtype", "bfloat16"], "dtype must be float32, which all are held against, got torch.bfloat16"),
        (["--llama-cpp", "absent-q8_0.gguf"], "'absent-q8_0.gguf', which is no file; give a GGUF file"),
    ],
)
def test_what_cannot_be_compared_is_refused(flags, capsys, extra, message):
    assert message in ran(capsys, ["evaluate", "--fidelity", *flags, *extra], 1).err


# ------------------------------------------------------------------ what training held out


def provenance_of(options, data):
    return {"configuration": {"data": options.data, "held_out_fraction": 0.3}, "data": data.counts}


def test_held_out_conversations_are_those_of_the_training_runs(tmp_path):
    path = write_rows(tmp_path / "data.jsonl", counting_rows(30))
    options = DataOptions(data=[str(path)], held_out_fraction=0.3)
    data = load_data(options, chat_tokenizer())
    record = provenance_of(options, data)
    found = held_out_answers({"a": record, "b": record}, chat_tokenizer())
    assert [row.token_ids for row in found] == [
        data.held_out[i].tokens.tolist() for i in range(len(data.held_out))
    ]
    assert sum(sum(row.is_label) for row in found) == data.held_out.num_labels > 0
    other = {**record, "configuration": {**record["configuration"], "seed": 7, "packing": True}}
    with pytest.raises(ValueError, match="'a' and 'b' held out other conversations: seed was 0 and is 7"):
        held_out_answers({"a": record, "b": other}, chat_tokenizer())
    with pytest.raises(ValueError, match="the heads 'b' do not record their training data"):
        held_out_answers({"a": record, "b": {}}, chat_tokenizer())
    write_rows(path, counting_rows(60))
    with pytest.raises(ValueError, match="the data have changed since"):
        held_out_answers({"a": record}, chat_tokenizer())
