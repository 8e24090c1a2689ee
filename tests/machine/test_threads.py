"""Threads of the matrix products: a share of the cores that are shared."""

import os

import pytest

from hpcdl.machine import threads as machine
from hpcdl.machine.threads import threads


class Node:
    """A communicator of so many ranks, with these cores each."""

    def __init__(self, cores):
        self.cores = cores

    def Split_type(self, kind):
        return self

    def allgather(self, mine):
        return self.cores

    def Free(self):
        pass


@pytest.mark.parametrize(
    "mine, others, wanted",
    [(range(8), 0, 8), (range(8), 3, 2), (range(2), 6, 1), ([3], 0, 1), (range(8, 16), 1, 4)],
)
def test_the_cores_are_shared_by_those_that_have_the_same(mine, others, wanted, monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(mine))
    apart = [[100, 101]]  # a rank with other cores takes nothing away
    assert threads(Node([list(mine)] * (1 + others) + apart)) == wanted


@pytest.mark.parametrize(
    ("slurm", "quota", "wanted"),
    [
        ({}, None, 4),
        ({"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "6"}, None, 3),
        ({"SLURM_CPUS_ON_NODE": "6"}, None, 4),  # left over from a job
        ({}, "max 100000", 4),
        ({}, "250000 100000", 1),  # two and a half cores, three at most: for two ranks
        ({"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "1"}, "800000 100000", 1),
    ],
)
def test_of_a_shared_node_only_what_is_allotted(slurm, quota, wanted, monkeypatch, tmp_path):
    """Two ranks, both bound to eight cores, on a node that others use, too."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "SLURM_JOB_ID", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine, "QUOTA", tmp_path / "cpu.max")
    if quota:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert threads(Node([list(range(8))] * 2)) == wanted


def test_the_user_decides(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(Node([[0]])) == 3
