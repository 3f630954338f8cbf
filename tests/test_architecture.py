"""The rules of the house, held by reading the source: see CONTRIBUTING.md."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = sorted((ROOT / "medusa").rglob("*.py"))
CORE = [path for path in LIBRARY if not {"training", "serving"} & set(path.parts)]
PROGRAMS = sorted(
    path for folder in ("train", "inference", "scripts") for path in (ROOT / folder).glob("*.py")
)
PROGRAM_NAMES = {path.stem for path in PROGRAMS} | {"train", "inference", "scripts", "tests"}
LATE = {
    "datasets",
    "deepspeed",
    "fastapi",
    "gguf",
    "httpx",
    "llama_cpp",
    "matplotlib",
    "peft",
    "prometheus_client",
    "pydantic",
    "starlette",
    "torchao",
    "uvicorn",
    "wandb",
}
FLOORS = (
    ("__main__",),
    ("cli",),
    ("measurement", "training", "interop", "serving"),
    ("model",),
    ("decoding",),
    ("drafters",),
    ("acceptance",),
    ("engine",),
    ("heads",),
    ("base",),
    ("trees",),
    (
        "checks",
        "choices",
        "files",
        "hardware",
        "hub",
        "plots",
        "pretrained",
        "progress",
        "prompts",
        "tables",
        "text_stream",
    ),
    ("places",),
)
"""The rooms of the library from top to bottom: a room imports from floors below it."""
TRAINING = ("run", "recipes", "states", "data", "losses", "config")
"""What medusa/training is made of, from top to bottom in the same way; distillation stands beside."""
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "legacy", "new", "old"}


def name_of(path):
    return str(path.relative_to(ROOT))


def imported(source):
    """(top-level package, full name, whether the import runs as soon as the module is imported)."""

    def visit(node, runs_at_once):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name.partition(".")[0], alias.name, runs_at_once
            elif isinstance(child, ast.ImportFrom):
                module = "." * child.level + (child.module or "")
                yield module.partition(".")[0], module, runs_at_once
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from visit(child, runs_at_once and not is_function)

    return list(visit(ast.parse(source), True))


def program_imports(source):
    return sorted(full for top, full, _ in imported(source) if top in PROGRAM_NAMES or full.startswith("."))


def early_imports(source):
    return sorted(full for top, full, runs_at_once in imported(source) if top in LATE and runs_at_once)


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_the_library_imports_no_program(path):
    reached = [name for name in program_imports(path.read_text()) if not name.startswith(".")]
    assert not reached, f"{name_of(path)} imports {reached}; move what both need into medusa/"


@pytest.mark.parametrize("path", PROGRAMS, ids=name_of)
def test_a_program_imports_no_program_and_nothing_from_its_own_folder(path):
    reached = program_imports(path.read_text())
    assert not reached, f"{name_of(path)} imports {reached}; move what both need into medusa/"


@pytest.mark.parametrize("path", PROGRAMS, ids=name_of)
def test_no_program_shadows_a_library_when_its_folder_is_first_on_the_path(path):
    taken = sys.stdlib_module_names | LATE | {"evaluate", "numpy", "torch", "transformers", "medusa", "yaml"}
    assert path.stem not in taken


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_the_library_imports_extras_and_slow_libraries_only_where_they_are_used(path):
    """`import medusa` and `medusa chat` work without the extras, and do not wait for a plotting library."""
    assert not early_imports(path.read_text())


@pytest.mark.parametrize("path", [*LIBRARY, *PROGRAMS], ids=name_of)
def test_every_module_says_what_it_is_and_is_named_after_it(path):
    source = path.read_text()
    assert ast.get_docstring(ast.parse(source)), f"{name_of(path)} has no docstring"
    assert path.stem not in VAGUE_NAMES


@pytest.mark.parametrize("path", [*LIBRARY, *PROGRAMS], ids=name_of)
def test_no_star_imports_and_no_swallowed_errors(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert all(alias.name != "*" for alias in node.names), f"line {node.lineno}: star import"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: bare except"


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path):
    """The library's own modules that a file imports anywhere, inside functions and for type checkers too."""
    known = {module_name(each) for each in LIBRARY}
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return sorted(found & known - {"medusa"})


def room_of(module):
    return module.split(".")[1]


@pytest.mark.parametrize(
    "path", [path for path in LIBRARY if path != ROOT / "medusa/__init__.py"], ids=name_of
)
def test_imports_run_down_the_floors(path):
    room = room_of(module_name(path))
    wrong = [
        module
        for module in imported_modules(path)
        if room_of(module) != room and FLOOR_OF[room_of(module)] <= FLOOR_OF[room]
    ]
    assert not wrong, f"{name_of(path)} stands in {room}, and imports {wrong} from the same floor or above"


@pytest.mark.parametrize(
    "path", [path for path in LIBRARY if path.parent.parent == ROOT / "medusa/training"], ids=name_of
)
def test_imports_run_down_the_floors_of_training(path):
    folder, below = path.parent.name, (*TRAINING, path.parent.name)
    reached = {each.split(".")[2] for each in imported_modules(path) if each.startswith("medusa.training.")}
    assert reached - {folder} <= set(below[below.index(folder) + 1 :])


def cycles(graph):
    """Every import cycle of ``graph`` (module -> modules), as the list of modules along it."""
    found, done = [], set()

    def visit(module, above):
        if module in above:
            found.append([*above[above.index(module) :], module])
        elif module not in done:
            for each in graph.get(module, ()):
                visit(each, [*above, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    return found


def test_no_two_modules_need_each_other():
    graph = {module_name(path): imported_modules(path) for path in LIBRARY if path.parent != ROOT / "medusa"}
    assert cycles(graph) == []


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


def test_every_folder_of_the_library_is_a_package():
    folders = {path.parent for path in LIBRARY}
    assert all((folder / "__init__.py").exists() for folder in folders)


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


def test_these_checks_see_what_they_forbid():
    assert cycles({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}) == [["a", "b", "c", "a"]]
    assert cycles({"a": ["b"], "b": ["c"], "d": ["b"]}) == []
    assert program_imports("def f():\n    from train_heads import x") == ["train_heads"]
    assert program_imports("import inference.chat\nfrom . import flags") == [".", "inference.chat"]
    assert program_imports("import medusa.training.run.trainer") == []
    assert early_imports("if True:\n    import matplotlib.pyplot") == ["matplotlib.pyplot"]
    assert early_imports("def f():\n    import matplotlib.pyplot") == []
