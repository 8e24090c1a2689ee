"""Buckets in flight while a gradient is made: the same sum, each started when complete, in turn."""

import time

import numpy as np
import pytest

from hpcdl.comm import Communicator
from hpcdl.comm import overlap as overlaps
from hpcdl.comm.allreduce import ALGORITHMS
from hpcdl.comm.compression import compressed
from hpcdl.comm.overlap import AfterBackward, Overlap, buckets, try_compression
from hpcdl.errors import UsageError
from hpcdl.models.layout import Layout, Tensor

WIDTHS = [(300,), (40, 7), (1,), (13,), (2, 3)]  # of the layers: 600 elements


class Layer:
    def __init__(self, name, shape):
        self.name, self.shapes, self.tied = name, {"weight": shape}, {}


LAYOUT = Layout.of_layers([Layer(f"layer{i}", shape) for i, shape in enumerate(WIDTHS)], "float64")
LAYERS = [cut for _, cut in reversed(LAYOUT.layer_slices)]  # the last first
PLANS = {size: buckets(LAYOUT, size) for size in (1, 100, 2000, 1 << 20)}


def integers(rank):
    """Whole numbers, whose sum is the same in any order."""
    return ((np.arange(LAYOUT.size) * 7 + 31 * rank) % 17).astype("f8")


def total(comm):
    return sum(integers(rank) for rank in range(comm.size))


@pytest.mark.parametrize("size", [0.5, 1, 8, 9, 104, 105, 2000, 2400, 4799, 4800, 1e9])
def test_buckets_are_the_fewest_whole_layers_that_make_the_size(size):
    cut = buckets(LAYOUT, size)
    assert [part.stop for part in cut] == [LAYOUT.size, *(part.start for part in cut[:-1])] and cut[-1].start == 0
    starts = {part.start for part in LAYERS}
    for part in cut[:-1]:
        assert part.start in starts and 8 * (part.stop - part.start) >= size
        first = min(layer.stop for layer in LAYERS if layer.start == part.start)  # without its earliest layer
        assert 8 * (part.stop - first) < size
    assert len(buckets(LAYOUT, 1)) == len(LAYERS) and len(buckets(LAYOUT, 1e9)) == 1


def test_a_layout_whose_tensors_come_in_another_order_is_cut_without_gaps():
    tensors = [Tensor("b", (4,), 6, "second"), Tensor("a", (6,), 0, "first")]
    assert buckets(Layout(tensors, "float32"), 1) == [slice(6, 10), slice(0, 6)]


def reported(order, rank, random):
    """The slices that a rank reports as final, one after the other."""
    return {
        "last first": LAYERS,
        "shuffled": [LAYERS[i] for i in random.permutation(len(LAYERS))],
        "halves": [slice(470, None), slice(None, 470)],
        "some": LAYERS[rank % 2 : 4],
        "none": [],
    }[order]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_sum_whatever_is_reported_when(name, bare):
    comm = Communicator(bare, name)
    gradient, random = comm.empty(LAYOUT.size, "float64"), np.random.default_rng(bare.rank)
    for cut in PLANS.values():
        overlap, calls = Overlap(comm, gradient, cut), comm.traffic["all_reduce"].calls
        for order in ("last first", "shuffled", "halves", "some", "none"):
            gradient[:] = np.nan
            parts = reported(order, bare.rank, random)
            for part in parts:
                gradient[part] = integers(bare.rank)[part]
                overlap.ready(part)
            for part in LAYERS if order in ("some", "none") else ():
                if part not in parts:
                    gradient[part] = integers(bare.rank)[part]
            overlap.finish()
            assert np.array_equal(gradient, total(bare))
        assert comm.traffic["all_reduce"].calls - calls == 5 * len(cut)
    del gradient, overlap


