"""The interface that users type: transformers' own arguments in, transformers' own results out."""

from __future__ import annotations

import functools
import inspect
import threading
from dataclasses import replace

import pytest
import torch
from conftest import (
    REAL_BASE,
    VOCAB_SIZE,
    OracleDrafter,
    assert_exact,
    left_padded,
    random_heads,
    random_prompts,
    tiny_model,
)
from refusals import assert_refused, refusals
from stateful_models import stateful_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DynamicCache,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
)

from medusa import (
    CandidateTree,
    DecodingStatistics,
    HeadsCheckpoint,
    HeadsConfig,
    MedusaHeads,
    MedusaModel,
    MedusaOutput,
    save_heads,
)
from medusa.base.passes import cache_argument, cache_of
from medusa.decoding.executor import Executor
from medusa.drafters.dynamic import DynamicHeadsDrafter
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.protocol import PlainDrafter
from medusa.drafters.registry import DRAFTERS
from medusa.drafters.suffix import SuffixDrafter
from medusa.drafters.union import UnionDrafter
from medusa.model import CallOptions
from medusa.trees.tuned_trees import TunedTree

TREE = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
PROMPT = random_prompts(1, 6)
GREEDY = {"max_new_tokens": 14, "do_sample": False}
SAMPLED = {"max_new_tokens": 14, "do_sample": True, "temperature": 1.2, "seed": 4}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One character a token; tokens 0 to 2 are special."""
    letters = [chr(ord("0") + i) for i in range(VOCAB_SIZE - 3)]
    words = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["<pad>", "<s>", "<unk>", *letters])}, "<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", unk_token="<unk>"
    )


@pytest.fixture
def model(tokenizer) -> MedusaModel:
    return MedusaModel(tiny_model("llama"), random_heads(), TREE, tokenizer)


def oracle_of(sequences: torch.Tensor, hit_rate: float = 0.8) -> OracleDrafter:
    return OracleDrafter(sequences.tolist(), TREE, hit_rate)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_custom_generate_argument_of_transformers_gives_the_same(model, options):
    batch = left_padded(random_prompts(3, 9), [9, 4, 1])
    expected = model.generate(**batch, **options)
    assert torch.equal(model.base.generate(**batch, **options, custom_generate=model.decode), expected)
    oracle = OracleDrafter(
        [row[9 - n :].tolist() for row, n in zip(expected, [9, 4, 1], strict=True)], TREE, 0.8
    )
    out = model.base.generate(
        **batch, **options, custom_generate=model.decode, drafter=oracle, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, expected)
    assert out.statistics.tokens_per_step > 1.2


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_streamed_steps_join_to_what_generate_returns(model, options):
    batch = left_padded(random_prompts(3, 9), [9, 4, 1])
    expected = model.generate(**batch, **options)
    oracle = OracleDrafter(
        [row[9 - n :].tolist() for row, n in zip(expected, [9, 4, 1], strict=True)], TREE, 0.8
    )
    statistics = DecodingStatistics()
    rows: list[list[int]] = [[], [], []]
    for step in model.stream(**batch, **options, drafter=oracle, statistics=statistics):
        for row, new, depths in zip(rows, step.tokens, step.depths, strict=True):
            assert len(new) == len(depths)
            assert not new or depths == [*range(1, len(new)), 0] or len(row) + len(new) == 14
            row.extend(new)
    assert rows == expected[:, 9:].tolist()
    assert statistics.num_tokens == 3 * 14 and statistics.tokens_per_step > 1.2


def test_depths_tell_which_tokens_were_guessed(model):
    known = model.generate(PROMPT, **GREEDY)
    oracle = OracleDrafter(known.tolist(), CandidateTree.chain(3), hit_rate=1.0)
    steps = list(model.stream(PROMPT, **GREEDY, drafter=oracle))
    assert [step.depths for step in steps] == [[[0]], [[1, 2, 3, 0]], [[1, 2, 3, 0]], [[1, 2, 3, 0]], [[1]]]


def test_a_finished_row_streams_nothing_more(model):
    prompts = random_prompts(2, 6)
    free = model.generate(prompts, **GREEDY)
    eos = next(token for token in free[0, 8:].tolist() if token not in free[1, 6:].tolist())
    steps = list(
        model.stream(prompts, **GREEDY, eos_token_id=eos, pad_token_id=0, tree=CandidateTree.chain(0))
    )
    end = free[0, 6:].tolist().index(eos)
    assert [step.tokens[0] for step in steps] == [[t] for t in free[0, 6 : 7 + end].tolist()] + [[]] * (
        13 - end
    )
    assert [step.tokens[1] for step in steps] == [[token] for token in free[1, 6:].tolist()]


class GradientMode(LogitsProcessor):
    def __init__(self):
        self.seen: list[bool] = []

    def __call__(self, input_ids, scores):
        self.seen.append(torch.is_grad_enabled() or scores.requires_grad)
        return scores


def test_the_callers_gradient_mode_is_restored_while_a_stream_waits(model):
    inside = GradientMode()
    with torch.enable_grad():
        steps = model.stream(PROMPT, **GREEDY, logits_processor=LogitsProcessorList([inside]))
        for _ in range(3):
            next(steps)
            assert torch.is_grad_enabled()
        steps.close()
        assert torch.is_grad_enabled()
    assert len(inside.seen) >= 3 and not any(inside.seen)


class Collector(TextStreamer):
    def __init__(self, tokenizer, **options):
        super().__init__(tokenizer, **options)
        self.text, self.num_ends = "", 0

    def on_finalized_text(self, text: str, stream_end: bool = False):
        self.text += text
        self.num_ends += stream_end


def test_a_text_streamer_gets_the_text_that_transformers_gives_it(model, tokenizer):
    for skip_prompt in (True, False):
        theirs, ours = (Collector(tokenizer, skip_prompt=skip_prompt) for _ in range(2))
        reference = model.base.generate(PROMPT, **GREEDY, streamer=theirs)
        drafted = model.generate(PROMPT, **GREEDY, streamer=ours, drafter=oracle_of(reference))
        assert torch.equal(drafted, reference)
        assert ours.text == theirs.text == tokenizer.decode(reference[0, 6 * skip_prompt :])
        assert ours.num_ends == 1


def test_a_streamer_bound_to_the_custom_generate_argument_gets_the_text(model, tokenizer):
    bound, direct = (Collector(tokenizer, skip_prompt=True) for _ in range(2))
    method = functools.partial(model.decode, streamer=bound)
    drafted = model.base.generate(PROMPT, **GREEDY, custom_generate=method)
    assert torch.equal(drafted, model.generate(PROMPT, **GREEDY, streamer=direct))
    assert bound.text == direct.text != "" and bound.num_ends == 1


def test_an_iterator_streamer_yields_the_text_while_another_thread_decodes(model, tokenizer):
    expected = tokenizer.decode(model.generate(PROMPT, **GREEDY)[0, 6:])
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    options = {**GREEDY, "streamer": streamer}
    thread = threading.Thread(target=model.generate, args=(PROMPT,), kwargs=options)
    thread.start()
    assert "".join(streamer) == expected
    thread.join()


@pytest.mark.parametrize("step", ["general", "static"])
def test_other_threads_may_run_the_model_in_the_middle_of_a_pass(model, step):
    """A forward pass of the base alone keeps all its logits, and answers of other threads their tokens."""
    others = left_padded(random_prompts(2, 9), [9, 4])
    expected = (
        model.generate(PROMPT, **SAMPLED),
        model.generate(**others, **SAMPLED),
        model.base(PROMPT).logits,
    )
    seen, main = [], threading.get_ident()

    def in_another_thread():
        with torch.no_grad():
            seen.append((model.generate(**others, **SAMPLED, step=step), model.base(PROMPT).logits))

    def interrupt(*_):
        if threading.get_ident() == main:
            thread = threading.Thread(target=in_another_thread)
            thread.start()
            thread.join()

    handle = model.base.model.layers[0].register_forward_hook(interrupt)
    interrupted = model.generate(PROMPT, **{**SAMPLED, "max_new_tokens": 4}, step=step)
    handle.remove()
    assert torch.equal(interrupted, expected[0][:, : PROMPT.shape[1] + 4])
    assert len(seen) >= 2
    for answer, logits in seen:
        assert torch.equal(answer, expected[1])
        assert torch.equal(logits, expected[2])


@pytest.mark.parametrize("end", range(2, 13))
def test_a_stop_string_ends_the_answer_at_its_last_token(model, tokenizer, end):
    """Wherever it falls in an accepted path, and even when it spans two steps."""
    free = model.generate(PROMPT, **GREEDY)
    stop = tokenizer.decode(free[0, 6 + end - 2 : 6 + end])
    options = {**GREEDY, "stop_strings": [stop, "never said"]}
    reference = model.base.generate(PROMPT, **options, tokenizer=tokenizer)
    assert reference.shape[1] <= 6 + end
    hows = [{"drafter": oracle_of(free, hit_rate)} for hit_rate in (0.5, 1.0)]
    assert_exact(model, PROMPT, *hows, {**hows[0], "tokenizer": tokenizer}, expected=reference, **options)
    streamed = [token for step in model.stream(PROMPT, **options) for token in step.tokens[0]]
    assert streamed == reference[0, 6:].tolist()


@pytest.mark.parametrize("end", [3, 8, 13])
def test_a_stop_string_ends_the_answer_of_a_base_that_keeps_a_state(tokenizer, end):
    model = MedusaModel(stateful_model("lfm2"), random_heads(), CandidateTree.chain(3), tokenizer)
    free = model.base.generate(PROMPT, **GREEDY, pad_token_id=0)
    stop = tokenizer.decode(free[0, 6 + end - 2 : 6 + end])
    options = {**GREEDY, "stop_strings": [stop, "never said"], "pad_token_id": 0}
    expected = model.base.generate(PROMPT, **options, tokenizer=tokenizer)
    assert expected.shape[1] <= 6 + end < free.shape[1]
    oracles = (OracleDrafter(free.tolist(), CandidateTree.chain(3), hit_rate) for hit_rate in (0.0, 0.5, 1.0))
    assert_exact(model, PROMPT, *({"drafter": each} for each in oracles), expected=expected, **options)


def test_stop_strings_are_read_from_a_generation_config_and_from_the_bases_own(model, tokenizer, monkeypatch):
    free = model.generate(PROMPT, **GREEDY)
    stop = tokenizer.decode(free[0, 10:12])
    expected = model.generate(PROMPT, **GREEDY, stop_strings=stop)
    assert expected.shape[1] <= 12
    config = GenerationConfig(**GREEDY, stop_strings=stop)
    assert torch.equal(model.generate(PROMPT, generation_config=config), expected)
    assert config.stop_strings == stop
    monkeypatch.setattr(model.base.generation_config, "stop_strings", stop)
    assert torch.equal(model.generate(PROMPT, **GREEDY), expected)
    assert torch.equal(model.generate(PROMPT, generation_config=GenerationConfig(**GREEDY)), expected)


def test_the_tokenizer_of_a_base_already_loaded_is_found_where_the_base_comes_from(tmp_path, tokenizer):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    model = MedusaModel(LlamaForCausalLM.from_pretrained(tmp_path / "base"))
    with pytest.raises(ValueError, match=r"no tokenizer could be loaded from '.*base'.*; pass tokenizer="):
        model.generate(PROMPT, **GREEDY, stop_strings="5")
    tokenizer.save_pretrained(tmp_path / "base")
    assert model.tokenizer.get_vocab() == tokenizer.get_vocab() and model.tokenizer is model.tokenizer
    expected = MedusaModel(model.base, tokenizer=tokenizer).generate(PROMPT, **GREEDY, stop_strings="5")
    assert torch.equal(model.generate(PROMPT, **GREEDY, stop_strings="5"), expected)


def test_a_dictionary_is_returned_when_asked_for_with_the_statistics(model):
    out = model.generate(PROMPT, **GREEDY, return_dict_in_generate=True)
    assert isinstance(out, MedusaOutput) and isinstance(out.statistics, DecodingStatistics)
    assert torch.equal(out.sequences, model.generate(PROMPT, **GREEDY))
    assert out["sequences"] is out.sequences
    assert out.statistics.num_tokens == 14 and out.statistics.num_rows == 1
    assert 1 <= len(out.statistics.acceptance_rate) < model.tree.num_nodes  # as deep as drafts were


def test_several_return_sequences_are_the_repeated_batch(model):
    batch = left_padded(random_prompts(2, 7), [7, 3])
    out = model.generate(**batch, **SAMPLED, num_return_sequences=3)
    repeated = {name: tensor.repeat_interleave(3, dim=0) for name, tensor in batch.items()}
    assert torch.equal(out, model.generate(**repeated, **SAMPLED))
    assert len({tuple(row) for row in out.tolist()}) == 6


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_a_generation_config_is_read_with_the_bases_defaults(model, monkeypatch):
    free = model.generate(PROMPT, **GREEDY)
    eos = int(free[0, 6 + 7])
    monkeypatch.setattr(model.base.generation_config, "eos_token_id", [eos])
    monkeypatch.setattr(model.base.generation_config, "pad_token_id", 0)
    config = GenerationConfig(max_new_tokens=14, repetition_penalty=1.3)
    for options in ({}, {"generation_config": config}, {"max_length": 11}):
        reference = model.base.generate(PROMPT, **options)
        assert_exact(model, PROMPT, {}, {"drafter": oracle_of(reference)}, expected=reference, **options)
    assert model.generate(PROMPT, max_new_tokens=14).shape[1] <= 6 + 8


def test_rows_that_end_early_are_padded_as_transformers_pads_them(model):
    """Without a padding token the first end-of-sequence id in the list fills up, not the smallest."""
    prompts = random_prompts(3, 6)
    free = model.base.generate(prompts, **GREEDY)
    eos = [int(free[0, 6 + 4]), int(free[1, 6 + 2]), 3]
    for ids in (eos, eos[::-1], eos[0]):
        options = {**GREEDY, "eos_token_id": ids, "pad_token_id": None}
        batch = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
        old = model.base.generation_config.pad_token_id
        model.base.generation_config.pad_token_id = None
        try:
            reference = model.base.generate(**batch, **options)
            assert torch.equal(model.generate(**batch, **options), reference)
        finally:
            model.base.generation_config.pad_token_id = old


def test_a_prompt_is_started_with_the_first_token_when_there_is_none(model):
    assert torch.equal(model.generate(**GREEDY), model.base.generate(**GREEDY))


def test_another_tree_for_one_call_leaves_the_models_own(model):
    out = model.generate(PROMPT, **GREEDY, tree=CandidateTree.chain(2), return_dict_in_generate=True)
    assert len(out.statistics.accepted_histogram) == 3
    plain = model.generate(PROMPT, **GREEDY, tree=CandidateTree.chain(0), return_dict_in_generate=True)
    assert plain.statistics.accepted_histogram == [13]
    assert model.tree is TREE
    assert torch.equal(plain.sequences, out.sequences)


def test_a_drafter_is_taken_by_its_name_and_made_once(model, monkeypatch):
    made = []
    for name, named in DRAFTERS.items():
        noting = replace(
            named, make=lambda *given, named=named: made.append(named.name) or named.make(*given)
        )
        monkeypatch.setitem(DRAFTERS, name, noting)
    hows = ({"drafter": name} for name in ("suffix", "dynamic-heads+suffix") * 2)
    plain = assert_exact(model, PROMPT, *hows, **SAMPLED).sequences
    assert made == ["suffix", "dynamic-heads"]
    steps = list(model.stream(PROMPT, **SAMPLED, drafter="dynamic-heads"))
    assert [token for step in steps for token in step.tokens[0]] == plain[0, PROMPT.shape[1] :].tolist()


def test_a_named_drafter_stands_aside_for_as_many_rows_as_it_does_not_pay():
    heads = random_heads()
    model = MedusaModel(tiny_model("llama"), heads, TREE)
    tuned = [TunedTree(model.runtime, 1, TREE), TunedTree(model.runtime, 2, CandidateTree.chain(0))]
    idle = MedusaModel(model.base, heads, TREE, tuned=tuned)
    pair, one = PROMPT.repeat(2, 1), PROMPT
    for rows, num_depths in ((one, 1 + TREE.depth), (pair, 1)):
        out = idle.generate(rows, **GREEDY, drafter="dynamic-heads", return_dict_in_generate=True)
        assert torch.equal(out.sequences, model.generate(rows, **GREEDY))
        assert len(out.statistics.accepted_histogram) == num_depths


def drafters_of(model, monkeypatch, **options):
    """What the loop is given for a call with these ``options``."""
    given = []

    def noting(executor, call):
        planned = plan(executor, call)
        given.append(planned.make_drafter(1, False, planned.step)[0])
        return planned

    plan = Executor.plan
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "plan", noting)
        model.generate(PROMPT, **options)
    return given


@pytest.mark.parametrize("method", ["generate", "stream", "decode"])
def test_the_options_of_a_call_are_those_of_one_declaration(method):
    """Written out, in the same order, of the same types, with the same defaults."""
    parameters = inspect.signature(getattr(MedusaModel, method)).parameters
    options = inspect.signature(CallOptions).parameters
    written_out = {name: parameter for name, parameter in parameters.items() if name in options}
    assert list(written_out) == list(options)
    for name, option in options.items():
        written = written_out[name]
        assert (written.annotation, written.default) == (option.annotation, option.default), name
        assert written.kind is inspect.Parameter.KEYWORD_ONLY


def test_the_fastest_drafter_is_the_default(model, monkeypatch):
    (drafter,) = drafters_of(model, monkeypatch, **GREEDY)
    assert type(drafter) is DynamicHeadsDrafter and drafter.tree == TREE and drafter.suffix_length == 16
    assert_exact(model, PROMPT, {}, **SAMPLED)


@pytest.mark.parametrize("drafter", ["suffix", SuffixDrafter(3)], ids=["a name", "an object"])
def test_a_root_alone_is_plain_decoding_whoever_is_to_fill_it(model, monkeypatch, drafter):
    (given,) = drafters_of(model, monkeypatch, **GREEDY, tree=CandidateTree.chain(0), drafter=drafter)
    assert type(given) is PlainDrafter
    (given,) = drafters_of(model, monkeypatch, **GREEDY, tree=CandidateTree.chain(2), drafter=drafter)
    assert type(given) is SuffixDrafter and given.max_depth == 2


def test_a_tree_alone_means_the_heads_in_that_tree(model, monkeypatch):
    (drafter,) = drafters_of(model, monkeypatch, **GREEDY, tree=CandidateTree.chain(2))
    assert type(drafter) is HeadsDrafter and drafter.tree == CandidateTree.chain(2)


def test_the_default_is_one_that_the_step_can_run(model, monkeypatch):
    (drafter,) = drafters_of(model, monkeypatch, **GREEDY, step="static")
    assert type(drafter) is DynamicHeadsDrafter and drafter.suffix_length == 16
    host_bound = UnionDrafter([drafter, OracleDrafter([], TREE, hit_rate=1.0)])
    monkeypatch.setattr("medusa.drafters.registry.not_capturable", lambda _: [host_bound])
    assert type(model.drafter_for(1)) is DynamicHeadsDrafter
    assert type(model._executor.drafters.default(1, "static")) is HeadsDrafter


@pytest.mark.parametrize(
    ("acceptance", "tree"), [("typical", TREE), ("multi_draft", TREE), ("block", CandidateTree.chain(3))]
)
def test_where_drafts_decide_the_text_the_heads_alone_draft(model, monkeypatch, acceptance, tree):
    (drafter,) = drafters_of(model, monkeypatch, **SAMPLED, acceptance=acceptance)
    assert type(drafter) is HeadsDrafter and drafter.tree == tree


def test_a_rule_for_chains_gets_one_as_deep_as_the_models_tree(model, monkeypatch):
    model.use_tree(TREE.subtree(2))
    (drafter,) = drafters_of(model, monkeypatch, **SAMPLED, acceptance="block")
    assert drafter.tree == CandidateTree.chain(2)


def test_a_tree_tuned_to_be_the_root_alone_decodes_plainly(model, monkeypatch):
    tuned = [TunedTree(model.runtime, 1, CandidateTree.chain(0))]
    idle = MedusaModel(model.base, random_heads(), TREE, tuned=tuned)
    for options in (GREEDY, {**GREEDY, "step": "static"}, {**SAMPLED, "acceptance": "block"}):
        (drafter,) = drafters_of(idle, monkeypatch, **options)
        assert type(drafter) is PlainDrafter


def test_without_heads_decoding_is_plain_and_without_a_tree_it_is_a_chain():
    base = tiny_model("llama")
    assert MedusaModel(base).tree == CandidateTree.chain(0)
    assert MedusaModel(base, random_heads()).tree == CandidateTree.chain(3)
    assert MedusaModel(base).device == base.device


def test_the_last_position_of_the_context_can_be_reached_with_learned_positions():
    """Tree nodes stick out past the end there; a model with a table of positions has none for them."""
    torch.manual_seed(0)
    base = GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=24, initializer_range=0.3)
    ).eval()
    base.generation_config.eos_token_id = None
    model, options = MedusaModel(base), {"max_new_tokens": 18, "do_sample": False, "pad_token_id": 0}
    reference = base.generate(PROMPT, **options)
    assert reference.shape[1] == 24
    oracles = (OracleDrafter(reference.tolist(), tree, 0.9) for tree in (TREE, CandidateTree.chain(5)))
    assert_exact(model, PROMPT, *({"drafter": each} for each in oracles), expected=reference, **options)


def test_typical_acceptance_gives_another_text_and_only_on_request(model):
    """A drafter that offers the model's most likely tokens is believed, where sampling would say others."""
    likely, plain = model.generate(PROMPT, **GREEDY), model.generate(PROMPT, **SAMPLED)
    exact = model.generate(PROMPT, **SAMPLED, drafter=oracle_of(likely, hit_rate=1.0))
    assert torch.equal(exact, plain)
    rule = {"acceptance": "typical", "drafter": oracle_of(likely, hit_rate=1.0)}
    typical = model.generate(PROMPT, **SAMPLED, **rule, return_dict_in_generate=True)
    assert typical.statistics.num_accepted > 0
    assert not torch.equal(typical.sequences, plain)


