"""Tests run on one rank and under mpiexec on several: a rank that fails ends all, for the others would wait for it."""

import contextlib
import errno
import importlib.util
import json
import os
import socket
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
    """One communicator for each size from 1, or $LEAST_RANKS, to the world's; a rank that is not in it gets None."""
    for size in range(int(os.environ.get("LEAST_RANKS", 1)), world.size + 1):
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


class Ranks:
    """Ranks that stay up and run one program after another (tests/standin/rank.py)."""

    def __init__(self, ranks: int, environment: dict[str, str]):
        self.folder, self.lines = tempfile.TemporaryDirectory(), []
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(f"{self.folder.name}/door")
            door.listen(ranks)
            door.settimeout(60)
            self.process = subprocess.Popen(
                [mpiexec(), "-n", str(ranks), sys.executable, STANDIN / "rank.py", self.folder.name],
                env=clean_environment() | environment,
                stdin=subprocess.DEVNULL,
            )
            while len(self.lines) < ranks:
                self.lines.append(door.accept()[0])

    def run(self, order, timeout):
        """The script, arguments and folder in `order`, on all ranks; returns the status and all that they print."""
        deadline, statuses = time.monotonic() + timeout, set()
        for line in self.lines:
            line.sendall(f"{json.dumps(order)}\n".encode())
        for line in self.lines:
            line.settimeout(max(0.1, deadline - time.monotonic()))
            statuses.add(line.recv(10).decode().strip())
        if "" in statuses:  # a rank has ended the job
            statuses = {self.process.wait(timeout=10)}
        said = [
            "".join(path.read_text() for path in sorted(Path(self.folder.name).glob(end))) for end in ("*.out", "*.err")
        ]
        assert len(statuses) == 1, f"the ranks leave with statuses {statuses}\n{''.join(said)}"
        return subprocess.CompletedProcess(order, int(statuses.pop()), *said)

    def end(self):
        """Let them go, or end them where they are still in a program."""
        for line in self.lines:
            line.close()
        for stop in (self.process.poll, self.process.terminate, self.process.kill):
            stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=10)
                break
        self.folder.cleanup()


@pytest.fixture(scope="session")
def ready():
    """The groups of ranks that are up, at most 20 in all, by their number and environment; the last used is last."""
    groups = {}
    yield groups
    for ranks in groups.values():
        ranks.end()


@pytest.fixture
def run_on(tmp_path, ready):
    """A function as `launch`, for what a script prints and writes: on ranks that stay up, all of the same status."""
    if MPI.COMM_WORLD.size > 1:
        pytest.skip("starts ranks of its own")

    def run(ranks, script, *arguments, timeout=60, check=None, cwd=tmp_path, **environment):
        which = ranks, *sorted(environment.items())
        while which not in ready and ready and ranks + sum(number for number, *_ in ready) > 20:
            ready.pop(next(iter(ready))).end()
        group = ready.pop(which, None) or Ranks(ranks, environment)
        try:
            done = group.run([str(script), [*map(str, arguments)], str(cwd)], timeout)
        except BaseException:
            group.end()
            raise
        if group.process.poll() is None:
            ready[which] = group
        else:
            group.end()
        if check is not None:
            assert done.returncode == check, done.stdout + done.stderr
        return done

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
def simulate(run_on):
    """A function as `run_on`, with the stand-in for CuPy, its kernels in Numba's simulator."""

    def run(ranks, script, *arguments, timeout=120, **options):
        environment = {"PYTHONPATH": str(STANDIN), "NUMBA_ENABLE_CUDASIM": "1"}
        return run_on(ranks, script, *arguments, timeout=timeout, **environment, **options)

    return run
