"""The estimates of |G|^2 and tr(Sigma) have no bias, whatever the shares; and a run tells the noise scale."""

from pathlib import Path

import numpy as np
import pytest
from written_runs import lines, summary

from hpcdl.errors import UsageError
from hpcdl.runs.noise_scale import NAMES, NoiseScale, refuse_no_parts

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_allreduce.py"


class Sums:
    """Stands for the ranks: all-reduces after each other, the last of which knows the sum."""

    def __init__(self):
        self.total = 0

    def all_reduce(self, array):
        self.total = self.total + array
        array[:] = self.total


@pytest.mark.parametrize("shares", [(8, 8), (1, 3, 4), (2, 2, 2, 2)], ids=str)
def test_estimates_are_those_of_the_distribution(shares):
    random, size, steps = np.random.default_rng(0), 50, 4000
    gradient = random.standard_normal(size)
    gradient *= 2 / np.linalg.norm(gradient)  # |G|^2 = 4
    deviation = np.linspace(0.5, 2, size)  # tr(Sigma) = sum of squares
    ranks, total = [NoiseScale() for _ in shares], sum(shares)
    sums = np.zeros(3)
    for _ in range(steps):
        own = [(gradient + deviation * random.standard_normal((rows, size))).sum(0) for rows in shares]
        for noise, g, rows in zip(ranks, own, shares, strict=True):
            noise.weight = noise.gradient = noise.variance = 0.0
            noise.own(g, rows)
            noise.summed(sum(own), total)
            sums += [noise.gradient, noise.variance, noise.weight]
    assert sums[0] / sums[2] == pytest.approx(4, rel=0.1)
    assert sums[1] / sums[2] == pytest.approx((deviation**2).sum(), rel=0.02)


def test_ranks_are_averaged_and_what_noise_hides_is_left_out():
    one, other, empty = NoiseScale(), NoiseScale(), NoiseScale()
    for noise, g in (one, np.array([3.0, 0.0])), (other, np.array([1.0, 2.0])):
        noise.own(g, 2)
        noise.summed(np.array([4.0, 2.0]), 4)
    empty.own(np.ones(2), 0)
    empty.summed(np.ones(2), 4)
    together = Sums()
    assert empty.scores(together) == {}
    one.scores(together)
    found = other.scores(together)
    # |g|^2 = 1.25; |g_r|^2 = 2.25 and 1.25; tr(Sigma) = 4 and 0, in the mean 2; |G|^2 = 1.25 - 2 / 4.
    assert found == pytest.approx(dict(zip(NAMES, (2 / 0.75, 0.75, 2), strict=True)))
    against = NoiseScale()
    against.own(np.array([5.0, 0.0]), 2)
    against.summed(np.array([0.1, 0.0]), 4)
    assert against.scores(Sums()) == {}  # |G|^2 below 0


def test_a_run_tells_it(run_on, tmp_path):
    options = "--noise-scale", "--epochs", "2", "--batch-per-rank", "16"
    done = run_on(2, SCRIPT, *options, "--out", "with", check=0)
    assert "gradient noise scale" in done.stdout
    found = summary(tmp_path / "with")
    assert found["noise_scale"] == pytest.approx(found["gradient_variance"] / found["gradient_norm_squared"])
    assert lines(tmp_path / "with")[-1]["noise_scale"] == found["noise_scale"] > 0
    run_on(2, SCRIPT, *options[1:], "--out", "without", check=0)
    plain = summary(tmp_path / "without")
    assert plain["train_loss"] == found["train_loss"] and "noise_scale" not in plain
    assert plain["bytes_sent_per_rank"] == found["bytes_sent_per_rank"]


def test_what_cannot_be_measured_is_refused():
    for ranks, batch, overlap, said in (
        (1, 8, False, "at least 2 ranks"),
        (2, 8, True, "--overlap"),
        (4, 3, False, "less than an example for each"),
    ):
        with pytest.raises(UsageError, match=said):
            refuse_no_parts(ranks, batch, overlap)
