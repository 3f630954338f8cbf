import json
import runpy
from pathlib import Path

import pytest
from conftest import CHECKOUT
from tiny_chat import save_chat_model, wide_tree
from transformers import PreTrainedTokenizerBase

import medusa
import medusa.hardware
from medusa import CandidateTree, MedusaModel, load_heads, save_tree
from medusa.cli.main import COMMANDS, main
from medusa.cli.reporting import exit_status
from medusa.heads.checkpoint import weights_digest
from medusa.progress import track
from medusa.trees.tuned_trees import Runtime, TunedTree

PROMPTS = [
    {"prompt": "Hello", "category": "greeting"},
    {"turns": ["Count to three", "And on"], "category": "counting"},
    {"messages": [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}]},
]


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Shared flags for the tiny model, and the folder that everything is in."""
    folder = tmp_path_factory.mktemp("programs")
    base, heads = save_chat_model(folder)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    flags = ["--base", base, "--heads", heads, "--prompts", str(prompts), "--max-new-tokens", "24"]
    return folder, flags


@pytest.fixture
def quick_probes(monkeypatch):
    """Rates of the device from little work."""
    monkeypatch.setitem(medusa.hardware.PROBE_BYTES, "cpu", 2**20)
    monkeypatch.setitem(medusa.hardware.PROBE_WIDTH, "cpu", 64)


def closing_json(printed):
    """The last line of standard output."""
    return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize("name", ["evaluate", "tune", "benchmark"])
def test_every_program_offers_the_shared_flags_and_examples(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    shared = [
        "--base",
        "--heads",
        "--prompts",
        "--limit",
        "--max-new-tokens",
        "--seed",
        "--temperature",
        "--json",
    ]
    assert [flag for flag in shared if flag not in text] == []
    assert f"    medusa {name}\n" in text


def test_evaluate_heads_prints_draws_and_writes_exactly_the_agreed_keys(setting, capsys):
    folder, flags = setting
    picture, report_file = folder / "plots" / "eval.png", folder / "reports" / "eval.json"
    status = main(["evaluate", *flags, "--plot", str(picture), "--json", str(report_file)])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert printed.err.startswith(f"medusa {medusa.__version__} from ")
    report = closing_json(printed.out)
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
    assert "top 10" in printed.out

    card = folder / "repository" / "README.md"
    asked = ["--base", "me/base", "--evaluation", str(report_file), "--dry-run", str(card.parent)]
    assert main(["push", flags[3], "me/heads", *asked]) == 0
    assert f"| all | 3 | {report['num_tokens']} | {report['tokens_per_step']:.2f} |" in card.read_text()


def test_limit_takes_the_first_prompts_and_sampling_is_reproducible(setting, capsys):
    folder, flags = setting
    sampled = [*flags, "--limit", "2", "--temperature", "0.9", "--seed", "4", "--plot", str(folder / "p.png")]
    reports = []
    for _ in range(2):
        assert main(["evaluate", *sampled]) == 0
        reports.append(closing_json(capsys.readouterr().out))
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
    assert main(["evaluate", *common, *asked]) == 0
    printed = capsys.readouterr()
    report = closing_json(printed.out)
    assert "tree of 7 nodes" in printed.err
    same, hot = report["also_at"]
    assert (same["temperature"], same["share"]) == (0, 1.0)
    assert {key: same[key] for key in same if key in report}.items() <= report.items()
    assert hot["temperature"] == 1.3
    assert hot["share"] == hot["tokens_per_step"] / report["tokens_per_step"]
    assert "Live decoding by temperature" in printed.out

    with pytest.raises(SystemExit):
        main(["evaluate", *common, "--tree-nodes", "7"])
    assert "tree_nodes and calibrate_on go together" in capsys.readouterr().err


def test_evaluate_asks_the_drafter_that_is_named(setting, capsys, monkeypatch, tmp_path):
    _, flags = setting
    common = ["evaluate", *flags, "--plot", str(tmp_path / "p.png")]
    asked, generate = [], MedusaModel.generate
    monkeypatch.setattr(
        MedusaModel, "generate", lambda *args, **given: asked.append(given) or generate(*args, **given)
    )
    assert main([*common, "--drafter", "dynamic-heads"]) == 0
    report = closing_json(capsys.readouterr().out)
    assert report["made"]["drafter"] == "dynamic-heads"
    assert {given.get("drafter") for given in asked} == {"dynamic-heads"}

    assert main([*common, "--drafter", "guesser"]) != 0
    assert "drafter 'guesser' is unknown" in capsys.readouterr().err
    assert len(asked) == report["num_prompts"]


def test_tune_tree_measures_sizes_and_writes_the_tree_with_its_origin(setting, capsys, tmp_path):
    base, heads = save_chat_model(tmp_path)
    _, flags = setting
    own = ["--base", base, "--heads", heads, *flags[4:], "--sizes", "2,4,8", "--rounds", "1"]
    assert main(["tune", *own, "--plot", str(tmp_path / "tree.png")]) == 0
    printed = capsys.readouterr()
    assert f"medusa side-by-side --base {base} --heads {heads}\n" in printed.err
    report = closing_json(printed.out)
    sizes = [row["num_nodes"] for row in report["by_num_nodes"]]
    assert sizes[0] == 1 and set(sizes) <= {1, 2, 4, 8}, "plain decoding takes part"
    best = max(report["by_num_nodes"], key=lambda row: row["tokens_per_second"])
    plain = report["by_num_nodes"][0]
    is_worth_it = best["tokens_per_second"] >= 1.03 * plain["tokens_per_second"]
    assert report["num_nodes"] == (best["num_nodes"] if is_worth_it else 1)
    assert load_heads(heads).tree.num_nodes == report["num_nodes"]
    written = json.loads((Path(heads) / "tree.json").read_text())
    assert written["device"].startswith("cpu")
    assert written["dtype"] == "float32"
    assert written["by_num_nodes"] == report["by_num_nodes"]
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")


def test_tune_tree_files_a_tree_for_each_batch_size_under_this_place(setting, capsys, tmp_path):
    base, heads = save_chat_model(tmp_path)
    save_tree(heads, wide_tree(), [TunedTree(Runtime("elsewhere", "float16", "eager"), 1, wide_tree())])
    _, flags = setting
    own = ["--base", base, "--heads", heads, *flags[4:], "--plot", str(tmp_path / "tree.png")]
    own += ["--sizes", "2,4", "--rounds", "1", "--engine", "eager"]
    status = main(["tune", *own, "--batch-sizes", "3,1"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    report = closing_json(printed.out)
    assert list(report["by_batch_size"]) == ["1", "3"]
    assert report["by_num_nodes"] == report["by_batch_size"]["1"]["by_num_nodes"]
    assert report["num_nodes"] == report["by_batch_size"]["1"]["chosen"]
    assert all(row["batch_size"] == 3 for row in report["by_batch_size"]["3"]["by_num_nodes"])
    loaded = load_heads(heads)
    assert loaded.tree.num_nodes == report["num_nodes"]
    assert [(entry.runtime.device == "elsewhere", entry.batch_size) for entry in loaded.tuned] == [
        (True, 1),
        (False, 1),
        (False, 3),
    ]
    assert loaded.tuned[2].tree.num_nodes == report["by_batch_size"]["3"]["chosen"]
    assert loaded.tuned[2].runtime == Runtime(report["device"], "float32", "eager")
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
    assert "default tree: now that of batch size 1" in printed.err
    assert {entry.step for entry in loaded.tuned} == {"general"}
    save_tree(heads, CandidateTree.chain(1), loaded.tuned, **loaded.tree_origin)
    assert main(["tune", *own, "--batch-sizes", "2", "--step", "static"]) == 0
    printed = capsys.readouterr()
    assert closing_json(printed.out)["step"] == "static"
    assert "default tree: left as it was (2 nodes): batch size 1 was not tuned" in printed.err
    loaded = load_heads(heads)
    assert loaded.tree == CandidateTree.chain(1)
    assert [(entry.step, entry.batch_size) for entry in loaded.tuned[3:]] == [("static", 2)]
    assert main(["tune", *own, "--num-nodes", "3"]) == 0
    assert [entry.runtime.device for entry in load_heads(heads).tuned] == ["elsewhere"]
    assert "tuned trees removed" in capsys.readouterr().err


def test_tune_tree_takes_a_size_and_answers_from_the_file_without_timing(setting, capsys, tmp_path):
    base, heads = save_chat_model(tmp_path)
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]}
        for text in ("a fine answer", "another answer")
    ]
    prompts = tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = (Path(heads) / "tree.json").read_text()
    flags = ["--base", base, "--heads", heads, "--prompts", str(prompts), "--num-nodes", "5"]
    assert main(["tune", *flags, "--no-save"]) == 0
    report = closing_json(capsys.readouterr().out)
    assert report["num_positions"] == sum(len(row["messages"][1]["content"]) - 3 for row in rows)
    assert (Path(heads) / "tree.json").read_text() == before
    assert main(["tune", *flags]) == 0
    assert load_heads(heads).tree.num_nodes == 5


def test_tune_tree_needs_a_directory_to_write_into(setting, capsys):
    _, flags = setting
    with pytest.raises(SystemExit):
        main(["tune", *flags, "--heads", "owner/name"])
    assert "heads must be a directory to" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_probes")
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_benchmark_ends_with_the_agreed_keys_and_identical_answers(setting, capsys, temperature):
    folder, flags = setting
    own = [*flags, "--contenders", "transformers", "heads", "--plot", str(folder / "benchmark.png")]
    assert main(["benchmark", *own, "--temperature", temperature, "--repeats", "2"]) == 0
    printed = capsys.readouterr().out
    report = closing_json(printed)
    agreed = {"tokens_per_step", "overhead", "speedup_vs_plain", "speedup_vs_transformers", "identical"}
    assert agreed | {"num_prompts"} <= set(report)
    assert report["identical"] is True
    assert report["num_identical"] == report["num_prompts"] == 3
    expected = ["heads", "plain", "transformers"] if temperature == "0" else ["heads", "plain"]
    assert report["compared"] == expected
    assert report["num_tokens"] <= 3 * 24, "repeats are not counted twice"
    assert set(report["by_category"]) == {"greeting", "counting", "uncategorised"}
    assert "3 of 3 answers token-identical" in printed
    assert (folder / "benchmark.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("quick_probes")
def test_benchmark_measures_every_setting_with_bounds_and_says_who_cannot_take_part(
    setting, capsys, tmp_path
):
    _, flags = setting
    names = ["transformers", "prompt-lookup", "assisted", "heads", "heads+suffix"]
    own = [*flags, "--max-new-tokens", "6", "--contenders", *names, "--plot", str(tmp_path / "b.png")]
    assert main(["benchmark", *own, "--batch-sizes", "2,1", "--context-lengths", "220,40"]) == 0
    report = closing_json(capsys.readouterr().out)
    settings = report["by_setting"]
    where = [(setting["context_length"], setting["batch_size"]) for setting in settings]
    assert where == [(40, 1), (40, 2), (220, 1), (220, 2)]
    assert 40 < settings[2]["num_prompt_tokens"] <= 220
    assert "give --draft-model" in report["skipped"]["assisted"]
    assert "one row at a time (at 2 rows, 40 tokens)" in report["skipped"]["prompt-lookup"]
    for found in settings:
        ours = {"plain", "heads", "heads+suffix"}
        lookup = {"prompt-lookup"} if found["batch_size"] == 1 else set()
        assert set(found["milliseconds_per_token"]) == ours | lookup | {"transformers"}
        assert set(found["step_milliseconds"]) == ours
        assert all(value > 0 for value in found["step_milliseconds"]["heads"].values())
        assert found["num_nodes"] == {"plain": 1, "heads": wide_tree().num_nodes}
        assert found["f_hw"]["heads"] > 0 and found["f_hw"]["plain"] > 0
        assert 0 < found["f_tree"] < 3
        assert found["num_identical"] == found["num_prompts"] == {1: 3, 2: 4}[found["batch_size"]]
        same = found["same_as_plain"]["heads+suffix"]
        assert same["num_tokens"] == same["of_tokens"] and same["num_answers"] == same["of_answers"]
    assert report["speedup_vs_plain"] == settings[0]["speedup_vs_plain"]
    assert report["device_rates"]["bytes_per_second"] > 0


@pytest.mark.usefixtures("quick_probes")
def test_benchmark_claims_no_identity_in_low_precision_and_reports_the_divergence(setting, capsys, tmp_path):
    _, flags = setting
    own = [*flags, "--limit", "2", "--contenders", "heads", "--plot", str(tmp_path / "b.png")]
    assert main(["benchmark", *own, "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    report = closing_json(printed)
    assert report["identical"] is None and report["dtype"] == "bfloat16"
    assert set(report["divergence"]) == {"plain", "heads"}
    assert all(0 <= entry["rate"] <= 1 for entry in report["divergence"].values())
    assert "which this precision does not promise" in printed


@pytest.mark.usefixtures("quick_probes")
def test_benchmark_without_heads_compares_drafters_and_stops_when_the_time_is_up(setting, capsys, tmp_path):
    _, flags = setting
    own = [*flags, "--contenders", "suffix", "--plot", str(tmp_path / "b.png")]
    assert main(["benchmark", *own, "--max-minutes", "0.0001"]) == 0
    report = closing_json(capsys.readouterr().out)
    assert report["num_prompts"] == 1, "one round is always measured"
    assert report["speedup_vs_plain"] is None and set(report["speedup_over_plain"]) == {"plain", "suffix"}


def test_benchmark_refuses_an_unknown_contender_before_loading_anything(setting, capsys):
    _, flags = setting
    with pytest.raises(SystemExit):
        main(["benchmark", *flags, "--contenders", "nobody"])
    assert "contender 'nobody' is not one of" in capsys.readouterr().err


DOORS = sorted(path for folder in ("train", "inference") for path in (CHECKOUT / folder).glob("*.py"))


@pytest.mark.parametrize("path", DOORS, ids=lambda path: path.name)
def test_a_program_is_another_door_to_a_command(path, monkeypatch):
    given = []
    monkeypatch.setattr("medusa.cli.main.main", lambda words: given.append(words) or 3)
    monkeypatch.setattr("sys.argv", [str(path), "--some", "flag"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 3
    ((command, *words),) = given
    assert words == ["--some", "flag"]
    assert command in COMMANDS and f"`medusa {command}`" in path.read_text()


def test_the_package_itself_is_a_door(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["medusa", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("medusa", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"medusa {medusa.__version__}\n"


def test_chat_answers_the_prompts_of_a_file_and_reports(setting, capsys):
    _, flags = setting
    assert main(["chat", *flags, "--limit", "2"]) == 0
    report = closing_json(capsys.readouterr().out)
    assert report["num_answers"] == 3, "the second row has two turns"
    assert report["tokens_per_step"] >= 1


TOOL = {"type": "function", "function": {"name": "clock"}}
ASKED = {"role": "user", "content": "What time is it?"}
TOOL_ROW = {
    "messages": [ASKED, {"role": "tool", "content": "noon"}],
    "tools": [TOOL],
    "chat_template_kwargs": {"mood": "glad"},
}


@pytest.mark.parametrize(
    "command",
    [
        "evaluate",
        "tune",
        "benchmark",
        "compare-drafters",
        "compare-engines",
        "compare-heads",
        "side-by-side",
        "chat",
    ],
)
def test_every_command_that_reads_prompts_shows_tools_and_template_arguments_to_the_template(
    command, setting, monkeypatch, tmp_path
):
    _, flags = setting
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps(TOOL_ROW) + "\n")

    class Seen(Exception):
        pass

    def seen(self, conversation, **options):
        raise Seen({"messages": list(conversation)} | options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", seen)
    with pytest.raises(Seen) as rendered:
        main([command, *flags, "--prompts", str(path)])
    told = rendered.value.args[0]
    assert [message["role"] for message in told["messages"]] == ["user", "tool"]
    assert told["tools"] == [TOOL] and told["mood"] == "glad"


def test_a_prompt_beyond_the_context_is_refused_by_row_before_any_work(setting, capsys, tmp_path):
    _, flags = setting
    prompts = tmp_path / "long.jsonl"
    prompts.write_text(json.dumps({"prompt": "fine"}) + "\n" + json.dumps({"prompt": "x" * 500}) + "\n")
    assert main(["benchmark", *flags, "--prompts", str(prompts)]) == 1
    printed = capsys.readouterr()
    assert f"{prompts} row 2 has 503 tokens" in printed.err
    assert "context of 512" in printed.err


def test_progress_without_a_terminal_is_lines_with_the_time_left(capsys, monkeypatch):
    monkeypatch.setattr("medusa.progress.SECONDS_BETWEEN_LINES", 0.0)
    assert list(track(["a", "b", "c"], "answering")) == ["a", "b", "c"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "answering  33%: 1/3",
        "answering  67%: 2/3",
        "answering 100%: 3/3",
    ]
    assert lines[-1].endswith("about 0:00 left")


def test_errors_and_ctrl_c_become_exit_statuses(capsys):
    def failing():
        raise ValueError("limit must be at least 1, got 0 [not markup]")

    def interrupted():
        raise KeyboardInterrupt

    assert exit_status(lambda: None, show_traceback=False) == 0
    assert exit_status(failing, show_traceback=False) == 1
    assert capsys.readouterr().err == "error: limit must be at least 1, got 0 [not markup]\n"
    assert exit_status(interrupted, show_traceback=False) == 130


def test_a_mistake_of_ours_is_not_dressed_up_as_a_user_error():
    with pytest.raises(ZeroDivisionError):
        exit_status(lambda: 1 / 0, show_traceback=False)
