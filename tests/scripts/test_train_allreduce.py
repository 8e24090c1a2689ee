"""The program as its user starts it: the same curve on any number of ranks, and theory's bytes."""

import re
from pathlib import Path

import h5py
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
        (2, "ring"),
        (3, "ring"),
        (3, "naive"),
        (3, "direct"),
        (3, "mpi"),
        (5, "tree"),
        (5, "ring"),
    ],
)
def test_the_same_curve_and_the_bytes_of_theory(run_on, tmp_path, sequential, ranks, algorithm):
    out = tmp_path / "a"
    run_on(ranks, SCRIPT, *OPTIONS, "--allreduce", algorithm, "--out", out, check=0)
    assert len(sequential) == STEPS and np.abs(curve(out) - sequential).max() <= 1e-10
    found = summary(out)
    assert found["replicas_agree"] is True and found["parameters"] == PARAMETERS
    length = [cut.stop - cut.start for cut in chunks(PARAMETERS, ranks)]
    theory = {  # values and messages that rank r sends for one all-reduce
        "ring": lambda r: (2 * PARAMETERS - length[(r + 1) % ranks] - length[(r + 2) % ranks], 2 * (ranks - 1)),
        "naive": lambda r: (PARAMETERS * (ranks - 1 if r == 0 else 1), ranks - 1 if r == 0 else 1),
        "direct": lambda r: (PARAMETERS * (ranks - 1), ranks - 1),
        "tree": lambda r: ([3, 1, 2, 1, 1][r] * PARAMETERS, [3, 1, 2, 1, 1][r]),  # of 5 ranks
        "mpi": lambda r: (PARAMETERS, None),
    }[algorithm]
    for rank, traffic in enumerate(found["traffic_per_rank"]):
        counted, (values, messages) = traffic["all_reduce"], theory(rank) if ranks > 1 else (0, 0)
        assert counted["calls"] == STEPS
        assert counted["bytes"] == 8 * STEPS * values
        assert counted["messages"] == (None if messages is None else STEPS * messages)
        assert found["bytes_sent_per_rank"][rank] == counted["bytes"] + traffic["broadcast"]["bytes"]


@pytest.mark.parametrize("ranks, algorithm", [(5, "shared"), (5, "recursive"), (5, "hierarchical"), (3, "auto")])
def test_the_same_curve(run_on, tmp_path, sequential, ranks, algorithm):
    run_on(ranks, SCRIPT, *OPTIONS, "--allreduce", algorithm, "--out", tmp_path / "a", check=0)
    found = summary(tmp_path / "a")
    assert np.abs(curve(tmp_path / "a") - sequential).max() <= 1e-10
    assert found["replicas_agree"] is True and found["allreduce"] == algorithm
    if algorithm in ("shared", "hierarchical"):
        assert all(traffic["all_reduce"]["messages"] == 0 for traffic in found["traffic_per_rank"])


def test_16_bits_halve_the_bytes_and_their_residuals_stay_with_their_ranks(run_on, tmp_path):
    options = [*OPTIONS, "--dtype", "float32", "--compress", "float16", "--out", tmp_path / "a"]
    run_on(3, SCRIPT, *options, check=0)
    found, length = summary(tmp_path / "a"), [cut.stop - cut.start for cut in chunks(PARAMETERS, 3)]
    assert (found["allreduce"], found["compress"]) == ("compressed", "float16")
    for traffic, k in zip(found["traffic_per_rank"], length, strict=True):
        assert traffic["all_reduce"]["bytes"] == STEPS * 2 * (PARAMETERS - k + 2 * k)
        assert traffic["all_reduce"]["messages"] == STEPS * 4
    for ranks, more, words in [
        (2, [], "residual belongs to its 3 ranks; start 3, not 2"),
        (3, ["--compress", "none"], "state is .*ranks/residual"),
        (3, ["--compress", "int8"], "--compress: expected one of 'none', 'float16', 'bfloat16', not int8"),
    ]:
        done = run_on(ranks, SCRIPT, "--resume", tmp_path / "a", "--epochs", "3", *more, check=2)
        ours = [line for line in done.stderr.splitlines() if "error:" in line]  # launchers add some of their own
        assert len(ours) == 1 and re.search(words, ours[0])


def test_float16_messages_that_overflow_advise_bfloat16(run_on, tmp_path):
    """Sums of gradients of values of ten thousand: 32 bits hold them, 16 bits of float16 do not."""
    x, y = np.full((64, 2), 1e4, "f4"), np.zeros(64)
    x[::2], y[::2] = -1e4, 1
    with h5py.File(tmp_path / "large.h5", "w") as data:
        for part in ("train", "test"):
            data[f"{part}/x"], data[f"{part}/y"] = x, y.astype("i4")
        data.attrs["classes"] = 2
    options = [
        "--data",
        tmp_path / "large.h5",
        "--model",
        "softmax",
        "--steps",
        "3",
        "--lr",
        "1e-9",
        "--progress",
        "none",
    ]
    done = run_on(2, SCRIPT, *options, "--compress", "float16", check=1)
    assert re.search("is not finite .*above 65504: --compress bfloat16 may help, or a smaller --lr", done.stderr)
    run_on(2, SCRIPT, *options, "--compress", "bfloat16", check=0)


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


def test_help_is_printed_once(run_on):
    done = run_on(3, SCRIPT, "--help", check=0)
    assert done.stdout.count("usage:") == 1 and "--batch-per-rank" in done.stdout
