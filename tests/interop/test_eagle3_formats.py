"""EAGLE-3 heads out and in: what others trained guesses here what it guesses there, and decodes exactly; what
is written here is what they read; bad directories write nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import BUSHY, left_padded
from damage import changed, config_says, removed
from foreign_eagle3 import (
    LAYERS,
    Eagle3Reference,
    as_speculators,
    deep_base,
    reference_config,
    reference_head,
    write_directory,
    written_tensors,
)
from foreign_heads import refused
from reported import ran
from safetensors.torch import load_file
from tiny_chat import chat_tokenizer

from medusa import (
    CandidateTree,
    HeadsCheckpoint,
    HeadsConfig,
    MedusaHeads,
    MedusaModel,
    load_heads,
    save_heads,
)
from medusa.cli.main import main
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head
from medusa.heads.fingerprint import BaseFingerprint

BASE = deep_base()
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("deep") / "base"
    BASE.save_pretrained(directory)
    chat_tokenizer().save_pretrained(directory)
    return str(directory)


def plain(directory: Path, base: str, file: str = WEIGHTS, is_half: bool = False, more=None, **changes):
    """A plain checkpoint, and the head that it holds; ``more`` changes its tensors."""
    head = reference_head(reference_config(**changes))
    head = head.half().float() if is_half else head
    tensors = written_tensors(head)
    if more is not None:
        more(tensors)
    if is_half:
        tensors = {name: each.half() if each.is_floating_point() else each for name, each in tensors.items()}
    return write_directory(directory, head.config, tensors, file), head


def with_base_rows(directory: Path, base: str):
    head = reference_head(reference_config())
    head.lm_head.weight.data.copy_(BASE.lm_head.weight[torch.arange(60) * 4 + 1])
    return write_directory(directory, head.config, written_tensors(head)), head


def speculators(directory: Path, base: str, says_residual: bool = True, **changes):
    head = reference_head(reference_config(**changes))
    tensors = written_tensors(head) | {"embed_tokens.weight": BASE.model.embed_tokens.weight.detach().clone()}
    config, tensors = as_speculators(head.config, tensors, base)
    if not says_residual:
        del config["norm_before_residual"]
    return write_directory(directory, config, tensors), head


def embeddings_too(tensors) -> None:
    tensors["embed_tokens.weight"] = BASE.model.embed_tokens.weight.detach().clone()


def older_names(tensors) -> None:
    """As some write them: a model inside, the maps as int32, frequencies that nothing reads."""
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[f"model.{name.replace('midlayer.', 'layers.0.')}"] = tensors.pop(name)
    tensors["d2t"] = tensors["d2t"].int()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
VARIANTS = {
    "SpecForge": (plain, {}),
    "SafeAILab": (plain, {"file": "pytorch_model.bin", "architectures": ["LlamaForCausalLM"]}),
    "AngelSlim": (
        plain,
        {"architectures": ["Eagle3LlamaForCausalLM"], "head_dim": 8, "sliding_window": None},
    ),
    "in shards": (plain, {"file": "model.safetensors.index.json"}),
    "in half precision": (plain, {"is_half": True}),
    "other names": (plain, {"more": older_names}),
    "every token": (plain, {"draft_vocab_size": 260}),
    "the base's rows": (with_base_rows, {}),
    "the base's embeddings": (plain, {"more": embeddings_too}),
    "no t2d": (plain, {"more": lambda tensors: tensors.pop("t2d")}),
    "scaled positions": (plain, {"rope_scaling": LLAMA3}),
    "one norm before fc": (plain, {"norm_before_fc": True}),
    "EAGLE-3.1": (plain, {"fc_norm": True, "norm_output": True}),
    "layers named": (plain, {"eagle_aux_hidden_state_layer_ids": [4, 2, 5]}),
    "layers named inside": (plain, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}}),
    "speculators": (speculators, {"norm_before_residual": False}),
    "speculators, normed residual": (speculators, {"norm_before_residual": True}),
    "speculators, residual left out": (speculators, {"says_residual": False, "norm_before_residual": True}),
}


def same_guesses(head: Eagle3Head, theirs: Eagle3Reference, tolerance: float = 1e-5) -> None:
    """Hold the head to the reference, on the base's states and on a step of its own."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(2, 7, 4 * 32, generator=generator)
    embeddings = torch.randn(2, 7, 32, generator=generator)
    with torch.no_grad():
        logits, features = theirs(states[..., 32:], embeddings)
        ours = head(head.fuse(states), embeddings)
        torch.testing.assert_close(
            head.unembedded(ours.states, BASE.lm_head), logits, atol=tolerance, rtol=1e-4
        )
        torch.testing.assert_close(ours.features, features, atol=tolerance, rtol=1e-4)
        logits, _ = theirs.drafted(features, embeddings)
        again = head(ours.features, embeddings)
        torch.testing.assert_close(
            head.unembedded(again.states, BASE.lm_head), logits, atol=tolerance, rtol=1e-4
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_of_others_guess_here_what_they_guess_there_and_decode_exactly(variant, base, tmp_path, capsys):
    make, arguments = VARIANTS[variant]
    directory, theirs = make(tmp_path / "theirs", base, **arguments)
    where = [] if make is speculators else ["--base", base]
    assert main(["import", str(directory), *where, "--output", str(tmp_path / "heads")]) == 0
    told = "leaves out norm_before_residual, which vLLM then takes for true" in capsys.readouterr().err
    assert told == (variant == "speculators, residual left out")
    checkpoint = load_heads(tmp_path / "heads")
    head = checkpoint.heads
    assert head.fused_layers == LAYERS and checkpoint.base_model == base
    assert head.config.own_lm_head == (variant != "the base's rows")
    assert head.num_heads == (3 if make is speculators else 5)
    drafted = None if variant == "every token" else (torch.arange(60) * 4 + 1).tolist()
    assert (head.token_map if drafted is None else head.token_map.tolist()) == drafted
    same_guesses(head, theirs)

    model = MedusaModel.from_pretrained(BASE, checkpoint)
    prompts = torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(2))
    arguments = {**left_padded(prompts, [9, 4, 7]), "max_new_tokens": 8, "seed": 3}
    arguments |= {"do_sample": True, "temperature": 0.7}
    plain_text = model.generate(**arguments, tree=CandidateTree.chain(0))
    assert torch.equal(model.generate(**arguments, tree=BUSHY.subtree(3)), plain_text)


