"""`medusa push`: a repository of heads on a hub, whole or not at all, with a card of what was measured."""

from __future__ import annotations

import json
import re

import pytest
import torch
from huggingface_hub import ModelCard, constants
from reported import ran
from tiny_chat import chat_base, chat_heads, chat_tokenizer, wide_tree

from medusa import HeadsCheckpoint, HeadsConfig, MedusaHeads, load_heads, save_heads
from medusa.cli.main import main
from medusa.heads.checkpoint import weights_digest

BASE = "someone/tiny-base"
PROVENANCE = {
    "command": "accelerate launch train/train_heads.py --config mine.yaml",
    "training": {"steps": 12, "tokens": 34567, "minutes": 2.5},
    "data": {"training documents": 89},
}
FILES = ["config.json", "model.safetensors", "provenance.json", "tree.json"]
CUSTOM = ["custom_generate/generate.py", "custom_generate/requirements.txt"]


@pytest.fixture
def heads(tmp_path):
    checkpoint = HeadsCheckpoint(chat_heads(), BASE, wide_tree(), PROVENANCE)
    return str(save_heads(checkpoint, tmp_path / "heads", dtype=torch.float16))


@pytest.fixture
def logged_in(hub, monkeypatch):
    """A hub that has the base, for the user ada."""
    hub.put(BASE, {"config.json": b"{}"})
    monkeypatch.setenv("HF_TOKEN", "hf_ada")
    return hub


def push(*arguments):
    return main(["push", *map(str, arguments)])


def evaluation(heads, tmp_path, **changes):
    """A report as `medusa evaluate` writes it."""
    entry = {
        "tokens_per_step": 1.73,
        "acceptance_rate": [0.5, 0.2, 0.03],
        "num_prompts": 4,
        "num_tokens": 256,
    }
    made = {
        "command": "python inference/evaluate_heads.py --heads runs/mine/heads",
        "date": "2026-11-22",
        "medusa_version": "0.2.0",
        "heads": "runs/mine/heads",
        "heads_sha256": weights_digest(heads),
        "device": "a CPU",
        "dtype": "float32",
        "tree_nodes": 16,
        "temperature": 0.0,
        "max_new_tokens": 64,
        "seed": 0,
    }
    by_category = {
        "coding": {**entry, "tokens_per_step": 2.11},
        "writing": {**entry, "tokens_per_step": 1.35},
    }
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**entry, "by_category": by_category, "made": made, **changes}))
    return path


def test_a_dry_run_writes_what_would_be_pushed_and_asks_no_hub(heads, tmp_path, capsys):
    folder = tmp_path / "folder"
    assert constants.is_offline_mode()
    assert push(heads, "ada/heads", "--dry-run", folder) == 0
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert found == ["README.md", *FILES[:1], *CUSTOM, *FILES[1:]]
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "heads/model.safetensors").read_bytes()
    assert load_heads(folder).tree == wide_tree()
    printed = capsys.readouterr()
    assert "the card says that nothing was measured" in printed.err
    assert f"read {folder}/README.md first" in printed.err
    assert json.loads(printed.out)["dry_run"] == str(folder)


def test_a_push_creates_the_repository_in_one_commit_and_the_heads_come_back(logged_in, heads, capsys):
    assert push(heads, "ada/heads", "--private") == 0
    files = logged_in.files("ada/heads")
    assert sorted(files) == [".gitattributes", "README.md", *FILES[:1], *CUSTOM, *FILES[1:]]
    assert len(logged_in.repositories["ada/heads"]) == 2, "the empty repository, and one commit"
    assert "ada/heads" in logged_in.private
    assert any(request.startswith("PUT /large/") for request in logged_in.requests)
    back, sent = load_heads("ada/heads"), load_heads(heads)
    assert all(map(torch.equal, back.heads.state_dict().values(), sent.heads.state_dict().values()))
    printed = capsys.readouterr()
    assert printed.err.endswith(f"medusa chat --base {BASE} --heads ada/heads\n")
    assert json.loads(printed.out)["url"] == f"{logged_in.url}/ada/heads"


