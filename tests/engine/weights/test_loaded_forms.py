"""Each kind of checkpoint loads by its name: with the text of ``transformers``, and in the memory that the
check of memory named before anything was read. What is as wide as real models stands on a page."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from checkpoint_kinds import KINDS, TINY, WEIGHTS, WIDE, bytes_held, in_mxfp4
from conftest import CHECKOUT, OracleDrafter, needs_kernels, random_prompts
from safetensors.torch import load_file, save_file

from medusa import CandidateTree, MedusaModel
from medusa.base.loading import find_base, is_held_quantised, quantised_directory
from medusa.base.recurrent import is_recurrent
from medusa.base.text_part import auto_class
from medusa.engine.weights import load, plan
from medusa.hardware import device_name

pytestmark = needs_kernels
GREEDY = {"do_sample": False, "max_new_tokens": 16}
WIDER = 1.3
"""Bytes held for each byte of the files, at most: norms are widened, and panels padded."""
TWICE = 2.0
"""FP8 is widened to bfloat16, and Q2_K and Q3_K are held in 4 bits; and an LM head is packed beside the rows
of a tied embedding in the file."""
NAMED = [(section, kind) for section, kinds in KINDS.items() for kind in kinds]
PAGE = CHECKOUT / "docs" / "guides" / "checkpoints.md"
ROW = re.compile(r"^\| (.+?) \| ([\d.]+ \| [\d.]+ \| [\d.]+) \|$", re.MULTILINE)
HEADINGS = "| kind | files, GB | named before, GB | held, GB |\n|---|---:|---:|---:|\n"


@dataclass
class Loaded:
    """Bytes of a base: in its files, as the check of memory named them, and as they are held."""

    in_files: int
    named: int
    held: int

    @property
    def row(self) -> str:
        return " | ".join(f"{each / 1e9:.2f}" for each in (self.in_files, self.named, self.held))


def theirs(path):
    """The model as ``transformers`` loads it, whole and in float32; of quantised files with their numbers."""
    source = find_base(path)
    if source.gguf is not None or is_held_quantised(source):
        return load.load_base(path)
    return auto_class(source.config).from_pretrained(path, dtype=torch.float32).eval()


def loaded(section, kind, widths, directory, monkeypatch):
    """Loads a checkpoint, and holds its logits, its text with drafts and without, and its memory to what
    ``transformers`` and the check of memory say."""
    named = []

    def note(weights, engine):
        named.append(plan.num_bytes(plan.planned(weights, engine)))
        plan.check_fits(weights, engine)

    monkeypatch.setattr(load, "check_fits", note)
    torch.manual_seed(5)
    path = KINDS[section][kind](directory, widths)
    model = MedusaModel.from_pretrained(path, engine="packed")
    ids = random_prompts(1, 9)
    own = theirs(path)
    with torch.no_grad():
        expected, logits = own(ids).logits, model.engine_base(ids).logits
    assert (logits - expected).abs().max() < 3e-4 * (1 + expected.abs().max())
    reference = own.generate(ids, **GREEDY, attention_mask=torch.ones_like(ids))
    del own
    tree = (
        CandidateTree.chain(2) if is_recurrent(model.base) else CandidateTree.from_paths([(0,), (1,), (0, 0)])
    )
    for drafter in ("plain", OracleDrafter(reference.tolist(), tree, hit_rate=0.8)):
        assert model.generate(ids, **GREEDY, drafter=drafter).tolist() == reference.tolist(), drafter
    files = [each for each in directory.iterdir() if each.suffix in (".safetensors", ".bin", ".gguf")]
    said = named[0]  # the others are of what it is held against
    return Loaded(sum(each.stat().st_size for each in files), said, bytes_held(model.engine_base, model.base))


def check_memory(sizes, kind):
    """What was named is what is held."""
    assert sizes.held == sizes.named
    is_twice = any(name in kind for name in ("FP8", "Q2_K", "tied"))
    assert sizes.held < (TWICE if is_twice else WIDER) * sizes.in_files


@pytest.mark.parametrize(("section", "kind"), NAMED)
def test_a_kind_loads_by_its_name_exactly_and_in_the_memory_that_was_named(
    section, kind, tmp_path, monkeypatch
):
    check_memory(loaded(section, kind, TINY, tmp_path, monkeypatch), kind)


@pytest.mark.parametrize(("section", "kind"), NAMED)
def test_int8_takes_the_memory_that_is_named_too(section, kind, tmp_path):
    path = KINDS[section][kind](tmp_path, TINY)
    assert bytes_held(load.load_base(path, "int8")) == plan.held_bytes(find_base(path), "int8")


def rows_of_page():
    sections = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {
        (section, kind): numbers
        for section, text in zip(sections[::2], sections[1::2], strict=True)
        for kind, numbers in ROW.findall(text)
    }


@pytest.fixture(scope="module")
def page(request):
    """Rows of the page by section and kind. With ``--write-pages`` those that were tried are written anew:
    ``pytest -m slow tests/engine/weights/test_loaded_forms.py --write-pages``."""
    rows = {}
    yield rows
    if request.config.getoption("--write-pages") and rows:
        rows = rows_of_page() | rows
        tables = [
            f"## {section}\n\n{HEADINGS}"
            + "".join(f"| {kind} | {rows[section, kind]} |\n" for kind in kinds if (section, kind) in rows)
            for section, kinds in KINDS.items()
        ]
        head, _, _ = PAGE.read_text().partition("\n## ")
        where = f"Tried on {device_name(torch.device('cpu'))}.\n"
        PAGE.write_text("\n".join([f"{head}\n" if not head.endswith("\n") else head, *tables, where]))


@pytest.mark.slow
@pytest.mark.parametrize(("section", "kind"), NAMED)
def test_so_does_one_as_wide_as_real_models(section, kind, tmp_path, monkeypatch, page):
    sizes = loaded(section, kind, WIDE, tmp_path, monkeypatch)
    check_memory(sizes, kind)
    page[section, kind] = sizes.row


def test_the_page_names_the_kinds_that_are_tried():
    assert list(rows_of_page()) == NAMED


def test_experts_that_are_not_whole_are_refused_by_name(tmp_path):
    tensors = load_file(in_mxfp4(tmp_path) / WEIGHTS)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    for scales in (tensors[name][:, :, :1].clone(), None):
        changed = {**tensors, name: scales}
        save_file({key: each for key, each in changed.items() if each is not None}, tmp_path / WEIGHTS)
        with pytest.raises(ValueError, match=rf"{name}' must have shape \(4, 128, 4\)"):
            MedusaModel.from_pretrained(tmp_path)
    assert "experts" in quantised_directory(find_base(tmp_path)).described
