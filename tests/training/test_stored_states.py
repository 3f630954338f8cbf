"""States from the file give the losses of the base itself, and a stale file is not used."""

from __future__ import annotations

import copy
import io
import shutil
from collections import namedtuple
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import VOCAB_SIZE, longrope_model, tiny_model
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_training import (
    CHAT_TEMPLATE,
    SYSTEM,
    chat_tokenizer,
    counting_rows,
    save_tiny_base,
    tiny_base,
    write_rows,
)
from transformers import AutoModelForCausalLM

from medusa import HeadsConfig, MedusaHeads
from medusa.base.causal_lm import lm_head
from medusa.console import ProgressReporter
from medusa.training.config import DataOptions, LossOptions
from medusa.training.data.batching import collate
from medusa.training.data.dataset import Document, Documents
from medusa.training.data.loading import load_data
from medusa.training.losses import teacher_of
from medusa.training.recipes.recipe import HeadsLoss
from medusa.training.states import format as states_format
from medusa.training.states.base import OnlineHiddenStates
from medusa.training.states.format import StatesDirectory, digest_of_weights
from medusa.training.states.stored import CachedHiddenStates, HiddenStateSource

NUM_HEADS = 3
BATCH = [[[4], [0]], [[2], [1]]]


def documents_of(seed: int = 0) -> Documents:
    random = np.random.default_rng(seed)
    return Documents.of(
        Document(random.integers(3, VOCAB_SIZE, length).astype(np.int32), np.arange(length) >= length // 2)
        for length in (30, 4, 25, 60, 2)
    )


def states_of(
    directory: Path, documents: Documents, dtype="float32", layers=(), needs_context=False, base=None
):
    base = tiny_model("llama") if base is None else base
    return CachedHiddenStates(directory, base, documents, NUM_HEADS, dtype, layers, needs_context)


def stored(directory: Path, documents: Documents, replace: bool = False, **options) -> CachedHiddenStates:
    """The states of ``documents``, stored by one process."""
    states = states_of(directory, documents, **options)
    base = options.get("base") or tiny_model("llama")
    line = ProgressReporter("states", Console(quiet=True))
    states.compute(
        states.open(replace, line), OnlineHiddenStates(base), DataOptions(tokens_per_batch=64), line
    )
    states.check(range(len(states.ends)))
    return states


class Feed(NamedTuple):
    """Gives what a loss reads of a micro-batch, and its targets."""

    documents: Documents
    layers: tuple[int, ...] = ()
    stored: CachedHiddenStates | None = None

    def __call__(self, batch):
        base = tiny_model("llama")
        states = HiddenStateSource(
            base, OnlineHiddenStates(base), {} if self.stored is None else {"training": self.stored}
        )
        rows, padded = states.of_batch(self.documents, "training", batch, self.layers)
        return rows, padded.aligned(NUM_HEADS)


def fill(directory: Path, documents: Documents, replace: bool = False, layers=(), **options) -> Feed:
    """Of states that are stored first."""
    return Feed(documents, layers, stored(directory, documents, replace, layers=layers, **options))


def losses(source: Feed, layers=()) -> torch.Tensor:
    """(2, K) sums of the KL objective, which reads the base's own rows as well."""
    base = tiny_model("llama")
    torch.manual_seed(0)
    heads = MedusaHeads(HeadsConfig(32, VOCAB_SIZE, NUM_HEADS, fused_layers=layers))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    module = HeadsLoss(heads, LossOptions("kl"))
    with torch.no_grad():
        results = [
            module(*source(batch), lm_head(base), torch.ones(NUM_HEADS), teacher_of(base))[1]
            for batch in BATCH
        ]
    return torch.stack([sums.loss for sums in results])


@pytest.mark.parametrize("layers", [(), (1, 2)], ids=["last state", "layers too"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-2), ("float16", 3e-3), ("float8", 0.1)]
)
def test_stored_states_give_the_losses_of_the_base(tmp_path, dtype, tolerance, layers):
    documents = documents_of()
    live = losses(Feed(documents, layers), layers)
    assert live.min() > 1
    found = losses(fill(tmp_path, documents, dtype=dtype, layers=layers), layers)
    torch.testing.assert_close(found, live, rtol=tolerance, atol=tolerance)


def test_a_row_has_its_states_where_they_are_kept_and_zeros_elsewhere(tmp_path):
    documents = documents_of()
    states = stored(tmp_path, documents)
    live = OnlineHiddenStates(tiny_model("llama"))(collate(documents, [[3]]))[0]
    needed = torch.from_numpy(states.needed[states.span(3)])
    assert 0 < needed.sum() < len(needed)
    torch.testing.assert_close(states.row(3)[needed], live[needed])
    assert not states.row(3)[~needed].any()