def test_input_on_disk_is_loaded_and_decoded(tmp_path, tokenizer):
    base_path, heads_path = tmp_path / "base", tmp_path / "heads"
    tiny_model("llama").save_pretrained(base_path)
    tokenizer.save_pretrained(base_path)
    save_heads(HeadsCheckpoint(random_heads(), "tiny", TREE), heads_path)
    expected = MedusaModel(tiny_model("llama"), random_heads(), TREE).generate(PROMPT, **GREEDY)
    for path in (base_path, str(base_path)):
        model = MedusaModel.from_pretrained(path, heads_path, dtype=torch.float32)
        assert model.tree == TREE
        assert not model.base.training and not model.heads.training
        ids = model.tokenizer(model.tokenizer.decode(PROMPT[0]), return_tensors="pt").input_ids
        assert len(model.tokenizer) == VOCAB_SIZE and ids.shape[0] == 1
        assert torch.equal(model.generate(PROMPT, **GREEDY), expected)
    half = MedusaModel.from_pretrained(
        base_path, str(heads_path), dtype=torch.bfloat16, tree=CandidateTree.chain(1)
    )
    assert half.base.dtype == torch.bfloat16 and half.tree == CandidateTree.chain(1)
    assert half.generate(PROMPT, **GREEDY).shape == (1, 20)


