"""Chains: when samples are taken, R-hat of made chains, vectors of chains on other ranks. Runs: test_sgld.py."""

import numpy as np
import pytest

from hpcdl.chunks import chunks
from hpcdl.comm import Communicator
from hpcdl.data import from_arrays
from hpcdl.inference.chains import Chains, PerChain
from hpcdl.memory import Memory
from hpcdl.models import for_data
from hpcdl.optim import make_optimizer

DATA = from_arrays(np.zeros((4, 2)), np.array([0, 1, 0, 1]), dtype="float64")
MODEL = for_data("logistic", DATA, "float64")


def held(comm, chains=1, burn_in=0, thin=1):
    """What this rank of `comm` holds."""
    w = np.zeros(3)
    number = next(c for c, part in enumerate(chunks(comm.size, chains)) if part.start <= comm.rank < part.stop)
    optimizer = make_optimizer("sgd", 3, "float64", lambda step: 1.0)
    found = Chains(MODEL, w, optimizer, comm.size, number, chains, burn_in, thin)
    found.join(comm, Memory())
    return found


@pytest.mark.parametrize(
    "burn_in, thin, steps, wanted", [(0, 1, 3, [1, 2, 3]), (4, 3, 12, [7, 10]), (4, 3, 6, []), (9, 1, 10, [10])]
)
def test_when_samples_are_taken(burn_in, thin, steps, wanted, world):
    comm = Communicator(world)
    found = held(comm, burn_in=burn_in, thin=thin)
    for step in range(1, steps + 1):
        found.take(step, 0.1)
    assert found.steps == found.due(steps) == wanted
    assert len(found.samples) == (len(wanted) if comm.rank == 0 else 0)
    comm.free()


@pytest.mark.least(1)
def test_r_hat_is_near_1_for_chains_of_one_distribution_and_large_for_others(bare):
    comm = Communicator(bare)
    for chains in range(1, comm.size + 1):
        found = held(comm, chains)
        random = np.random.default_rng(found.number)
        assert found.r_hat() is None
        for step in range(1, 201):
            # Of the three parameters, one is alike in all chains, one is shifted in each, one drifts.
            found.w[:] = random.standard_normal(3) + np.array([0, 5 * found.number, step / 20])
            found.take(step, 0.1)
        alike, shifted, drifting = found.r_hat()
        assert alike < 1.05 and drifting > 1.5
        assert (shifted > 1.5) == (chains > 1)
    comm.free()


def test_a_vector_of_each_chain_for_any_number_of_ranks(bare):
    comm, parts = Communicator(bare), chunks(bare.size, min(2, bare.size))
    number = next(c for c, part in enumerate(parts) if part.start <= comm.rank < part.stop)
    mine = PerChain(np.full(5, 1.0 + number), [part.start for part in parts], number)
    assert mine.form(comm.size) == ((len(parts), 5), np.dtype("float64")) and mine.stored("w") == "chains/w"
    whole = mine.gather(comm)
    assert (whole is None) == (comm.rank > 0)
    if whole is not None:
        assert np.array_equal(whole, np.repeat([[1.0], [2.0]], 5, axis=1)[: len(parts)])
    mine.array[:] = 0
    mine.scatter(comm, whole)
    assert (mine.array == 1 + number).all()
    comm.free()
