"""``medusa compile``, and answers in compiled steps once their library is there."""

from __future__ import annotations

import pytest
from conftest import REAL_BASE, tiny_model

from medusa import MedusaModel
from medusa.cli.chat_session import use_compiled_if_there
from medusa.cli.main import main
from medusa.decoding.steps import Libraries
from medusa.drafters.compiled import CompiledDrafter


class Compiled:
    setup_seconds = 321.0


@pytest.fixture
def compiling(monkeypatch):
    """Compiling leaves an empty library; the directories that it was asked for."""
    made = []

    def compiled_pass(self, layers=()):
        made.extend(self.paths([]))
        made[-1].parent.mkdir(parents=True, exist_ok=True)
        made[-1].touch()
        return Compiled(), Compiled.setup_seconds

    def prepare(self, is_sampled):
        made.append(self.path(is_sampled))
        made[-1].touch()
        return 0.0

    monkeypatch.setattr(Libraries, "compiled_pass", compiled_pass)
    monkeypatch.setattr(CompiledDrafter, "prepare", prepare)
    yield made
    for path in made:
        path.unlink(missing_ok=True)


def test_answers_are_compiled_once_the_library_is_there(compiling):
    model = MedusaModel(tiny_model("llama"), engine="packed")
    use_compiled_if_there(model)
    assert not model.is_compiled and model.step == "general"
    assert model.compile() == 321.0 and model.is_compiled
    use_compiled_if_there(model)
    assert model.step == "compiled"
    model.step = "static"
    use_compiled_if_there(model)
    assert model.step == "static", "the caller has chosen another kind of step"


def test_an_engine_that_keeps_no_library_is_refused(compiling):
    model = MedusaModel(tiny_model("llama"), engine="eager")
    assert not model.is_compiled
    with pytest.raises(ValueError, match="step='compiled' needs engine='packed' or 'int8'"):
        model.compile()


@pytest.mark.skipif(not REAL_BASE.exists(), reason="needs `make models`")
def test_the_command_compiles_and_says_how_long_it_took(compiling, capsys):
    assert main(["compile", "--base", str(REAL_BASE), "--engine", "int8"]) == 0
    assert "compiled, ready after 321.0 s" in capsys.readouterr().err
    names = [path.name.rsplit("-", 1)[0] for path in compiling]
    assert set(names) == {"llama-int8", "draft"} and len(set(compiling)) == 1 + 2 * 2, "two trees"
    assert main(["compile", "--base", str(REAL_BASE), "--engine", "int8"]) == 0
    assert "was there" in capsys.readouterr().err
