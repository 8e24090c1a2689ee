"""Tests run on one rank and under mpiexec on several: a rank that fails ends all, for the others would wait for it."""

import errno
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.comm.launcher import clean_environment, mpiexec
from hpcdl.kernels import device

STANDIN = Path(__file__).parent / "standin"


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Rank 0 reports for all; what another rank has to say, it says when it fails."""
    config.cache_folder = tempfile.TemporaryDirectory()
    os.environ["HPCDL_CACHE"] = config.cache_folder.name  # what `auto` measures is not kept
    if MPI.COMM_WORLD.rank > 0:
        config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115 - open as long as pytest runs


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node, call, report):
    """Print the report of the rank that failed, then end the job."""
    if MPI.COMM_WORLD.size > 1:
        sys.stdout.flush()
        sys.stderr.write(f"\nrank {MPI.COMM_WORLD.rank} failed in {node.nodeid}\n{report.longreprtext}\n")
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)


@pytest.fixture
def world():
    """All ranks; a barrier before and after keeps one test's messages out of the next."""
    MPI.COMM_WORLD.Barrier()
    yield MPI.COMM_WORLD
    MPI.COMM_WORLD.Barrier()


def groups(world):
    """One communicator for each size from 1 to the world's; a rank that is not in it gets None."""
    for size in range(1, world.size + 1):
        part = world.Split(0 if world.rank < size else MPI.UNDEFINED, world.rank)
        yield size, None if part == MPI.COMM_NULL else part
        if part != MPI.COMM_NULL:
            part.Free()


@pytest.fixture
def each_group(world):
    """A function: run `body(comm)` on the first 1, 2, ... ranks, so that a world of 4 tests sizes 1 to 4."""

    def run(body):
        for _, comm in groups(world):
            if comm is not None:
                body(comm)

    return run


@pytest.fixture
def launch(tmp_path):
    """A function: start a program on so many ranks, as a user would; for tests that run on one rank themselves."""
    if MPI.COMM_WORLD.size > 1:
        pytest.skip("starts ranks of its own")

    def run(ranks, *command, timeout=60, check=None, cwd=tmp_path, **environment):
        done = subprocess.run(
            [mpiexec(), "-n", str(ranks), sys.executable, *map(str, command)],
            env=clean_environment() | environment,
            cwd=cwd,
            timeout=timeout,
            capture_output=True,
            text=True,
        )
        if check is not None:
            assert done.returncode == check, done.stdout + done.stderr
        return done

    run.mpiexec = mpiexec()
    return run


@pytest.fixture
def fetch_first(world):
    """A function: run `body()` on all ranks; rank `late` first fetches from `busy`, whose MPI must answer meanwhile."""

    def run(body, busy, late):
        exposed, fetched = np.full(100, float(world.rank)), np.empty(100)
        window = MPI.Win.Create(exposed, 8, comm=world)
        if world.rank == late:
            time.sleep(0.1)  # the others wait by now
            window.Lock(busy)
            window.Get(fetched, busy)
            window.Unlock(busy)
            assert (fetched == busy).all()
        body()
        window.Free()

    return run


@pytest.fixture
def no_room(monkeypatch):
    """A function: let /dev/shm have no room for this rank of the world."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill(rank):
        if MPI.COMM_WORLD.rank == rank:
            monkeypatch.setattr(os, "posix_fallocate", full)

    return fill


@pytest.fixture
def gpu(monkeypatch):
    """The stand-in for a GPU (tests/standin/cupy.py) as a device; its arrays meet no kernel here."""
    spec = importlib.util.spec_from_file_location("cupy", STANDIN / "cupy.py")
    standin = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "cupy", standin)
    spec.loader.exec_module(standin)
    device.cuda.cache_clear()
    yield device.cuda(0)
    device.cuda.cache_clear()


@pytest.fixture
def simulate(launch):
    """A function: start a program on so many ranks with the stand-in for CuPy, its kernels in Numba's simulator."""

    def run(ranks, *command, timeout=120, **options):
        return launch(ranks, *command, timeout=timeout, PYTHONPATH=str(STANDIN), NUMBA_ENABLE_CUDASIM="1", **options)

    return run
