"""The documents: links lead somewhere, pages exist, and the reference names what there is."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import library_calls, random_heads, random_prompts, tiny_model
from stateful_models import table_of_types

from medusa import MedusaModel
from medusa.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "medusa/pretrained").rglob("*.md")]
)
specification = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
hooks = importlib.util.module_from_spec(specification)
specification.loader.exec_module(hooks)
MADE = {*hooks.DOCUMENTS.values(), *(f"reference/{room}.md" for room in (*hooks.ROOMS, hooks.REST))}
MADE |= {"reference/commands.md"}


def name_of(path):
    return str(path.relative_to(ROOT))


def pages(nav):
    """The pages below an entry of the navigation."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in pages(entry)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_between_documents_lead_to_files_that_exist(path):
    targets = re.findall(r"\]\(([^)#\s]+)", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL))
    made = {ROOT / "docs" / page for page in MADE}
    files = [(path.parent / each).resolve() for each in targets if "://" not in each]
    assert [file for file in files if file not in made and not file.exists()] == []


TODAY = [path for path in DOCUMENTS if path.name != "CHANGELOG.md" and "history" not in path.parts]


@pytest.mark.parametrize("path", TODAY, ids=name_of)
def test_files_of_the_project_that_a_document_names_exist(path):
    named = re.findall(r"`([\w.]+(?:/[\w.]+)+\.(?:py|cpp|yaml|jsonl))`", path.read_text())
    roots = (ROOT, ROOT / "medusa")
    missing = [name for name in named if not any((root / name).exists() for root in roots)]
    assert [name for name in missing if any((root / name).parent.exists() for root in roots)] == []


@pytest.mark.parametrize("path", TODAY, ids=name_of)
def test_a_number_that_links_to_the_measurements_stands_there(path):
    for text, page, place in re.findall(
        r"\[([^]]*\d[^]]*)\]\((\S+/MEASUREMENTS\.md)#(\S+)\)", path.read_text()
    ):
        sections = re.split(r"^#+ (.*)\n", (path.parent / page).read_text(), flags=re.MULTILINE)
        titled = zip(sections[1::2], sections[2::2], strict=True)
        (section,) = (rest for title, rest in titled if title.lower().replace(" ", "-") == place)
        assert set(re.findall(r"[\d.]*\d", text)) <= set(re.findall(r"[\d.]*\d", section)), text


def literals(path):
    """The texts in the code of a file; what a formatted one fills in is a null character."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.JoinedStr, ast.Constant)):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in parts)


def test_every_message_that_is_explained_is_one_of_the_programs():
    page = (ROOT / "docs/guides/troubleshooting.md").read_text()
    quotes = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(quotes) > 8
    known = [text for path in (ROOT / "medusa").rglob("*.py") for text in literals(path)]
    for quote in quotes:
        parts = [re.sub(r"'[^']*'|hidden_size", "\0", part) for part in quote.split("...")]
        pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
        assert any(map(pattern.search, known)), f"no program says {quote!r}"


def test_the_navigation_names_every_page_and_no_other():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages(settings["nav"])) == sorted(written | MADE)


def test_every_folder_of_the_library_has_a_page_of_reference():
    folders = {path.parent.name for path in (ROOT / "medusa").glob("*/__init__.py")}
    assert folders - {"cli", "pretrained"} == set(hooks.ROOMS) - {"model"}


def test_every_name_in_the_reference_can_be_imported():
    texts = [hooks.reference(room) for room in (*hooks.ROOMS, hooks.REST)]
    texts += [path.read_text() for path in DOCUMENTS]
    targets = [target for text in texts for target in re.findall(r"^::: (\S+)", text, re.MULTILINE)]
    assert len(targets) > 50
    has_triton = importlib.util.find_spec("triton") is not None
    for target in targets:
        if has_triton or not target.startswith("medusa.engine.card."):  # which import it, where they are used
            importlib.import_module(target)
    for module, name in re.findall(r"\]\[(medusa\.[\w.]+)\.(\w+)\]", "".join(texts)):
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_without_the_network(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    elsewhere = [
        page.name
        for page in tmp_path.rglob("*.html")
        if re.search(r"<(script|link|img)[^>]+(src|href)=\"https?://", page.read_text())
    ]
    assert elsewhere == []


PROGRAM = re.compile(rf"(?:train|inference|scripts)/\w+\.py|medusa (?:{'|'.join(COMMANDS)})(?![\w-])")


def commands_in(text):
    """(program, flags) of every command line in the code of a document."""
    for block in re.findall(r"^ *```sh\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.search(
                rf"(?:train|inference|scripts)/\w+\.py|medusa (?:{'|'.join(COMMANDS)})(?![\w-])", line
            )
            if found:
                yield found.group(), re.findall(r"(?<=\s)--([\w-]+)", line[found.end() :].partition("#")[0])


def test_every_program_that_a_document_runs_is_there():
    named = {program for path in DOCUMENTS for program, _ in commands_in(path.read_text())}
    assert len(named) > 8
    assert [name for name in named if "/" in name and not (ROOT / name).exists()] == []


@pytest.mark.slow
def test_every_flag_in_a_documents_commands_is_one_of_the_programs():
    given = {}
    for path in DOCUMENTS:
        for program, flags in commands_in(path.read_text()):
            given.setdefault(program, set()).update(flag.replace("_", "-") for flag in flags)
    for program, flags in given.items():
        known = set(re.findall(r"--([\w-]+)", hooks.help_text(program).replace("_", "-")))
        assert flags <= known, f"{program} has no {sorted(flags - known)}"


def test_the_guides_table_of_types_that_keep_a_state_is_what_loading_them_gives():
    """Where it is not, the message has the table to put there."""
    table = table_of_types()
    assert table in (ROOT / "docs/guides/recurrent.md").read_text(), table


def test_the_files_of_a_call_are_those_that_a_run_executes():
    model, prompt = MedusaModel(tiny_model("llama"), random_heads()), random_prompts(1, 9)
    library = ROOT / "medusa"
    executed = set()
    with library_calls(lambda frame: executed.add(frame.f_code.co_filename)):
        model.generate(prompt, max_new_tokens=12, do_sample=False)
    executed = {str(Path(name).relative_to(library)) for name in executed}
    _, _, section = (ROOT / "docs/concepts/request.md").read_text().partition("## The files of a call")
    assert set(re.findall(r"`([\w/]+\.py)`", section)) == executed
