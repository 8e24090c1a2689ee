"""Averages: FedAvg weighs by rows; the private one asks by coins, clips, counts once and divides by what it expects."""

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.checkpoint.state import State
from hpcdl.comm import Communicator
from hpcdl.errors import UsageError
from hpcdl.federated.averaging import PrivacySpent, PrivateAverage, WeightedAverage
from hpcdl.federated.clients import sample
from hpcdl.federated.privacy import INTEGERS, ORDERS, divergences, epsilon
from hpcdl.random import Random

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="pure functions")

ROWS = [np.arange(count) for count in (4, 0, 7, 1, 0, 3, 5)]
HAVING = [0, 2, 3, 5, 6]


@pytest.mark.parametrize(("fraction", "asked"), [(0.0001, 1), (0.3, 2), (0.5, 4), (1.0, 5)])
def test_the_weighted_average_asks_so_many_that_have_rows_and_weighs_by_them(fraction, asked):
    average = WeightedAverage(Random(3), ROWS, fraction)
    assert average.clients == average.expected == asked and average.having_rows == HAVING
    for turn in range(9):
        assert average.ask(turn) == sample(Random(3), turn, HAVING, asked)
    change, total = np.array([3.0, 4.0]), np.array([1.0, 2.0])
    assert average.weigh(2, change) == 7 and np.array_equal(change, [3, 4])
    assert average.finish(total, 12, 0) == 12 and np.array_equal(total, [1, 2])
    assert average.finish(total, 0, 0) == 0  # nobody has answered
    assert average.tracked() == average.report() == {}
    private = PrivateAverage(Random(3), ROWS, 0.4, np.zeros(2), clip=2.5)
    assert all(set(private.ask(turn)) <= set(HAVING) for turn in range(30))


def test_what_an_older_checkpoint_has_spent_bounds_epsilon_by_whole_orders():
    spent, older = np.zeros(len(ORDERS)), 60 * divergences(2.0, 0.25)[[ORDERS.index(order) for order in INTEGERS]]
    state, found = State(), Checkpoint({"privacy_spent": older}, {})
    state.tracked["privacy_spent"] = PrivacySpent(spent)
    state.check_vectors(found, 1, "")
    state.load(Communicator(MPI.COMM_SELF), found)
    assert np.isinf(spent).sum() == len(ORDERS) - len(INTEGERS) and state.collect(Communicator(MPI.COMM_SELF), False)[2]
    assert abs(epsilon(spent, 1e-5) - 5.42) < 0.005 < epsilon(spent, 1e-5) - epsilon(60 * divergences(2.0, 0.25), 1e-5)
    with pytest.raises(UsageError, match="privacy_spent is 7 of float64, not"):
        state.check_vectors(Checkpoint({"privacy_spent": older[:7]}, {}), 1, "")