@pytest.mark.parametrize("batch", [[[4], [0]], [[2, 1], [3, 4]], []], ids=["padded", "packed", "empty"])
def test_stored_features_are_those_of_the_base(tmp_path, batch):
    documents = documents_of()
    feed = fill(tmp_path, documents, needs_context=True)
    states = feed.stored
    ends = [documents.is_label[states.span(index)].nonzero()[0][-1] for index in range(len(documents))]
    assert states.num_bytes == sum(ends) * 32 * 4, "all up to the one before the last label"
    (found, found_alignment), (live, live_alignment) = feed(batch), Feed(documents)(batch)
    assert torch.equal(found_alignment.sources, live_alignment.sources)
    assert torch.equal(found.next_tokens, live.next_tokens)
    for row, indices in enumerate(batch):
        needed = torch.from_numpy(np.concatenate([states.needed[states.span(index)] for index in indices]))
        torch.testing.assert_close(found[0][row, : len(needed)][needed], live[0][row, : len(needed)][needed])


def test_float8_keeps_the_layers_of_each_state_in_their_own_range(tmp_path):
    generator = torch.Generator().manual_seed(0)
    small, large = torch.randn(2, 50, 32, generator=generator)
    states = torch.cat([0.01 * small, 1e5 * large, torch.zeros(50, 32)], dim=1)
    rows, scales = states_format.in_float8(states, 3)
    assert rows.element_size() == 1 and scales.shape == (50, 3)
    kept = states_format.widened(rows, scales)
    assert kept.dtype == torch.bfloat16
    assert torch.equal(kept.float(), rows.float() * scales.repeat_interleave(32, dim=1)), "nothing is rounded"
    # four bits of a number, and the least steps below 2^-6 of the range
    bound = torch.maximum(states.abs() / 16, scales.repeat_interleave(32, dim=1) / 1024)
    assert ((kept - states).abs() <= bound).all()
    assert (rows[:, :64].float().abs().unflatten(1, (2, 32)).amax(-1) >= 224).all(), (
        "all of the range is used"
    )


def test_float8_takes_a_byte_a_number_and_is_checked(tmp_path):
    documents = documents_of()
    states = stored(tmp_path, documents, dtype="float8", layers=(1, 2))
    assert states.num_bytes == int(states.first[-1]) * (3 * 32 + 3 * 4)
    tensors = load_file(states.path(0))
    tensors["scales"][0, 1] *= 2
    with safe_open(states.path(0), "pt") as file:
        metadata = file.metadata()
    save_file(tensors, states.path(0), metadata=metadata)
    assert states.damage(0) == "has other bytes than were written"


