"""Averagings in pairs end on every graph, keep the mean and lose no step; both of a pair hold the same bits."""

import numpy as np
import pytest
from graphs import graph

from hpcdl.comm import Communicator
from hpcdl.comm.gossip.pairwise import PairwiseGossip
from hpcdl.comm.gossip.topology import topology
from hpcdl.comm.progress import activity
from hpcdl.random import Random

GRAPHS = ["ring", "star", "complete", "random-regular:degree=2", "erdos-renyi:p=0.6", "torus", "random-matching"]


def together(comm, spec, length, least, step=0.0):
    """Averagings until each rank has had `least`, with random steps between; returns the first values, x, the steps."""
    made = graph(spec, comm.size)
    if made is None:
        return None
    group, own = Communicator(comm, "ring", trace=100_000), Communicator(comm, "tree")
    random = np.random.default_rng(comm.rank)
    first = random.standard_normal(length)
    x, steps, count = first.copy(), np.zeros(length), 0
    pairs = PairwiseGossip(group, x, made)
    pairs.listen()
    enough = None
    while comm.size > 1 and not (enough and enough.test()):
        if enough is None and pairs.averagings >= least:
            enough = own.ibarrier()  # go on until all have so many
        pairs.pick(Random(7)("pair", comm.rank, count), count)
        count += 1
        if step:
            change = step * random.standard_normal(length)
            x += change
            steps += change
            pairs.moved = True
    pairs.rest(own)
    pairs.close()
    assert not any(each.communicator in (group, own) for each in activity.in_flight)
    own.barrier()
    assert not group.mpi.Iprobe(), "a message is left"
    spans = [details for _, _, _, details in group.timeline.spans]
    assert {(comm.rank, each["to"]) for each in spans if "to" in each} <= made.edges
    assert comm.allreduce(pairs.averagings) % 2 == 0
    group.free()
    own.free()
    return first, x, steps


@pytest.mark.parametrize("spec", GRAPHS)
def test_all_come_to_the_mean_which_stays(spec, bare):
    done = together(bare, spec, 5, 60)
    if done is not None:
        every = np.array(bare.allgather(done))
        first, x = every[:, 0], every[:, 1]
        assert np.abs(x.mean(axis=0) - first.mean(axis=0)).max() < 1e-12
        assert np.abs(x - first.mean(axis=0)).max() < 0.05


@pytest.mark.parametrize("length", [3, 300_000])
@pytest.mark.parametrize("spec", ["ring", "complete"])
def test_no_step_is_lost_while_an_averaging_is_under_way(spec, length, world):
    first, x, steps = (
        np.array(each) for each in zip(*world.allgather(together(world, spec, length, 25, 0.1)), strict=True)
    )
    assert np.abs(x.mean(axis=0) - (first + steps).mean(axis=0)).max() < 1e-10
    assert world.size == 1 or np.abs(x - first - steps).max() > 0.1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("asks", [0, 1])
def test_both_of_a_pair_hold_the_same_bits(asks, world):
    group = Communicator(world, "ring")
    x = first = np.random.default_rng(world.rank).standard_normal(1000)
    x = first.copy()
    pairs = PairwiseGossip(group, x, topology("ring", world.size))
    pairs.listen()
    if world.rank == asks:

        class Neighbour:
            def integers(self, count):
                return pairs.topology.graph(0)[asks].index(1 - asks)

        pairs.pick(Neighbour(), 0)
    group.wait_until(lambda: pairs.averagings or world.rank > 1, pairs.progress)
    pairs.rest(group)
    pairs.close()
    first, x = np.array(world.allgather(first)), np.array(world.allgather(x))
    assert np.array_equal(x[0], (first[0] + first[1]) / 2)
    assert np.array_equal(x[0], x[1])
    assert np.array_equal(x[2:], first[2:])
