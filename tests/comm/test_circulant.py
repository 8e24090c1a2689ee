"""Circulant graphs: the ring's bytes in 2 ceil(log2 N) steps for every N; so do all-gather and reduce-scatter."""

import math

import numpy as np
import pytest
from local_ranks import circulant_traffic, reduced_locally, run_locally
from sums import total, values

from hpcdl.chunks import chunk
from hpcdl.comm import Communicator
from hpcdl.comm.allreduce import ALGORITHMS, circulant
from hpcdl.comm.operations import SUM

SIZES = [*range(1, 10), 16]


@pytest.mark.parametrize("name", ["circulant", "recursive"])
@pytest.mark.parametrize("size", SIZES)
def test_sums_counts_and_steps_of_any_number_of_ranks(alone, name, size):
    for length in (0, 1, size - 1, 5 * size, 1009):
        rows = np.stack([values(rank, length, "float64") for rank in range(size)])
        comms, steps = reduced_locally(ALGORITHMS[name], rows)
        assert (rows == total(size, length, "float64")).all()
        assert steps == 2 * math.ceil(math.log2(size)) if size > 1 else steps == 0
        for comm in comms:
            if name == "circulant" or size & (size - 1):
                (scattered, first), (gathered, second) = circulant_traffic(length, size, comm.rank)
                own = chunk(length, size, comm.rank)
                assert scattered == length - (own.stop - own.start) and first <= 1 + math.ceil(math.log2(size))
                assert (comm.values, comm.messages) == (scattered + gathered, first + second)
            if length % size == 0:
                assert comm.values == 2 * (size - 1) * length // size
            assert comm.values <= 2 * (size - 1) * math.ceil(length / size)
        assert sum(comm.values for comm in comms) == 2 * (size - 1) * length


@pytest.mark.parametrize("size", [3, 5, 7, 16])
def test_all_ranks_have_the_same_bits(alone, size):
    rows = np.random.default_rng(size).standard_normal((2, size, 1009)).astype("float32")
    rows[1] = rows[0]
    for each in rows:
        reduced_locally(circulant.ALGORITHM, each)
    assert (rows[0] == rows[0][0]).all() and np.array_equal(rows[0], rows[1])


@pytest.mark.parametrize("size", SIZES)
def test_the_halves(alone, size):
    rows = np.stack([values(rank, 23, "float64") for rank in range(size)])
    wanted = rows.sum(axis=0)
    run_locally(circulant.circulant_reduce_scatter.steps, list(rows), SUM)
    for rank, row in enumerate(rows):
        own = chunk(23, size, rank)
        assert np.array_equal(row[own], wanted[own])
        row[: own.start] = row[own.stop :] = -1
    run_locally(circulant.circulant_all_gather.steps, list(rows))
    assert (rows == wanted).all()


@pytest.mark.parametrize("length", [0, 5, 1024])
def test_counts_by_mpi(length, bare):
    comm = Communicator(bare, allreduce="circulant")
    comm.all_reduce(np.ones(length))
    sent, messages = sum(circulant_traffic(length, comm.size, comm.rank))
    assert (comm.traffic["all_reduce"].bytes, comm.traffic["all_reduce"].messages) == (8 * sent, messages)
