"""K-means on a parameter store is k-means, on any ranks and servers."""

from pathlib import Path

import numpy as np
import pytest

from hpcdl.data import open_data
from hpcdl.parameter_server import kmeans
from hpcdl.random import Random

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_kmeans.py"
EACH_ROUND = """\
import sys
from hpcdl.scripts.train_kmeans import main

for rounds in range(1, 6):
    main([*sys.argv[1:], "--rounds", str(rounds), "--out", f"{rounds}.npz"])
"""


@pytest.fixture(scope="module")
def digits():
    """The training rows, and the first 7 centroids of seed 3."""
    data = open_data("digits", dtype="float64")
    return data.train.rows(0, data.examples)[0], kmeans.plus_plus(data.train, 7, 3)


@pytest.fixture
def each_round(tmp_path):
    """A program that clusters in one round, in two, ... in five."""
    program = tmp_path / "each_round.py"
    program.write_text(EACH_ROUND)
    return program


def nearest(x, centroids):
    squares = ((x[:, None, :] - centroids) ** 2).sum(axis=2)
    return squares.argmin(axis=1), squares.min(axis=1)


def compare(path, wanted):
    """The files of rounds 1, 2, ... hold the same centroids and counts, and the objectives so far."""
    objectives = []
    for rounds, (centroids, counts, objective) in enumerate(wanted, 1):
        found = np.load(path / f"{rounds}.npz")
        objectives.append(objective)
        assert np.abs(found["centroids"] - centroids).max() < 1e-10 and np.array_equal(found["counts"], counts)
        assert np.allclose(found["objective"], objectives, rtol=1e-12, atol=0)
    return objectives


@pytest.mark.parametrize("ranks, servers", [(2, 1), pytest.param(4, 2, marks=pytest.mark.long)])
def test_lloyd(run_on, tmp_path, each_round, digits, ranks, servers):
    """Each round's centroids are those of Lloyd's algorithm in numpy; the objective never rises."""

    def rounds(x, centroids):
        for _ in range(5):
            which, squares = nearest(x, centroids)
            counts = np.bincount(which, minlength=7)
            centroids = np.array([x[which == i].mean(axis=0) for i in range(7)])
            yield centroids, counts, squares.mean()

    run_on(ranks, each_round, "--clusters", 7, "--seed", 3, "--servers", servers, check=0)
    objectives = compare(tmp_path, rounds(*digits))
    assert (np.diff(objectives) <= 0).all()


@pytest.mark.parametrize(
    "ranks, servers, consistency",
    [(4, 2, ["bsp"]), (2, 1, ["ssp", "--staleness", "2"]), (4, 3, ["async"])],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mini_batches(run_on, tmp_path, each_round, digits, ranks, servers, consistency):
    """Each round's centroids are those of Sculley's algorithm, row by row; one client takes its steps in sequence."""

    def rounds(x, first):
        centroids, counts = first.copy(), np.zeros(7)
        for step in range(5):
            batch = x[Random(3)("batch", step).integers(0, len(x), 31)]
            which, squares = nearest(batch, centroids)
            for row, i in zip(batch, which, strict=True):
                counts[i] += 1
                centroids[i] += (row - centroids[i]) / counts[i]
            yield centroids, counts, squares.mean()

    options = ["--clusters", 7, "--seed", 3, "--servers", servers, "--batch-size", 31, "--consistency", *consistency]
    run_on(ranks, each_round, *options, check=0)
    compare(tmp_path, rounds(*digits))


def test_a_centroid_without_rows_stays():
    centroids, counts = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([5.0, 5.0])
    for update, wanted, had in [(kmeans.lloyd, [3, 4], [0, 2]), (kmeans.mini_batch, [3, 4], [5, 7])]:
        update(centroids, counts, np.array([[0.0, 0.0], [6.0, 8.0]]), np.array([0.0, 2.0]))
        assert np.array_equal(centroids, [[1, 2], wanted]) and np.array_equal(counts, had)
        counts[:] = 5


@pytest.mark.parametrize("consistency", ["ssp", "async"])
def test_digits(run_on, consistency):
    """Ten clusters explain half of what the mean of all rows leaves, and are mostly one digit each."""
    staleness = ["--staleness", "2"] if consistency == "ssp" else []
    options = ["--servers", "2", "--batch-size", "100", "--rounds", "60", "--consistency", consistency, *staleness]
    done = run_on(4, SCRIPT, *options, check=0)
    *rounds, last = done.stdout.splitlines()
    assert [line.split()[1] for line in rounds] == [f"{i}/60" for i in range(1, 61)]
    words = last.split()
    assert words[:4] == ["10", "clusters", "of", "digits:"]
    assert float(words[5]) < 2.8 and float(words[7].rstrip("%")) > 60
