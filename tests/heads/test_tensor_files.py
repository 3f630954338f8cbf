"""Tensors of strangers: what is not plain numbers is refused by name, before memory is asked for."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from medusa.heads.tensor_files import read_tensors

BYTES = torch.zeros(4, 4, dtype=torch.uint8)
FLOAT8, FLOAT4 = BYTES.view(torch.float8_e4m3fn), BYTES.view(torch.float4_e2m1fn_x2)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (FLOAT8, r"must hold floats, got torch.float8_e4m3fn; quantised"),
        (FLOAT4, r"must hold floats, got torch.float4_e2m1fn_x2; quantised"),
        (torch.eye(4).to_sparse(), r"must be a plain one, got a torch.sparse_coo tensor; save it as"),
        (torch.eye(4).to_sparse_csr(), r"must be a plain one, got a torch.sparse_csr tensor"),
        (torch.empty(4, 4, device="meta"), r"must be a plain one, got a meta tensor"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"got a nested tensor"),
        (
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            r"got a nested tensor",
        ),
        (
            torch.zeros(1).expand(60_000, 60_000),
            r"repeats 4 bytes to 14,400,000,000 \(shape \(60000, 60000\)",
        ),
    ],
    ids=["float8", "float4", "sparse", "csr", "meta", "nested", "jagged", "stride 0"],
)
def test_a_tensor_that_is_not_plain_numbers_is_named(tmp_path, tensor, message):
    path = tmp_path / "medusa_lm_head.pt"
    torch.save({"0.0.linear.weight": tensor}, path)
    with pytest.raises(ValueError, match=rf"medusa_lm_head.pt: tensor '0.0.linear.weight' .*{message}"):
        read_tensors(path)


@pytest.mark.parametrize("tensor", [FLOAT8, FLOAT4], ids=["float8", "float4"])
def test_a_type_of_safetensors_that_nothing_computes_in_is_named(tmp_path, tensor):
    path = tmp_path / "model.safetensors"
    save_file({"a": tensor}, path)
    with pytest.raises(ValueError, match=r"model.safetensors: tensor 'a' must hold floats, got torch.float"):
        read_tensors(path)


def packed(path: Path) -> Path:
    """The same file with its entries packed, which torch reads too."""
    target = path.with_name("packed.pt")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in source.infolist():
            archive.writestr(entry.filename, source.read(entry))
    return target


def test_a_small_file_that_unpacks_to_a_large_one_is_refused_unread(tmp_path, monkeypatch):
    torch.save({"a": torch.zeros(500_000)}, tmp_path / "plain.pt")
    path = packed(tmp_path / "plain.pt")
    assert read_tensors(tmp_path / "plain.pt")["a"].shape == (500_000,)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("was read"))
    with pytest.raises(
        ValueError, match=r"packed.pt is packed, [\d,]+ bytes of 2,00\d,\d+, .* torch.save, or"
    ):
        read_tensors(path)


def test_tensors_that_share_their_memory_and_transposed_ones_are_plain(tmp_path):
    rows = torch.arange(12.0).view(3, 4)
    torch.save({"a": rows, "b": rows, "c": rows.T, "d": rows[1]}, tmp_path / "shared.pt")
    found = read_tensors(tmp_path / "shared.pt")
    assert torch.equal(found["c"], rows.T) and torch.equal(found["d"], rows[1])
