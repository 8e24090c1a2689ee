"""Rounds of gossip by messages are products with the mixing matrix; averages stay, distances shrink as theory says."""

import time

import numpy as np
import pytest

from hpcdl.comm import Communicator
from hpcdl.comm.gossip.mixing import acceleration, exact_factors, mixing, second_eigenvalue
from hpcdl.comm.gossip.rounds import AcceleratedGossip, Gossip
from hpcdl.comm.gossip.topology import topology
from hpcdl.errors import UsageError

SPECS = ["ring", "torus", "hypercube", "exponential", "one-peer", "star", "complete", "random-regular:degree=2"]
SPECS += ["erdos-renyi:p=0.6", "random-matching"]


def graph_of(spec, size):
    """The topology, or None where there is none of this size."""
    try:
        return topology(spec, size, seed=5)
    except UsageError:
        return None


def together(comm, vector):
    """The vectors of all ranks, one in each row."""
    return np.array(comm.mpi.allgather(vector))


@pytest.mark.parametrize("spec", SPECS)
def test_rounds_are_products_with_the_mixing_matrix(spec, each_group):
    def body(bare):
        comm = Communicator(bare)
        graph = graph_of(spec, comm.size)
        if graph is not None:
            x = np.random.default_rng(comm.rank).standard_normal(1000)
            gossip, wanted = Gossip(comm, x), together(comm, x)
            mean = wanted.mean(axis=0)
            for step in range(7):
                w = mixing(graph, step)
                gossip.round(w)
                wanted = w @ wanted
                assert np.abs(x - wanted[comm.rank]).max() < 1e-14
            assert np.abs(together(comm, x).mean(axis=0) - mean).max() < 1e-14
            sent = sum(len(graph.graph(step)[comm.rank]) for step in range(7))
            assert comm.traffic["push"].bytes == sent * 8000 and comm.traffic["push"].messages == sent
        comm.free()

    each_group(body)


@pytest.mark.parametrize("spec", ["ring", "torus", "hypercube", "exponential", "star", "complete"])
@pytest.mark.parametrize("rule", ["metropolis-hastings", "uniform"])
def test_the_slowest_part_contracts_by_the_second_eigenvalue_and_no_part_by_less(spec, rule, each_group):
    def body(bare):
        comm = Communicator(bare)
        graph = graph_of(spec, comm.size)
        if graph is not None and comm.size > 1:
            w = mixing(graph, 0, rule)
            factor = second_eigenvalue(w)
            _, values, rows = np.linalg.svd(w - 1 / comm.size)
            assert values[0] == pytest.approx(factor)
            x = np.array([rows[0, comm.rank], np.random.default_rng(comm.rank).standard_normal()])
            before = together(comm, x)
            gossip = Gossip(comm, x)
            gossip.round(w)
            after = together(comm, x)
            lengths = [np.linalg.norm(each - each.mean(axis=0), axis=0) for each in (before, after)]
            assert lengths[1][0] == pytest.approx(factor * lengths[0][0], abs=1e-14)
            assert lengths[1][1] <= factor * lengths[0][1] + 1e-14
        comm.free()

    each_group(body)


@pytest.mark.mpi(min_size=3)
def test_accelerated_rounds_follow_the_recursion_and_come_closer_than_plain_ones(world):
    comm = Communicator(world)
    w = mixing(topology("ring", comm.size), 0)
    w = 0.8 * np.eye(comm.size) + 0.2 * w  # a slow one, also on a few ranks
    eta = acceleration(w)
    x = np.random.default_rng(comm.rank).standard_normal(50)
    plain = x.copy()
    gossip, reference = AcceleratedGossip(comm, x, eta), Gossip(comm, plain)
    now = before = start = together(comm, x)
    gossip.begin()
    for _ in range(20):
        gossip.round(w)
        reference.round(w)
        now, before = (1 + eta) * w @ now - eta * before, now
        assert np.abs(x - now[comm.rank]).max() < 1e-13
    mean = start.mean(axis=0)
    assert np.abs(together(comm, x).mean(axis=0) - mean).max() < 1e-13
    apart = [np.linalg.norm(together(comm, each) - mean) for each in (x, plain)]
    assert apart[0] < 0.5 * apart[1]
    comm.free()


@pytest.mark.parametrize("spec", ["ring", "torus", "hypercube", "one-peer", "star", "erdos-renyi:p=0.6"])
def test_factors_average_exactly(spec, each_group):
    def body(bare):
        comm = Communicator(bare)
        graph = graph_of(spec, comm.size)
        if graph is not None and not (spec == "one-peer" and comm.size & (comm.size - 1)):
            x = np.random.default_rng(comm.rank).standard_normal(100)
            mean, gossip = together(comm, x).mean(axis=0), Gossip(comm, x)
            for factor in exact_factors(graph):
                gossip.round(factor)
            assert np.abs(x - mean).max() < 1e-14
        comm.free()

    each_group(body)


@pytest.mark.mpi(min_size=3)
def test_what_has_arrived_does_not_keep_the_rest_from_moving(world):
    """The message of rank 1 is there at once, that of the last rank comes later, and needs this rank's help."""
    comm = Communicator(world)
    x, last = np.full(300_000, float(comm.rank)), comm.size - 1
    gossip = Gossip(comm, x)
    w = np.eye(comm.size)
    w[0, [0, 1, last]] = 1 / 3
    if comm.rank == last:
        comm.wait(source=0)  # that rank 0 has what rank 1 sent
    gossip.start(w)
    if comm.rank == 0:
        while not gossip.in_flight[0].done:
            gossip.progress()
        comm.notify(last)
        deadline = time.monotonic() + 20
        while not all(request.done for request in gossip.in_flight) and time.monotonic() < deadline:
            gossip.progress()
        assert all(request.done for request in gossip.in_flight)
    gossip.finish()
    assert np.allclose(x, (1 + last) / 3 if comm.rank == 0 else comm.rank)
    comm.free()


@pytest.mark.mpi(min_size=2)
def test_a_round_passes_while_the_rank_computes_and_takes_messages_of_any_length(world):
    """Longer than what MPI sends at once; x rests until the end."""
    comm = Communicator(world)
    x = np.full(400_000, float(comm.rank))
    gossip = Gossip(comm, x)
    gossip.start(mixing(topology("complete", comm.size), 0))
    for _ in range(10):
        gossip.progress()
        assert (x == comm.rank).all()
    gossip.finish()
    assert np.allclose(x, (comm.size - 1) / 2, rtol=0, atol=1e-14)
    comm.free()