def test_a_bucket_starts_when_it_is_complete_and_its_turn_has_come(bare):
    comm = Communicator(bare, "ring")
    gradient = integers(bare.rank)
    overlap = Overlap(comm, gradient, [slice(500, 600), slice(300, 500), slice(0, 300)])
    started = []
    for part in [slice(550, 600), slice(290, 500), slice(500, 550), slice(0, 280), slice(280, 290)]:
        overlap.ready(part)
        started.append(comm.traffic["all_reduce"].calls)
    assert started == [0, 0, 2, 2, 3]
    overlap.finish()
    assert np.array_equal(gradient, total(bare))


@pytest.mark.parametrize("name", [*sorted(ALGORITHMS), "compressed"])
def test_what_is_in_flight_goes_on_between_layers(name, bare):
    compress = name == "compressed"
    comm = Communicator(bare, "ring" if compress else name)
    gradient = comm.empty(LAYOUT.size, "float64")
    gradient[:] = integers(bare.rank)
    state = compressed("float16", LAYOUT.size, "float64") if compress else None
    overlap = Overlap(comm, gradient, PLANS[1], state)
    for part in LAYERS[:3]:
        overlap.ready(part)
    deadline = time.monotonic() + 20
    while overlap.in_flight:
        assert time.monotonic() < deadline
        overlap.ready(slice(0, 0))
    done = slice(LAYERS[2].start, None)  # though nobody has waited for it
    assert np.array_equal(gradient[done], total(bare)[done])
    overlap.finish()
    assert np.array_equal(gradient, total(bare))
    del gradient, overlap


@pytest.mark.parametrize("size", PLANS)
def test_the_ring_sends_the_bytes_of_the_whole(size, bare):
    comm = Communicator(bare, "ring")
    Overlap(comm, integers(bare.rank), PLANS[size]).finish()
    counted = comm.traffic["all_reduce"]
    assert bare.allreduce(counted.bytes) == 2 * (bare.size - 1) * LAYOUT.size * 8
    assert counted.messages == len(PLANS[size]) * 2 * (bare.size - 1)


@pytest.mark.parametrize("size", PLANS)
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_compressed_buckets_lose_nothing(kind, size, bare):
    """sum (gradient + residual before) = result + sum (residual after), from one size of buckets to another."""
    comm = Communicator(bare)
    gradient, state = np.empty(LAYOUT.size), compressed(kind, LAYOUT.size, "float64")
    plans = [PLANS[size], PLANS[size], PLANS[100]]
    ways = [*(Overlap(comm, gradient, plan, state) for plan in plans), AfterBackward(comm, gradient, state)]
    for step, way in enumerate(ways):
        gradient[:] = np.random.default_rng([step, bare.rank]).standard_normal(LAYOUT.size)
        wanted = sum(bare.allgather(gradient + state.residual))
        if way.ready:
            for part in LAYERS:
                way.ready(part)
        way.finish()
        left = sum(bare.allgather(state.residual))
        assert np.allclose(gradient + left, wanted, rtol=0, atol=1e-13)
        assert all(np.array_equal(gradient, other) for other in bare.allgather(gradient))
        assert bare.size == 1 or all(left[part].any() for part in LAYERS)
    assert comm.traffic["all_reduce"].calls == 1 + sum(map(len, plans))
    sent = 2 * (bare.size - 1) * LAYOUT.size * 2 * len(ways)
    assert bare.allreduce(comm.traffic["all_reduce"].bytes) == sent


@pytest.mark.parametrize("again", [slice(590, 600), slice(585, None), slice(300, 600)])
def test_a_part_that_is_reported_twice_is_refused(again, world):
    comm = Communicator(world, "ring")
    overlap = Overlap(comm, integers(world.rank), [slice(580, 600), slice(0, 580)])
    overlap.ready(slice(580 if again.stop == 600 else 590, 600))  # the first bucket has started, or has not
    with pytest.raises(UsageError, match="on_ready was called twice"):
        overlap.ready(again)
    overlap.finish()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", [None, "bfloat16"])
