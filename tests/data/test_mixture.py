"""Mixtures: exact shares, rows of a source in its own order, the same batches for any number of ranks and start."""

import itertools

import numpy as np
import pytest
from batches import assert_same, assert_same_rows, copied
from sparse_files import make_sparse, write_sparse

from hpcdl.data import hdf5, open_data
from hpcdl.data.mixture import Mixture, apportioned, parse_mixture
from hpcdl.errors import UsageError
from hpcdl.random import Random

PLACES = ("shared", "streamed")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(hdf5, "SLAB_BYTES", 330)  # 11 rows of 30 bytes


@pytest.fixture
def two(tmp_path, images, write):
    """Files a and b: 100 and 37 rows of images, of which those of b are brighter."""
    write(tmp_path / "a.h5", *images(), classes=4)
    x, y, *test = images(37)
    write(tmp_path / "b.h5", x + 50, y, *test, classes=4)
    return tmp_path / "a.h5", tmp_path / "b.h5"


def mix(paths, *weights):
    return "mix:" + ",".join(f"{path}={weight}" for path, weight in zip(paths, weights, strict=True))


def kept(data, epoch, size=7, share=(0, 1), start=0):
    return [copied(batch) for batch in data.batches(epoch, size, share, start)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", [{}, {"augment": "shift:1,flip", "validation": 0.1}, {"standardize": True}])
def test_a_mixture_of_one_source_is_that_source(two, place, how):
    alone, data = (open_data(name, placement=place, seed=3, **how) for name in (two[0], mix(two[:1], 2)))
    for epoch, share in itertools.product((0, 3), ((0, 1), (1, 3))):
        for one, other in zip(kept(alone, epoch, 7, share), kept(data, epoch, 7, share), strict=True):
            assert_same(one, other)
    assert (data.digest, data.order, data.examples) == (alone.digest, alone.order, alone.examples)
    assert (data.test.examples, data.validation is None) == (20, alone.validation is None)
    for each in (alone, data):
        each.close()


def sources(tmp_path, two):
    yield two
    for name, rows in (("c", 60), ("d", 31)):
        x, y, x_test, y_test = make_sparse()
        write_sparse(tmp_path / f"{name}.h5", x[:rows] * 2, y[:rows], x_test, y_test, attributes={"classes": 3})
    yield tmp_path / "c.h5", tmp_path / "d.h5"


@pytest.mark.parametrize(
    "how", [{"placement": "shared"}, *({"placement": "streamed", "shuffle_window": w} for w in (1, 3))]
)
def test_batches_of_any_number_of_ranks_from_any_start(tmp_path, two, how):
    for paths in sources(tmp_path, two):
        data = open_data(mix(paths, 0.3, 0.7), seed=5, **how)
        seed = int(Random(5)("source", 0).integers(2**31))
        alone = open_data(paths[0], seed=5, **how), open_data(paths[1], seed=seed, **how)
        first, drawn = data.mixture.first, data.mixture.drawn
        assert drawn[0] == alone[0].examples and abs(drawn[1] - drawn[0] * 7 / 3) <= 0.5
        streams = [[], []]
        for epoch in range(2):
            whole = kept(data, epoch)
            index = np.concatenate([batch.index for batch in whole])
            assert len(index) == data.examples == drawn.sum()
            for number, stream in enumerate(streams):
                stream += (index[(index >= first[number]) & (index < first[number + 1])] - first[number]).tolist()
            for batch in whole:
                x, y = data.train.take(batch.index)
                assert_same_rows(batch.x, x)
                np.testing.assert_array_equal(batch.y, y)
            for size in range(1, 8) if epoch else ():
                start = size * len(whole) // 9
                parts = [kept(data, epoch, 7, (rank, size), start) for rank in range(size)]
                for step, batches in enumerate(zip(*parts, strict=True), start):
                    together = np.concatenate([batch.index for batch in batches])
                    np.testing.assert_array_equal(together, whole[step].index)
                    assert {batch.total for batch in batches} == {len(together)}
        for stream, source in zip(streams, alone, strict=True):  # rows of a source come in its own order
            own = [batch.index for epoch in range(13) for batch in kept(source, epoch)]
            assert stream == np.concatenate(own)[: len(stream)].tolist()
        wanted = {(epoch, batch.step): batch for epoch in range(2) for batch in kept(data, epoch, 7, (0, 2))}
        for ahead in (True, False):
            cursor = data.cursor(7, (0, 2), ahead)
            for place in ((0, 0), (0, 1), (0, 5), (0, 2), (1, 3), (1, 4), (0, 7), (1, 1)):
                assert_same(cursor.take(*place), wanted[place])
            cursor.close()
        for each in (data, *alone):
            each.close()


def test_shares_are_exact_to_a_row_in_a_thousand():
    for weights in ((0.7, 0.3), (1, 1, 1), (5, 0.011), (0.2, 0.5, 0.3)):
        mixture = Mixture("abc"[: len(weights)], weights, [9001, 400, 77][: len(weights)], 3)
        shares = np.array(weights) / sum(weights)
        assert mixture.drawn[0] == 9001 and (abs(mixture.counts - 1000 * shares) < 1).all()
        for epoch, position in itertools.product((0, 2), range(0, mixture.examples, 1000)):
            counts = mixture.before(epoch, position) - mixture.before(epoch, 0)
            assert (abs(counts - position * shares) <= position / 1000).all()
        assert (abs(mixture.drawn - mixture.examples * shares) <= 1 + mixture.examples / 1000).all()
        np.testing.assert_array_equal(mixture.before(0, mixture.examples), mixture.before(1, 0))
        one, two = (mixture.sources(0, start, start + 1000) for start in (0, 1000))
        assert (one != two).any() and (np.sort(one) == np.sort(two)).all()
    assert apportioned([1, 1, 1], 1000).tolist() == [334, 333, 333]


def test_what_a_run_records(two):
    data = open_data(mix(two, 1, 1), validation=0.2)
    assert data.source == f"mix:{two[0]}=1,{two[1]}=1" and data.name == "mix of a, b"
    assert (data.examples, data.train.examples, data.validation.examples, data.test.examples) == (160, 117, 20, 20)
    steps = data.steps_per_epoch(32)
    assert data.mixture.used(2, 0, 32) == {"a": {"rows": 160, "epochs": 2.0}, "b": {"rows": 160, "epochs": 4.324324}}
    assert sum(each["rows"] for each in data.mixture.used(1, steps - 1, 32).values()) == 160 + 32 * (steps - 1)
    again = Mixture(**data.mixture.describe())
    np.testing.assert_array_equal(again.sources(1, 3, 99), data.mixture.sources(1, 3, 99))
    assert data.class_counts.sum() in (159, 160, 161)
    others = [open_data(mix(*each), validation=0.2) for each in ((two, 1, 2), (two[::-1], 1, 1))]
    assert len({each.digest for each in (data, *others)}) == len({each.order for each in (data, *others)}) + 1 == 3
    for each in (data, *others):
        each.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mix:", "'' is no data set with a weight; write mix:A=0.7,B=0.3"),
        ("mix:a", "'a' is no data set with a weight"),
        ("mix:a=1,", "'' is no data set with a weight"),
        ("mix:a=0,b=1", "the weight of a should be a number greater than 0, not '0'"),
        ("mix:a=1,b=x", "the weight of b should be a number greater than 0, not 'x'"),
        ("mix:a=-1", "the weight of a should be"),
        ("mix:a=nan", "the weight of a should be"),
        ("mix:a=inf", "the weight of a should be"),
        ("mix:a=1,a=2", "a comes twice; give it one weight"),
        ("mix:mix:a=1", "mix:a is a mixture in a mixture"),
        ("mix:tables:load=1,b=2", "tables:load is a function; a mixture takes data files"),
    ],
)
def test_bad_weights(text, message):
    with pytest.raises(UsageError) as caught:
        parse_mixture(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_sources_that_differ(tmp_path, two, images, write):
    def refused(name, *arrays, **attributes):
        write(tmp_path / "other.h5", *arrays, **attributes)
        with pytest.raises(UsageError, match=f"sources of a mixture are alike, but their {name} differ: "):
            open_data(mix((two[0], tmp_path / "other.h5"), 1, 1))

    refused("shapes of rows", *images(shape=(5, 6)), classes=4)
    refused("numbers of classes", *images(classes=5), classes=5)
    refused("scales", *images(), classes=4, scale=0.5)
    refused("names of classes", *images(), classes=4, labels=["a", "b", "c", "d"])
    write_sparse(tmp_path / "sparse.h5", *make_sparse(), attributes={"classes": 3})
    with pytest.raises(UsageError, match="their shapes of rows differ"):
        open_data(mix((tmp_path / "sparse.h5", two[0]), 1, 1))
    with pytest.raises(UsageError, match="their shapes of rows differ"):
        open_data("mix:text=1,digits=1")
    x, y, *test = make_sparse()
    write(tmp_path / "dense.h5", x, y, *test, classes=3)
    with pytest.raises(UsageError, match=r"their kinds of rows differ: sparse .sparse. and dense .dense."):
        open_data(mix((tmp_path / "sparse.h5", tmp_path / "dense.h5"), 1, 1))
    for how in ({"placement": "partitioned"}, {"partition": "by-label"}):
        with pytest.raises(UsageError, match="every rank reads all sources of a mixture"):
            open_data(mix(two, 1, 1), **how)
    for weights, message in (((1, 0.0001), "less than one row in 1000"), ((1, 0.002), "has none of b")):
        with pytest.raises(UsageError, match=message):
            open_data(mix(two, *weights))
    data = open_data(mix(two, 1, 1))
    for call in (lambda: data.in_place(0), lambda: data.divide(2), lambda: data.with_rows(np.arange(3))):
        with pytest.raises(UsageError, match="in memory"):
            call()
    data.close()
