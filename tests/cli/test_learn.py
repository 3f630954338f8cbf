"""`medusa learn` goes from a base to heads in use; `medusa heads` lists, undoes and forgets them."""

import json
import os
import shutil

import pytest
from accelerate.state import AcceleratorState
from conftest import counting_model
from reported import ran
from safetensors.torch import load_file, save_file
from tiny_chat import chat_tokenizer

from medusa import MedusaModel
from medusa.base.known_models import heads_that_fit, signature_of
from medusa.cli import learn, learn_collected
from medusa.cli.main import main
from medusa.files import read_json, write_json
from medusa.heads.checkpoint import load_heads
from medusa.learning.collected_texts import CollectedTexts
from medusa.learning.learned_heads import LearnedHeads
from medusa.prompts import encode_messages

SIZE = 264
MINUTES = "0.3"


def pretend_benchmark(monkeypatch, *speedups, tokens_per_step=2.0):
    """Reports of benchmarks, of what was learned and then of what is in use, round after round."""
    coming = iter(speedups)

    def benchmark(options):
        speedup = next(coming)
        values = {
            "speedup_over_plain": {"heads": speedup - 0.25, "default": speedup},
            "speedup_interval": {"default": [speedup - 0.1, speedup + 0.1]},
            "tokens_per_step_of": {"default": tokens_per_step},
            "identical": True,
            "num_prompts": 4,
        }
        write_json(options.report.json, values)

    monkeypatch.setattr(learn, "benchmark", benchmark)