@pytest.mark.parametrize("dtype", ["float16", "float8"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_states_that_are_not_finite_are_not_stored(tmp_path, dtype, number):
    documents = documents_of()
    states = states_of(tmp_path, documents, dtype=dtype)
    states.open(False, ProgressReporter("states", Console(quiet=True)))
    broken = torch.full((int(documents.lengths[0]), 32), number)
    with pytest.raises(ValueError, match=r"document 0 in torch.float.* are not finite"):
        states.write(0, [(0, broken)], "a test")
    assert not states.path(0).exists()


@pytest.fixture
def small_shards(monkeypatch):
    """Shards of about one document."""
    monkeypatch.setattr(states_format, "SHARD_BYTES", 1500)


def test_states_of_the_same_documents_are_used_again(tmp_path, monkeypatch):
    fill(tmp_path, documents_of())
    monkeypatch.setattr(OnlineHiddenStates, "__call__", lambda *_: pytest.fail("computed again"))
    fill(tmp_path, documents_of())


@pytest.mark.parametrize("change", ["documents", "dtype", "layers", "weights", "configuration"])
def test_states_of_something_else_are_refused_and_made_anew_when_overwriting(tmp_path, change):
    fill(tmp_path, documents_of())
    documents = documents_of(seed=1 if change == "documents" else 0)
    options = {"dtype": "float16" if change == "dtype" else "float32"}
    options["layers"] = (1,) if change == "layers" else ()
    base = copy.deepcopy(tiny_model("llama"))
    if change == "weights":
        with torch.no_grad():
            base.lm_head.weight += 0.01
    if change == "configuration":
        base.config.rope_parameters["rope_theta"] = 5e5
    with pytest.raises(ValueError, match=rf"manifest.json is of other states: {change} was.*Delete"):
        stored(tmp_path, documents, base=base, **options)
    made_anew = stored(tmp_path, documents, replace=True, base=base, **options)
    live = OnlineHiddenStates(base)(collate(documents, [[0]]), options["layers"])[0]
    needed = torch.from_numpy(made_anew.needed[made_anew.span(0)])
    torch.testing.assert_close(made_anew.of([0]).float(), live[needed], rtol=3e-3, atol=3e-3)


def test_other_weights_at_the_same_path_are_noticed(tmp_path):
    """The LM head, the sizes and the name stay what they were."""
    save_tiny_base(tmp_path / "base")

    def loaded():
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()

    before = loaded()
    stored(tmp_path / "states", documents_of(), base=before)
    stored(tmp_path / "states", documents_of(), base=loaded())
    with torch.no_grad():
        before.model.layers[0].self_attn.q_proj.weight += 0.01
    before.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="is of other states: weights was 'files "):
        stored(tmp_path / "states", documents_of(), base=loaded())


@pytest.mark.parametrize("change", ["tokenizer", "template"])
def test_states_of_another_tokenizer_or_chat_template_are_refused(tmp_path, change):
    """Their fingerprint is that of the tokens and labels that they made."""
    options = DataOptions(data=[str(write_rows(tmp_path / "rows.jsonl", counting_rows(5)))])
    other = chat_tokenizer(CHAT_TEMPLATE.replace(SYSTEM, "Be brief"))
    if change == "tokenizer":
        other = chat_tokenizer()
        other.add_tokens(["ab"])
    base = tiny_base(300)
    stored(tmp_path / "states", load_data(options, chat_tokenizer()).training, base=base)
    with pytest.raises(ValueError, match="is of other states: documents was "):
        stored(tmp_path / "states", load_data(options, other).training, base=base)


def test_states_of_less_precision_are_refused(tmp_path):
    with torch.autocast("cpu", torch.bfloat16):
        fill(tmp_path, documents_of())
    with pytest.raises(ValueError, match=r"arithmetic was 'torch.bfloat16' and is 'torch.float32'"):
        fill(tmp_path, documents_of())


def test_states_of_full_precision_serve_runs_of_less_and_are_completed_as_they_began(tmp_path, small_shards):
    documents = documents_of()
    states = stored(tmp_path, documents)
    whole = [states.row(index).tolist() for index in range(len(documents))]
    states.path(1).unlink()
    with torch.autocast("cpu", torch.bfloat16):
        again = stored(tmp_path, documents)
    assert [again.row(index).tolist() for index in range(len(documents))] == whole


def test_a_run_that_died_goes_on_at_the_first_missing_shard(tmp_path, small_shards, monkeypatch):
    documents, computed = documents_of(), []
    compute = OnlineHiddenStates.of_documents

    def mortal(states: OnlineHiddenStates, documents: Documents, wanted: range, *arguments):
        if len(computed) == 2:
            raise KeyboardInterrupt
        computed.append(wanted)
        return compute(states, documents, wanted, *arguments)

    monkeypatch.setattr(OnlineHiddenStates, "of_documents", mortal)
    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path, documents)
    monkeypatch.setattr(
        OnlineHiddenStates,
        "of_documents",
        lambda self, documents, wanted, *rest: (
            computed.append(wanted) or compute(self, documents, wanted, *rest)
        ),
    )
    feed = fill(tmp_path, documents)
    assert computed == [feed.stored.documents_of(shard) for shard in range(len(feed.stored.ends))]
    assert len(computed) > 2
    live = losses(Feed(documents))
    torch.testing.assert_close(losses(feed), live)


def test_several_processes_write_the_same_shards_as_one(tmp_path, small_shards):
    documents, line = documents_of(), ProgressReporter("states", Console(quiet=True))
    alone = stored(tmp_path / "alone", documents)
    together = states_of(tmp_path / "together", documents)
    missing = together.open(False, line)
    for rank in (1, 0):  # in any order
        ours = states_of(tmp_path / "together", documents)
        ours.compute(
            missing[rank::2], OnlineHiddenStates(tiny_model("llama")), DataOptions(tokens_per_batch=64), line
        )
    assert len(missing) > 2
    together.check(missing)
    everything = range(len(documents))
    assert torch.equal(together.of(everything), alone.of(everything))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def zero_the_states(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-40] + bytes(40))