@pytest.mark.parametrize("size", [1, 1 << 20])
@pytest.mark.parametrize("slow", ["plain", "overlapped"])
@pytest.mark.four
def test_a_trial_finds_what_is_slower_and_leaves_no_trace(slow, size, kind, world):
    comm = Communicator(world, "ring")
    gradient = integers(world.rank)
    state = compressed(kind, LAYOUT.size, "float64") if kind else None
    overlap, computed = Overlap(comm, gradient, PLANS[size], state), []

    def backward(into, on_ready):
        computed.append((into is not gradient, on_ready is not None))
        into[:] = 0.1 * world.rank
        for part in LAYERS if on_ready else ():
            on_ready(part)
        if (on_ready is None) == (slow == "plain") and world.rank == 0:
            time.sleep(0.02)

    line = overlap.try_out(backward)
    assert len(set(world.allgather(line))) == 1
    assert (line is not None) == (slow == "overlapped")
    assert line is None or ("smaller --bucket-mib" in line) == (len(PLANS[size]) == 1)
    trial = overlap.trial
    assert (trial["overlapped_step_seconds"] > trial["plain_step_seconds"]) == (slow == "overlapped")
    assert len(set(world.allgather(len(computed)))) == 1
    assert set(computed) == {(True, False), (True, True)}
    assert np.array_equal(gradient, integers(world.rank)) and overlap.steps == 0
    assert state is None or not state.residual.any()
    assert comm.traffic.bytes == comm.traffic["all_reduce"].calls == 0


@pytest.mark.parametrize("plain, slower", [(0.25, True), (0.5, False)])
def test_a_trial_of_compression(plain, slower, world, monkeypatch):
    """It reduces its own vector and state, a real turn each, and says what the seconds say."""
    turns = []
    monkeypatch.setattr(overlaps, "seconds_of", lambda turn, own: turns.append(turn()) or [plain, 0.5])
    comm, gradient = Communicator(world, "ring"), integers(world.rank)
    state = compressed("topk:0.1", gradient.size, "float64")
    trial, line = try_compression(comm, gradient, state)
    assert trial == {"plain_seconds": plain, "compressed_seconds": 0.5}
    assert bool(line) == slower == line.startswith("compression loses: an all-reduce takes 500 ms with it, 250 ms")
    assert [len(each) for each in turns] == [2] and min(turns[0]) > 0
    assert np.array_equal(gradient, integers(world.rank)) and not state.tracked["residual"].any()
    assert comm.traffic.bytes == comm.traffic["all_reduce"].calls == 0


@pytest.mark.parametrize("share, wanted", [(0, 1), (0.25, 0.75), (1, 0), (3, 0)])
def test_the_hidden_fraction_is_what_steps_did_not_wait_for(share, wanted, world):
    comm = Communicator(world, "ring")
    comm.traffic["all_reduce"].seconds = 99.0  # of something else, before
    overlap = Overlap(comm, np.ones(8), [slice(4, 8), slice(0, 4)])
    assert overlap.costs(comm) == {"hidden_fraction": None, "overlap": {"buckets": 2}}  # nothing measured
    overlap.trial = {"exchange_alone_seconds": 0.5}
    assert overlap.costs(comm)["hidden_fraction"] is None  # no step
    overlap.finish()
    overlap.finish()
    mean = share * 0.5 * 2  # of two steps; ranks differ
    comm.traffic["all_reduce"].seconds = 99 + mean * (1 + (world.rank - (world.size - 1) / 2) / world.size)
    found = overlap.costs(comm)
    assert found["hidden_fraction"] == pytest.approx(wanted, abs=1e-9)
    seconds = {"exchange_alone_seconds": 0.5, "exchange_exposed_seconds": pytest.approx(share * 0.5)}
    assert found["overlap"] == {"buckets": 2} | seconds
