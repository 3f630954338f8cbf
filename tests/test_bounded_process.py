"""Questions are answered in a process that is bounded in time, memory and stack, and is made anew."""

import sys

import pytest

from medusa.bounded_process import BoundedProcess, OutOfBounds

WORK = """
import mmap


def prepared(settings):
    held = mmap.mmap(-1, settings["megabytes"] << 20)

    def answer(question):
        name, number = question
        if name == "take":
            return len(mmap.mmap(-1, number << 20)) >> 20
        if name == "nest":
            return nest(number)
        while name == "turn":
            pass
        return [name, number, len(held) >> 20]

    return answer


def nest(depth):
    return depth and nest(depth - 1)
"""


@pytest.fixture
def process(tmp_path):
    """One that holds 800 MiB once it is prepared: addresses, of which none is written to."""
    work = tmp_path / "work.py"
    work.write_text(WORK)
    process = BoundedProcess(work, lambda: {"megabytes": 800}, seconds=1)
    yield process
    process._process.kill()


def test_it_is_prepared_once_and_answers_one_question_after_the_other(process):
    assert [process.ask(["say", number]) for number in (1, 2)] == [["say", 1, 800], ["say", 2, 800]]
    assert process.bounds == "1 seconds, 1024 MiB or a deep stack"


@pytest.mark.skipif(sys.platform != "linux", reason="bounds memory on Linux alone")
def test_a_question_may_take_a_gibibyte_beside_what_is_held_and_no_more(process):
    assert process.ask(["take", 900]) == 900
    with pytest.raises(OutOfBounds, match=r"more than 1 seconds, 1024 MiB"):
        process.ask(["take", 1100])
    assert process.ask(["say", 3]) == ["say", 3, 800]


@pytest.mark.parametrize("question", [["turn", 0], ["nest", 10**5]])
def test_a_question_that_does_not_end_or_nests_too_deep_ends_the_process_and_the_next_is_answered(
    process, question
):
    with pytest.raises(OutOfBounds):
        process.ask(question)
    assert process.ask(["say", 4]) == ["say", 4, 800]
