"""What others leave of the cores: the arithmetic of two looks at what the kernel counts."""

import os

import pytest
from own_time import set_own_time

from hpcdl.machine import load
from hpcdl.machine.load import Load, LoadSample

HEAD = "cpu  9 9 9 9 9 9 9 9 9 9\n"


@pytest.fixture
def watched(monkeypatch, tmp_path):
    """A function: now the kernel says this; cores 1 and 3 are ours."""
    monkeypatch.setattr(load, "STAT", tmp_path / "stat")
    monkeypatch.setattr(load, "TICK", 0.01)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 3})
    monkeypatch.delenv("HPCDL_LOAD", raising=False)

    def say(at, own, *idle):
        rows = "".join(f"cpu{core} 1 2 3 {each} 0 5 6 7 8 9\n" for core, each in enumerate(idle))
        (tmp_path / "stat").write_text(HEAD + rows + "intr 1 2 3\n")
        set_own_time(monkeypatch, load, monotonic=lambda: at, process_time=lambda: own)

    return say


def test_idle_of_ones_own_cores_counts(watched):
    watched(5.0, 1.5, 7777, 100, 7777, 20)
    assert load.take_sample({1, 3}) == LoadSample(5.0, 1.5, 1.2)


def test_left_is_what_this_one_took_and_its_part_of_what_nobody_did(watched):
    watched(0.0, 0.0, 0, 0, 0, 0)
    found = Load()
    watched(2.0, 1.0, 0, 100, 0, 60)  # in 4 seconds of cores 1 by this one, 1.6 by nobody, so 1.4 by others
    assert found.available(ranks=1) == pytest.approx(1.3)
    watched(2.1, 1.1, 0, 100, 0, 60)
    assert found.available(ranks=1) == pytest.approx(1.3)  # too soon: as it was
    assert found.measure(1, min_seconds=1.0) is None
    watched(4.0, 1.0, 0, 300, 0, 60)  # idle for 2 s, of which two ranks could have 1 each
    assert found.measure(2, min_seconds=1.0) == pytest.approx(0.5)


def test_not_known_is_none(watched, monkeypatch, tmp_path):
    monkeypatch.setattr(load, "STAT", tmp_path / "nowhere")
    set_own_time(monkeypatch, load, monotonic=lambda: 0.0)
    found = Load()
    set_own_time(monkeypatch, load, monotonic=lambda: 9.0)
    assert found.available(1) is None


def test_who_wants_nobody_to_look_is_heard(watched, monkeypatch):
    watched(0.0, 0.0, 0, 0, 0, 0)
    found = Load()
    watched(2.0, 1.0, 0, 100, 0, 60)
    monkeypatch.setenv("HPCDL_LOAD", "ignore")
    assert found.available(1) is None and found.measure(1, 0.0) is None


def test_the_first_look_is_waited_for(monkeypatch):
    """A program that has just begun would else take as many threads as on a quiet machine."""
    monkeypatch.delenv("HPCDL_LOAD", raising=False)
    assert Load().available(1) is not None
