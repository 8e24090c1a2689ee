"""Rounds of gossip by messages are products with the mixing matrix; averages stay, distances shrink as theory says."""

import time

import numpy as np
import pytest
from graphs import graph

from hpcdl.comm import Communicator
from hpcdl.comm.gossip.mixing import acceleration, mixing
from hpcdl.comm.gossip.rounds import AcceleratedGossip, Gossip
from hpcdl.comm.gossip.topology import topology

SPECS = ["ring", "torus", "hypercube", "exponential", "one-peer", "star", "complete", "random-regular:degree=2"]
SPECS += ["erdos-renyi:p=0.6", "random-matching"]


def together(comm, vector):
    """The vectors of all ranks, one in each row."""
    return np.array(comm.mpi.allgather(vector))


@pytest.mark.parametrize("spec", SPECS)
def test_rounds_are_products_with_the_mixing_matrix(spec, bare):
    comm = Communicator(bare)
    found = graph(spec, comm.size)
    if found is not None:
        x = np.random.default_rng(comm.rank).standard_normal(1000)
        gossip, wanted = Gossip(comm, x), together(comm, x)
        mean = wanted.mean(axis=0)
        for step in range(7):
            w = mixing(found, step)
            gossip.round(w)
            wanted = w @ wanted
            assert np.abs(x - wanted[comm.rank]).max() < 1e-14
        assert np.abs(together(comm, x).mean(axis=0) - mean).max() < 1e-14
        sent = sum(len(found.graph(step)[comm.rank]) for step in range(7))
        assert comm.traffic["push"].bytes == sent * 8000 and comm.traffic["push"].messages == sent


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
        assert all(request.done for request in gossip.in_flight) and (x == 0).all()  # x rests until the end
    gossip.finish()
    assert np.allclose(x, (1 + last) / 3 if comm.rank == 0 else comm.rank)
