"""Threads of the matrix products: a share of the cores that are shared."""

import os
from types import SimpleNamespace

import pytest
from threadpoolctl import threadpool_info

from hpcdl.machine import threads as machine
from hpcdl.machine.threads import Threads


def ranks_with(cores, halved=0):
    """A communicator of ranks with these cores each; halved: what another rank has found."""
    node = SimpleNamespace(allgather=lambda mine: cores, Free=lambda: None)
    node.allreduce = lambda mine, op: max(mine, halved)
    node.Split_type = lambda kind: node
    return node


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in (*machine.BLAS, "SLURM_JOB_ID", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def alone_on_four(monkeypatch):
    """A function: the threads of a rank on four cores, of which others leave so many, look after look."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))

    def made(*found, ranks=1, halved=0):
        looks = iter(found)
        load = SimpleNamespace(available=lambda ranks: next(looks), measure=lambda ranks, min_seconds: next(looks))
        monkeypatch.setattr(machine, "load", load)
        return Threads(ranks_with([list(range(4))] * ranks, halved))

    return made


@pytest.mark.parametrize(
    "mine, others, wanted", [(range(8), 0, 8), (range(8), 3, 2), (range(2), 6, 1), ([3], 0, 1), (range(8, 16), 1, 4)]
)
def test_the_cores_are_shared_by_those_that_have_the_same(mine, others, wanted, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(mine))
    apart = [[100, 101]]  # a rank with other cores takes nothing away
    assert Threads(ranks_with([list(mine)] * (1 + others) + apart)).now == wanted


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
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine, "QUOTA", tmp_path / "cpu.max")
    if quota:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert Threads(ranks_with([list(range(8))] * 2)).now == wanted


@pytest.mark.parametrize(
    ("left", "wanted"), [(None, 4), (4.0, 4), (3.8, 4), (3.7, 2), (2.0, 2), (1.8, 2), (1.7, 1), (0.0, 1)]
)
def test_where_others_compute_fewer_threads_are_taken(alone_on_four, left, wanted):
    assert alone_on_four(left).now == wanted


def test_all_ranks_take_the_same_part_of_their_shares(alone_on_four):
    assert alone_on_four(2.0, ranks=2, halved=1).now == 1  # another rank found too few


def test_what_the_user_has_set_stays(alone_on_four, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    ours = alone_on_four()  # nobody looks
    assert (ours.now, ours.vote()) == (3, 0)


def test_votes_follow_the_load_and_threads_what_is_agreed(alone_on_four):
    with alone_on_four(4.0, None, 1.1, 1.1, 1.1, 1.9, 4.0, 4.0, 4.0) as ours:
        seen = []
        for _ in range(8):
            vote = ours.vote()
            ours.agreed(vote)
            seen.append((vote, ours.now))
    assert seen == [(0, 4), (-1, 2), (-1, 1), (0, 1), (1, 2), (1, 4), (0, 4), (0, 4)]
    assert ours.used == [4, 2, 1, 2, 4]


def test_blas_takes_as_many_as_agreed_and_afterwards_as_before(alone_on_four):
    def pools():
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    before = pools()
    with alone_on_four(2.0, 1.0) as ours:
        ours.agreed(ours.vote())
        assert set(pools()) == {1}
    assert pools() == before
