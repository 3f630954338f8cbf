"""Tables that fit a terminal."""

import pytest
from rich.console import Console

from medusa.tables import counted, print_table

HEADERS = ["name", *(f"column {n}" for n in range(9))]
ROWS = [["first", *(f"a{n}" for n in range(9))], ["a longer name", *(f"b{n}" for n in range(9))]]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_what_does_not_fit_follows_below_and_nothing_is_cut(capsys, width):
    print_table(Console(width=width), "Some numbers", HEADERS, ROWS, note="a note")
    printed = capsys.readouterr().out
    assert all(len(line) <= width for line in printed.splitlines())
    assert "…" not in printed
    assert all(printed.count(text) == 1 for text in [*HEADERS[1:], *ROWS[0][1:], *ROWS[1][1:]])
    assert (printed.count("first") == 1) == (width == 200)


def test_one_is_no_plural():
    assert (counted(1, "node"), counted(2, "node")) == ("1 node", "2 nodes")