def pretend_training(monkeypatch, heads):
    """Training that leaves copies of ``heads``; the configurations that it was asked for."""
    asked = []

    def train(configuration):
        asked.append(configuration)
        directory = os.path.join(configuration.run.output_dir, "heads")
        shutil.copytree(heads, directory, dirs_exist_ok=True)
        return True

    monkeypatch.setattr(learn.job, "train", train)
    monkeypatch.setattr(learn, "tune", lambda options: None)
    return asked


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base that counts, questions, and a cache in which it has learned once."""
    folder = tmp_path_factory.mktemp("learn")
    base = folder / "base"
    counting_model(SIZE).save_pretrained(base)
    chat_tokenizer().save_pretrained(base)
    questions = [{"prompt": f"Question number {number}"} for number in range(40)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    AcceleratorState._reset_state(True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medusa.learning.learned_heads.cache_home", lambda: folder / "cache")
        patch.setattr(learn, "LONGEST_ANSWER", 64)
        pretend_benchmark(patch, 2.0, 1.1)
        patch.setattr(MedusaModel, "compile", lambda model: 0.0)
        words = ["--prompts", str(folder / "questions.jsonl"), "--minutes", MINUTES]
        assert main(["learn", str(base), *words]) == 0
    AcceleratorState._reset_state(True)
    return folder


@pytest.fixture
def learned(place, tmp_path, monkeypatch):
    """That base with a copy of its cache; words that let it learn again."""
    shutil.copytree(place / "cache", tmp_path / "cache")
    monkeypatch.setattr("medusa.learning.learned_heads.cache_home", lambda: tmp_path / "cache")
    monkeypatch.setattr(MedusaModel, "compile", lambda model: 0.0)
    monkeypatch.setattr(learn, "LONGEST_ANSWER", 32)
    return LearnedHeads.of_signature(signature_of(str(place / "base")))


@pytest.fixture
def again(place):
    return ["learn", str(place / "base"), "--prompts", str(place / "questions.jsonl"), "--minutes", MINUTES]


def test_a_base_finds_what_it_has_learned_and_writes_the_same_text_in_fewer_steps(place, learned):
    base = str(place / "base")
    assert heads_that_fit(base) == str(learned.heads_of(learned.version))
    model = MedusaModel.from_pretrained(base, "default")
    prompt = encode_messages(model.tokenizer, [{"role": "user", "content": "Question"}])
    plain = MedusaModel.from_pretrained(base).generate(**prompt, max_new_tokens=40)
    output = model.generate(**prompt, max_new_tokens=40, return_dict_in_generate=True, tree=model.tree)
    assert output.sequences.tolist() == plain.tolist()
    assert output.statistics.tokens_per_step > 1.2


def test_it_finds_them_in_a_copy_and_not_for_other_weights(place, learned, tmp_path):
    copy = shutil.copytree(place / "base", tmp_path / "copy")
    assert heads_that_fit(str(copy)) == str(learned.in_use)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] *= 2
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    assert heads_that_fit(str(copy)) is None


def test_a_round_leaves_answers_and_heads_that_nobody_else_can_read(learned):
    assert not learned.round.exists()
    assert [path.name for path in learned.answers] == ["answers-1.jsonl"]
    assert 1 <= len(learned.answers[0].read_text().splitlines()) <= 36, "four were kept apart"
    assert learned.directory.stat().st_mode & 0o77 == 0


def test_the_list_says_how_good_they_are_and_from_what(place, learned, capsys):
    said = ran(capsys, ["heads"])
    (row,) = json.loads(said.out.splitlines()[-1])["heads"]
    assert row["is_in_use"] and row["base"] == str(place / "base")
    assert row["speedup"] == 2.0 and row["gain"] == 1.818, "1.1 was in use"
    assert row["learned_from"] == [str(place / "questions.jsonl")] and row["num_tokens"] > 50
    assert "2.00x" in said.out and f"medusa chat --base {place / 'base'}" in said.err
    with learned.locked():
        learned.begin(learned.base, has_template=False)
    assert f"medusa generate --base {place / 'base'} 'Once upon a time'" in ran(capsys, ["heads"]).err
    with learned.locked():
        learned.begin(learned.base, has_template=True)


def test_the_next_round_begins_as_the_heads_in_use_and_learns_from_earlier_answers(
    place, learned, again, monkeypatch, capsys
):
    before = learned.in_use
    asked = pretend_training(monkeypatch, before)
    pretend_benchmark(monkeypatch, 2.2, 2.0)
    said = ran(capsys, again).err
    assert "2.20 times plain decoding on 4 questions" in said and "by the heads alone 1.95 times" in said
    (configuration,) = asked
    assert configuration.heads.start_from == str(before)
    assert configuration.data.data[0] == str(learned.answers[0])
    assert learned.version.number == 2 and learned.in_use != before and learned.version.is_private
    answers = [path.read_text() for path in learned.answers]
    assert len(answers) == 2
    said = ran(capsys, ["heads", "undo", str(place / "base")]).err
    assert "version 2 of" in said and "was removed" in said and "has version 1 of" in said
    assert learned.in_use == before and not learned.heads_of(learned.version).with_name("heads-2").exists()


@pytest.mark.parametrize("is_alike", [True, False])
def test_a_finetune_begins_as_the_heads_of_its_origin_where_these_guess_it(
    place, learned, again, tmp_path, monkeypatch, capsys, is_alike
):
    finetune = shutil.copytree(place / "base", tmp_path / "finetune")
    tensors = load_file(finetune / "model.safetensors")
    tensors["model.norm.weight"] *= 1.001
    if not is_alike:  # it counts by three
        tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(2, dims=0)
    save_file(tensors, finetune / "model.safetensors", {"format": "pt"})
    asked = pretend_training(monkeypatch, learned.in_use)
    pretend_benchmark(monkeypatch, 1.5, 1.0)
    said = ran(capsys, ["learn", str(finetune), *again[2:]]).err
    expected = str(learned.in_use) if is_alike else None
    assert [configuration.heads.start_from for configuration in asked] == [expected]
    assert f"heads of another base with the same widths, {learned.in_use}, guess" in said


@pytest.mark.parametrize(
    ("speedup", "before", "tokens_per_step"), [(2.0, 1.98, 2.0), (1.08, 1.0, 2.0), (1.5, 1.0, 1.0)]
)
def test_heads_that_are_not_surely_faster_change_nothing(
    learned, again, monkeypatch, capsys, speedup, before, tokens_per_step
):
    version = learned.version
    pretend_training(monkeypatch, learned.in_use)
    pretend_benchmark(monkeypatch, speedup, before, tokens_per_step=tokens_per_step)
    said = ran(capsys, again).err
    assert "no better than what was in use" in said and "--minutes 6" in said
    assert learned.version == version and learned.last_number == 2
    assert len(learned.answers) == 2, "the next round learns from them"


def test_a_round_that_was_stopped_goes_on_with_its_options_alone(learned, again, monkeypatch, capsys):
    def stop(configuration):
        raise KeyboardInterrupt

    monkeypatch.setattr(learn.job, "train", stop)
    assert main(again) == 130
    answers = (learned.round / "answers.jsonl").read_text()
    said = ran(capsys, [*again[:-1], "0.1"], 1).err
    assert "minutes was 0.3 and is 0.1" in said and "--fresh" in said
    pretend_training(monkeypatch, learned.in_use)
    pretend_benchmark(monkeypatch, 3.0, 2.0)
    monkeypatch.setattr(learn, "LocalAnswerer", lambda *given: pytest.fail("answered again"))
    assert "going on with the round that was stopped" in ran(capsys, again).err
    assert learned.version.number == 2 and learned.answers[-1].read_text() == answers


def test_two_do_not_learn_for_one_base_at_once(learned, again, capsys):
    with learned.locked():
        assert "is in use by process" in ran(capsys, again, 1).err


def test_what_chat_and_generate_wrote_is_learned_from(place, learned, again, monkeypatch, capsys):
    base = ["--base", str(place / "base"), "--max-new-tokens", "40", "--learn"]
    said = ran(capsys, ["generate", *base, "A question of some length"]).err
    assert "4 heads that it has learned (`medusa heads`), a tree of" in said
    assert f"are kept in {learned.directory}, and heads learn from them while nothing is asked" in said
    ran(capsys, ["chat", *base, "--prompts", str(place / "questions.jsonl"), "--limit", "2"])
    assert "wait for `medusa learn" in ran(capsys, ["heads"]).out
    asked = pretend_training(monkeypatch, learned.in_use)
    read = []

    def tune(options):
        read.extend((learned.round / "texts.jsonl").read_text().splitlines())

    monkeypatch.setattr(learn, "tune", tune)
    pretend_benchmark(monkeypatch, 3.0, 2.0)
    ran(capsys, again)
    kept = [json.loads(line)["text"] for line in read]
    assert len(kept) == 3 and "A question of some length" in kept[-1]
    assert asked[0].data.data[-1].endswith("texts.jsonl")
    assert learned.version.learned_from[1] == "3 texts that it wrote" and learned.version.is_private


def test_what_is_forgotten_is_gone_and_found_no_more(place, learned, capsys):
    ran(capsys, ["heads", "forget", str(place / "base")])
    assert not learned.directory.exists() and heads_that_fit(str(place / "base")) is None
    said = ran(capsys, ["heads", "forget", str(place / "base")], 1).err
    assert "must be one for which heads were learned here" in said


def test_heads_of_ones_own_texts_are_not_shared_unless_told(learned, tmp_path, capsys):
    push = [
        "push",
        str(learned.in_use),
        "me/heads",
        "--base",
        "some/base",
        "--dry-run",
        str(tmp_path / "out"),
    ]
    said = ran(capsys, push, 1).err
    assert "were learned from texts of your own" in said and "--share-learned" in said
    assert not (tmp_path / "out").exists()
    ran(capsys, [*push, "--share-learned"])
    export = ["export", str(learned.in_use), "--to", "vllm-medusa", "--output", str(tmp_path / "export")]
    assert "--share-learned" in ran(capsys, export, 1).err
    assert load_heads(str(learned.in_use)).provenance["learned"]["is_private"]


def test_a_damaged_record_is_named(place, learned, capsys):
    record = learned.directory / "record.json"
    write_json(record, {**read_json(record), "versions": [{"number": 1}]})
    said = ran(capsys, ["generate", "--base", str(place / "base"), "Hello"], 1).err
    assert "record.json is damaged" in said and "remove" in said
    ran(capsys, ["generate", "--base", str(place / "base"), "--heads", "none", "--max-new-tokens", "4", "Hi"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["none/here/at-all"], "no base model at"),
        (["{base}", "--data", "{folder}/none.jsonl"], "does not exist"),
        (["{base}", "--prompts", "{folder}/none.jsonl"], "does not exist"),
    ],
)
def test_what_is_not_there_is_named(place, learned, capsys, words, expected):
    words = [word.format(base=place / "base", folder=place) for word in words]
    assert expected in ran(capsys, ["learn", *words], 1).err
    assert not learned.round.exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["learn", "base", "--minutes", "0"], "minutes must be above 0"),
        (["learn", "base", "--data", "a", "--prompts", "b"], "give one of them"),
        (["heads", "forget"], "forget needs a base"),
    ],
)
def test_words_that_make_no_sense_are_refused(capsys, words, expected):
    with pytest.raises(SystemExit):
        main(words)
    assert expected in " ".join(capsys.readouterr().err.split())


# ------------------------------------------------------------------ what was written in use


def collect(place, learned, count, start=0):
    """Answers of the base, which counts, kept as those of use are."""
    collected = CollectedTexts(learned.directory, chat_tokenizer())
    for number in range(start, start + count):
        first = 5 + number % 40
        question = chat_tokenizer()(f"Question number {number}<|assistant|>")["input_ids"]
        collected.add(question, range(first, first + 50))
    return collected


@pytest.fixture
def unlearned(place, tmp_path, monkeypatch):
    """The base in a cache of its own, in which it has learned nothing."""
    monkeypatch.setattr("medusa.learning.learned_heads.cache_home", lambda: tmp_path / "cache")
    monkeypatch.setattr(MedusaModel, "compile", lambda model: 0.0)
    learned = LearnedHeads.of_signature(signature_of(str(place / "base")))
    with learned.locked():
        learned.begin(str(place / "base"))
    AcceleratorState._reset_state(True)
    yield learned
    AcceleratorState._reset_state(True)


def test_heads_learn_from_use_and_are_judged_on_the_newest_answers(place, unlearned, capsys):
    collected = collect(place, unlearned, 40)
    said = ran(capsys, ["learn", str(place / "base"), "--collected"])
    report = json.loads(said.out.splitlines()[-1])
    assert report["is_in_use"] and report["tokens_per_step"] > 1.5 and report["speedup"] is None
    assert "tokens a step on the newest answers" in said.err and "those of nothing" in said.err
    assert heads_that_fit(str(place / "base")) == str(unlearned.in_use)
    assert unlearned.version.gain == unlearned.version.tokens_per_step, "against plain decoding"
    assert unlearned.version.is_private and unlearned.version.learned_from == ["34 texts that it wrote"]
    assert not collected.new_rows() and len([*collected.newest_first()]) == 40, "they are replayed later"
    assert not unlearned.answers and not unlearned.round.exists()
    assert "34 texts that it wrote" in " ".join(ran(capsys, ["heads"]).out.split())


def test_a_round_of_use_reads_what_is_new_and_as_much_of_before(place, learned, monkeypatch, capsys):
    collect(place, learned, 30).end_new()
    collect(place, learned, 30, start=30)
    monkeypatch.setattr(learn_collected, "LEAST_REPLAYED", 2000)
    before = learned.in_use
    asked = pretend_training(monkeypatch, before)
    read = {}

    def judged(model, heads, in_use, rows):
        read["texts"] = [json.loads(line) for line in (learned.round / "texts.jsonl").open()]
        read["held out"] = [json.loads(line)["text"] for line in (learned.round / "held_out.jsonl").open()]
        read["rows"] = rows
        return {"value": 2.0, "low": 1.9, "high": 2.1}, {"value": 1.02, "low": 1.01, "high": 1.03}

    monkeypatch.setattr(learn_collected, "_judged", judged)
    said = ran(capsys, ["learn", str(place / "base"), "--collected"]).err
    assert "no better, so nothing changes" in said and learned.in_use == before
    texts = [row["text"] for row in read["texts"] if "text" in row]
    new = [text for text in texts[:24]]
    assert all(f"Question number {53 - place}<" in text for place, text in enumerate(new))
    assert [f"Question number {59 - place}<" in text for place, text in enumerate(read["held out"])] == [
        True
    ] * 6
    assert 24 < len(read["texts"]) < 24 + 45, "and some of before"
    assert all(sum(row.is_label) == 50 for row in read["rows"]), "it wrote fifty of each"
    (configuration,) = asked
    assert configuration.heads.start_from == str(before)
    assert configuration.optimisation.num_epochs == learn_collected.LATER_EPOCHS
    assert configuration.optimisation.max_minutes is None


@pytest.mark.parametrize(
    ("value", "low", "is_first", "expected"),
    [
        (1.2, 1.1, True, True),
        (1.05, 1.01, True, False),
        (1.05, 1.01, False, True),
        (1.5, 0.99, False, False),
        (1.02, 1.01, False, False),
        (1.5, None, True, False),
    ],
)
def test_only_what_is_surely_better_is_used(value, low, is_first, expected):
    assert learn_collected._is_better({"value": value, "low": low}, is_first) is expected


def test_too_few_answers_are_refused_in_words(place, learned, capsys):
    collect(place, learned, 3)
    said = ran(capsys, ["learn", str(place / "base"), "--collected"], 1).err
    assert "collected needs 12 answers or more" in said and "3 are kept" in said
