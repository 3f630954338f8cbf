"""The GGUF files that are written for llama.cpp hold the weights of their source."""

import numpy as np
import pytest
from conftest import program as load_program
from tiny_chat import chat_base
from tiny_gguf import written_gguf

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
program = load_program("scripts/fetch_smollm2.py")


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_a_gguf_file_has_the_weights_and_the_metadata_of_its_source(tmp_path, kind):
    source = written_gguf(chat_base(), tmp_path / "source.gguf")
    program.write_gguf(source, tmp_path / "written.gguf", kind)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "written.gguf")
    kept = {name: field.contents() for name, field in after.fields.items() if not name.startswith("GGUF.")}
    assert kept.pop("general.file_type") == {"f32": 0, "q8_0": 7}[kind]
    wanted = {name: field.contents() for name, field in before.fields.items() if not name.startswith("GGUF.")}
    assert kept == wanted
    assert [tensor.name for tensor in after.tensors] == [tensor.name for tensor in before.tensors]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        is_matrix = len(old.shape) > 1
        assert new.tensor_type.name == ("Q8_0" if kind == "q8_0" and is_matrix else "F32")
        weights = gguf.dequantize(new.data, new.tensor_type)
        tolerance = np.abs(old.data).max() / 127 / 2 * 1.2 if kind == "q8_0" and is_matrix else 0
        assert np.abs(weights - old.data).max() <= tolerance
