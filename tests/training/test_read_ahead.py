"""Micro-batches are read before they are asked for, in order, and no further than asked."""

from __future__ import annotations

import threading
import time

import pytest

from medusa.training.data.batching import read_ahead

GROUPS = [(number, [(number, part) for part in range(3)]) for number in range(8)]


@pytest.mark.parametrize("num_workers", [0, 1, 4])
def test_every_batch_comes_once_in_order(num_workers):
    found = [(group, [read() for read in reads]) for group, reads in read_ahead(GROUPS, str, num_workers)]
    assert found == [(number, [str(batch) for batch in batches]) for number, batches in GROUPS]


def test_the_next_groups_are_read_while_one_is_worked_on_and_not_all_of_them():
    began, all_of_two = [], threading.Event()

    def read(batch):
        began.append(batch)
        if len(began) >= 6:
            all_of_two.set()
        return batch

    coming = read_ahead(GROUPS, read, 2)
    next(coming)
    assert all_of_two.wait(timeout=10), "the second group was not read beforehand"
    time.sleep(0.05)
    assert len(began) < 12
    coming.close()


def test_without_workers_nothing_is_read_before_it_is_asked_for():
    began = []
    _, reads = next(read_ahead(GROUPS, began.append, 0))
    assert began == []
    reads[1]()
    assert began == [(0, 1)]


def test_what_fails_while_reading_is_raised_where_it_is_asked_for():
    def fail(batch):
        raise OSError("the disk is gone")

    _, reads = next(read_ahead(GROUPS, fail, 1))
    with pytest.raises(OSError, match="the disk is gone"):
        reads[0]()
