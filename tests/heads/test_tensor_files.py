"""Tensors of strangers: what is not plain numbers is refused by name, before memory is asked for."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from damage import write_tensors
from refusals import refusals
from safetensors.torch import save_file

from medusa.heads.tensor_files import read_tensors

BYTES = torch.zeros(4, 4, dtype=torch.uint8)
FLOAT8, FLOAT4 = BYTES.view(torch.float8_e4m3fn), BYTES.view(torch.float4_e2m1fn_x2)


NESTED = [torch.ones(2), torch.ones(3)]
JAGGED = torch.nested.nested_tensor(NESTED, layout=torch.jagged)
TENSORS = [
    ("float8", FLOAT8, "must hold floats, got torch.float8_e4m3fn; quantised"),
    ("float4", FLOAT4, "must hold floats, got torch.float4_e2m1fn_x2; quantised"),
    ("ints", torch.zeros(3).int(), "must hold floats, got torch.int32"),
    ("no number", torch.full((3,), torch.nan), "must hold finite numbers"),
    ("sparse", torch.eye(4).to_sparse(), "must be a plain one, got a torch.sparse_coo tensor"),
    ("csr", torch.eye(4).to_sparse_csr(), "must be a plain one, got a torch.sparse_csr tensor"),
    ("meta", torch.empty(4, 4, device="meta"), "must be a plain one, got a meta tensor"),
    ("nested", torch.nested.nested_tensor(NESTED), "must be a plain one, got a nested tensor"),
    ("jagged", JAGGED, "must be a plain one, got a nested tensor"),
    ("stride 0", torch.zeros(1).expand(60_000, 60_000), "repeats 4 bytes to 14,400,000,000"),
]
SAFE, PICKLE = "model.safetensors", "medusa_lm_head.pt"


class Unwelcome:
    """What a pickle may hold beside tensors."""


def cut_short(length: int, path: Path) -> None:
    write_tensors(path, {"a": torch.zeros(3000)})
    path.write_bytes(path.read_bytes()[:length])


def read(file: str, write: Callable[[Path], object], tmp_path: Path) -> None:
    write(tmp_path / file)
    read_tensors(tmp_path / file)


def pickled(value) -> partial:
    return partial(read, PICKLE, partial(torch.save, value))


test_a_file_that_is_not_plain_numbers_by_name_is_refused = refusals(
    *(
        (f"{id}, pickled", pickled({"a": each}), f"{PICKLE}: tensor 'a' {words}")
        for id, each, words in TENSORS
    ),
    *(
        (id, partial(read, SAFE, partial(save_file, {"a": each})), f"{SAFE}: tensor 'a' {words}")
        for id, each, words in TENSORS[:4]
    ),
    *(
        (
            f"{file} cut to {length}",
            partial(read, file, partial(cut_short, length)),
            f"{file} is damaged or cut short",
        )
        for file in (SAFE, PICKLE)
        for length in (0, 5, 40, -1, -5000)
    ),
    (
        "text",
        partial(read, PICKLE, partial(Path.write_text, data="hello")),
        f"{PICKLE} is damaged or cut short",
    ),
    ("objects", pickled({"a": Unwelcome()}), f"{PICKLE} holds pickled Python objects beside tensors"),
    ("a list", pickled([torch.zeros(2)]), f"{PICKLE} must hold tensors by name, got list"),
    ("two levels", pickled({"state_dict": {}}), "must hold tensors by name, got dict at 'state_dict'"),
)


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
    with pytest.raises(ValueError, match=r"packed.pt is packed, [\d,]+ bytes of 2,00\d,\d+, .* torch.save"):
        read_tensors(path)


def test_tensors_that_share_their_memory_and_transposed_ones_are_plain(tmp_path):
    rows = torch.arange(12.0).view(3, 4)
    torch.save({"a": rows, "b": rows, "c": rows.T, "d": rows[1]}, tmp_path / "shared.pt")
    found = read_tensors(tmp_path / "shared.pt")
    assert torch.equal(found["c"], rows.T) and torch.equal(found["d"], rows[1])
