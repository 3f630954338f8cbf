"""States that vLLM computed are those of the base: asked of servers, or read from files that they wrote."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_model
from fake_vllm import FakeVllm, write_states
from refusals import assert_refused
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny_training import configuration_of, save_base_and_rows, tiny_base

from medusa.console import ProgressReporter
from medusa.engine.weights.load import load_base
from medusa.training import endpoints
from medusa.training.config import BaseOptions, DataOptions
from medusa.training.data.batching import collate
from medusa.training.data.dataset import Document, Documents
from medusa.training.run import job
from medusa.training.states import format as states_format
from medusa.training.states import served
from medusa.training.states.base import OnlineHiddenStates, frozen_base
from medusa.training.states.served import ServedHiddenStates, final_norm, prompt_length
from medusa.training.states.stored import CachedHiddenStates

LAST = 2
"""Layers of the tiny base."""
LAYERS = [(), (1,)]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return save_base_and_rows(tmp_path_factory.mktemp("place"))


@pytest.fixture
def without_layers(place):
    return frozen_base(BaseOptions(str(place / "base")), torch.device("cpu"), layers=False)


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Starts servers that write into ``tmp_path / "states"``."""
    monkeypatch.setattr(endpoints, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(endpoints, "MAX_ATTEMPTS", 2)
    monkeypatch.setattr(served, "SECONDS_BETWEEN_LOOKS", 0.01)
    (tmp_path / "states").mkdir()
    started: list[FakeVllm] = []

    def start(base=None, layers=(LAST,), **options) -> FakeVllm:
        base = tiny_base() if base is None else base
        started.append(FakeVllm(base, tmp_path / "states", layers, **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@functools.cache
def documents_of(*lengths: int) -> Documents:
    """Random prompts, and as many tokens that the tiny base writes behind them."""
    random = np.random.default_rng(0)
    documents = []
    for length in lengths or (30, 4, 25, 60, 2):
        prompt = torch.from_numpy(random.integers(3, 250, (1, length // 2)))
        new = {"max_new_tokens": length - length // 2, "min_new_tokens": length - length // 2}
        tokens = tiny_base().generate(prompt, do_sample=False, **new)[0].numpy()
        documents.append(Document(tokens.astype(np.int32), np.arange(length) >= length // 2))
    return Documents.of(documents)


def stored(
    directory: Path, documents: Documents, states: ServedHiddenStates, layers=()
) -> CachedHiddenStates:
    """The states of ``documents``, stored by one process."""
    cached = CachedHiddenStates(directory, states.base, documents, 3, "float32", layers, arithmetic="vLLM")
    line = ProgressReporter("states", Console(quiet=True))
    cached.compute(cached.open(False, line), states, DataOptions(), line)
    return cached


def assert_those_of_the_base(cached: CachedHiddenStates, documents: Documents, layers=()) -> None:
    live = OnlineHiddenStates(tiny_base())
    for index in range(len(documents)):
        needed = torch.from_numpy(cached.needed[cached.span(index)])
        expected = live(collate(documents, [[index]]), layers)[0][needed]
        torch.testing.assert_close(cached.of([index]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", LAYERS)
def test_states_of_servers_are_those_of_the_base(serve, tmp_path, without_layers, layers):
    servers = [serve(layers=(*layers, LAST), failures=[503]) for _ in range(2)]
    documents = documents_of()
    states = ServedHiddenStates(without_layers, [server.url for server in servers])
    cached = stored(tmp_path / "ours", documents, states, layers)
    assert_those_of_the_base(cached, documents, layers)
    assert not list((tmp_path / "states").iterdir()), "what was read of a server is deleted"
    sent = [request for server in servers for _, request in server.requests[1:]]
    assert {request["model"] for request in sent} == {"the-model"}
    assert max(len(request["prompt"]) for request in sent) == 59, "nothing is asked after the last label"


@pytest.mark.parametrize("layers", LAYERS)
def test_states_of_files_are_those_of_the_base(serve, tmp_path, without_layers, layers):
    """Of files with more layers, in another order, and with longer texts."""
    documents = documents_of()
    for index in range(len(documents)):
        tokens = [*documents[index].tokens.tolist(), 7, 7]
        write_states(tmp_path / "states" / f"{index}.safetensors", tiny_base(), tokens, [LAST, 0, 1])
    states = ServedHiddenStates(without_layers, [str(tmp_path / "states")], [LAST, 0, 1])
    cached = stored(tmp_path / "ours", documents, states, layers)
    assert_those_of_the_base(cached, documents, layers)
    assert len(list((tmp_path / "states").iterdir())) == len(documents), "files stay unless told"


def test_files_are_read_while_they_appear_and_deleted_where_told(serve, tmp_path, without_layers):
    documents = documents_of()
    directory = tmp_path / "states"

    def write() -> None:
        for index in reversed(range(len(documents))):
            tokens = documents[index].tokens[: prompt_length(documents, index)].tolist()
            write_states(directory / "partial", tiny_base(), tokens, [LAST])
            (directory / "partial").rename(directory / f"{index}.safetensors")

    writer = threading.Timer(0.1, write)
    writer.start()
    states = ServedHiddenStates(without_layers, [str(directory)], deletes_read=True)
    assert_those_of_the_base(stored(tmp_path / "ours", documents, states), documents)
    writer.join()
    assert not list(directory.iterdir())


def test_a_file_stays_until_all_documents_that_it_has_are_stored(
    serve, tmp_path, without_layers, monkeypatch
):
    """Shards of one document; the first is the last one's too."""
    monkeypatch.setattr(states_format, "SHARD_BYTES", 1500)
    some = documents_of()
    documents = Documents.of([*(some[index] for index in range(len(some))), some[0]])
    write_odd(tmp_path / "states", some)
    states = ServedHiddenStates(without_layers, [str(tmp_path / "states")], deletes_read=True)
    cached = stored(tmp_path / "ours", documents, states)
    assert len(cached.ends) > 2
    assert_those_of_the_base(cached, documents)
    assert not list((tmp_path / "states").iterdir())


def test_no_file_is_deleted_before_its_states_are_stored(serve, tmp_path, without_layers, monkeypatch):
    documents = documents_of()
    write_odd(tmp_path / "states", documents)
    states = ServedHiddenStates(without_layers, [str(tmp_path / "states")], deletes_read=True)
    monkeypatch.setattr(states_format, "save_file", lambda *_, **__: (_ for _ in ()).throw(OSError("full")))
    assert_refused(lambda: stored(tmp_path / "ours", documents, states), OSError, "full")
    assert len(list((tmp_path / "states").iterdir())) == len(documents)


def test_servers_are_asked_for_what_no_file_has(serve, tmp_path, without_layers):
    server = serve()
    documents = documents_of()
    write_states(tmp_path / "states" / "0.safetensors", tiny_base(), documents[0].tokens.tolist(), [LAST])
    lines: list[str] = []
    states = ServedHiddenStates(without_layers, [str(tmp_path / "states"), server.url], say=lines.append)
    assert_those_of_the_base(stored(tmp_path / "ours", documents, states), documents)
    assert len(server.requests) == len(documents) - 1
    assert lines == [f"hidden states: 1 documents from files, {len(documents) - 1} asked of servers"]


def test_a_server_that_dies_is_given_up_and_the_others_go_on(serve, tmp_path, without_layers):
    dying = serve(failures=[500] * 200)
    living = serve()
    lines: list[str] = []
    urls = [dying.url, living.url]
    states = ServedHiddenStates(without_layers, urls, say=lines.append)
    documents = documents_of(*range(20, 40))
    assert_those_of_the_base(stored(tmp_path / "ours", documents, states), documents)
    assert any("is given up, 1 of 2 go on" in line for line in lines)


def test_when_all_servers_are_gone_the_same_command_goes_on_later(serve, tmp_path, without_layers):
    server = serve(failures=[500] * 10)
    documents = documents_of()
    states = ServedHiddenStates(without_layers, [server.url])
    assert_refused(
        lambda: stored(tmp_path / "ours", documents, states),
        ConnectionError,
        "gave no answer in 2 tries ... HTTP 500 ... The same command goes on where it stopped",
    )
    assert_those_of_the_base(stored(tmp_path / "ours", documents, states), documents)


def test_an_address_without_a_server_is_refused_in_words(serve, tmp_path, without_layers):
    server = serve()
    server.stop()
    states = ServedHiddenStates(without_layers, [server.url])
    assert_refused(
        lambda: stored(tmp_path / "ours", documents_of(), states),
        ConnectionError,
        "/v1/models names no model (Connect ... is a server of vLLM running there?",
    )


def other_base():
    base = tiny_base()
    with torch.no_grad():
        base.lm_head.weight.copy_(base.lm_head.weight.flip(0))
    return base


def write_odd(directory: Path, documents: Documents, **changes) -> None:
    """Files of the tiny base, with other tensors."""
    for index in range(len(documents)):
        path = directory / f"{index}.safetensors"
        write_states(path, tiny_base(), documents[index].tokens.tolist(), [LAST])
        tensors = load_file(path)
        save_file({**tensors, **{name: change(tensors[name]) for name, change in changes.items()}}, path)


def test_a_server_of_another_model_or_of_other_layers_is_refused(serve, tmp_path, without_layers):
    documents = documents_of()
    for server in (serve(other_base()), serve(layers=(1,))):
        states = ServedHiddenStates(without_layers, [server.url])
        assert_refused(
            lambda: stored(tmp_path / "ours", documents, states),  # noqa: B023
            ValueError,
            "gives token ... and the LM head of ... it serves another model, or states of other layers",
        )
    server = serve(layers=(1, LAST))
    states = ServedHiddenStates(without_layers, [server.url])
    assert_refused(
        lambda: stored(tmp_path / "ours", documents, states),
        ValueError,
        "1, 32), tokens by layers ... 2, 32)",
    )


def test_a_document_that_a_server_refuses_ends_the_run_with_the_next_step(serve, tmp_path, without_layers):
    states = ServedHiddenStates(without_layers, [serve().url])
    assert_refused(
        lambda: stored(tmp_path / "ours", documents_of(450), states),
        ValueError,
        "a document of 449 tokens was refused: ... HTTP 400 ... a smaller max_length",
    )


def test_files_of_another_model_are_refused(serve, tmp_path, without_layers):
    documents = documents_of()
    write_odd(tmp_path / "states", documents, hidden_states=lambda states: -states)
    states = ServedHiddenStates(without_layers, [str(tmp_path / "states")])
    assert_refused(
        lambda: stored(tmp_path / "ours", documents, states), ValueError, "foresee their text with a loss of"
    )


def test_states_in_eight_bits_are_widened(serve, tmp_path, without_layers):
    """As speculators' connector writes them: a scale for each token."""
    documents = documents_of()
    write_odd(
        tmp_path / "states",
        documents,
        hidden_states=lambda states: states / 2,
        token_ids=lambda tokens: tokens,
    )
    for path in (tmp_path / "states").iterdir():
        tensors = load_file(path)
        save_file(
            {**tensors, "hidden_states_scales": torch.full((len(tensors["token_ids"]), 1, 1), 2.0)}, path
        )
    states = ServedHiddenStates(without_layers, [str(tmp_path / "states")])
    assert_those_of_the_base(stored(tmp_path / "ours", documents, states), documents)


def test_states_that_do_not_come_are_waited_for_so_long(serve, tmp_path, without_layers):
    states = ServedHiddenStates(without_layers, [str(tmp_path / "states")], timeout_minutes=0.001)
    assert_refused(
        lambda: stored(tmp_path / "ours", documents_of(), states),
        TimeoutError,
        "5 documents have no states in ... no file came for 0.001 minutes",
    )


def test_a_file_that_was_cut_short_is_refused_once_it_is_old(serve, tmp_path, without_layers, monkeypatch):
    monkeypatch.setattr(served, "SECONDS_UNREADABLE", 0.2)
    (tmp_path / "states" / "a.safetensors").write_bytes(b"\x10" * 30)
    states = ServedHiddenStates(without_layers, [str(tmp_path / "states")])
    assert_refused(
        lambda: stored(tmp_path / "ours", documents_of(), states),
        ValueError,
        "a.safetensors has no token_ids",
    )


def test_a_server_that_writes_nowhere_is_given_up(serve, tmp_path, without_layers, monkeypatch):
    server = serve()
    monkeypatch.setattr("fake_vllm.write_states", lambda *_: None)
    monkeypatch.setattr(served, "SECONDS_UNREADABLE", 0.2)
    states = ServedHiddenStates(without_layers, [server.url])
    assert_refused(
        lambda: stored(tmp_path / "ours", documents_of(), states),
        ConnectionError,
        "vLLM says that it wrote ... its shared_storage_path must be a directory that is seen here",
    )


def test_layers_that_the_engine_does_not_extract_are_refused(serve, tmp_path, without_layers):
    states = ServedHiddenStates(without_layers, [str(tmp_path / "states")], [0, 1])
    assert_refused(
        lambda: stored(tmp_path / "ours", documents_of(), states),
        ValueError,
        "states_layers must hold [2], the layers that this run reads, got [0, 1]",
    )
    assert_refused(
        lambda: ServedHiddenStates(without_layers, ["nowhere"]), FileNotFoundError, "'nowhere', no directory"
    )


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "phi"])
def test_the_final_norm_is_found(name, tmp_path):
    base = tiny_model(name)
    base.save_pretrained(tmp_path)
    bare = frozen_base(BaseOptions(str(tmp_path)), torch.device("cpu"), layers=False)
    norm = final_norm(bare)
    raw: list[torch.Tensor] = []
    names = [path for path, module in bare.named_modules() if module is norm]
    whole = load_base(str(tmp_path))
    whole.get_submodule(names[0]).register_forward_pre_hook(lambda _module, args: raw.append(args[0]))
    read: list[torch.Tensor] = []
    whole.get_output_embeddings().register_forward_pre_hook(lambda _module, args: read.append(args[0]))
    with torch.no_grad():
        whole(input_ids=torch.tensor([[5, 9, 4]]), use_cache=False)
        torch.testing.assert_close(norm(raw[0]), read[0])


def test_a_base_with_something_between_norm_and_head_is_refused(without_layers):
    class Scaled(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def forward(self, hidden):
            return self.norm(hidden) * 2

    without_layers.model.norm = Scaled(without_layers.model.norm)
    assert_refused(lambda: final_norm(without_layers), ValueError, "something else comes between them")


@pytest.mark.usefixtures("fresh_accelerator")
def test_heads_learn_from_a_server_as_from_the_base(place, serve, tmp_path):
    def trained(name: str, **options) -> list[float]:
        defaults = {
            "base": place / "base",
            "data": place / "rows.jsonl",
            "output_dir": tmp_path / name,
            "num_heads": 2,
            "max_steps": 4,
            "objective": "blend",
            "logging_steps": 1,
            "cache_hidden_states": True,
        }
        job.train(configuration_of(**defaults | options))
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [row["train/loss"] for row in map(json.loads, rows) if "train/loss" in row]

    server = serve()
    loaded: list[str] = []
    ours = trained("ours")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "live_states", lambda *_: loaded.append("the base"))
        theirs = trained("theirs", states_from=[server.url])
        server.stop()
        trained("theirs", states_from=[server.url], max_steps=6, resume="auto")  # the states are there
    assert theirs == pytest.approx(ours, rel=1e-4)
    assert not loaded, "no layer of the base is loaded"
