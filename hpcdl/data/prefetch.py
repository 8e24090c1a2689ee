"""Prefetching: a background thread makes the next item while the caller uses this one.

    caller    use 0          use 1          use 2
    thread    make 1 ......  make 2 ......  make 3

One item is ahead: the thread starts on item k + 1 when the caller gets item k. A producer that reuses its buffers
needs one for the item in use and one for the item in the making.
"""

from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")


def prefetch(items: Iterable[Item]) -> Generator[Item, None, None]:
    """Yield the items, each made one ahead in a thread; an error in the thread is raised here, at its item.

    The thread ends with the items, with an error, or when the caller closes (or drops) the iterator early.
    """
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
