"""Bytes that a rank holds: counted as they come and go, with their peaks, and those that a model's layers take."""

from pathlib import Path

import numpy as np
import pytest

from hpcdl.errors import UsageError, refuse_beyond
from hpcdl.memory import KINDS, Memory, available
from hpcdl.models import make_model
from hpcdl.models.pool import Pool
from hpcdl.random import Random


def test_now_and_peak_of_each_kind():
    memory = Memory()
    assert all(memory.now[kind] == memory.peak[kind] == 0 for kind in KINDS)
    for count in (100, 20, -60, 30):
        memory.add("gradients", count)
    memory.add("activations", 5)
    assert memory.now == {"gradients": 90, "activations": 5}
    assert memory.peak == {"gradients": 120, "activations": 5}
    array = np.zeros((3, 4))
    assert memory.hold("optimizer", array) is array
    assert memory.now["optimizer"] == memory.peak["optimizer"] == 96


def test_an_array_counts_until_nobody_has_it_any_more():
    memory = Memory()
    array = memory.hold_until_freed("parameters", np.zeros(5))
    view = array[1:3]
    del array
    assert memory.now["parameters"] == 40
    del view
    assert (memory.now["parameters"], memory.peak["parameters"]) == (0, 40)


def test_what_there_is_is_what_the_container_may_have(tmp_path):
    here = available(tmp_path)
    assert here == available(Path("/nowhere")) > 2**28
    (tmp_path / "memory.max").write_text("max\n")
    assert available.__wrapped__(tmp_path) == here
    (tmp_path / "memory.max").write_text("1000000\n")
    assert available.__wrapped__(tmp_path) == 1_000_000


def test_what_cannot_be_had_is_refused_by_its_bytes():
    refuse_beyond("it", available(), available())
    with pytest.raises(UsageError, match=f"at least {available() + 1:,} bytes of memory, .* {available():,}"):
        refuse_beyond("it", available() + 1, available())


def test_what_is_paused_counts_for_no_peak():
    memory = Memory()
    memory.add("parameters", 10)
    with pytest.raises(ZeroDivisionError), memory.paused():
        memory.add("parameters", 50)
        with memory.paused():
            memory.add("parameters", 50)
        memory.add("parameters", -95)
        raise ZeroDivisionError
    assert memory.now["parameters"] == 15 and memory.peak["parameters"] == 10
    memory.add("parameters", 1)
    assert memory.peak["parameters"] == 16


def test_a_pool_counts_whole_buffers_while_they_are_lent():
    """They are of 2^k elements; nothing is counted before the pool is given a memory."""
    pool, memory = Pool("float32"), Memory()
    pool.give(pool.take(1000))
    pool.memory = memory
    one, two = pool.take(3, 3), pool.take(1000)
    assert memory.now["activations"] == 4 * (16 + 1024)
    pool.give(one)
    three = pool.take(0, 7)
    assert memory.now["activations"] == 4 * (1024 + 2)
    pool.give(two)
    pool.give(three)
    assert memory.now["activations"] == 0 and memory.peak["activations"] == 4 * (16 + 1024)


@pytest.mark.parametrize(("spec", "tokens"), [("mlp:64,64", False), ("gpt:layers=2,width=16,heads=2,context=8", True)])
def test_all_is_given_back_after_a_step(spec, tokens):
    random = np.random.default_rng(0)
    model = make_model(spec, (8,), 10, "float64")
    x = random.integers(0, 10, (32, 8)).astype("float64") if tokens else random.standard_normal((32, 8))
    batch = type("Batch", (), {"x": x, "y": random.integers(0, 10, 32)})
    parameters, gradient = model.initialize(Random(0)), np.zeros(model.size)
    model.pool.memory = memory = Memory()
    model.evaluate(parameters, batch)
    scored = memory.peak["activations"]
    model.loss_and_gradient(parameters, batch, gradient)
    trained = memory.peak["activations"]
    model.loss_and_gradient(parameters, batch, gradient)
    assert memory.now["activations"] == 0 and memory.peak["activations"] == trained
    outputs = sum(8 * 32 * width for width in (64, 64, 10)) if not tokens else 8 * 32 * 8 * 16 * 6
    assert scored < trained > outputs  # each layer's output lasts until its backward
