"""Operations in flight: who takes them forward, and that their futures come to be complete."""

import gc
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from hpcdl.torch.work import DONE, engine

pytestmark = [pytest.mark.mpi(min_size=2)]
LONG = 1 << 16  # elements, in several pieces


def reduced(size):
    return size * (size + 1) / 2


def ones(rank, length=LONG):
    return torch.full((length,), float(rank + 1))


def test_a_blocking_call_is_complete(group, rank, size):
    tensor, opts = ones(rank), dist.AllreduceOptions()
    opts.asyncOp = False
    assert group.group.WORLD.allreduce([tensor], opts) is DONE and (tensor == reduced(size)).all()
    assert DONE.wait() and DONE.is_completed() and DONE.get_future().done()


def test_works_are_waited_for_in_any_order(group, rank, size):
    tensors = [ones(rank) for _ in range(4)]
    works = [dist.all_reduce(each, async_op=True) for each in tensors]
    for work in works[::-1] if rank % 2 else works:
        assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
    assert all((each == reduced(size)).all() for each in tensors)
    assert works[0].result()[0] is tensors[0]


def test_one_is_complete_though_it_is_only_looked_at(group, rank, size):
    work = dist.all_reduce(ones(rank), async_op=True)
    while not work.is_completed():
        pass


def test_a_future_becomes_complete_by_itself(group, rank, size):
    """And what hangs on it is done, whatever that is: another operation, too."""
    tensor, second = ones(rank), ones(rank)
    work = dist.all_reduce(tensor, async_op=True)
    found = work.get_future().then(lambda each: dist.all_reduce(second, async_op=True).get_future().wait())
    while not found.done():
        time.sleep(1e-3)
    assert (found.value()[0] == reduced(size)).all() and (tensor == reduced(size)).all()
    assert work.get_future() is work.get_future() and work.get_future().wait()[0] is tensor


def test_futures_in_a_backward_pass_are_complete_at_its_end(group, rank):
    found, x = [], torch.ones(3, requires_grad=True)

    def hook(gradient):
        found.append(dist.all_reduce(ones(rank), async_op=True).get_future())

    x.register_hook(hook)
    for _ in range(2):
        (x * 2).sum().backward()
    assert len(found) == 2 and all(each.done() for each in found)


def test_two_threads_wait_for_what_needs_the_other(group, rank, size):
    """The main thread's operation on rank 0 comes after its thread's on rank 1, and the other way round elsewhere."""
    other, done = dist.new_group(), []

    def second():
        tensor = ones(rank, 10)
        dist.all_reduce(tensor, group=other)
        done.append(tensor)

    thread = threading.Thread(target=second)
    first = ones(rank, 10)
    if rank == 0:
        dist.all_reduce(first)
        thread.start()
    else:
        thread.start()
        dist.all_reduce(first)
    thread.join(20)
    assert (first == reduced(size)).all() and (done[0] == reduced(size)).all()
    engine.alone()
    assert thread.ident not in engine.users  # ended: calls by the remaining thread take the short way again


def test_a_wait_may_have_an_end(group, rank):
    if rank == 0:
        work = dist.irecv(torch.empty(1), 1, tag=77)
        with pytest.raises(RuntimeError, match=r"rank 0: timeout after 0\.05 s: wait is not complete"):
            work.wait(timedelta(seconds=0.05))
        assert not work.is_completed()
        dist.send(torch.ones(1), 1, tag=78)
        work.wait()
    if rank == 1:
        dist.recv(torch.empty(1), 0, tag=78)
        dist.send(torch.ones(1), 0, tag=77)


def test_a_group_with_a_time_of_its_own(group, rank, size):
    short = dist.new_group(timeout=timedelta(seconds=0.2))
    if rank == 0:
        with pytest.raises(RuntimeError, match="barrier is not complete"):
            dist.barrier(short)
    dist.barrier()
    if rank:
        dist.barrier(short)
    for each in list(engine.live.values()):
        each.wait()


def test_complete_operations_leave_no_garbage(group, rank):
    """A cycle of references would keep their tensors until Python collects it, and the collection takes time."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            work = dist.all_reduce(ones(rank), async_op=True)
            work.wait()
            work.get_future().wait()
        del work
        assert gc.collect() < 10
    finally:
        gc.enable()


def test_what_goes_wrong_at_the_end_is_raised(group, rank):
    def fail():
        raise ValueError("spoilt")

    work = engine.start(lambda: [group.group.WORLD.comm.ibarrier()], [], fail)
    future = work.get_future()
    with pytest.raises(ValueError, match="spoilt"):
        work.wait()
    assert not work.is_success() and isinstance(work.exception(), ValueError)
    with pytest.raises(Exception, match="spoilt"):
        future.wait()
