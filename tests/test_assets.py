"""Names stand for what ships, and paths for themselves."""

import pytest

from medusa.assets import (
    EMBEDDED_BASE,
    FETCHABLE_FILES,
    FetchableFile,
    cache_home,
    embedded_base,
    is_embedded_base,
    known_heads,
    name_in_reports,
    named_file,
    shipped_files,
)


def test_a_path_stands_for_itself_and_a_name_for_what_ships(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()  # a directory is no configuration
    assert named_file("smollm2", ".yaml", "file") == shipped_files() / "smollm2.yaml"
    (tmp_path / "smollm2_demo").write_text("of my own")
    assert named_file("smollm2_demo", ".yaml", "file").read_text() == "of my own"


@pytest.mark.parametrize("given", ["smolm2_demo", "configs/smollm2_dem.yaml"])
def test_a_wrong_name_is_answered_with_the_nearest(given):
    with pytest.raises(FileNotFoundError, match=f"file '{given}' .*did you mean 'smollm2_demo'"):
        named_file(given, ".yaml", "file")
    with pytest.raises(FileNotFoundError, match="or one of coding_heldout, demo_heldout, demo_prompts"):
        named_file("zzz", ".jsonl", "file")


def test_a_package_that_is_installed_has_its_configurations_in_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("medusa.assets.PACKAGE", tmp_path / "site-packages" / "medusa")
    assert shipped_files() == tmp_path / "site-packages/medusa/configs"
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/pyproject.toml").touch()
    assert shipped_files() == tmp_path / "site-packages/configs"


def test_the_cache_is_where_the_user_wants_it(tmp_path, monkeypatch):
    monkeypatch.delenv("MEDUSA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_home() == tmp_path / "medusa"
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path / "mine"))
    assert cache_home() == tmp_path / "mine"


def test_the_embedded_base_is_known_by_name_and_by_directory(tmp_path, monkeypatch):
    monkeypatch.setattr("medusa.assets.checkout", lambda: None)
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))
    home = tmp_path / "models" / EMBEDDED_BASE
    home.mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"fetch it once: `medusa fetch smollm2-135m-instruct`"):
        embedded_base()  # a directory without a model
    (home / "config.json").touch()
    assert embedded_base() == home
    monkeypatch.chdir(tmp_path / "models")
    assert is_embedded_base(EMBEDDED_BASE) and is_embedded_base(str(home))
    assert not is_embedded_base("another/model")


def test_heads_that_ship_are_known_by_the_names_that_a_base_has(tmp_path, monkeypatch):
    file = FetchableFile("Tiny", "tiny.gguf", "MIT", "", (), 5, "0" * 64, same_model=("someone/Tiny",))
    monkeypatch.setitem(FETCHABLE_FILES, "tiny", file)
    bases = ["tiny", "someone/Tiny", "someone/Tiny@main", "someone/Tiny:Q4_K_M"]
    assert [known_heads(base) for base in bases] == [None] * 4  # no heads ship
    monkeypatch.setattr("medusa.assets.shipped_heads", lambda: {"tiny": tmp_path})
    assert [known_heads(base) for base in bases] == ["tiny"] * 4
    for base in ("another/Tiny", "someone/Tiny2", str(tmp_path)):
        assert known_heads(base) is None


def test_a_report_names_no_directory_of_the_machine_that_others_lack(tmp_path, monkeypatch):
    fetched = FetchableFile("Tiny", "tiny.gguf", "MIT", "", (), 5, "0" * 64)
    monkeypatch.setitem(FETCHABLE_FILES, "tiny", fetched)
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert name_in_reports(str(fetched.home("tiny") / "tiny.gguf")) == "tiny"
    assert name_in_reports(str(tmp_path / "models" / "mine")) == "models/mine"
    for name in ("owner/name", "owner/name:Q4_K_M", "/elsewhere/mine"):
        assert name_in_reports(name) == name
