"""What a model holds beside its parameters becomes the same on all ranks, and is averaged where it may."""

from types import SimpleNamespace

import numpy as np
import pytest

from hpcdl.checkpoint import buffers
from hpcdl.comm import Communicator
from hpcdl.models.model import ModelWrapper


def model(rank, averaged=("mean", "count", "half", "mask", "flag")):
    arrays = {
        "mean": np.array([[1.0 + rank, 2.0]]),
        "half": np.full(3, rank, np.float16),
        "count": np.array([rank, 7], np.int64),
        "flag": np.array([rank == 1]),
        "mask": np.array([0.1, -np.inf, np.inf]),
        "frozen": np.array([float(rank)]),
        "empty": np.empty((0, 2)),
    }
    return SimpleNamespace(extra=arrays, averaged=averaged)


def test_all_take_those_of_rank_0(bare):
    made = model(bare.rank)
    buffers.share(ModelWrapper(made), Communicator(bare))
    for name, array in model(0).extra.items():
        assert np.array_equal(made.extra[name], array) and made.extra[name].dtype == array.dtype


def test_the_mean_and_the_largest(bare):
    made = model(bare.rank)
    buffers.average(ModelWrapper(made), Communicator(bare))
    middle = (bare.size - 1) / 2
    assert made.extra["mean"].tolist() == pytest.approx(np.array([[1.0 + middle, 2.0]]))
    assert np.allclose(made.extra["half"], middle, atol=2e-3)
    assert made.extra["count"].tolist() == [bare.size - 1, 7]
    assert made.extra["flag"].tolist() == [bare.size > 1]
    assert np.array_equal(made.extra["mask"], [0.1, -np.inf, np.inf])  # the same on all: to the bit
    assert made.extra["frozen"].tolist() == [bare.rank]
    for array in made.extra.values():
        assert all(np.array_equal(each, array) for each in bare.allgather(array)) or array is made.extra["frozen"]
    local = model(bare.rank, ())
    buffers.average(local, Communicator(bare))
    assert local.extra["mean"][0, 0] == 1.0 + bare.rank


def test_nothing_of_what_is_kept_stays():
    made = model(3)
    with buffers.buffers_restored(made):
        for array in made.extra.values():
            array[...] = 0
    assert all(np.array_equal(array, model(3).extra[name]) for name, array in made.extra.items())
    with buffers.buffers_restored(object()):
        pass
