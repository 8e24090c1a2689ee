"""Communicators of groups that are destroyed: they go back to MPI when no rank needs them, and none waits for that."""

import contextlib
import time

import pytest
import torch
from mpi4py import MPI
from torch import distributed as dist

from hpcdl.errors import UsageError
from hpcdl.torch import group_cleanup

pytestmark = [pytest.mark.mpi(min_size=2)]
LIMIT = 2048  # communicators that MPICH has; Open MPI has more
LEFT = 12  # of them that the test leaves: a group takes three


@pytest.fixture
def few_left(world):
    """Few communicators are left, where MPI has not many times as many."""
    taken = []
    with contextlib.suppress(MPI.Exception):
        while len(taken) < LIMIT:
            taken.append(world.Dup())
    for _ in range(min(LEFT, len(taken))):
        taken.pop().Free()
    yield
    for each in taken:
        each.Free()


@pytest.fixture(autouse=True)
def none_is_left(group):
    """What a test has destroyed on all ranks goes back."""
    yield
    until_given_back()


def until_given_back():
    deadline = time.monotonic() + 20
    while group_cleanup.destroyed and time.monotonic() < deadline:
        group_cleanup.free_unused()
    assert not group_cleanup.destroyed


def used(group, size):
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert (tensor == size).all()
    return group


def test_there_can_be_any_number_one_after_the_other(few_left, group, size):
    for _ in range(LEFT):
        dist.destroy_process_group(used(dist.new_group(), size))


def test_ranks_destroy_in_orders_and_at_times_of_their_own(group, rank, size, world):
    groups = [used(dist.new_group(), size) for _ in range(3)]
    communicators = [each.comm for each in groups]
    if rank == 0:
        for each in groups:
            dist.destroy_process_group(each)
        assert len(group_cleanup.destroyed) == 3  # nobody else has come, and nobody waits
    world.Barrier()
    if rank:
        assert all(each.mpi != MPI.COMM_NULL for each in communicators)
        for each in groups[::-1]:
            dist.destroy_process_group(each)
    until_given_back()
    assert all(each.mpi == MPI.COMM_NULL for each in communicators)
    used(dist.group.WORLD, size)


def test_one_that_a_rank_keeps_stays(group, rank, size, world):
    kept = used(dist.new_group(), size)
    communicator = kept.comm
    if rank:
        dist.destroy_process_group(kept)
    other = used(dist.new_group(), size)
    assert communicator.mpi != MPI.COMM_NULL
    dist.destroy_process_group(other)
    world.Barrier()
    if rank == 0:
        dist.destroy_process_group(kept)


def test_an_operation_in_flight_is_completed_first(group, rank, size, world):
    last, tensor = dist.new_group(), torch.ones(1 << 20)
    work = dist.all_reduce(tensor, group=last, async_op=True)
    dist.destroy_process_group(last)
    world.Barrier()
    group_cleanup.free_unused()
    work.wait()
    assert (tensor == size).all()


def test_what_was_destroyed_says_so(group, rank, size):
    gone = used(dist.new_group(), size)
    dist.destroy_process_group(gone)
    gone.shutdown()  # nothing more happens
    with pytest.raises(UsageError, match=f"'{gone.getGroupName()}' was destroyed"):
        gone.barrier()


def test_a_part_of_a_part(group, rank, size):
    """The part that a group was cut from goes back after what was cut from it."""
    part = dist.new_group()
    half = part.split_group([0, 1])
    communicators = [part.comm] + ([half.comm] if half else [])
    dist.destroy_process_group(part)
    if half is not None:
        group_cleanup.free_unused()
        half.allreduce([torch.ones(2)]).wait()
        half.shutdown()
    until_given_back()
    assert all(each.mpi == MPI.COMM_NULL for each in communicators)