def test_a_loaded_base_and_a_loaded_checkpoint_are_taken_as_they_are(tokenizer):
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    ).train()
    checkpoint = HeadsCheckpoint(random_heads(), "tiny", TREE)
    model = MedusaModel.from_pretrained(base, checkpoint, tokenizer=tokenizer)
    assert model.base is base and model.heads is checkpoint.heads and model.tokenizer is tokenizer
    assert not base.training and model.tree == TREE


def mask(*rows: list[int]) -> dict:
    return {"attention_mask": torch.tensor(rows)}


def longer(length: int, new: int = 4) -> dict:
    return {"inputs": random_prompts(1, length), "max_new_tokens": new}


TWO, DICT = {"inputs": random_prompts(2, 3)}, {"return_dict_in_generate": True}
HEALING = GenerationConfig(max_new_tokens=4, token_healing=True)
CALLS = {
    "empty batch": ({"inputs": torch.zeros(0, 5, dtype=torch.long)}, "at least one row, got an empty batch"),
    "continuous batching": (
        {"cache_implementation": "paged"},
        "cache_implementation='paged' ... leave it out",
    ),
    "no whole seed": ({"do_sample": True, "seed": 1.5}, "an int or one int per row, got 1.5"),
    "empty prompt": ({"inputs": torch.zeros(1, 0, dtype=torch.long)}, "at least one token per row, got none"),
    "longer than the context": (
        longer(1030),
        "1030 tokens + max_new_tokens=4 ... 1024 ... shorten the prompt",
    ),
    "answer past it": (longer(1000, 25), "max_new_tokens=25 ... 1024 ... or max_new_tokens"),
    "a row of padding": ({**TWO, **mask([1, 1, 1], [0, 0, 0])}, "row 1 of input_ids is all padding"),
    "padding on the right": (
        {**TWO, **mask([1, 1, 1], [1, 1, 0])},
        "padded on the left: set ... padding_side",
    ),
    "a hole in the mask": (mask([1, 0, 1, 1, 1, 1]), "prompts must be padded on the left"),
    "another shape": ({**TWO, **mask([0, 1, 1, 1], [1, 1, 1, 1])}, "attention_mask ... (2, 3), got (2, 4)"),
    "ones of another shape": (mask([1, 1, 1, 1]), "attention_mask ... of input_ids, ... got ... 4"),
    "positions": ({"position_ids": torch.arange(3, 9)[None]}, "position_ids ... from 0; leave them out"),
    "beams": ({"num_beams": 3}, "greedily or by sampling, got generation mode 'beam_search'"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "got generation mode 'assisted_generation'"),
    "assistant": ({"assistant_model": tiny_model("llama")}, "assistant_model is not used ... pass drafter="),
    "scores": ({**DICT, "output_scores": True}, "output_scores not available"),
    "hidden states": (
        {**DICT, "output_hidden_states": True, "output_attentions": True},
        "output_attentions, output_hidden_states not available",
    ),
    "fractions": ({"inputs": PROMPT.float()}, "input_ids must be whole numbers, ... got torch.float32"),
    "ids of another tokenizer": (
        {"inputs": PROMPT + 60},
        "input_ids ... from 0 to 60 ... got ids from ... 118",
    ),
    "negative ids": ({"inputs": PROMPT - 90}, "input_ids ... from 0 to 60, ... got ids from -"),
    "token healing": ({"token_healing": True}, "base.heal_tokens(input_ids, tokenizer)"),
    "token healing in a configuration": ({"generation_config": HEALING}, "base.heal_tokens("),
    "inputs_embeds": (
        {"inputs": None, "inputs_embeds": torch.randn(1, 4, 32)},
        "inputs_embeds is not supported",
    ),
    "seeds": ({"do_sample": True, "seed": [1, 2]}, "an int or one int per row: 1 rows, got 2 seeds"),
    "acceptance": ({"acceptance": "always"}, "must be 'exact', 'typical' (lossy) ... got 'always'"),
    "deep tree": ({"tree": CandidateTree.chain(4)}, "tree has depth 4, the heads are 3: ... tree.subtree(3)"),
    "a tree that the drafter cannot fill": (
        {"tree": CandidateTree.chain(1), "drafter": OracleDrafter([[]], TREE, 0.0)},
        "OracleDrafter fills no tree but its own: leave tree out, or write its with_tree",
    ),
    "a tree deeper than the drafter's heads": (
        {"tree": CandidateTree.chain(4), "drafter": "dynamic-heads"},
        "tree has depth 4, the heads are 3",
    ),
    "unknown drafter": ({"drafter": "sufix"}, "drafter 'sufix' is unknown; there are ... suffix"),
    "typo": ({"max_new_tokns": 3}, "not used by the model: ['max_new_tokns']"),
    "a cache": ({"past_key_values": DynamicCache()}, "past_key_values is not used ... medusa's own cache"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_cannot_be_honoured_is_refused_with_the_reason(model, call):
    changes, words = CALLS[call]
    options = {"inputs": PROMPT, "max_new_tokens": 4, **changes}
    for method in (model.generate, model.stream):
        assert_refused(lambda: method(**options), ValueError, words)  # noqa: B023


class Images(LlamaForCausalLM):
    """Reads an input beside the tokens, as a model of images does."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, pixel_values=None, **kwargs):
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)

    def prepare_inputs_for_generation(self, *args, pixel_values=None, **kwargs):
        return super().prepare_inputs_for_generation(*args, **kwargs)


def with_an_image():
    model = MedusaModel(Images(tiny_model("llama").config).eval())
    model.generate(PROMPT, **GREEDY, pixel_values=torch.ones(1, 3))


def with_a_cache(model):
    cache = cache_of(model.base(PROMPT, use_cache=True))
    model.generate(PROMPT, **GREEDY, **{cache_argument(model.base): cache})


def to_another(model):
    tiny_model("qwen3").generate(PROMPT, **GREEDY, custom_generate=model.decode)


def two_streamed(model, tokenizer):
    model.generate(random_prompts(2, 4), **GREEDY, streamer=TextStreamer(tokenizer))


def plain(heads=None, tree=None) -> MedusaModel:
    return MedusaModel(tiny_model("llama"), heads, tree)


def sized_heads(**sizes) -> MedusaHeads:
    return MedusaHeads(HeadsConfig(**{"hidden_size": 32, "vocab_size": VOCAB_SIZE, "num_heads": 3, **sizes}))


load = MedusaModel.from_pretrained
test_what_cannot_be_loaded_or_asked_for_is_refused = refusals(
    ("a filled cache", with_a_cache, "is not used here; a tree needs medusa's own cache"),
    ("an image", with_an_image, "pixel_values not supported: ... only from input_ids"),
    ("no tokenizer", lambda: plain().generate(PROMPT, stop_strings="5"), "stop_strings needs a tokenizer"),
    ("no heads", lambda: plain().generate(PROMPT, drafter="heads"), "drafter 'heads' needs heads"),
    ("two rows streamed", two_streamed, "streamer works with batch size 1, got 2 rows"),
    ("a streamed stream", lambda model, tokenizer: model.stream(
        PROMPT, **GREEDY, streamer=TextStreamer(tokenizer)), "streamer is not used here; stream()"),
    ("another base", to_another, "this MedusaModel's own base model, got another one"),
    ("narrow heads", lambda: plain(sized_heads(hidden_size=16)), "hidden_size=16, ... has 32; load the base"),
    ("other tokens", lambda: plain(sized_heads(vocab_size=99)), "vocab_size=99, ... has 61; load the base"),
    ("a deep tree", lambda: plain(random_heads(), CandidateTree.chain(4)), "depth 4, the heads are 3"),
    ("a tree for nobody", lambda: plain(None, CandidateTree.chain(1)), "tree has depth 1, the heads are 0"),
    ("no base", lambda: load(torch.nn.Linear(2, 2)), TypeError, "base must be a path, ... got Linear"),
    ("bare heads", lambda: load(tiny_model("llama"), random_heads()), TypeError,
     "heads must be a path, a hub id or a HeadsCheckpoint, got MedusaHeads"),
    ("options for files", lambda: load(tiny_model("llama"), dtype="float32", device_map="auto"),
     "['device_map', 'dtype'] go with a path or a hub id"),
)  # fmt: skip


@pytest.mark.parametrize("step", ["general", "static"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_prompts_of_any_whole_numbers_are_read_as_longs(model, dtype, step):
    given = model.generate(PROMPT.to(dtype), **GREEDY, step=step)
    assert given.dtype == torch.long and given.equal(model.generate(PROMPT, **GREEDY, step=step))


@pytest.mark.parametrize("setting", ["scores", "logits", "attentions", "hidden_states"])
def test_outputs_that_only_a_dictionary_has_are_ignored_without_one_as_in_transformers(model, setting):
    config = GenerationConfig(**GREEDY, **{f"output_{setting}": True})
    assert model.generate(PROMPT, generation_config=config).equal(model.generate(PROMPT, **GREEDY))


@pytest.mark.parametrize("step", ["general", "static"])
@pytest.mark.parametrize("begins_inside", [True, False])
def test_a_stream_may_cross_the_bounds_of_inference_mode(model, begins_inside, step):
    with torch.inference_mode(begins_inside):
        stream = model.stream(PROMPT, **GREEDY, step=step)
        tokens = next(stream).tokens[0]
    with torch.inference_mode(not begins_inside):
        tokens += [token for result in stream for token in result.tokens[0]]
    assert tokens == model.generate(PROMPT, **GREEDY)[0, PROMPT.shape[1] :].tolist()


def test_autocast_is_refused_by_an_engine_that_keeps_its_precision_and_heeded_by_the_base(model):
    packed = MedusaModel(model.base, engine="packed")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ValueError, match=r"torch\.autocast .* use engine='eager'"):
            packed.generate(PROMPT, **GREEDY)
        attending = {"attention_mask": torch.ones_like(PROMPT)}
        assert model.generate(PROMPT, **GREEDY).equal(model.base.generate(PROMPT, **GREEDY, **attending))


def test_the_heads_that_ship_for_a_base_are_named_once(real_base, tmp_path):
    named = MedusaModel.from_pretrained(real_base, "smollm2-135m-instruct")
    tiny_model("llama").save_pretrained(tmp_path / "another")
    with pytest.raises(ValueError, match=r"exist for .*smollm2-135m-instruct, got base '.*another"):
        MedusaModel.from_pretrained(tmp_path / "another", heads="default")
    default = MedusaModel.from_pretrained(str(REAL_BASE), heads="default")
    assert default.heads.config == named.heads.config and default.tree == named.tree
