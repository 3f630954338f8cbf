"""Tables that fit a terminal."""

import pytest
from rich.console import Console

from medusa.console import cell, counted, print_table

HEADERS = ["name", *(f"column {n}" for n in range(9))]
COLUMNS = {header: (at, "{}") for at, header in enumerate(HEADERS)}
ROWS = [["first", *(f"a{n}" for n in range(9))], ["a longer name", *(f"b{n}" for n in range(9))]]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_what_does_not_fit_follows_below_and_nothing_is_cut(capsys, width):
    print_table(Console(width=width), "Some numbers", COLUMNS, ROWS, note="a note")
    printed = capsys.readouterr().out
    assert all(len(line) <= width for line in printed.splitlines())
    assert "…" not in printed
    assert all(printed.count(text) == 1 for text in [*HEADERS[1:], *ROWS[0][1:], *ROWS[1][1:]])
    assert (printed.count("first") == 1) == (width == 200)


def test_one_is_no_plural():
    assert (counted(1, "node"), counted(2, "node")) == ("1 node", "2 nodes")


def test_what_is_not_known_is_a_dash():
    assert (cell(0.5, "{:.1%}"), cell(None, "{:.1%}")) == ("50.0%", "-")
    assert (cell([1.0, 2.0], "{:.1f} to {:.1f}"), cell([None, None], "{} to {}")) == ("1.0 to 2.0", "-")
