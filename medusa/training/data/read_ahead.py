"""Reading micro-batches while the device works on earlier ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

G = TypeVar("G")
B = TypeVar("B")


def read_ahead(
    groups: Iterable[tuple[G, Sequence[B]]], read: Callable[[B], Any], num_workers: int
) -> Generator[tuple[G, list[Callable[[], Any]]], None, None]:
    """Each group with, for each of its batches, a function that waits for what ``read`` gives of it.

    ``num_workers`` threads read in order, so many batches ahead of the group that was given out last, or more
    where groups are larger. 0: nothing is read before it is asked for.
    """
    if not num_workers:
        for group, batches in groups:
            yield group, [lambda batch=batch: read(batch) for batch in batches]  # type: ignore[misc]
        return
    coming: deque[tuple[G, list[Future]]] = deque()
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="reading")
    try:
        left = iter(groups)
        while True:
            while sum(len(futures) for _, futures in list(coming)[1:]) < num_workers:
                following = next(left, None)
                if following is None:
                    break
                coming.append((following[0], [pool.submit(read, batch) for batch in following[1]]))
            if not coming:
                return
            group, futures = coming.popleft()
            yield group, [future.result for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)
