"""Where a step's time goes, by a clock that the test moves."""

import itertools
from types import SimpleNamespace

import pytest

from hpcdl.comm.trace import Traffic
from hpcdl.runs import stopwatch
from hpcdl.runs.stopwatch import Stopwatch


@pytest.fixture
def watch(monkeypatch):
    """A stopwatch whose clock goes on by `watch.wait(seconds)`; `watch.spans` are those of its timeline."""
    now, spans = [0], []
    monkeypatch.setattr(stopwatch, "clock", lambda: now[0])
    made = Stopwatch(Traffic(), SimpleNamespace(add=lambda *span: spans.append(span)))

    def wait(seconds, communicating=False, blocked=0.0):
        now[0] += int(seconds * 1e9)
        made.traffic["wait"].seconds += seconds * communicating
        made.traffic["wait"].blocked_seconds += blocked

    made.wait, made.spans = wait, spans
    return made


def times(watch):
    return tuple(getattr(watch, f"{name}_seconds") for name in ("step", "data", "communication", "idle", "apart"))


def test_a_step_is_what_is_neither_fetched_nor_apart(watch):
    with watch.step("serve"):
        watch.wait(1)
        with watch.fetching():
            watch.wait(10, communicating=True, blocked=4)
        watch.wait(2, communicating=True, blocked=0.5)
        with watch.apart():
            watch.wait(100, communicating=True, blocked=50)
        watch.wait(3)
    assert times(watch) == (6, 10, 2, 0.5, 100)
    assert watch.seconds == 16
    assert watch.spans == [("serve", 0, 116 * 10**9)]


def test_what_is_added_up_is_true_in_the_middle_of_a_long_step(watch):
    with watch.step("serve"):
        watch.wait(2, communicating=True, blocked=0.5)
        with watch.apart():
            assert times(watch)[:4] == (2, 0, 2, 0.5)
            watch.wait(100, communicating=True, blocked=50)
        assert times(watch)[:4] == (2, 0, 2, 0.5)


def test_between_two_steps_a_batch_is_waited_for(watch):
    asked = stopwatch.clock()
    watch.wait(2)
    watch.fetched_since(asked)
    with watch.step():
        watch.wait(1)
    assert times(watch) == (1, 2, 0, 0, 0)


def test_an_excused_wait_is_taken_off(watch):
    with watch.step():
        watch.wait(2, communicating=True, blocked=1.5)
        watch.excuse(0.25)
    assert times(watch) == (1.75, 0, 1.75, 1.25, 0)


def test_now_knows_of_the_step_under_way_and_of_the_seconds_before(watch):
    watch.earlier_seconds = 7
    seen = []
    for _ in range(2):
        with watch.step():
            watch.wait(1)
            seen.append(watch.now())
            with watch.apart():
                watch.wait(5)
            seen.append(watch.now())
            watch.wait(1)
    assert seen == [8, 8, 10, 10] and watch.seconds == 11
    assert all(a <= b for a, b in itertools.pairwise(seen))
