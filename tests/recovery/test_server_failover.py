"""Who computes what when workers are gone: each part of each batch once; and a slice is where all slices are."""

import random

import numpy as np
import pytest

from hpcdl.errors import TrainingError
from hpcdl.parameter_server.clocks import Clocks
from hpcdl.parameter_server.consistency import BSP, Consistency
from hpcdl.parameter_server.replication import PendingPush, SliceReplica
from hpcdl.parameter_server.store_messages import Push
from hpcdl.recovery.server_failover import Known, WorkDivision, WorkShare, refuse_lost, settle, share_at, speakers_of


class Work:
    """Workers within a bound of each other, which are killed, and what of each batch is learned from."""

    def __init__(self, seed, workers, bound, steps):
        self.draw, self.bound, self.steps = random.Random(seed), bound, steps
        shares = {rank: [WorkShare(0, number, workers)] for number, rank in enumerate(range(2, 2 + workers))}
        self.division = WorkDivision(shares, {}, dict.fromkeys(shares, 0))
        self.clocks, self.done = dict.fromkeys(shares, 0), {}

    def add(self, step, share):
        for part in range(share.part * 12 // share.parts, (share.part + 1) * 12 // share.parts):
            assert 12 % share.parts == 0
            self.done[step, part] = self.done.get((step, part), 0) + 1

    def push(self, rank):
        step = self.clocks[rank]
        self.add(step, share_at(self.division.shares[rank], step))
        for orphan in self.division.orphans.get(rank, []) if step == self.division.begun[rank] else []:
            self.add(orphan.first, orphan)
        self.clocks[rank] += 1

    def run(self, kills):
        at = sorted(self.draw.randrange(self.steps * len(self.clocks) // 2) for _ in range(kills))
        turns = 0
        while (least := min(self.clocks.values())) < self.steps:
            most = min(self.steps - 1, least + self.bound)
            self.push(self.draw.choice([rank for rank, clock in self.clocks.items() if clock <= most]))
            turns += 1
            while at and turns >= at[0] and len(self.clocks) > 1:
                at.pop(0)
                gone = self.draw.choice(list(self.clocks))
                self.begin_again([rank for rank in self.clocks if rank != gone])

    def begin_again(self, left):
        """The ranks that are left, which are numbered anew."""
        numbers = {rank: number for number, rank in enumerate(left, 2)}
        self.division = self.division.again(self.clocks, left).numbered(numbers)
        self.clocks = {numbers[rank]: self.clocks[rank] for rank in left}
        assert self.division.begun == self.clocks


@pytest.mark.parametrize("bound", [0, 1, 4])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_each_part_of_each_batch_is_learned_from_once(workers, bound):
    """At most 12 parts; under bsp workers are gone in a round that is not whole, and it is done again."""
    for seed in range(60):
        work = Work(f"{seed} {workers} {bound}", workers, bound, 30)
        if bound == 0:  # whole rounds alone
            for _ in range(seed % 7):
                for rank in work.clocks:
                    work.push(rank)
            work.begin_again(list(work.clocks)[: 1 + seed % workers])
            work.run(0)
        else:
            work.run(seed % workers)
        assert work.done == {(step, part): 1 for step in range(30) for part in range(12)}


def test_what_was_taken_over_is_taken_over_again_where_it_was_not_pushed():
    shares = {2: [WorkShare(0, 0, 3)], 3: [WorkShare(0, 1, 3)], 4: [WorkShare(0, 2, 3)]}
    first = WorkDivision(shares, {}, {2: 0, 3: 0, 4: 0}).again({2: 5, 3: 4, 4: 3}, [2, 3])
    assert first.orphans == {2: [WorkShare(3, 2, 3)], 3: [WorkShare(4, 2, 3)]} and first.begun == {2: 5, 3: 4}
    assert first.shares == {2: [WorkShare(5, 0, 2)], 3: [WorkShare(0, 1, 3), WorkShare(5, 1, 2)]}
    second = first.again({2: 5, 3: 5}, [3])  # 2 had not pushed since, 3 had
    assert second.orphans == {3: [WorkShare(3, 2, 3)]} and second.shares == {3: [WorkShare(5, 0, 1)]}


class Adding:
    def __call__(self, values, pushed, push):
        values += pushed


def slice_of(consistency, pushed, kept=()):
    """A slice to which clients 2, 3, ... have made so many pushes of ones, and which keeps another one of some."""
    clients = range(2, 2 + len(pushed))
    state = SliceReplica(np.zeros(2), Clocks(clients, consistency), Adding(), led=True)
    for step in range(max(pushed) + 1):
        for client, count in zip(clients, pushed, strict=True):
            push = Push(client, slice(0, 2), step, step, 0, count=1, total=2, loss=1, norm=0, drawn=step)
            if step < count:
                state.take_in(push, np.ones(2))
            elif step == count and client in kept:
                state.pending[client] = PendingPush(push, np.ones(2))
        for _ in state.clocks.complete():
            state.apply_round()
    return state


@pytest.mark.parametrize(
    "pushed, kept, whole, values",
    [
        ((3, 3), (), (3, 3), 6),
        ((3, 3), (2, 3), (4, 4), 8),  # a round that all slices have
        ((3, 3), (2, 3), (3, 3), 6),  # and one that only this one has
        ((4, 3), (), (3, 3), 6),  # half of a round
    ],
)
def test_rounds_are_whole_or_not_there(pushed, kept, whole, values):
    state = slice_of(BSP, pushed, kept)
    for _ in range(2):  # once more changes nothing
        settle(state, state.pending, dict(enumerate(whole, 2)))
        assert state.values.tolist() == [values, values] and not state.round
        assert state.clocks.of_client == dict(enumerate(whole, 2)) and set(state.losses) == set(range(min(whole)))


def test_pushes_that_all_slices_have_are_applied_and_others_are_dropped():
    for consistency in (Consistency("ssp", 3), Consistency("async")):
        state = slice_of(consistency, (5, 3), (2, 3))
        settle(state, state.pending, {2: 6, 3: 3})
        assert state.values.tolist() == [9, 9] and state.clocks.of_client == {2: 6, 3: 3}
        assert sum(state.clocks.staleness.values()) == 9


def test_steps_that_nobody_has_pushed_are_given_out_again():
    before = Clocks([2, 3], Consistency("async"))
    for drawn in (0, 1, 3, 5):
        before.pushed(Push(2, slice(0, 1), 0, 0, 0, count=1, total=1, loss=0, norm=0, drawn=drawn))
    assert (before.low, before.beyond) == (2, {3, 5})
    after = Clocks([4], Consistency("async"))
    after.go_on_from(before.progress({})._replace(of_client={4: 4}))
    assert [after.grant(0) for _ in range(4)] == [2, 4, 6, 7] and after.of_store == 4


def known(rank, clock=-1, **slices):
    held = {int(name[1:]): (far, {4: pushes}) for name, (far, pushes) in slices.items()}
    return Known(rank, True, clock, held, {})


def test_whoever_has_followed_a_slice_furthest_speaks_for_it():
    ranks = [known(1, s1=(1 << 40, 7), s0=(9, 6)), known(2, s2=(1 << 40, 7), s1=(11, 7), s0=(10, 7)), known(4, clock=6)]
    assert speakers_of({each.rank: each for each in ranks}, 3, "") == [2, 1, 2]
    with pytest.raises(TrainingError, match="all replicas of slice 0 of 3 slices are gone: ranks 0 and 1 are gone"):
        speakers_of({2: known(2, s2=(5, 1))}, 3, "ranks 0 and 1 are gone")


def test_an_acknowledged_push_that_is_not_there_is_an_error():
    refuse_lost({4: known(4, clock=6)}, {4: 7})
    with pytest.raises(TrainingError, match="push 6 of rank 4 was acknowledged, but the servers left hold only 6"):
        refuse_lost({4: known(4, clock=7)}, {4: 6})
