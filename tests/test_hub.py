"""Heads and bases by hub id: revisions, tokens, the cache, and errors that say what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from reported import ran
from tiny_chat import chat_base, chat_heads, chat_tokenizer
from transformers import LlamaForCausalLM

from medusa import HeadsCheckpoint, MedusaModel, load_heads, save_heads
from medusa.base.loading import load_tokenizer
from medusa.cli.main import main
from medusa.engine.weights.load import load_base
from medusa.hub import split_revision

PROMPT = torch.tensor([[72, 105, 33, 40]])
REMOTE_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OddConfig(LlamaConfig):
    model_type = "odd"

class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig
"""


def chat_directory(directory: Path, seed: int = 0) -> Path:
    """A base and its tokenizer."""
    chat_base(seed).save_pretrained(directory)
    chat_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def filled(hub, tmp_path):
    """A hub with two revisions of a base and of heads for it; the tag v1 names the first."""
    for i in range(2):
        hub.put("ada/base", chat_directory(tmp_path / f"base-{i}", seed=i))
        checkpoint = HeadsCheckpoint(chat_heads(num_heads=2 + i), "ada/base")
        hub.put("ada/heads", save_heads(checkpoint, tmp_path / f"heads-{i}"))
    hub.tags = {"ada/base": {"v1": 0}, "ada/heads": {"v1": 0}}
    return hub


def same_weights(one, other) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_a_name_is_split_at_its_revision():
    assert split_revision("ada/heads@v1") == ("ada/heads", "v1")
    assert split_revision("ada/heads") == ("ada/heads", None)
    assert split_revision("ada/heads@") == ("ada/heads@", None)


@pytest.mark.parametrize("name, number", [("ada/heads", 3), ("ada/heads@v1", 2)])
def test_heads_come_at_the_revision_that_their_name_has(filled, name, number):
    assert load_heads(name).heads.num_heads == number
    commit = filled.commit_id("ada/heads", number - 2)
    assert load_heads(f"ada/heads@{commit}").heads.num_heads == number


def test_only_the_files_of_a_heads_directory_are_downloaded(filled):
    filled.put(
        "ada/heads", {**filled.files("ada/heads"), "exports/vllm-medusa/config.json": b"{}", "big.bin": b"x"}
    )
    load_heads("ada/heads")
    fetched = {request.rpartition("/")[2] for request in filled.requests if "/resolve/" in request}
    assert fetched == {"config.json", "model.safetensors", "provenance.json"}


def test_private_heads_need_a_token_and_take_one(filled, tmp_path):
    filled.private = {"ada/heads"}
    with pytest.raises(FileNotFoundError, match="If the repository is private, log in with `hf auth login`"):
        load_heads("ada/heads")
    elsewhere = tmp_path / "elsewhere"
    assert load_heads("ada/heads", token="hf_ada", cache_dir=elsewhere).heads.num_heads == 3
    assert elsewhere.is_dir()
    base = chat_base()
    assert MedusaModel.from_pretrained(base, "ada/heads", token="hf_ada").heads.num_heads == 3


def test_a_token_that_nobody_has_is_said_to_be_refused(filled):
    with pytest.raises(FileNotFoundError, match=r"refused the token for the heads directory .* \(401\)"):
        load_heads("ada/heads", token="hf_nobody")


def test_a_gated_repository_says_where_to_accept_its_terms(filled):
    filled.gated = {"ada/heads", "ada/base"}
    for load in (load_heads, load_base):
        with pytest.raises(FileNotFoundError, match="is gated on the hub; accept its terms there"):
            load("ada/heads" if load is load_heads else "ada/base")


@pytest.mark.parametrize("load, name", [(load_heads, "ada/heads"), (load_base, "ada/base")])
def test_a_revision_that_is_not_there_is_named(filled, load, name):
    with pytest.raises(FileNotFoundError, match=rf"{name} on the hub has no revision 'v9'; name a branch"):
        load(f"{name}@v9")


@pytest.mark.parametrize("load", [load_heads, load_base])
def test_a_repository_that_is_not_there_is_named(filled, load):
    with pytest.raises(FileNotFoundError, match="at 'ada/nothing', neither here nor on the hub"):
        load("ada/nothing")


@pytest.mark.parametrize("name", ["Qwen2.5-coder-1.5b", "qwen2.5-coder-15b", "smolm2-135m-instruct"])
@pytest.mark.parametrize("load", [load_heads, load_base])
def test_a_name_that_is_nearly_a_known_one_is_answered_with_that(filled, monkeypatch, load, name):
    known = "smollm2-135m-instruct" if name[0] == "s" else "qwen2.5-coder-1.5b"
    for away in (None, "gone"):
        if away:
            take_away(filled, monkeypatch, away)
        with pytest.raises(FileNotFoundError, match=f"at '{name}'; did you mean '{known}'. (It is no|Else)"):
            load(name)