def test_the_card_has_what_was_measured_with_its_command(heads, tmp_path):
    report = evaluation(heads, tmp_path)
    told = ["--license", "apache-2.0", "--datasets", "ada/answers", "--evaluation", report]
    assert push(heads, "ada/heads", *told, "--dry-run", tmp_path / "folder") == 0
    card = ModelCard.load(tmp_path / "folder" / "README.md")
    assert card.data.to_dict() == {
        "base_model": BASE,
        "base_model_relation": "adapter",
        "datasets": ["ada/answers"],
        "library_name": "medusa-heads",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "medusa", "draft-model", "custom_generate"],
    }
    assert "| coding | 4 | 256 | 2.11 | 50.0% | 20.0% | 3.0% |" in card.text
    assert "| all | 4 | 256 | 1.73 | 50.0% | 20.0% | 3.0% |" in card.text
    assert "python inference/evaluate_heads.py --heads runs/mine/heads" in card.text
    assert "a CPU, float32, greedy, at most 64 new tokens, a tree of 16 nodes, 2026-11-22" in card.text
    assert "accelerate launch train/train_heads.py --config mine.yaml" in card.text
    assert "| training tokens | 34,567 |" in card.text


def test_a_card_without_measurements_says_so_and_holds_no_number_of_them(heads, tmp_path):
    assert push(heads, "ada/heads", "--dry-run", tmp_path / "folder") == 0
    text = (tmp_path / "folder" / "README.md").read_text()
    assert "Nothing was measured for this card." in text
    assert "tokens per step" not in text.partition("## What they reach")[2]


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"made": {"heads": "others", "heads_sha256": "0" * 64}}, "about other heads than these: 'others'"),
        ({"made": None}, "must hold made, and does not"),
    ],
)
def test_a_report_about_other_heads_is_refused(heads, tmp_path, capsys, changes, complaint):
    report = evaluation(heads, tmp_path, **changes)
    if changes["made"] is None:
        report.write_text(
            json.dumps({k: v for k, v in json.loads(report.read_text()).items() if k != "made"})
        )
    assert push(heads, "ada/heads", "--evaluation", report, "--dry-run", tmp_path / "folder") == 1
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "folder").exists()


