"""One statement a line, and names that say what the thing is: as far as a program can tell it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from conftest import CHECKOUT

LIBRARY = CHECKOUT / "medusa"
ROOMS = ("", *sorted(path.name for path in LIBRARY.iterdir() if (path / "__init__.py").exists()))
"""The packages of the library, and "" for the modules beside them."""


PLACEHOLDERS = frozenset(["asked", "each", "found", "given", "here", "made", "read", "said", "there", "told"])
"""Names that say how a value came about, and not what it is."""
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def placeholders(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The lines of ``tree`` where a parameter or a variable has a placeholder for its name. In a
    comprehension, where it lives for a line, and as a field, beside its class, it may have."""
    short_lived = {
        name
        for node in ast.walk(tree)
        if isinstance(node, COMPREHENSIONS)
        for generator in node.generators
        for name in ast.walk(generator.target)
    }
    fields = {
        statement.target
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.arg in PLACEHOLDERS:
            yield node.lineno, f"has a parameter named {node.arg!r}"
        is_stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        if is_stored and node.id in PLACEHOLDERS and node not in short_lived | fields:
            yield node.lineno, f"names a value {node.id!r}"


def compressions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The lines of ``tree`` that do several things at once, and what they do."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and is_parallel(node):
            yield node.lineno, "assigns several values at once"
        if isinstance(node, ast.If | ast.Return | ast.Assign | ast.Expr) and names_inside(node):
            yield node.lineno, "names a value inside of an expression"
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            yield from unpacked_tuples(function)


def is_parallel(node: ast.Assign) -> bool:
    """Whether several names get values of their own; not a pair of constants, nor a swap."""
    if not isinstance(node.value, ast.Tuple) or len(node.value.elts) < 2:
        return False
    if all(isinstance(value, ast.Constant) for value in node.value.elts):
        return False
    (targets,) = (target.elts for target in node.targets if isinstance(target, ast.Tuple))
    return {ast.unparse(each) for each in targets} != {ast.unparse(each) for each in node.value.elts}


def names_inside(node: ast.stmt) -> bool:
    """Whether the expression of a statement holds a ``:=``, comprehensions left out."""
    expression = node.test if isinstance(node, ast.If) else getattr(node, "value", None)
    waiting = [] if expression is None else [expression]
    while waiting:
        part = waiting.pop()
        if isinstance(part, ast.NamedExpr):
            return True
        if not isinstance(part, COMPREHENSIONS):
            waiting += ast.iter_child_nodes(part)
    return False


def unpacked_tuples(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """Calls whose arguments are a tuple that a line above has built."""
    built = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(function):
        for argument in node.args if isinstance(node, ast.Call) else []:
            if isinstance(argument, ast.Starred) and getattr(argument.value, "id", None) in built:
                yield node.lineno, "takes a tuple that was built above"


@pytest.mark.parametrize("rule", [compressions, placeholders])
@pytest.mark.parametrize("room", ROOMS)
def test_a_line_does_one_thing_and_a_name_says_what_the_thing_is(room, rule):
    files = (LIBRARY / room).rglob("*.py") if room else LIBRARY.glob("*.py")
    refused = [
        f"{path.relative_to(CHECKOUT)}:{line} {what}"
        for path in sorted(files)
        for line, what in rule(ast.parse(path.read_text()))
    ]
    assert not refused, "\n".join(refused)


@pytest.mark.parametrize(
    "line", ["found = f()", "for each in a: pass", "def f(given): pass", "found: int = 1"]
)
def test_placeholders_are_refused(line):
    assert list(placeholders(ast.parse(line)))


@pytest.mark.parametrize("line", ["a = [f(each) for each in b]", "class A:\n read: int", "a.found = 1"])
def test_other_names_pass(line):
    assert not list(placeholders(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "a, b = 1, c.d",
        "if (a := f()) is not None: pass",
        "return (a := f())",
        "def f():\n arguments = a, b\n return g(*arguments)",
    ],
)
def test_what_does_several_things_is_refused(line):
    assert list(compressions(ast.parse(line if "def" in line else f"def f():\n {line}")))


@pytest.mark.parametrize(
    "line", ["a, b = b, a", "a, b = f()", "while (a := f()): pass", "x = [b for a in c if (b := f(a))]"]
)
def test_what_does_one_thing_passes(line):
    assert not list(compressions(ast.parse(line)))
