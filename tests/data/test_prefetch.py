"""The background thread: order, one item ahead, errors at their place, a clean end."""

import queue
import threading
import time

import pytest

from hpcdl.data.order.prefetch import prefetch


def alive():
    return [thread for thread in threading.enumerate() if thread.name.startswith("hpcdl-prefetch")]


def test_items_come_in_order_made_by_another_thread():
    threads = set()

    def items():
        for i in range(50):
            threads.add(threading.get_ident())
            yield i

    assert list(prefetch(items())) == list(range(50))
    assert len(threads) == 1 and threading.get_ident() not in threads
    assert list(prefetch([])) == []
    assert not alive()


def test_exactly_one_item_is_ahead():
    made = queue.Queue()

    def items():
        for i in range(5):
            made.put(i)
            yield i

    stream = prefetch(items())
    assert made.empty()
    assert next(stream) == 0
    assert [made.get(timeout=10), made.get(timeout=10)] == [0, 1]  # 1 is made though nobody has asked for it
    time.sleep(0.02)
    assert made.empty()  # 2 is not
    stream.close()


def test_an_error_is_raised_at_its_item():
    def items():
        yield 1
        yield 2
        raise ZeroDivisionError("in the thread")

    stream = prefetch(items())
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(ZeroDivisionError, match="in the thread"):
        next(stream)
    assert list(stream) == []
    assert not alive()


def test_a_consumer_that_stops_early_ends_the_thread_and_the_source():
    ended = []

    def items():
        try:
            yield from range(100)
        finally:
            ended.append(True)

    source = items()
    for item in (stream := prefetch(source)):
        if item == 3:
            break
    stream.close()
    assert ended == [True] and not alive()

    with pytest.raises(KeyError):
        for _ in (stream := prefetch(items())):
            raise KeyError
    del stream  # dropped, not closed
    assert ended == [True, True] and not alive()
