"""The rules of the house that no linter knows: see CONTRIBUTING.md."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = sorted((ROOT / "medusa").rglob("*.py"))
CPP = sorted((ROOT / "medusa/engine/cpp").glob("[!.]*"))
LONGEST_LINE = 120
"""Characters of a line of C++."""
PROGRAMS = sorted(
    path for folder in ("train", "inference", "scripts") for path in (ROOT / folder).glob("*.py")
)
FLOORS = (
    ("__main__",),
    ("cli",),
    ("measurement", "training", "interop", "serving"),
    ("model",),
    ("decoding", "reference"),
    ("drafters",),
    ("acceptance",),
    ("engine",),
    ("heads",),
    ("base",),
    ("trees", "learning"),
    (
        "bounded_process",
        "console",
        "files",
        "hardware",
        "hub",
        "options",
        "plots",
        "prompts",
        "revision",
        "text_stream",
    ),
    ("conversations", "assets"),
)
"""The rooms of the library from top to bottom: a room imports from floors below it."""
TRAINING = ("run", "recipes", "states", "data", "losses", "config", "endpoints")
"""What medusa/training is made of, from top to bottom in the same way; distillation stands beside."""
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported_modules(path):
    """All that a file imports anywhere, inside functions and for type checkers too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return sorted(found)


NAMES = {module_name(path) for path in LIBRARY} - {"medusa"}
GRAPH = {module_name(path): [each for each in imported_modules(path) if each in NAMES] for path in LIBRARY}


def test_nobody_imports_a_program():
    programs = {path.stem for path in PROGRAMS} | {"train", "inference", "scripts", "tests"}
    for path in [*LIBRARY, *PROGRAMS]:
        reached = {each.partition(".")[0] for each in imported_modules(path)} & programs
        assert not reached, f"{path} imports {reached}; move what both need into medusa/"


def test_no_program_shadows_a_library_when_its_folder_is_first_on_the_path():
    libraries = {"datasets", "evaluate", "numpy", "torch", "transformers", "medusa", "yaml", "wandb"}
    assert not {path.stem for path in PROGRAMS} & (sys.stdlib_module_names | libraries)


@pytest.mark.parametrize("room", sorted(FLOOR_OF))
def test_imports_run_down_the_floors(room):
    for module, imported in GRAPH.items():
        if module.split(".")[1:2] == [room]:
            others = {each for each in imported if each.split(".")[1] != room}
            wrong = {each for each in others if FLOOR_OF[each.split(".")[1]] <= FLOOR_OF[room]}
            assert not wrong, f"{module} imports {wrong} from the same floor or above"


def test_imports_run_down_the_floors_of_training():
    for module, imported in GRAPH.items():
        folder = module.split(".")[2] if module.startswith("medusa.training.") else None
        if folder in TRAINING:
            below = TRAINING[TRAINING.index(folder) :]
            reached = {each.split(".")[2] for each in imported if each.startswith("medusa.training.")}
            assert reached <= {*below}, module


def cycle_in(graph):
    """An import cycle of ``graph`` (module -> modules), as the modules along it; None where there is none."""
    done = set()

    def visit(module, above):
        if module in above:
            return [*above[above.index(module) :], module]
        if module not in done:
            for each in graph.get(module, ()):
                if (found := visit(each, [*above, module])) is not None:
                    return found
            done.add(module)
        return None

    return next((found for module in graph if (found := visit(module, [])) is not None), None)


def test_no_two_modules_need_each_other():
    assert cycle_in({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}) == ["a", "b", "c", "a"]
    assert cycle_in({"a": ["b"], "b": ["c"], "d": ["b"]}) is None
    assert cycle_in({module: imported for module, imported in GRAPH.items() if module != "medusa"}) is None


def long_lines(text):
    """The numbers of the lines that are longer than C++ here may be."""
    return [number for number, line in enumerate(text.splitlines(), 1) if len(line) > LONGEST_LINE]


def test_lines_of_cpp_can_be_read_without_scrolling():
    assert long_lines("x" * LONGEST_LINE + "\n" + "é" * (LONGEST_LINE + 1)) == [2]
    assert len(CPP) > 20
    files = [*CPP, ROOT / "tests/engine/tiles.h"]
    assert {str(path): found for path in files if (found := long_lines(path.read_text()))} == {}


def test_the_list_of_operators_names_files_that_exist():
    folder = ROOT / "medusa/engine/cpp"
    named = re.findall(r"^// (\w+\.cpp)", (folder / "operators.h").read_text(), re.MULTILINE)
    assert len(named) > 5 and [name for name in named if not (folder / name).exists()] == []


def test_type_checkers_see_the_public_names_where_python_finds_them():
    tree = ast.parse((ROOT / "medusa/__init__.py").read_text())
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("medusa")
        for alias in node.names
    }
    homes = next(n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "_HOME")
    assert seen == ast.literal_eval(homes)


def test_the_paths_in_the_picture_of_the_house_exist():
    picture = (ROOT / "CONTRIBUTING.md").read_text().partition("```text\n")[2].partition("```")[0]
    paths = [line.split()[0] for line in picture.splitlines() if line.strip()]
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
    rooms = {
        path.stem if path.is_file() else path.name for path in map(Path, (ROOT / "medusa").glob("[a-z]*"))
    }
    drawn = {Path(path).stem for path in paths if path.startswith("medusa/")}
    assert rooms - drawn == set(), "rooms that the map leaves out"


def test_the_list_of_floors_in_the_documents_is_the_one_that_is_held():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("__main__ > ")]
    floors = [tuple(sorted(floor.split(", "))) for floor in line.split(" > ")]
    assert floors == [tuple(sorted(floor)) for floor in FLOORS]
