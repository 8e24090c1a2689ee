"""A client's update is what the algorithm says, in an order of its own and with a fresh state in each round."""

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.data import from_arrays
from hpcdl.federated.client import ClientUpdate
from hpcdl.models import make_model
from hpcdl.optim import make_optimizer
from hpcdl.random import Random

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="clients know nothing of ranks")

X, Y = (np.random.default_rng(2).standard_normal(shape) for shape in ((17, 3), 17))
ROWS = [np.array([0, 5, 9, 12, 13]), np.array([1, 2, 16])]


def update(epochs, batch, penalty=0.0):
    model, data = make_model("linear", (3,), 0, "float64"), from_arrays(X, Y, dtype="float64")
    optimizer = make_optimizer("momentum:beta=0.5", model.layout.size, "float64", lambda step: 0.1 / (step + 1))
    gradient = np.zeros(model.layout.size)
    return ClientUpdate(model, data, ROWS, optimizer, Random(4), gradient, epochs, batch, penalty)


def by_numpy(w, client, turn, epochs, batch, penalty):
    """The change of w and the sum of the losses, for linear regression with momentum 0.5."""
    x, own, velocity, losses = np.c_[X, np.ones(17)], w.copy(), np.zeros(4), 0.0
    for epoch in range(epochs):
        order = ROWS[client][Random(4)("local order", client, turn, epoch).permutation(len(ROWS[client]))]
        size = batch or len(order)
        for rows in (order[start : start + size] for start in range(0, len(order), size)):
            apart = x[rows] @ own - Y[rows]
            losses += (apart**2).sum() / 2
            velocity = 0.5 * velocity + x[rows].T @ apart / len(rows) + penalty * (own - w)
            own = own - 0.1 / (turn + 1) * velocity
    return own - w, losses


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("batch", [0, 2, 5])
@pytest.mark.parametrize("penalty", [0.0, 0.7], ids=["FedAvg", "FedProx"])
def test_as_the_algorithm_in_plain_numpy(epochs, batch, penalty):
    """One client after the other, from another w in each round: nothing of one is left for the next."""
    client_update, random = update(epochs, batch, penalty), np.random.default_rng(6)
    for turn in range(3):
        w = random.standard_normal(4)
        for client in (1, 0):
            before = w.copy()
            change, loss = client_update(client, turn, w)
            wanted, losses = by_numpy(w, client, turn, epochs, batch, penalty)
            assert np.abs(change - wanted).max() < 1e-14 and loss == pytest.approx(losses, rel=1e-13)
            assert np.array_equal(w, before)


def test_its_work_is_what_it_computes():
    assert [update(3, 2).work(client) for client in (0, 1)] == [15, 9]