def test_the_type_of_the_file_is_kept_and_what_was_decided_is_said(base, tmp_path, capsys):
    directory, _ = plain(
        tmp_path / "theirs", base, is_half=True, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    )
    words = ["import", str(directory), "--base", base]
    assert main([*words, "--output", str(tmp_path / "heads")]) == 0
    written = load_file(tmp_path / "heads" / WEIGHTS)
    assert {each.dtype for each in written.values() if each.is_floating_point()} == {torch.float16}
    error = capsys.readouterr().err
    assert "an EAGLE-3 head over layers 1 3 4 that drafts 5 deep and scores 60 tokens with rows of" in error
    assert "SGLang for one more" in error and "--fused-layers 2 4 5" in error
    assert main([*words, "--output", str(tmp_path / "further"), "--fused-layers", "2", "4", "5"]) == 0
    assert load_heads(tmp_path / "further").heads.fused_layers == LAYERS


def test_a_depth_that_nothing_says_is_taken_for_5_aloud_and_can_be_given(base, tmp_path, capsys):
    silent, _ = plain(tmp_path / "silent", base)
    saying, _ = plain(tmp_path / "saying", base, num_speculative_tokens=4)
    for directory, words, depth in (
        (silent, [], 5),
        (silent, ["--max-depth", "7"], 7),
        (saying, [], 4),
        (saying, ["--max-depth", "2"], 2),
    ):
        output = tmp_path / f"heads {depth}"
        assert main(["import", str(directory), "--base", base, "--output", str(output), *words]) == 0
        said = "does not say how deep the head drafts: 5 is taken; another depth: --max-depth"
        assert (said in capsys.readouterr().err) == (depth == 5)
        assert load_heads(output).heads.num_heads == depth
    words = ["import", str(silent), "--base", base, "--max-depth", "0"]
    refused(words, tmp_path, capsys, "--max-depth must be an int from 1 to 256, got 0")


@pytest.mark.parametrize("given", [["2", "4", "9"], ["0", "2", "4"], ["2", "4", "4"]])
def test_layers_that_the_base_has_not_are_refused_when_they_are_given(given, base, tmp_path, capsys):
    directory, _ = plain(tmp_path / "theirs", base)
    words = ["import", str(directory), "--base", base, "--fused-layers", *given]
    message = "error: --fused-layers must be different ints from 1 to 8, ... got"
    refused(words, tmp_path, capsys, message)


# ------------------------------------------------------------------ bad directories


