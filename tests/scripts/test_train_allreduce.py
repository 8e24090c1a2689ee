"""The program as its user starts it: the same curve on any number of ranks, and theory's bytes."""

from pathlib import Path

import numpy as np
import pytest
from curves import OPTIONS, PARAMETERS, STEPS, curve
from written_runs import summary

from hpcdl.chunks import chunks

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_allreduce.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder for the runs that several tests ask for."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def sequential(run_on, runs):
    """The curve of the sequential program."""
    if not (runs / "sequential").exists():
        run_on(1, SCRIPT.with_name("train_sequential.py"), *OPTIONS, "--out", runs / "sequential", check=0)
    return curve(runs / "sequential")


@pytest.mark.parametrize(
    "ranks, algorithm",
    [
        (1, "ring"),
        (3, "ring"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((3, "mpi"), (5, "tree"), (5, "shared"))),
    ],
)
def test_the_same_curve_and_the_bytes_of_theory(run_on, tmp_path, sequential, ranks, algorithm):
    run_on(ranks, SCRIPT, *OPTIONS, "--allreduce", algorithm, "--out", tmp_path / "a", check=0)
    assert len(sequential) == STEPS and np.abs(curve(tmp_path / "a") - sequential).max() <= 1e-10
    found, length = summary(tmp_path / "a"), [cut.stop - cut.start for cut in chunks(PARAMETERS, ranks)]
    assert found["replicas_agree"] is True and found["parameters"] == PARAMETERS and found["allreduce"] == algorithm
    for rank, traffic in enumerate(found["traffic_per_rank"]):
        counted = traffic["all_reduce"]
        assert counted["calls"] == STEPS
        if algorithm == "ring":
            values = 2 * PARAMETERS - length[(rank + 1) % ranks] - length[(rank + 2) % ranks] if ranks > 1 else 0
            assert (counted["bytes"], counted["messages"]) == (8 * STEPS * values, STEPS * 2 * (ranks - 1))
            assert found["bytes_sent_per_rank"][rank] == counted["bytes"] + traffic["broadcast"]["bytes"]


def test_a_run_says_where_compression_loses(run_on, tmp_path):
    """And the trial counts for nothing: messages are those of the steps, and the residual begins at zero."""
    options = [*OPTIONS, "--allreduce", "ring", "--compress", "topk:1"]
    done = run_on(2, SCRIPT, *options, "--out", tmp_path / "a", check=0)
    found = summary(tmp_path / "a")
    trial = found["compression"]
    assert done.stdout.count("compression loses: ") == (trial["compressed_seconds"] > trial["plain_seconds"])
    assert [traffic["all_reduce"]["calls"] for traffic in found["traffic_per_rank"]] == 2 * [STEPS]


def test_overlap_changes_no_step_and_says_what_it_hides(run_on, tmp_path, sequential):
    options = [*OPTIONS, "--allreduce", "ring", "--overlap", "--bucket-mib", "0.001"]
    done = run_on(3, SCRIPT, *options, "--out", tmp_path / "a", check=0)
    found = summary(tmp_path / "a")
    assert np.abs(curve(tmp_path / "a") - sequential).max() <= 1e-10
    assert found["replicas_agree"] is True and 0 <= found["hidden_fraction"] <= 1
    trial = found["overlap"]
    assert trial["buckets"] == 2 and trial["exchange_alone_seconds"] > 0 < trial["exchange_exposed_seconds"]
    loses = trial["overlapped_step_seconds"] > trial["plain_step_seconds"]
    assert done.stdout.count("overlap loses: ") == loses
    assert [traffic["all_reduce"]["calls"] for traffic in found["traffic_per_rank"]] == 3 * [2 * STEPS]
    sent = sum(traffic["all_reduce"]["bytes"] for traffic in found["traffic_per_rank"])
    assert sent == 8 * STEPS * 2 * 2 * PARAMETERS
