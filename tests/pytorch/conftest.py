"""Runs of one strategy after another, as the strategies' own tests have them; a process group on the test's ranks."""

import datetime
import importlib.util

import pytest
from mpi4py import MPI
from strategies.conftest import cut, follow, references, resumes, ring  # noqa: F401

if importlib.util.find_spec("torch"):
    import torch

    torch.set_num_threads(1)
else:
    collect_ignore_glob = ["test_[!m]*.py", "test_m[!i]*.py"]  # all but test_missing.py


@pytest.fixture(scope="module")
def _opened():
    import hpcdl.torch  # noqa: F401 - registers the backend

    torch.distributed.init_process_group("hpcdl")
    yield torch.distributed
    torch.distributed.destroy_process_group()


@pytest.fixture
def group(world, _opened):
    """torch.distributed with a default group of ours on all ranks; what is in flight at the end is none."""
    from hpcdl.torch.work import engine

    yield _opened
    assert not engine.live
    world.Barrier()


@pytest.fixture
def gloo(group, _opened):
    """A group of gloo's over the same ranks, to compare with."""
    return group.new_group(backend="gloo", timeout=datetime.timedelta(seconds=60))


@pytest.fixture
def rank():
    return MPI.COMM_WORLD.rank


@pytest.fixture
def size():
    return MPI.COMM_WORLD.size