@pytest.mark.parametrize("damage", [cut, zero, zero_the_states, Path.unlink])
def test_a_damaged_shard_is_named_and_made_anew_when_overwriting(tmp_path, small_shards, damage):
    documents = documents_of()
    whole = stored(tmp_path, documents)
    before = whole.of(range(len(documents))).clone()
    damage(whole.path(1))
    with pytest.raises(ValueError, match=r"00001.safetensors (is|has) .*, although it was stored again"):
        states_of(tmp_path, documents).check(range(len(whole.ends)))
    made_anew = stored(tmp_path, documents, replace=True)
    assert torch.equal(made_anew.of(range(len(documents))), before)


def test_a_shard_of_other_states_is_refused(tmp_path, small_shards):
    first, second = documents_of(), documents_of(seed=1)
    ours, theirs = stored(tmp_path / "a", first), stored(tmp_path / "b", second)
    ours.path(0).write_bytes(theirs.path(0).read_bytes())
    with pytest.raises(ValueError, match=r"00000.safetensors belongs to other states"):
        ours.check([0])


def test_a_disk_with_too_little_room_is_noticed_before_writing(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100))
    with pytest.raises(OSError, match=r"cache_hidden_states needs .* GiB in .* choose cache_dtype=bfloat16"):
        fill(tmp_path, documents_of())
    assert [path.name for path in tmp_path.glob("0*")] == []


def test_the_size_is_announced_before_writing(tmp_path, small_shards):
    said = io.StringIO()
    states = states_of(tmp_path, documents_of())
    states.open(False, ProgressReporter("states", Console(file=said, width=300)))
    assert f"{len(states.ends)} shards (0 are there)" in said.getvalue()
    assert "MiB to write" in said.getvalue()


def test_a_writer_that_gives_too_little_or_what_no_number_is_is_refused(tmp_path):
    states, line = states_of(tmp_path, documents_of(), "float16"), ProgressReporter("", Console(quiet=True))
    states.open(False, line)
    given = [(index, torch.ones(int(length), 32)) for index, length in enumerate(documents_of().lengths)]
    with pytest.raises(ValueError, match=r"shard 0 lacks the states of documents \[4\]"):
        states.write(0, given[:-1], "test")
    with pytest.raises(ValueError, match=r"the states of document 0 must be \(30, 32\), got \(29, 32\)"):
        states.write(0, [(0, torch.ones(29, 32))], "test")
    with pytest.raises(ValueError, match=r"document 2 in torch.float16 are not finite"):
        states.write(0, [*given[:2], (2, 1e6 * given[2][1])], "test")
    assert states.missing() == [0]


def test_documents_that_are_not_the_manifests_are_refused(tmp_path):
    stored(tmp_path / "a", documents_of())
    stored(tmp_path / "b", documents_of(seed=1))
    shutil.copy(tmp_path / "b" / "documents.safetensors", tmp_path / "a")
    with pytest.raises(ValueError, match=r"documents.safetensors is not what manifest.json is of"):
        StatesDirectory.read(tmp_path / "a")


@pytest.mark.parametrize("kind", ["safetensors", "bin", "gguf"])
def test_a_change_of_any_tensor_changes_the_digest_of_the_weights(tmp_path, kind):
    """Small ones lie between matrices that are far larger than what is read of them."""
    tensors = {}
    for layer in range(3):
        tensors[f"{layer}.matrix"] = torch.zeros(300, 300)
        tensors[f"{layer}.norm"] = torch.ones(64)

    def digest(**changed: torch.Tensor) -> str | None:
        path = tmp_path / f"model.{kind}"
        if kind == "bin":
            torch.save(tensors | changed, path)
        elif kind == "gguf":
            path.write_bytes(b"".join(each.numpy().tobytes() for each in (tensors | changed).values()))
        else:
            save_file(tensors | changed, path, metadata={"format": "pt"})
        return digest_of_weights(tmp_path)

    before = digest()
    assert digest() == before
    same = [name for name in tensors if digest(**{name: 3 * tensors[name] + 1}) == before]
    assert not same


def test_the_stored_states_of_a_longrope_base_are_those_that_each_document_has_alone(tmp_path):
    base, documents = longrope_model(), documents_of()
    states, line = states_of(tmp_path, documents, base=base), ProgressReporter("states", Console(quiet=True))
    states.compute(
        states.open(False, line), OnlineHiddenStates(base), DataOptions(tokens_per_batch=1000), line
    )
    for index in range(len(documents)):
        alone = OnlineHiddenStates(base)(collate(documents, [[index]]))[0]
        needed = torch.from_numpy(states.needed[states.span(index)])
        torch.testing.assert_close(states.of([index]), alone[needed], rtol=1e-4, atol=1e-4)
