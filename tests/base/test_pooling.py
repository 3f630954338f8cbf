"""What the files of a base state about embeddings."""

from __future__ import annotations

import json

import gguf
import pytest
from quantised_files import write_model
from tiny_chat import chat_base

from medusa.base.pooling import Pooling, stated_pooling
from medusa.engine.weights.load import load_base

MODULES = ("Transformer", "Pooling", "Normalize")


def directory(path, settings=None, modules=MODULES, **config):
    base = chat_base()
    base.config.update(config)
    base.save_pretrained(path)
    if settings is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
        listed = [{"idx": 0, "type": f"sentence_transformers.models.{name}"} for name in modules]
        (path / "modules.json").write_text(json.dumps(listed))
    return load_base(path)


def gguf_base(folder, **metadata):
    pytest.importorskip("medusa.base.gguf_model", exc_type=ImportError, reason="needs a newer transformers")
    return load_base(write_model(folder / "m.gguf", **metadata))


@pytest.mark.parametrize(
    ("settings", "modules", "pooling"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, MODULES, Pooling("last")),
        ({"pooling_mode_mean_tokens": True}, MODULES[:2], Pooling("mean", is_normalised=False)),
        ({"embedding_dimension": 32, "pooling_mode": "lasttoken"}, MODULES, Pooling("last")),
        ({"pooling_mode": "mean"}, MODULES, Pooling("mean")),
    ],
)
def test_a_directory_of_sentence_transformers_states_its_pooling(tmp_path, settings, modules, pooling):
    assert stated_pooling(directory(tmp_path, settings, modules)) == pooling


def test_a_chat_model_states_none(tmp_path):
    assert stated_pooling(directory(tmp_path)) is None
    assert stated_pooling(chat_base()) is None


def test_a_chat_model_in_a_gguf_file_states_none(tmp_path):
    assert stated_pooling(gguf_base(tmp_path)) is None


@pytest.mark.parametrize(
    ("settings", "modules", "config", "words"),
    [
        ({"pooling_mode_cls_token": True}, MODULES, {}, "mean or last, got cls"),
        (
            {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True},
            MODULES,
            {},
            r"max_tokens\+mean",
        ),
        ({}, MODULES, {}, "got none"),
        ({"pooling_mode": "mean"}, (*MODULES[:2], "Dense"), {}, "has a module 'Dense' behind its pooling"),
        ({"pooling_mode": "mean"}, MODULES, {"use_bidirectional_attention": True}, "from left to right"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, settings, modules, config, words):
    with pytest.raises(ValueError, match=words):
        stated_pooling(directory(tmp_path, settings, modules, **config))


def test_a_damaged_file_is_named(tmp_path):
    base = directory(tmp_path, {"pooling_mode": "mean"})
    (tmp_path / "1_Pooling" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"1_Pooling/config.json of .* must be JSON"):
        stated_pooling(base)


@pytest.mark.parametrize(("kind", "pooling"), [("LAST", "last"), ("MEAN", "mean"), ("NONE", None)])
def test_a_gguf_file_states_its_pooling(tmp_path, kind, pooling):
    base = gguf_base(tmp_path, pooling_type=gguf.PoolingType[kind])
    assert stated_pooling(base) == (None if pooling is None else Pooling(pooling))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"pooling_type": gguf.PoolingType.CLS}, "got cls"),
        ({"pooling_type": gguf.PoolingType.RANK}, "got rank"),
        ({"pooling_type": gguf.PoolingType.MEAN, "causal_attention": False}, "from left to right"),
    ],
)
def test_a_gguf_file_of_another_kind_is_refused(tmp_path, metadata, words):
    with pytest.raises(ValueError, match=words):
        stated_pooling(gguf_base(tmp_path, **metadata))
