"""Partitions: every row belongs to one rank, and the named skew is really there."""

import numpy as np
import pytest

from hpcdl.data.partition import hold_out, parse_partition, partition
from hpcdl.errors import UsageError
from hpcdl.random import Random

LABELS = np.random.default_rng(0).integers(0, 10, 1000)
OWNERS = np.random.default_rng(1).choice([-3, 0, 4, 5, 70, 1000, 1001], 1000, p=[0.4, 0.3, 0.1, 0.05, 0.05, 0.05, 0.05])


SPECS = "iid by-label shards shards:1 shards:60 column:owner dirichlet:0.5 dirichlet:100 dirichlet:1e-300"


@pytest.mark.parametrize("spec", SPECS.split())
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 20])
def test_every_row_belongs_to_one_rank(spec, ranks):
    parts = partition(spec, LABELS, 10, ranks, 1, OWNERS)
    assert len(parts) == ranks
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(1000))
    assert all((np.diff(part) > 0).all() for part in parts)
    again = partition(spec, LABELS, 10, ranks, 1, OWNERS)
    assert all((one == two).all() for one, two in zip(parts, again, strict=True))


def classes_per_rank(spec, ranks=10, seed=0):
    return [len(np.unique(LABELS[part])) for part in partition(spec, LABELS, 10, ranks, seed)]


def test_the_skew_is_as_named():
    assert min(classes_per_rank("iid")) == 10
    assert max(classes_per_rank("by-label")) <= 3
    assert max(classes_per_rank("by-label", ranks=20)) <= 2
    assert np.mean(classes_per_rank("dirichlet:0.05")) < np.mean(classes_per_rank("dirichlet:1"))
    even = np.arange(1000) % 10
    parts = partition("dirichlet:0.1", even, 10, 10, 0)
    largest = np.argmax([np.bincount(even[part], minlength=10) for part in parts], axis=0)
    assert len(set(largest)) > 3  # each class has a mix of its own
    sizes = [len(part) for part in partition("by-label", LABELS, 10, 7, 0)]
    assert max(sizes) - min(sizes) <= 1
    sizes = [len(part) for part in partition("dirichlet:1e9", LABELS, 10, 10, 0)]
    assert max(sizes) - min(sizes) <= 10  # one by rounding for each class


def test_shards_are_few_labels_each_and_of_one_size():
    """McMahan's: 60,000 rows of 10 labels in 200 shards of 300, two for each of 100 clients."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 6000))
    parts = partition("shards:2", labels, 10, 100, 0)
    assert {len(part) for part in parts} == {600}
    seen = [np.unique(labels[part], return_counts=True) for part in parts]
    assert all(len(which) <= 2 and set(counts) <= {300, 600} for which, counts in seen)
    assert len({tuple(which) for which, _ in seen}) > 20  # dealt at random: pairs of any two labels
    assert all(np.array_equal(*pair) for pair in zip(parts, partition("shards", labels, 10, 100, 0), strict=True))
    uneven = [len(part) for part in partition("shards:3", LABELS, 10, 7, 0)]
    assert max(uneven) - min(uneven) <= 3
    assert sum(len(part) == 0 for part in partition("shards:2", LABELS[:5], 10, 5, 0)) < 4


def test_rows_of_one_owner_stay_together():
    parts = partition("column:owner", LABELS, 10, 7, 0, OWNERS)
    assert [set(OWNERS[part]) for part in parts] == [{-3}, {0}, {4}, {5}, {70}, {1000}, {1001}]
    fewer = partition("column:owner", LABELS, 10, 3, 0, OWNERS)
    assert [set(OWNERS[part]) for part in fewer] == [{-3, 0, 4}, {5, 70}, {1000, 1001}]
    assert [len(part) for part in partition("column:owner", LABELS, 10, 9, 0, OWNERS)][7:] == [0, 0]


def test_partitions_depend_on_the_seed():
    for spec in ("iid", "shards:2", "dirichlet:0.5"):
        one, two = (partition(spec, LABELS, 10, 3, seed)[0] for seed in (0, 1))
        assert not np.array_equal(one, two)


@pytest.mark.parametrize(
    ("spec", "classes", "message"),
    [
        ("by_label", 10, "did you mean 'by-label'"),
        ("by-label:3", 10, "unknown partition"),
        ("dirichlet", 10, "write dirichlet:ALPHA"),
        ("dirichlet:x", 10, "write dirichlet:ALPHA"),
        ("dirichlet:0", 10, "alpha must be greater than 0"),
        ("dirichlet:inf", 10, "alpha must be greater than 0"),
        ("shards:0", 10, "write shards:S"),
        ("shards:1.5", 10, "write shards:S"),
        ("shards:2", 0, "needs class labels"),
        ("column", 10, "write column:NAME"),
        ("column:y", 10, "write column:NAME"),
        ("by-label", 0, "needs class labels"),
    ],
)
def test_refusals(spec, classes, message):
    with pytest.raises(UsageError, match=message):
        parse_partition(spec, classes)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.29, 1 / 3, 0.999])
def test_hold_out_is_stratified_and_exact(fraction):
    rows = hold_out(LABELS, 10, fraction, Random(0)("x"))
    assert len(rows) == round(fraction * 1000)
    assert (np.diff(rows) > 0).all()
    quota = fraction * np.bincount(LABELS)
    assert (np.abs(np.bincount(LABELS[rows], minlength=10) - quota) < 1 + 1e-9).all()
    assert len(hold_out(LABELS, 0, fraction, Random(0)("x"))) == round(fraction * 1000)