def test_exports_lie_beside_the_heads_and_the_card_says_how_to_serve_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chat_base().save_pretrained("base")
    config = HeadsConfig(hidden_size=32, vocab_size=260, num_heads=2)
    save_heads(HeadsCheckpoint(MedusaHeads(config), "base"), "plain")
    asked = ["--base", BASE, "--exports", "vllm-medusa", "--dry-run", "folder"]
    assert push("plain", "ada/heads", *asked) == 0
    written = json.loads((tmp_path / "folder/exports/vllm-medusa/config.json").read_text())
    assert written["base_model_name_or_path"] == BASE
    assert load_heads(tmp_path / "folder").base_model == BASE
    card = (tmp_path / "folder/README.md").read_text()
    assert f"vllm serve {BASE}" in card and "hf download ada/heads --include 'exports/vllm-medusa/*'" in card


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["heads"], "repository must be of the form user/repo, got 'heads'"),
        (["a b/c"], "repository must be of the form user/repo, got 'a b/c'"),
        (["ada/heads", "--base", "."], "base must be a hub id, so that others find it, got '.'"),
        (["ada/heads", "--evaluation", "none.json"], "evaluation: no file at 'none.json'"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_anything_is_written(
    logged_in, heads, capsys, arguments, complaint
):
    assert push(heads, *arguments) == 1
    assert complaint in capsys.readouterr().err
    assert logged_in.requests == []


def test_a_recorded_base_that_is_a_directory_here_must_be_named_by_its_hub_id(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/base").mkdir(parents=True)
    save_heads(HeadsCheckpoint(chat_heads(), "models/base"), "heads")
    assert push("heads", "ada/heads", "--dry-run", "folder") == 1
    assert "heads records the base, which must be a hub id" in capsys.readouterr().err


REFUSED = {
    "no token": ({"HF_TOKEN": ""}, "needs a token with the right to write; log in with `hf auth login`"),
    "a token that nobody has": ({"HF_TOKEN": "hf_nobody"}, "does not know the token"),
    "a token that only reads": ({"HF_TOKEN": "hf_ada_reads"}, "the token may not write to 'ada/heads' (403)"),
    "somebody else's repository": ({"HF_TOKEN": "hf_bob"}, "it belongs to 'bob'; push to bob/NAME"),
}


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_who_may_not_write_is_told_what_to_do_and_nothing_is_pushed(
    logged_in, heads, monkeypatch, capsys, case, exists
):
    environment, complaint = REFUSED[case]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if exists:
        logged_in.put("ada/heads", {".gitattributes": b""})
    assert push(heads, "ada/heads") == 1
    assert complaint in capsys.readouterr().err
    assert not any(
        request.startswith(("PUT", "POST /api/models/ada/heads/commit")) for request in logged_in.requests
    )
    assert len(logged_in.repositories.get("ada/heads", [])) == int(exists)


@pytest.mark.parametrize("failure", [500, None])
@pytest.mark.parametrize(
    "fails_at",
    ["whoami", "GET /api/models/someone", "repos/create", "preupload", "objects/batch", "PUT", "commit/main"],
)
def test_a_hub_that_fails_on_the_way_leaves_nothing_half_pushed(logged_in, heads, capsys, fails_at, failure):
    logged_in.fails_at, logged_in.failure = fails_at, failure
    assert push(heads, "ada/heads") == 1
    printed = capsys.readouterr().err
    assert "did not end (" in printed and "A push is one commit" in printed
    assert set(logged_in.repositories.get("ada/heads", [{}])[-1]) <= {".gitattributes"}
    logged_in.fails_at = None
    assert push(heads, "ada/heads") == 0, "the same command goes on"


def test_a_hub_that_is_not_there_is_named(logged_in, heads, capsys):
    logged_in.stop()
    assert push(heads, "ada/heads") == 1
    assert f"the push to 'ada/heads' at {logged_in.url} did not end" in capsys.readouterr().err


def test_a_base_that_the_hub_does_not_have_is_refused(logged_in, heads, capsys):
    assert push(heads, "ada/heads", "--base", "someone/else") == 1
    assert "the hub has no model 'someone/else'" in capsys.readouterr().err
    assert "ada/heads" not in logged_in.repositories


def test_a_repository_with_files_is_replaced_only_when_asked_and_keeps_what_is_not_ours(
    logged_in, heads, capsys
):
    before = {
        "config.json": b"{}",
        "exports/old/config.json": b"{}",
        "notes.md": b"mine",
        ".gitattributes": b"",
    }
    logged_in.put("ada/heads", before)
    assert push(heads, "ada/heads") == 1
    assert re.search(
        r"holds 3 files \(config.json, .*\); push to another, or give --overwrite", capsys.readouterr().err
    )
    assert logged_in.files("ada/heads") == before
    assert push(heads, "ada/heads", "--overwrite") == 0
    after = logged_in.files("ada/heads")
    assert after["notes.md"] == b"mine" and "exports/old/config.json" not in after
    assert len(logged_in.repositories["ada/heads"]) == 2, "one commit"
    assert "deleted: exports/old/config.json" in capsys.readouterr().err


def test_a_dry_run_replaces_an_earlier_one_and_no_project(heads, tmp_path, capsys):
    project, folder = tmp_path / "project", tmp_path / "folder"
    (project / "src").mkdir(parents=True)
    (project / "src" / "a.py").write_text("mine")
    for output in (project, heads):
        assert push(heads, "ada/heads", "--dry-run", output, "--overwrite") == 1
    assert "holds something else (src/a.py)" in capsys.readouterr().err
    assert (project / "src" / "a.py").read_text() == "mine"
    for _ in range(2):
        assert push(heads, "ada/heads", "--dry-run", folder, "--overwrite") == 0
    assert f"to be replaced:\n  {folder / 'README.md'}" in capsys.readouterr().err


def test_a_push_deletes_only_what_a_push_writes(logged_in, heads):
    logged_in.put("ada/heads", {"exports/notes.md": b"mine", "exports/old/config.json": b"{}"})
    assert push(heads, "ada/heads", "--overwrite") == 0
    after = logged_in.files("ada/heads")
    assert "exports/notes.md" in after and "exports/old/config.json" not in after


def test_the_tiny_chat_is_answered_from_the_hub(logged_in, heads, tmp_path, capsys):
    chat_base().save_pretrained(tmp_path / "base")
    chat_tokenizer().save_pretrained(tmp_path / "base")
    logged_in.put(BASE, tmp_path / "base")
    assert push(heads, "ada/heads") == 0
    answer = ["--max-new-tokens", "12", "Hello"]
    capsys.readouterr()
    ours = ran(capsys, ["generate", "--base", BASE, "--heads", "ada/heads", *answer]).out
    assert main(["generate", "--base", str(tmp_path / "base"), "--heads", heads, "--plain", *answer]) == 0
    assert ours == capsys.readouterr().out
