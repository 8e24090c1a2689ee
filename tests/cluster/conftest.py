"""What needs a cluster: run by `make test-cluster`, or by naming this folder; else skipped. Each test runs per MPI."""

import fcntl
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdl.machine.launcher import clean_environment

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for the modules in this folder, which is no package
ROOT = HERE.parents[1]
ENVIRONMENTS = {"mpich": ROOT / ".venv", "openmpi": ROOT / ".venv-openmpi"}  # as make install makes them


def pytest_collection_modifyitems(config, items):
    """Skip what lies here, unless this folder or something in it was asked for."""
    paths = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    if not any(path.is_relative_to(HERE) for path in paths):
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason="needs root and installs packages: make test-cluster"))


@pytest.fixture(scope="session", params=list(ENVIRONMENTS))
def mpi(request):
    """The name of an MPI library that is installed into a virtual environment of this repository."""
    if not (ENVIRONMENTS[request.param] / "bin" / "hpcdl").exists():
        pytest.skip(f"{ENVIRONMENTS[request.param].name} is missing: make install MPI={request.param}")
    return request.param


@pytest.fixture
def venv(mpi):
    """The virtual environment with this MPI."""
    return ENVIRONMENTS[mpi]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A function: a Slurm for jobs on 1 node, of 4 cores, or on 2, of 2 cores, with a node to spare; it starts once."""
    from slurm import Slurm, install

    if problem := install():
        pytest.skip(problem)
    started = []

    @functools.cache
    def of(nodes):
        size = (1, 4) if nodes == 1 else (3, 2)
        started.append(Slurm(tmp_path_factory.mktemp(f"slurm-{nodes}"), *size).__enter__())
        return started[-1]

    yield of
    for each in started:
        each.__exit__()
    for each in started:
        left = subprocess.run(["pgrep", "-f", str(each.folder)], capture_output=True, text=True).stdout
        assert not left, f"processes of Slurm are left: {left}"


@pytest.fixture(scope="session")
def compiled():
    """The compile cache of all runs, as slurm/env.sh calls it in TMPDIR, where `make clean` finds it. It is filled
    first, in each precision at the same time: the ranks of a run would compile all kernels each."""
    environment = next(path for path in ENVIRONMENTS.values() if path.exists())
    cache = environment / "cluster" / f"hpcdl-cache-{os.getuid()}"
    cache.parent.mkdir(exist_ok=True)
    with (cache.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes of pytest may come here
        if not cache.exists():
            cache.mkdir(mode=0o700)
            train = [environment / "bin" / "mpiexec", "-n", "2", environment / "bin" / "hpcdl", "train-allreduce"]
            train += ["--data", "digits", "--model", "mlp:8", "--steps", "2", "--out", "none", "--allreduce"]
            ways = ["hierarchical"], ["ring", "--dtype", "float64"]
            clean = clean_environment() | {"NUMBA_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
            runs = [subprocess.Popen([*train, *way], env=clean, stdout=subprocess.DEVNULL) for way in ways]
            assert [run.wait(100) for run in runs] == [0, 0]
    return cache


@pytest.fixture(scope="session")
def shared(compiled, tmp_path_factory):
    """Environment variables of all jobs: their caches, and where Python finds gate.py."""
    places = {"TMPDIR": compiled.parent, "HPCDL_CACHE": tmp_path_factory.mktemp("cache"), "PYTHONPATH": HERE}
    crowded = {"OMPI_MCA_mpi_yield_when_idle": "1"}  # there are more ranks than cores
    return {name: str(path) for name, path in places.items()} | crowded


@pytest.fixture
def submit(slurm, venv, shared, tmp_path):
    """A function: submit a template with its arguments, on so many nodes, under the MPI of this test; returns the job.
    Jobs run in tmp_path; those that a test leaves are cancelled. sbatch: its options."""
    jobs = []

    def start(template, *arguments, nodes=1, sbatch=(), **environment):
        environment = {"HPCDL_VENV": str(venv)} | shared | environment
        template = template if str(template).startswith("-") else ROOT / "slurm" / template
        jobs.append(slurm(nodes).submit(*sbatch, template, *arguments, cwd=tmp_path, **environment))
        return jobs[-1]

    yield start
    for job in jobs:
        job.cancel()