D2T = torch.arange(60) * 3 + 1
FC, HIDDEN_NORM, Q_NORM = "fc.weight", "midlayer.hidden_norm.weight", "midlayer.self_attn.q_norm.weight"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
BAD = [
    (removed(WEIGHTS), "holds none of ... model.safetensors"),
    (changed(WEIGHTS, {FC: None}), f"{WEIGHTS} lacks {FC}; ... Get it again"),
    (changed(WEIGHTS, {HIDDEN_NORM: None}), f"{WEIGHTS} lacks {HIDDEN_NORM}, ... get it again"),
    (changed(WEIGHTS, {Q_NORM: torch.ones(8)}), f"{WEIGHTS} holds tensors that are no part ... : {Q_NORM}"),
    (changed(WEIGHTS, {"norm.weight": torch.ones(31)}), "'norm.weight' must have shape (32,), ... 31"),
    (changed(WEIGHTS, {FC: torch.ones(96)}), f"'{FC}' must have 2 dimensions"),
    (changed(WEIGHTS, {FC: torch.ones(32, 128)}), f"'{FC}' must have shape (32, 96), ... (32, 128)"),
    (changed(WEIGHTS, {"d2t": None, "t2d": None}), f"{WEIGHTS} lacks d2t, ... 60 of 260 tokens"),
    (changed(WEIGHTS, {"d2t": D2T[:9], "t2d": None}), "d2t of 9 tokens and an lm_head.weight of 60 rows"),
    (changed(WEIGHTS, {"lm_head.weight": None}), "holds a d2t of 60 tokens and no lm_head.weight"),
    (changed(WEIGHTS, {"d2t": 5 * D2T, "t2d": None}), "d2t does not map ... ids must be in [0, 260)"),
    (changed(WEIGHTS, {"d2t": -torch.arange(60), "t2d": None}), "d2t does not map ... 60 different ids"),
    (changed(WEIGHTS, {"d2t": D2T.float()}), "d2t must be one row of ints, got torch.float32"),
    (changed(WEIGHTS, {"d2t": D2T - 1}), "d2t and t2d name different tokens"),
    (changed(WEIGHTS, {"embed_tokens.weight": torch.ones(260, 32)}), "embed_tokens.weight is ... --base"),
    (changed(WEIGHTS, {"input_norm.weight": torch.ones(96)}), "input_norm.weight, ... norm_before_fc: true"),
    (config_says(fc_norm=True), "lacks fc_norm.0.weight, fc_norm.1.weight"),
    (config_says(hidden_size=64), "hidden_size=64, and ... holds 32; ... --trust-tensors"),
    (config_says(draft_vocab_size=61), "draft_vocab_size=61, and ... holds 60"),
    (config_says(num_hidden_layers=2), "num_hidden_layers=2, and ... holds 1"),
    (config_says(target_hidden_size=64), "target_hidden_size=64, and ... holds 32"),
    (config_says(attention_bias=True), "attention_bias=True, and EAGLE-3 heads ... have False"),
    (config_says(partial_rotary_factor=0.5), "partial_rotary_factor=0.5, and EAGLE-3 heads ... have 1.0"),
    (config_says(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5, and EAGLE-3"),
    (config_says(model_type="qwen3"), "model_type='qwen3', ... have 'llama'"),
    (config_says(architectures=["Eagle3DeepseekV2ForCausalLM"]), "architectures=['Eagle3DeepseekV2"),
    (config_says(**{LAYER_IDS: [2, 4, 9]}), "layer_ids ... 1 to 8, ... got [2, 4, 9]; ... --fused-layers"),
    (config_says(**{LAYER_IDS: [2, 4]}), f"'{FC}' must have shape (32, 64), ... (32, 96)"),
    (config_says(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state=False"),
    (config_says(num_attention_heads=5), "config.json: num_key_value_heads must divide"),
    (config_says(num_attention_heads="4"), "config.json: ... mend it"),
    (config_says(num_speculative_tokens="4"), "num_speculative_tokens ... 256, got '4'; ... --max-depth"),
    (config_says(rope_scaling={"rope_type": "longrope"}), "rope_type must be one of ... got 'longrope'"),
    (config_says(fc_norm="no"), "config.json: fc_norm must be true or false, got 'no'"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD)
def test_bad_directories_are_refused_in_one_line_that_names_the_file_and_nothing_is_written(
    spoil, message, base, tmp_path, capsys
):
    directory, _ = plain(tmp_path / "theirs", base)
    spoil(directory)
    refused(["import", str(directory), "--base", base], tmp_path, capsys, f"error: {directory} ... {message}")


def layer_says(**keys):
    """A change inside transformer_layer_config."""

    def change(directory):
        layer = json.loads((directory / "config.json").read_text())["transformer_layer_config"]
        config_says(transformer_layer_config=layer | keys)(directory)

    return change


NO_DEPTH = {"proposal_methods": [{"speculative_tokens": 0}], "verifier": {"name_or_path": "x"}}
GATE, NORM = "layers.0.mlp.gate_proj.weight", "layers.1.hidden_norm.weight"
BAD_SPECULATORS = [
    (config_says(speculators_model_type="dflash"), "config.json must say speculators_model_type='eagle3'"),
    (config_says(transformer_layer_config=None), "config.json must say ... transformer_layer_config"),
    (config_says(speculators_config={"proposal_methods": []}), "must hold speculators_config with"),
    (config_says(speculators_config=NO_DEPTH), "num_speculative_tokens ... from 1 to 256, got 0"),
    (changed(WEIGHTS, {GATE: None}), f"{WEIGHTS} lacks {GATE}"),
    (changed(WEIGHTS, {NORM: torch.ones(32)}), f"{WEIGHTS} holds tensors that are no part ... : {NORM}"),
    (layer_says(hidden_size=64), f"hidden_size=64, and {WEIGHTS} holds 32"),
    (layer_says(num_hidden_layers=2), f"num_hidden_layers=2, and {WEIGHTS} holds 1"),
    (config_says(**{LAYER_IDS: "2 4 5"}), f"config.json: {LAYER_IDS} ... from 1 to 8, ... '2 4 5'"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD_SPECULATORS)
def test_bad_speculators_are_refused(spoil, message, base, tmp_path, capsys):
    directory, _ = speculators(tmp_path / "theirs", base, norm_before_residual=False)
    spoil(directory)
    refused(["import", str(directory), "--base", base], tmp_path, capsys, f"error: {directory} ... {message}")


@pytest.mark.parametrize("make", [plain, speculators])
def test_a_base_of_other_sizes_or_too_few_layers_is_refused(make, base, tmp_path, capsys):
    directory, _ = make(tmp_path / "theirs", base)
    for change, message in (
        ({"vocab_size": 300}, "heads for vocab_size=260, base model ... has 300; ... --base"),
        ({"hidden_size": 64}, "heads for hidden_size=32, base model ... has 64; ... --base"),
        ({"num_hidden_layers": 6}, "names no layers: ... has 6 layers, ... fused_layers, ... --base"),
    ):
        shutil.rmtree(tmp_path / "other", ignore_errors=True)
        deep_base(**change).save_pretrained(tmp_path / "other")
        refused(["import", str(directory), "--base", str(tmp_path / "other")], tmp_path, capsys, message)


def test_a_contradiction_is_passed_over_where_the_tensors_are_trusted(base, tmp_path, capsys):
    directory, theirs = plain(tmp_path / "theirs", base, num_hidden_layers=36)
    words = ["import", str(directory), "--base", base, "--trust-tensors"]
    assert main([*words, "--output", str(tmp_path / "heads")]) == 0
    assert (
        "says num_hidden_layers=36, and model.safetensors holds 1: the tensors are" in capsys.readouterr().err
    )
    same_guesses(load_heads(tmp_path / "heads").heads, theirs)


# ------------------------------------------------------------------ out


def our_head(**options) -> Eagle3Head:
    torch.manual_seed(4)
    token_map = [200, 3, 97, 41, 255, 12] if "token_map_size" in options else None
    layers = options.pop("fused_layers", None)
    head = Eagle3Head(Eagle3Config.of_base(BASE, fused_layers=layers, max_depth=3, **options), token_map)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return head.eval()


def saved(directory: Path, base: str, head, **parts) -> str:
    parts = {"fingerprint": BaseFingerprint.of(BASE), "tree": CandidateTree.chain(2)} | parts
    return str(save_heads(HeadsCheckpoint(head, base, **parts), directory / "heads"))


OURS = {
    "every token": {},
    "a token map": {"token_map_size": 6},
    "rows of its own": {"token_map_size": 6, "own_lm_head": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "other layers": {"fused_layers": (1, 3, 8)},
}


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("to", ["vllm-eagle3", "speculators"])
def test_an_export_holds_what_the_reference_loads_and_comes_back_to_the_bit(to, kind, base, tmp_path, capsys):
    head = our_head(**OURS[kind])
    heads, output = saved(tmp_path, base, head), tmp_path / "export"
    error = ran(capsys, ["export", heads, "--to", to, "--output", str(output)]).err
    assert (
        "the candidate tree of 3 nodes is left out" in error and f"medusa check {output} --as {to}" in error
    )
    assert ("6 tokens are written" in error) == (kind == "a token map")
    assert sorted(path.name for path in output.iterdir()) == ["config.json", WEIGHTS]
    config, tensors = json.loads((output / "config.json").read_text()), load_file(output / WEIGHTS)
    layer = config if to == "vllm-eagle3" else config["transformer_layer_config"] | config
    assert layer["draft_vocab_size"] == len(tensors["lm_head.weight"]) == head.num_columns
    assert layer["norm_before_residual"] is False
    if to == "vllm-eagle3":
        assert config["num_speculative_tokens"] == 3, "how deep it was trained"
    named = [1, 3, 8] if kind == "other layers" else None
    assert config.get("eagle_aux_hidden_state_layer_ids") == named
    if head.token_map is not None:
        drafted = tensors.pop("d2t") + torch.arange(6)
        assert drafted.tolist() == sorted(head.token_map.tolist())
        assert tensors.pop("t2d").nonzero().flatten().tolist() == drafted.tolist()
    theirs = Eagle3Reference(layer)
    theirs.load_state_dict({name.replace("layers.0.", "midlayer."): each for name, each in tensors.items()})
    if head.token_map is None:
        same_guesses(head, theirs.eval())

    assert main(["import", str(output), "--base", base, "--output", str(tmp_path / "back")]) == 0
    back = load_heads(tmp_path / "back").heads
    assert back.config.own_lm_head == head.config.own_lm_head and back.fused_layers == head.fused_layers
    assert back.num_heads == 3
    for name, tensor in head.state_dict().items():
        if name not in ("token_map", "lm_head.weight"):
            assert torch.equal(back.state_dict()[name], tensor), name
    if head.token_map is not None:
        states, order = torch.randn(5, 32), head.token_map.argsort()
        ours, again = (each.unembedded(states, BASE.lm_head) for each in (head, back))
        torch.testing.assert_close(again, ours[:, order])


def test_the_layout_of_speculators_names_base_and_depth_and_starts_alone(base, tmp_path):
    output = tmp_path / "export"
    words = ["export", saved(tmp_path, base, our_head()), "--to", "speculators", "--output", str(output)]
    assert main([*words, "--json", str(tmp_path / "report.json")]) == 0
    config = json.loads((output / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == base
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert json.loads((tmp_path / "report.json").read_text())["serve"] == f"vllm serve {output}"


def test_what_the_formats_have_no_place_for_is_refused(base, tmp_path, capsys):
    medusa_heads = saved(tmp_path, base, MedusaHeads(HeadsConfig(32, 260, num_heads=3)))
    words = ["export", medusa_heads, "--to", "vllm-eagle3"]
    refused(words, tmp_path, capsys, "of kind medusa, ... --to vllm-medusa, ... --head-kind eagle3")
    shutil.rmtree(tmp_path / "heads")
    deep_base(seed=9).save_pretrained(tmp_path / "other")
    words = ["export", saved(tmp_path, base, our_head()), "--to", "speculators"]
    message = "trained on another model ... its LM head is ... --base"
    refused([*words, "--base", str(tmp_path / "other")], tmp_path, capsys, message)


@pytest.mark.parametrize("to", ["vllm-eagle3", "speculators"])
def test_a_check_reads_an_export_back_and_measures_it(to, base, tmp_path, capsys):
    """Random heads guess no better than untrained ones, which the check says after its measurement."""
    output = tmp_path / "export"
    heads = saved(tmp_path, base, our_head(token_map_size=6))
    assert main(["export", heads, "--to", to, "--output", str(output)]) == 0
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "One"}\n')
    words = ["check", str(output), "--as", to, "--prompts", str(tmp_path / "prompts.jsonl")]
    printed = ran(capsys, [*words, "--max-new-tokens", "8", "--json", str(tmp_path / "report.json")], 1)
    assert "vLLM loads an EAGLE-3 head over layers 2 4 5 that drafts" in printed.err
    assert "would slow vLLM down" in printed.err
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["acceptance_rate"]) == 3
    assert main([*words, "--max-new-tokens", "8", "--max-depth", "2", "--json", "-"]) == 1
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["acceptance_rate"]) == 2
