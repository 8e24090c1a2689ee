"""A folder of shards is the one file with the same rows, to the bit; a damaged shard is named."""

import json
import shutil

import h5py
import numpy as np
import pytest

from hpcdl.csr import CSR
from hpcdl.data import hdf5, open_data, shards
from hpcdl.data.digest import compute_digest, file_digest
from hpcdl.data.format import find_data_file, read_info
from hpcdl.data.formats.prepare import Output
from hpcdl.data.formats.sparse_file import open_rows
from hpcdl.data.formats.vocabulary import Vocabulary
from hpcdl.data.hdf5 import dataset, open_file
from hpcdl.data.placement import FileRows
from hpcdl.errors import UsageError
from hpcdl.scripts import prepare_data

TRAIN, TEST, SHARD = 101, 23, 400  # rows, and bytes of a shard
KINDS = ("dense", "sparse", "text")
ON_RANKS = ["dense", "sparse", pytest.param("text", marks=pytest.mark.long)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(hdf5, "SLAB_BYTES", 130)
    monkeypatch.setattr(shards, "OPEN_SHARDS", 2)


def groups_of(kind):
    """Groups for `Output.write`, and its other arguments; x comes in slabs of 17 rows."""
    random, groups = np.random.default_rng(1), {}
    for group, rows in (("train", TRAIN), ("test", TEST)):
        y, others = np.arange(rows) * 7 % 3, {"owner": np.arange(rows) // 5, "row": np.arange(rows)[::-1].copy()}
        if kind == "dense":
            x = random.normal(size=(rows, 3, 2)).astype(np.float32)
            others["id"] = np.array([f"row {row}".encode() for row in range(rows)])
        elif kind == "sparse":
            x = random.integers(-200, 60, (rows, 30)).clip(0).astype(np.uint8)
            x[40:60] = 0
            x, others = CSR.of(x), {}
        else:
            x = random.integers(0, 3, (rows, 8)).astype(np.uint8)
        groups[group] = x.shape, [x[start : start + 17] for start in range(0, rows, 17)], y, others
    about = {"base": 1, "sparse": True} if kind == "sparse" else {}
    about |= {"vocabulary": Vocabulary(["a", "b", "c"])} if kind == "text" else {}
    return groups, (x.dtype, 1.0, None if kind == "text" else ["p", "q", "r"], 3), about


def make(folder, kind):
    """The same rows as one file and as a folder of shards."""
    for out in ("one.h5", "many/"):
        groups, arguments, about = groups_of(kind)
        Output(f"{folder}/{out}", name="rows", shard_size=SHARD).write(groups, *arguments, **about)
    return folder / "one.h5", folder / "many"


@pytest.fixture
def made(tmp_path):
    return lambda kind="dense": make(tmp_path, kind)


def array(x):
    return x if isinstance(x, np.ndarray) else np.concatenate([x.data[x.part], x.indices[x.part], np.diff(x.indptr)])


def epoch(data, comm):
    share = comm.rank, comm.size
    return [(array(b.x).copy(), b.y.copy(), b.index.copy(), b.total) for b in data.batches(1, 13, share)]


def same(ones, others):
    return all(
        np.array_equal(a, b) for one, two in zip(ones, others, strict=True) for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("kind", ON_RANKS)
def test_it_is_the_one_file_to_the_bit(each_group, mpi_tmp_path, kind):
    """Under placements shared and partitioned: batches, splits, held-out rows, statistics and owners."""

    def body(comm):
        here = mpi_tmp_path / str(comm.size)
        if comm.rank == 0:
            here.mkdir()
            make(here, kind)
        comm.Barrier()
        hows = [{"placement": placement, "validation": 0.1} for placement in ("shared", "partitioned")]
        hows += [{"partition": "column:owner"}] * (kind != "sparse") + [{"partition": "dirichlet:0.5"}]
        hows += [{"standardize": True, "placement": "partitioned"}] * (kind == "dense")
        for how in hows:
            one, many = (open_data(str(here / name), comm=comm, **how) for name in ("one.h5", "many"))
            assert one.examples == many.examples and one.schema.describe() == many.schema.describe()
            assert same(epoch(one, comm), epoch(many, comm))
            for part in ("train", "test", "validation"):
                a, b = getattr(one, part), getattr(many, part)
                assert (a is None) == (b is None)
                if a is not None:
                    rows = np.random.default_rng(0).integers(0, a.examples, 40)
                    assert same([map(array, a.take(rows))], [map(array, b.take(rows))])
            assert same([one.statistics.values()], [many.statistics.values()])
            one.close()
            many.close()

    each_group(body)


@pytest.mark.parametrize("kind", ON_RANKS)
def test_streamed_blocks_lie_in_one_shard(each_group, mpi_tmp_path, kind):
    """Each row comes once, in the same order on any number of ranks."""

    def body(comm):
        here = mpi_tmp_path / f"streamed-{comm.size}"
        if comm.rank == 0:
            here.mkdir()
            make(here, kind)
        comm.Barrier()
        data = open_data(str(here / "many"), comm=comm, placement="streamed", validation=0.1)
        alone = open_data(str(here / "many"), placement="streamed", validation=0.1)
        rows, bounds = data.train.source, np.unique(getattr(data.train.source.x, "bounds", ()))
        assert set(bounds) <= set(rows.starts) and len(bounds) > 3 and len(rows.starts) > len(bounds)
        parts = comm.allgather(epoch(data, comm))
        orders = [np.concatenate([each[step][2] for each in parts]) for step in range(len(parts[0]))]
        whole = [batch.index.copy() for batch in alone.batches(1, 13)]
        assert all(map(np.array_equal, orders, whole))
        order = np.concatenate(whole)
        assert sorted(order) == list(range(data.examples))
        plain = open_data(str(here / "one.h5"), validation=0.1)
        assert same([array(plain.train.take(order)[0])], [array(alone.train.take(order)[0])])
        x, y, index, _ = epoch(data, comm)[2]
        assert same([(x, y)], [map(array, plain.train.take(index))])
        for each in (data, alone, plain):
            each.close()

    each_group(body)


@pytest.mark.parametrize("kind", KINDS)
def test_every_slice_of_a_joined_set(made, kind):
    """Any slice of any data set is that of the one file; few shards are open at a time."""
    one, many = made(kind)
    with open_file(one) as file, open_file(many) as folder:
        names = [*folder.index.columns]
        assert {"train/x/indptr" if kind == "sparse" else "train/x", "test/y"} <= set(names)
        for name in names:
            a, b = dataset(file, name), dataset(folder, name)
            assert (a.shape, len(a), a.ndim, a.size) == (b.shape, len(b), b.ndim, b.size)
            for start in range(0, len(a) + 1, max(5, len(a) // 15)):
                for stop in (start, start + 1, start + 17, len(a) + 5):
                    assert np.array_equal(a[start:stop], b[start:stop]), (name, start, stop)
            assert np.array_equal(a[...], b[()]) and a[5] == b[5] if a.ndim == 1 else True
            assert len(folder.open) <= 2
        starts = [slab.start for slab in hdf5.slabs_of(dataset(folder, "train/y"))]
        assert set(dataset(folder, "train/y").bounds[:-1]) <= set(starts)
        if kind == "sparse":
            a, b = open_rows(file, "train/x"), open_rows(folder, "train/x")
            chosen = np.arange(3, TRAIN, 4)
            assert np.array_equal(a.lengths(chosen), b.lengths(chosen)) and a.most_elements(9) == b.most_elements(9)
    assert [read_info(path).rows for path in (one, many)] == [{"train": TRAIN, "test": TEST, "rows": 0}] * 2


def test_the_digest_is_that_of_the_shards(made):
    _, many = made()
    info = read_info(many)
    index = json.loads((many / "index.json").read_text())
    assert file_digest(info) == compute_digest(info) == index["digest"]
    shard = many / index["shards"][1]["file"]
    stat = shard.stat()
    with h5py.File(shard, "r+") as file:
        file["train/x"][0, 0, 0] += 1
    assert shard.stat().st_mtime != stat.st_mtime and shard.stat().st_size == stat.st_size
    assert file_digest(info) != index["digest"]


def test_a_folder_takes_the_place_of_a_file(made, tmp_path, monkeypatch):
    _, many = made()
    monkeypatch.chdir(tmp_path)
    assert find_data_file("many") == find_data_file("many/") == many.relative_to(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="is a folder without index"):
        find_data_file("empty")


def edited(folder, change):
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def spoil(path, name="train/x"):
    """Other elements than HDF5 can read: the shard keeps its size."""
    with h5py.File(path) as file:
        at, size = file[name].id.get_offset(), path.stat().st_size
    assert at is not None and size
    with open(path, "r+b") as file:
        file.seek(0)
        file.write(bytes(512))


DAMAGE = {
    "a shard is missing": (lambda many, shard: shard.unlink(), "names 00001.h5, which is missing"),
    "a shard is cut off": (lambda many, shard: truncate(shard), "00001.h5 has .* bytes, and the index says"),
    "a shard is broken": (lambda many, shard: spoil(shard), "00001.h5 is (not an HDF5 file|damaged)"),
    "a shard is another file": (
        lambda many, shard: shutil.copy(many / "00002.h5", shard),
        "00001.h5 holds other rows than the index says",
    ),
    "a shard lies elsewhere": (
        lambda many, shard: shard.symlink_to(shard.rename(many.parent / "other.h5")),
        "00001.h5, which is a link out of the folder",
    ),
    "a name leads out": (
        lambda many, shard: edited(many, lambda index: index["shards"][1].update(file="../one.h5")),
        r"it names '../one.h5'; shards lie in the folder",
    ),
    "other rows": (
        lambda many, shard: edited(many, lambda index: index["shards"][1]["rows"].update(train=15)),
        r"00001.h5: train/id is .* of shape \(16,\), and the index says .* of shape \(15,\)",
    ),
    "another type": (
        lambda many, shard: edited(many, lambda index: index["columns"].update({"train/x": ["<f8", [3, 2]]})),
        r"00000.h5: train/x is float32 of shape \(16, 3, 2\), and the index says float64",
    ),
    "twice": (
        lambda many, shard: edited(many, lambda index: index["shards"].append(index["shards"][1])),
        "it names a shard twice",
    ),
    "no shards": (lambda many, shard: edited(many, lambda index: index.update(shards=[])), "it names no shard"),
    "no index": (lambda many, shard: (many / "index.json").write_text("{}"), "is no index of shards"),
    "no text": (lambda many, shard: (many / "index.json").write_bytes(b"\xff[" * 2000), "is no index of shards"),
    "a later version": (
        lambda many, shard: edited(many, lambda index: index.update(schema_version=2)),
        "has version 2",
    ),
    "odd rows": (
        lambda many, shard: edited(many, lambda index: index["shards"][1].update(rows={"train": -3})),
        "the rows of 00001.h5 are no numbers",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_one_line_that_names_the_shard(made, what):
    _, many = made()
    harm, message = DAMAGE[what]
    harm(many, many / "00001.h5")
    with pytest.raises(UsageError, match=message) as caught:
        open_data(str(many))
    assert "\n" not in str(caught.value) and "many" in str(caught.value)


def test_other_classes_in_a_shard_are_refused(made):
    _, many = made()
    with h5py.File(many / "00003.h5", "r+") as file:
        file.attrs["labels"] = ["p", "r", "q"]
    with pytest.raises(UsageError, match=r"00003.h5 has another labels than 00000.h5|00003.h5 has .* bytes"):
        read_info(many)


def test_a_shard_that_is_damaged_later_is_named_while_rows_are_read(made):
    """What `read_info` did not see: numbers that no model takes, and a file that vanishes."""
    _, many = made()
    with h5py.File(many / "00002.h5", "r+") as file:
        file["train/x"][3, 1, 1] = np.nan
    with pytest.raises(UsageError, match=r"many/00002.h5: train/x has a NaN or an infinity \(as float32\) in row 3"):
        open_data(str(many))
    data = FileRows(read_info(many), "train", np.dtype(np.float32))
    (many / "00004.h5").unlink()
    with pytest.raises(UsageError, match="which is missing"):
        data.read(70, 75)
    data.close()


def columns(path):
    """Every data set of a data file or a folder, whole."""
    with open_file(path) as file:
        names = getattr(getattr(file, "index", None), "columns", None)
        if names is None:
            names = []
            file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        return {name: dataset(file, name)[...] for name in names}


@pytest.mark.parametrize("kind", ["npz", "sparse", "csv", "text", "libsvm", "synthetic"])
def test_prepare_data_cuts_what_it_would_write_into_one_file(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    random, options = np.random.default_rng(2), []
    x, y = random.integers(0, 4, (90, 6)) * (random.random((90, 6)) < 0.6), np.arange(90) % 3
    if kind == "npz":
        np.savez("source", x=x.reshape(90, 2, 3), y=y)
    elif kind == "sparse":
        rows, kind = CSR.of(x), "npz"
        parts = {name: getattr(rows, name) for name in ("data", "indices", "indptr", "shape")}
        np.savez("source", format=b"csr", y=y, **parts)
    elif kind == "csv":
        lines = [f"{a},{'' if a == 2 else b},{'xyz'[c]},{e},{f % 2}" for a, b, c, _, e, f in np.minimum(x, 2)]
        (tmp_path / "source.npz").write_text("\n".join(["a,b,c,id,y", *lines]))
        options = ["--id", "id", "--group", "a"]
    elif kind == "text":
        (tmp_path / "source.npz").write_text("".join(random.choice([*"abcde"], 2000)))
    elif kind == "libsvm":
        lines = (" ".join(f"{k + 1}:{v}" for k, v in enumerate(row) if v) for row in x)
        (tmp_path / "source.npz").write_text("\n".join(f"{label} {line}" for label, line in zip(y, lines, strict=True)))
    source = "small:rows=100,test=20" if kind == "synthetic" else "source.npz"
    for out in ("one.h5", "many/"):
        prepare_data.main([kind, source, out, "--shard-size", "700", "--name", "rows", *options])
    one, many = columns("one.h5"), columns("many")
    assert one.keys() == many.keys() and len(shards.shard_paths("many")) > 1
    assert all(np.array_equal(one[name], many[name]) and one[name].dtype == many[name].dtype for name in one)
    infos = [read_info(path) for path in ("one.h5", "many")]
    assert infos[0].schema.describe() == infos[1].schema.describe() and infos[0].rows == infos[1].rows


@pytest.mark.long
def test_any_change_of_the_index_is_one_line_or_changes_nothing(made):
    """Values of the index are replaced at random: the rows are what they were, or a line says what is wrong."""
    _, many = made()
    path, random = many / "index.json", np.random.default_rng(3)
    text, plain = path.read_text(), columns(many)
    values = [None, -1, 0, 1, 10**30, 1.5, "", "x", "../00001.h5", "00002.h5", [], {}, ["<f8", [2]], "<f8", True, [[]]]
    refused = 0
    for _ in range(50):
        index = json.loads(text)
        at = index
        while True:
            keys = list(at) if isinstance(at, dict) else range(len(at))
            key = keys[random.integers(len(keys))]
            if isinstance(at[key], dict | list) and at[key] and random.random() < 0.8:
                at = at[key]
                continue
            at[key] = values[random.integers(len(values))]
            break
        path.write_text(json.dumps(index))
        try:
            read_info(many)
            assert all(np.array_equal(plain[name], each) for name, each in columns(many).items())
        except UsageError as error:
            assert "\n" not in str(error) and "many" in str(error)
            refused += 1
    assert 5 < refused < 50
