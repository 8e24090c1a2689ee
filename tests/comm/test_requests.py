"""Operations in flight: waited for, also in naps, and what they count; all others go on meanwhile."""

import gc
import weakref

import numpy as np
import pytest

from hpcdl.comm import Communicator, requests
from hpcdl.comm.diagnostics.call_signature import SOME
from hpcdl.comm.progress import WaitTarget, activity, nap_until


def test_an_operation_that_is_waited_for_in_naps(world, monkeypatch):
    """Its result, its seconds (all blocked, counted once); and done is done."""
    comm, naps = Communicator(world, "ring"), []

    def counted(condition, name, *arguments, **options):
        nap_until(condition, name, *arguments, **options)
        naps.append(name)
        return 0.25

    monkeypatch.setattr(requests, "nap_until", counted)
    values, room = np.arange(3.0) + world.rank, np.empty(3)
    left = (world.rank - 1) % world.size
    sent = comm.ipush(values, (world.rank + 1) % world.size, tag=4)
    request = comm.iwait(room, left, tag=4)
    before = comm.traffic["wait"].seconds, comm.traffic["wait"].blocked_seconds
    arrival = request.wait(doze=True)
    assert (arrival.source, arrival.size) == (left, 3) and (room == np.arange(3) + left).all()
    counters = comm.traffic["wait"]
    assert naps == ["wait"] and counters.blocked_seconds - before[1] == 0.25
    assert counters.seconds - before[0] == pytest.approx(0.25)
    assert request.wait(doze=True) is arrival and naps == ["wait"]
    sent.wait()


def test_a_wait_for_a_condition_is_counted_as_blocked(world, monkeypatch):
    comm, given = Communicator(world, "ring"), []

    def told(*arguments):
        given.append(arguments)
        return 0.5

    monkeypatch.setattr("hpcdl.comm.point_to_point.nap_until", told)
    comm.wait_until(any, all, patient=True)
    comm.wait_until(any)
    some = WaitTarget(comm, SOME)
    assert given == [(any, "wait", all, True, some), (any, "wait", None, False, some)]
    assert (comm.traffic["wait"].seconds, comm.traffic["wait"].blocked_seconds) == (1.0, 1.0)


@pytest.mark.parametrize("doze", [True, False])
def test_all_in_flight_goes_on_whatever_is_waited_for(doze, world):
    """Rank 0 waits for a sum first, the others for a second one, which needs rank 0's part."""
    comm = Communicator(world, "ring")
    vectors = [np.full(1000, float(world.rank + which)) for which in range(3)]
    sums = [comm.iall_reduce(vector) for vector in vectors]
    order = sums if world.rank == 0 else sums[::-1]
    for each in order:
        each.wait(doze=doze)
    last = comm.iall_reduce(np.zeros(10))
    comm.wait_until(lambda: last.done)
    ranks = sum(range(world.size))
    for which, vector in enumerate(vectors):
        assert (vector == ranks + which * world.size).all()
    assert not [each for each in activity.in_flight if each.communicator is comm]


def test_buffers_are_freed_with_their_request(world):
    """Without a garbage collection: nothing that a request holds refers to itself."""
    comm, right, left = Communicator(world, "ring"), (world.rank + 1) % world.size, (world.rank - 1) % world.size
    gc.collect()
    gc.disable()
    try:
        values, room = np.arange(3.0), np.empty(3)
        buffers = [weakref.ref(each) for each in (values, room)]
        pair = [comm.iwait(room, left, tag=5), comm.ipush(values, right, tag=5)]
        for request in pair:
            request.wait()
        del values, room, pair, request
        assert [buffer() for buffer in buffers] == [None, None]
    finally:
        gc.enable()
    comm.free()