@pytest.mark.parametrize("name", ["gpt2", "ada/qwen2.5-coder-15b"])
def test_a_name_that_is_far_from_known_ones_or_has_an_owner_is_not(filled, name):
    with pytest.raises(FileNotFoundError) as refused:
        load_base(name)
    assert "did you mean" not in str(refused.value)


@pytest.mark.parametrize("away", ["offline", "gone", "failing"])
@pytest.mark.parametrize("load, name", [(load_heads, "ada/heads@v1"), (load_base, "ada/base@v1")])
def test_what_is_cached_is_used_without_the_hub(filled, monkeypatch, load, name, away):
    before = load(name)
    take_away(filled, monkeypatch, away)
    after = load(name)
    assert same_weights(before, after) if load is load_base else same_weights(before.heads, after.heads)


@pytest.mark.parametrize(
    "away, why",
    [
        ("offline", "HF_HUB_OFFLINE is set; unset it"),
        ("gone", r"the hub at http://127.0.0.1:\d+ cannot be reached \(.*\); check the network"),
        ("failing", r"the hub at http://127.0.0.1:\d+ cannot be reached \(.*500.*\); check the network"),
    ],
)
@pytest.mark.parametrize("load, name", [(load_heads, "ada/heads@v1"), (load_base, "ada/base@v1")])
def test_what_is_not_cached_says_how_to_get_it(filled, monkeypatch, load, name, away, why):
    take_away(filled, monkeypatch, away)
    repository = name.partition("@")[0]
    with pytest.raises(FileNotFoundError, match=f"{why}, or run `hf download {repository} --revision v1`"):
        load(name)


def test_local_files_only_asks_no_hub_and_says_so(filled):
    for load, name in ((load_heads, "ada/heads"), (load_base, "ada/base")):
        with pytest.raises(FileNotFoundError, match="local_files_only is set; leave it out"):
            load(name, local_files_only=True)
    assert filled.requests == []


def take_away(hub, monkeypatch, how):
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif how == "gone":
        hub.stop()
    else:
        hub.fails_at, hub.failure = "/", 500


@pytest.mark.parametrize("name", ["ada/base@v1", "ada/base"])
def test_a_base_and_its_tokenizer_come_at_the_revision_of_its_name(filled, tmp_path, name):
    number = 0 if name.endswith("v1") else 1
    model = MedusaModel.from_pretrained(name, "ada/heads", engine="eager")
    assert same_weights(model.base, LlamaForCausalLM.from_pretrained(tmp_path / f"base-{number}"))
    assert model.base.name_or_path == "ada/base"
    assert model.tokenizer.decode([72, 105]) == load_tokenizer(tmp_path / "base-0").decode([72, 105])
    commit = filled.commit_id("ada/base", number)
    asked = [each for each in filled.requests if "tokenizer_config.json" in each]
    assert asked and all(commit in each for each in asked)


def test_a_revision_is_given_once(filled):
    assert same_weights(load_base("ada/base", revision="v1"), load_base("ada/base@v1"))
    with pytest.raises(ValueError, match="revision must be given once, got 'ada/base@v1'"):
        load_base("ada/base@v1", revision="main")


def test_loading_arguments_that_only_a_base_reads_are_refused_with_a_loaded_one(filled):
    with pytest.raises(ValueError, match=r"\['revision'\] go with a path or a hub id"):
        MedusaModel.from_pretrained(chat_base(), "ada/heads", token="hf_ada", revision="v1")
    with pytest.raises(ValueError, match=r"\['token'\] go with a path or a hub id"):
        MedusaModel.from_pretrained(chat_base(), token="hf_ada")


@pytest.fixture
def odd(tmp_path, monkeypatch):
    """A model whose code comes with it."""
    directory = chat_directory(tmp_path / "odd")
    (directory / "odd.py").write_text(REMOTE_CODE)
    config = (directory / "config.json").read_text()
    auto = '"auto_map": {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}'
    config = re.sub('"model_type": "llama"', f'"model_type": "odd", {auto}', config)
    (directory / "config.json").write_text(config.replace("LlamaForCausalLM", "OddForCausalLM"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return directory


@pytest.mark.parametrize("place", ["directory", "hub"])
def test_a_base_with_code_of_its_own_runs_when_that_is_trusted(hub, odd, place):
    hub.put("ada/odd", odd)
    source = str(odd) if place == "directory" else "ada/odd"
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        MedusaModel.from_pretrained(source)
    model = MedusaModel.from_pretrained(source, trust_remote_code=True)
    assert type(model.base).__name__ == "OddForCausalLM"
    plain = chat_base().generate(PROMPT, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=8, do_sample=False), plain)


def test_the_command_line_trusts_code_only_when_told(odd, tmp_path, capsys):
    heads = str(save_heads(HeadsCheckpoint(chat_heads(), str(odd)), tmp_path / "heads"))
    asked = ["generate", "--heads", heads, "--max-new-tokens", "4", "Hi"]
    assert "trust_remote_code=True" in ran(capsys, asked, 1).err
    assert main([*asked, "--trust-remote-code"]) == 0
