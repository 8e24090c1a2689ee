"""Runs of one strategy after another, as the strategies' own tests have them; a process group on the test's ranks."""

import datetime
from pathlib import Path

import pytest
from mpi4py import MPI
from strategies.conftest import cut, follow, references, resumes, ring  # noqa: F401


@pytest.fixture(scope="session")
def _torch():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    return torch


@pytest.fixture(scope="module")
def _opened(_torch):
    import hpcdl.torch  # noqa: F401 - registers the backend

    distributed = _torch.distributed
    distributed.init_process_group("hpcdl")
    yield distributed
    distributed.destroy_process_group()


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
def same_over_gloo(launch, tmp_path):
    """A function: a program of docs/examples prints its losses, and `last`, and over gloo the same losses."""

    def compare(name, last):
        text = (Path(__file__).parents[2] / "docs/examples" / name).read_text()
        assert text.count('init_process_group("hpcdl")') == 1
        said = []
        for backend in ("hpcdl", "gloo"):
            path = tmp_path / f"over_{backend}.py"
            path.write_text(text.replace('init_process_group("hpcdl")', f'init_process_group("{backend}")'))
            # Gloo's threads may still hold tensors when Python ends, and then abort: what was printed counts there.
            done = launch(2, path, check=0 if backend == "hpcdl" else None, timeout=150)
            said.append([line for line in done.stdout.splitlines() if "loss" in line])
            assert backend == "gloo" or last in done.stdout
        assert said[0] == said[1] and len(said[0]) > 2

    return compare


@pytest.fixture
def rank():
    return MPI.COMM_WORLD.rank


@pytest.fixture
def size():
    return MPI.COMM_WORLD.size
