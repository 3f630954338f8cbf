"""Layers that bases come with draft as transformers' own loop does, and everything that heads do."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers
from conftest import assert_exact, left_padded, needs_newest, random_prompts, tiny_model
from mtp_models import FAMILIES, FEW_TOKENS, PROMPT, WITH_TREES, load_base, made_base, save_base
from stateful_models import turned_at_a_tie
from tiny_training import chat_tokenizer, counting_rows, write_rows
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from medusa import CandidateTree, HeadsCheckpoint, MedusaModel, load_heads, save_heads
from medusa.cli.info import describe_base, describe_heads
from medusa.cli.main import main
from medusa.decoding.batch import Row
from medusa.decoding.state import DecodeRequest
from medusa.drafters.autoregressive import AutoregressiveDrafter
from medusa.heads.autoregressive_head import unroll
from medusa.heads.mtp import own_head

pytestmark = needs_newest
TREE = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)])
CASES = [(family, count) for family in WITH_TREES for count in (1, 3)]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """The base of a family with so many layers, saved and loaded once."""
    made = {}

    def base_of(family: str, num_layers: int = 1):
        if (family, num_layers) not in made:
            directory = tmp_path_factory.mktemp("base") / family
            made[family, num_layers] = load_base(save_base(directory, family, num_layers))
        return made[family, num_layers]

    return base_of


def watched(monkeypatch) -> list[tuple[list[int], list[int]]]:
    """The text of each row, up to the root, and its draft, of each step to come."""
    drafts, draft = [], AutoregressiveDrafter.draft

    def kept(self, context):
        drafted = draft(self, context)
        for text, length, tokens in zip(context.tokens, context.lengths, drafted.tokens, strict=True):
            drafts.append((text[: int(length)].tolist(), tokens[1:].tolist()))
        return drafted

    monkeypatch.setattr(AutoregressiveDrafter, "draft", kept)
    return drafts


@pytest.mark.parametrize(("family", "num_layers"), CASES)
def test_as_many_tokens_are_accepted_as_by_transformers_use_mtp(bases, monkeypatch, family, num_layers):
    base, prompt, theirs = bases(family, num_layers), PROMPT, []
    candidates = MTPCandidateGenerator.get_candidates

    def kept(self, input_ids, *args, **kwargs):
        tokens, logits = candidates(self, input_ids, *args, **kwargs)
        theirs.append((input_ids[0].tolist(), tokens[0, input_ids.shape[1] :].tolist()))
        return tokens, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", kept)
    ours = watched(monkeypatch)
    asked = {"max_new_tokens": 32, "do_sample": False, "return_dict_in_generate": True}
    expected = base.generate(prompt, use_mtp=True, **asked).sequences
    output = MedusaModel(base).generate(prompt, drafter="mtp", **asked)
    assert torch.equal(output.sequences, expected)
    assert torch.equal(base.generate(prompt, **asked).sequences, expected)
    assert all(len(tokens) == num_layers for _, tokens in theirs[1:])
    assert [text for text, _ in ours] == [text for text, _ in theirs[1 : len(ours) + 1]]
    assert ours == theirs[1 : len(ours) + 1] and len(theirs) - 1 <= len(ours) + 1
    assert output.statistics.tokens_per_step > 1.2


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITH_TREES])
def test_bases_that_keep_a_state_draft_as_transformers_modules_do(bases, monkeypatch, family):
    base, prompt, drafts = bases(family), PROMPT, watched(monkeypatch)
    model, asked = MedusaModel(base), {"max_new_tokens": 32, "do_sample": False}
    output = model.generate(prompt, drafter="mtp", return_dict_in_generate=True, **asked)
    assert not turned_at_a_tie(base, output.sequences, base.generate(prompt, **asked), prompt.shape[1])
    assert output.statistics.tokens_per_step > 1.2
    modules = MtpModel.from_pretrained(base)
    for text, draft in drafts:
        tokens = torch.tensor([text])
        states = base(tokens[:, :-1], output_hidden_states=True).hidden_states[-1]
        positions = torch.arange(1, len(text))[None]
        cache = MtpCache(config=base.config.get_mtp_config())
        assert modules(tokens[:, 1:], states, None, positions, cache)[0].tolist() == [draft]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_that_of_plain_decoding(bases, family):
    base = bases(family, 2 if family in WITH_TREES else 1)
    model = MedusaModel.from_pretrained(base, "mtp", engine="eager")
    prompts = left_padded(random_prompts(2, 9) % FEW_TOKENS, [9, 4])
    tree = TREE if family in WITH_TREES else CandidateTree.chain(3)
    sampled = {"do_sample": True, "temperature": 0.8, "seed": 5}
    given = ({}, {"drafter": "mtp", "tree": tree}, {"drafter": "mtp"}, {"drafter": "dynamic-heads"})
    for asked, hows in (({"do_sample": False}, given), (sampled, given[:1])):
        assert_exact(model, prompts, *hows, max_new_tokens=12, **asked)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_rows_of_a_ragged_batch_are_drafted_as_each_alone(bases, monkeypatch, num_layers):
    model, drafts = MedusaModel(bases("deepseek_v3", num_layers)), watched(monkeypatch)
    asked = {"drafter": "mtp", "tree": CandidateTree.chain(4), "max_new_tokens": 16, "do_sample": False}
    for length in (9, 5, 2):
        model.generate(PROMPT[:, -length:], **asked)
    alone = {tuple(text): draft for text, draft in drafts}
    drafts.clear()
    model.generate(**left_padded(PROMPT.repeat(3, 1), [9, 5, 2]), **asked)
    assert len(drafts) > 16
    assert all(draft == alone[tuple(text)] for text, draft in drafts if tuple(text) in alone)
    assert sum(tuple(text) in alone for text, _ in drafts) > 16


@pytest.mark.parametrize(("family", "num_layers"), [*CASES, ("qwen3_5_text", 1)])
def test_unrolled_states_are_those_of_drafts(bases, monkeypatch, family, num_layers):
    """Deeper than there are layers, too."""
    base, drafts, depth = bases(family, num_layers), watched(monkeypatch), 5
    model = MedusaModel(base)
    model.generate(PROMPT, drafter="mtp", tree=CandidateTree.chain(depth), max_new_tokens=12)
    head = own_head(base, depth)
    assert {len(draft) for _, draft in drafts} == {depth}
    for text, draft in drafts:
        tokens = torch.tensor([text + draft])
        hidden = base(tokens, output_hidden_states=True).hidden_states[-1]
        following = base.get_input_embeddings()(tokens.roll(-1, dims=1))
        states = unroll(head, hidden, following, torch.arange(tokens.shape[1])[None])
        ends = range(len(text) - 2, len(text) - 2 + depth)
        guesses = [int(base.lm_head(each[0, end]).argmax()) for each, end in zip(states, ends, strict=True)]
        assert guesses == draft


def test_a_heads_directory_holds_them(bases, tmp_path):
    base = bases("deepseek_v3", 2)
    head = own_head(base)
    saved = save_heads(HeadsCheckpoint(head, "some/base", TREE.subtree(2)), tmp_path / "heads")
    loaded = load_heads(saved).heads
    assert loaded.config == head.config and loaded.kind == "mtp"
    for name, weight in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    asked = {"max_new_tokens": 12, "return_dict_in_generate": True, "drafter": "heads"}
    ours = MedusaModel.from_pretrained(base, saved, engine="eager").generate(PROMPT, **asked)
    own = MedusaModel(base, head, TREE.subtree(2)).generate(PROMPT, **asked)
    assert ours.statistics.accepted_histogram == own.statistics.accepted_histogram
    assert describe_heads(load_heads(saved))["base_config"]["model_type"] == "deepseek_v3"


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (lambda: tiny_model("llama"), "needs a base that comes with layers .* LlamaForCausalLM has none"),
        (lambda: made_base("deepseek_v3"), "needs the files .* save and load it first"),
    ],
)
def test_a_base_without_them_is_refused(base, message):
    with pytest.raises(ValueError, match=message):
        MedusaModel(base()).generate(PROMPT, drafter="mtp", max_new_tokens=4)


def test_files_without_the_weights_are_refused(bases, tmp_path):
    base = bases("qwen3_5_text")
    base.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"do not hold the layers .* train heads .*eh_proj"):
        MedusaModel(load_base(tmp_path)).generate(PROMPT, drafter="mtp", max_new_tokens=4)


def test_layers_with_other_masks_are_refused(bases):
    config = copy.deepcopy(bases("glm4_moe").config)
    config.mtp_layer_types = ["sliding_attention"]
    other = copy.copy(bases("glm4_moe"))
    other.config = config
    with pytest.raises(ValueError, match=r"are of kind sliding_attention, and medusa runs .* full attention"):
        own_head(other)


def test_an_older_transformers_is_told_which_it_takes(bases, monkeypatch):
    base = bases("glm4_moe")
    monkeypatch.delattr(transformers.modeling_layers, "MtpModel")
    with pytest.raises(ValueError, match=r"drafter 'mtp' needs transformers 5\.23 .* pip install"):
        MedusaModel(base).generate(PROMPT, drafter="mtp")


def test_a_heads_directory_says_it_too(bases, monkeypatch, tmp_path):
    saved = save_heads(HeadsCheckpoint(own_head(bases("glm4_moe")), "some/base"), tmp_path / "heads")
    config = json.loads((saved / "config.json").read_text())
    says = r"config.json: base_config must (be a configuration|say layers)"
    for wrong in ({}, {"model_type": "llama"}, {**config["base_config"], "num_hidden_layers": 10**9}, 3):
        (saved / "config.json").write_text(json.dumps(config | {"base_config": wrong}))
        with pytest.raises(ValueError, match=says):
            load_heads(saved)
    (saved / "config.json").write_text(json.dumps(config))
    monkeypatch.delattr(transformers.modeling_layers, "MtpModel")
    with pytest.raises(ValueError, match=r"heads of kind 'mtp' need transformers 5\.23 or newer"):
        load_heads(saved)


def test_rows_join_a_batch_that_drafts_with_them(bases):
    model = MedusaModel(bases("deepseek_v3", 3), own_head(bases("deepseek_v3", 3), 3), TREE)
    expected = [model.generate(PROMPT[:, -length:], drafter="plain", max_new_tokens=12) for length in (9, 4)]
    batch, answers = model.continuous_batch(), []
    for length in (9, 4):
        ids = torch.tensor([length])
        request = DecodeRequest(PROMPT[:, -length:], ids, 12, eos_ids=frozenset())
        answers.append(Row(request, length))
        batch.add(answers[-1])
        for _ in range(3):
            batch.step()
    while any(row.finish_reason is None for row in answers):
        batch.step()
    for row, whole in zip(answers, expected, strict=True):
        assert row.tokens == whole[0, -12:].tolist()


@pytest.mark.parametrize(("family", "count"), [*((family, 1) for family in FAMILIES), ("deepseek_v3", 3)])
def test_info_says_that_a_base_has_them(bases, tmp_path, family, count):
    assert describe_base(bases(family, count).config)["mtp_layers"] == count


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_text"])
def test_they_are_evaluated_as_any_heads_are(family, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = save_base(tmp_path / "base", family, vocab_size=258)
    chat_tokenizer().save_pretrained(base)
    data = write_rows(tmp_path / "data.jsonl", counting_rows(4))
    words = ["--prompts", str(data), "--limit", "2", "--max-new-tokens", "8", "--json", "report.json"]
    assert main(["evaluate", "--base", str(base), "--heads", "mtp", *words]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["head_accuracy"]["top1"]) == 3
    assert report["made"]["heads"] == "mtp" and report["made"]["heads_sha256"] is None


def test_a_command_drafts_with_them_where_nothing_is_named(tmp_path, capsys):
    base = save_base(tmp_path / "base", "deepseek_v3", vocab_size=258)
    chat_tokenizer().save_pretrained(base)

    def answer(*words: str, code: int = 0) -> tuple[str, str]:
        asked = ["generate", "What?", "--base", str(base), "--max-new-tokens", "8", "--engine", "eager"]
        assert main([*asked, *words]) == code
        shown = capsys.readouterr()
        return shown.out, " ".join(shown.err.split())

    with_them, said = answer()
    assert "its own layer for guesses, 3 deep, a tree of 4 nodes" in said
    without, said = answer("--heads", "none")
    assert with_them == without and "no heads" in said
    made_base("deepseek_v3", vocab_size=258).save_pretrained(base)
    without, said = answer()
    assert with_them == without and "the base does not draft itself: the files of" in said
    assert "do not hold the layers" in answer("--heads", "mtp", code=1)[1]


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_moe_text"])
def test_they_are_trained_further_from_the_weights_of_the_base(family, tmp_path):
    base = save_base(tmp_path / "base", family, vocab_size=258)
    chat_tokenizer().save_pretrained(base)
    data, run = write_rows(tmp_path / "data.jsonl", counting_rows(40)), tmp_path / "run"
    words = ["--base", str(base), "--data", str(data), "--output_dir", str(run), "--head_kind", "mtp"]
    words += ["--num_heads", "2", "--max_steps", "6", "--tree_nodes", "4", "--learning_rate", "1e-2"]
    assert main(["train", *words, "--logging_steps", "1", "--cache_hidden_states", "true"]) == 0
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [entry["train/loss"] for entry in logged if "train/loss" in entry]
    assert losses[-1] < losses[0]
    trained = load_heads(run / "heads")
    for name, weight in own_head(load_base(base)).layers.state_dict().items():
        moved = (weight - trained.heads.layers.state_dict()[name]).abs().max()
        assert moved < 0.1, f"{name} did not start from the base's own"  # six steps of at most 0.01
    model = MedusaModel.from_pretrained(str(base), run / "heads", engine="eager")
    assert_exact(model, PROMPT, {}, max_new_tokens=12, do_sample=False)
