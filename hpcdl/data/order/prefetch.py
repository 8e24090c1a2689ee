"""Prefetching: a background thread makes the next item while the caller uses this one.

    caller    use 0          use 1          use 2
    thread    make 1 ......  make 2 ......  make 3

The thread starts on item k + 1 when the caller gets item k, so a producer that reuses its buffers needs two of them."""

from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")


def prefetch(items: Iterable[Item]) -> Generator[Item, None, None]:
    """Yield the items; a thread makes the next one. An error is raised at its item. Closing ends the thread."""
    source: Iterator[Any] = iter(items)
    end: Any = object()
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hpcdl-prefetch")
    try:
        ahead = pool.submit(next, source, end)
        while (item := ahead.result()) is not end:
            ahead = pool.submit(next, source, end)
            yield item
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        if hasattr(source, "close"):
            source.close()  # a generator: its own `finally` runs now, not whenever it is collected
