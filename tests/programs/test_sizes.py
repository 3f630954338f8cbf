"""``scripts/sizes.py``: what its contenders read is there before they are measured."""

from __future__ import annotations

import conftest


def test_each_file_that_a_contender_reads_is_written_once(tmp_path, monkeypatch):
    sizes = conftest.program("scripts/sizes.py")
    written = []

    def write_shape(shape, directory, tokenizer):
        directory.mkdir()
        (directory / "config.json").touch()

    def write_gguf(directory, target, kind):
        written.append(kind)
        target.touch()

    monkeypatch.setattr(sizes, "write_shape", write_shape)
    monkeypatch.setattr(sizes, "write_gguf", write_gguf)
    monkeypatch.setattr(sizes, "apart", lambda *command: 0.0)
    directory = tmp_path / "1B"
    for _ in range(2):
        sizes.prepare("1B", directory, [*sizes.OURS, *sizes.THEIRS, "file Q8_0"], tmp_path)
    assert written == ["BF16", "Q8_0"]
    assert sorted(each.name for each in directory.glob("*.gguf")) == ["BF16.gguf", "Q8_0.gguf"]
