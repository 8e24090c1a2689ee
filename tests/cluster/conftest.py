"""What needs a cluster: run by `make test-cluster`, or by naming this folder; else skipped. Each test runs per MPI."""

import functools
import importlib.util
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
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
def slurm_module():
    """The module slurm.py of this folder."""
    spec = importlib.util.spec_from_file_location("cluster_slurm", HERE / "slurm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def slurm(slurm_module, tmp_path_factory):
    """A function: a Slurm for jobs on 1 node, of 4 cores, or on 2, of 2 cores, with a node to spare; it starts once."""
    problem = slurm_module.install()
    if problem:
        pytest.skip(problem)
    started = []

    @functools.cache
    def of(nodes):
        size = (1, 4) if nodes == 1 else (3, 2)
        started.append(slurm_module.Slurm(tmp_path_factory.mktemp(f"slurm-{nodes}"), *size).__enter__())
        return started[-1]

    yield of
    for each in started:
        each.__exit__()
    for each in started:
        left = subprocess.run(["pgrep", "-f", str(each.folder)], capture_output=True, text=True).stdout
        assert not left, f"processes of Slurm are left: {left}"


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """Environment variables of all jobs: their caches, and where Python finds gate.py.

    Compiled kernels stay where `make clean` finds them: to make them takes longer than most tests.
    """
    compiled = next(path for path in ENVIRONMENTS.values() if path.exists()) / "cluster"
    compiled.mkdir(exist_ok=True)
    return {
        "TMPDIR": str(compiled),
        "HPCDL_CACHE": str(tmp_path_factory.mktemp("cache")),
        "PYTHONPATH": str(HERE),
        "OMPI_MCA_mpi_yield_when_idle": "1",  # there are more ranks than cores
    }


@pytest.fixture
def submit(slurm, venv, shared, tmp_path):
    """A function: submit a template with its arguments, on so many nodes, under the MPI of this test; returns the job.

    Jobs run in tmp_path; those that a test leaves are cancelled. sbatch: its options.
    """
    jobs = []

    def start(template, *arguments, nodes=1, sbatch=(), **environment):
        environment = {"HPCDL_VENV": str(venv)} | shared | environment
        template = template if str(template).startswith("-") else ROOT / "slurm" / template
        jobs.append(slurm(nodes).submit(*sbatch, template, *arguments, cwd=tmp_path, **environment))
        return jobs[-1]

    yield start
    for job in jobs:
        job.cancel()
