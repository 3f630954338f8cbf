"""Numbers out of their range are named, with the rule; so is what two configurations differ in."""

from types import SimpleNamespace

import pytest

from medusa.options import check_above, check_at_least, check_within, differences


@pytest.mark.parametrize(
    ("check", "rule", "kept", "refused"),
    [
        (lambda options: check_at_least(options, 1, "number"), "at least 1", [1, 2.5, None], [0, 0.9]),
        (lambda options: check_above(options, 0, "number"), "above 0", [1e-9, None], [0, -1, float("inf")]),
        (lambda options: check_within(options, "(0, 1]", "number"), r"in \(0, 1\]", [1, [0.1, 1]], [0, 1.1]),
        (lambda options: check_within(options, "[0, 1)", "number"), r"in \[0, 1\)", [0], [1, [0, 1]]),
    ],
    ids=["at least", "above", "in (0, 1]", "in [0, 1)"],
)
def test_a_number_out_of_its_range_is_named_with_the_rule(check, rule, kept, refused):
    for number in kept:
        check(SimpleNamespace(number=number))
    for number in [*refused, float("nan")]:
        with pytest.raises(ValueError, match=rf"number must be {rule}, got "):
            check(SimpleNamespace(number=number))


def test_numbers_that_no_array_takes_are_refused():
    with pytest.raises(ValueError, match=r"number must be below 2\*\*63, got"):
        check_at_least(SimpleNamespace(number=10**40), 1, "number")


def test_what_two_configurations_differ_in_is_said_by_key():
    assert differences({"a": 1, "b": [2]}, {"a": 1, "b": [3], "c": "x"}) == [
        "b was [2] and is [3]",
        "c was None and is 'x'",
    ]
