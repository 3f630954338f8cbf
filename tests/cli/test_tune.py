"""`medusa tune` end to end on a tiny model."""

import json
from pathlib import Path

import pytest
from reported import reported
from tiny_chat import save_chat_model, wide_tree

from medusa import CandidateTree, load_heads, save_tree
from medusa.cli.main import main
from medusa.trees.tuned_trees import Runtime, TunedTree


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """The folder that everything is in, and flags for the tiny model."""
    folder = tmp_path_factory.mktemp("tune")
    base, heads = save_chat_model(folder)
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n{"prompt": "Count to three"}\n{"prompt": "Hi"}\n')
    return folder, ["--base", base, "--heads", heads, "--prompts", str(prompts), "--max-new-tokens", "24"]


def test_tune_tree_measures_sizes_and_writes_the_tree_with_its_origin(setting, capsys, tmp_path):
    base, heads = save_chat_model(tmp_path)
    _, flags = setting
    own = ["--base", base, "--heads", heads, *flags[4:], "--sizes", "2,4,8", "--rounds", "1"]
    report, _, said = reported(capsys, "tune", *own, "--plot", tmp_path / "tree.png")
    assert f"medusa benchmark --base {base} --heads {heads}\n" in said
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
    report, _, said = reported(capsys, "tune", *own, "--batch-sizes", "3,1")
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
    assert "default tree: now the tree of batch size 1" in said
    assert {entry.step for entry in loaded.tuned} == {"general"}
    save_tree(heads, CandidateTree.chain(1), loaded.tuned, **loaded.tree_origin)
    report, _, said = reported(capsys, "tune", *own, "--batch-sizes", "2", "--step", "static")
    assert report["step"] == "static"
    assert "default tree: left as it was (2 nodes): batch size 1 was not tuned" in said
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
    report, _, _ = reported(capsys, "tune", *flags, "--no-save")
    assert report["num_positions"] == sum(len(row["messages"][1]["content"]) - 3 for row in rows)
    assert (Path(heads) / "tree.json").read_text() == before
    assert main(["tune", *flags]) == 0
    assert load_heads(heads).tree.num_nodes == 5
