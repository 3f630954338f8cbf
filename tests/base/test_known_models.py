"""A model is known by what is in its file, whatever that is called."""

import shutil

import gguf
import pytest
from quantised_files import write_model

from medusa.assets import FETCHABLE_FILES, FetchableFile
from medusa.base.gguf_file import GGUFFile
from medusa.base.known_models import heads_for, heads_that_fit, model_signature
from medusa.cli.options import ModelOptions

pytestmark = pytest.mark.usefixtures("known")
TYPES = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def known(model, tmp_path, monkeypatch):
    """A model that `medusa fetch` would bring, and for which heads ship."""
    signature = model_signature(GGUFFile.open(model))
    file = FetchableFile("Tiny", "tiny.gguf", "MIT", "", (), 5, "0" * 64, signature)
    monkeypatch.setitem(FETCHABLE_FILES, "tiny", file)
    monkeypatch.setattr("medusa.assets.shipped_heads", lambda: {"tiny": tmp_path})
    monkeypatch.setattr("medusa.base.known_models.shipped_heads", lambda: {"tiny": tmp_path})


def test_a_file_of_a_known_model_gets_its_heads_under_any_name(model, tmp_path):
    (tmp_path / "models").mkdir()
    names = ["q15.gguf", "sha256-5ee4f07c", "models/Renamed.GGUF", "m-00001-of-00000.gguf"]
    for name in names:
        shutil.copy(model, tmp_path / name)
    for name in (*names, "models"):  # a directory with the file alone too
        assert heads_that_fit(str(tmp_path / name)) == "tiny"
        assert heads_for(str(tmp_path / name)) == "tiny"
        assert ModelOptions(base=str(tmp_path / name)).named_heads == "tiny"
        assert ModelOptions(base=str(tmp_path / name), heads="none").named_heads is None


def test_so_does_a_file_of_the_same_model_in_other_bits_and_no_file_of_another(tmp_path):
    same = write_model(tmp_path / "a.gguf", matrices=TYPES.Q8_0, others=TYPES.Q8_0)
    assert heads_that_fit(str(same)) == "tiny"
    other = write_model(tmp_path / "tiny.gguf", seed=1)
    assert heads_that_fit(str(other)) is None
    with pytest.raises(ValueError, match=r"exist for tiny, got base .*tiny.gguf"):
        heads_for(str(other))
    other.write_bytes(same.read_bytes())  # written anew
    assert heads_that_fit(str(other)) == "tiny"
    (tmp_path / "empty").mkdir()
    for base in (str(tmp_path / "empty"), str(tmp_path / "none.gguf"), "someone/tiny"):
        assert heads_that_fit(base) is None


def test_no_heads_are_known_that_do_not_ship(model, monkeypatch):
    monkeypatch.setattr("medusa.base.known_models.shipped_heads", dict)
    assert heads_that_fit(str(model)) is None
