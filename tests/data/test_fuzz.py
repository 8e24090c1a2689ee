"""Whatever a file holds: its rows can be read, and are finite and of its classes; or one line says why not.

No other exception, nothing printed by a library, nothing left in the folder, no memory for what a file only claims.
HPCDL_FUZZ=N tries N times as many cases, and new ones each time."""

import contextlib
import gzip
import itertools
import shutil
import tempfile
import tracemalloc
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from fuzz import cases, damaged, tried
from hypothesis import given
from hypothesis import strategies as st
from sparse_files import put_sparse

from hpcdl.csr import CSR
from hpcdl.data import open_data
from hpcdl.data.digest import compute_digest, file_digest
from hpcdl.data.format import read_info
from hpcdl.data.formats.prepare import Output
from hpcdl.data.formats.prepare_idx import prepare_idx
from hpcdl.data.formats.prepare_npz import prepare_npz
from hpcdl.data.formats.prepare_table import prepare_table
from hpcdl.data.formats.prepare_text import prepare_text
from hpcdl.data.formats.recipe import recipe_of
from hpcdl.data.formats.table_rows import TableRows

MOST_MEMORY = 256 << 20  # of Python and NumPy, for files of some kilobytes
GOOD = ("good.h5", "sparse.h5")
NAMES = ("train/x", "train/y", "test/x", "test/y")
PARTS = ("train/x/data", "train/x/indices", "train/x/indptr")
PATHS = st.sampled_from([*NAMES, *PARTS * 3, "train", "test", "train/group"])
KINDS = ["u1", "i1", "<u2", ">i4", "i8", "u8", "f2", ">f4", "f8", "g", "c8", "S3", "?", "V5", "O"]
ODD = [0, 1, 2, 3, 4, -1, 255, 2**31, 2**40, 2**63 - 1, -(2**63), 0.5, -0.0, 1e-320, 1e38, 1e308]
ODD += [float("inf"), float("nan")]
TEXTS = st.sampled_from(["", "a", "bytes", "a\0b", "\n", "café", "\x1b[31m", "x" * 3000, "2", "nan"])
TEXTS |= st.text(max_size=5)
OPTIONS = st.fixed_dictionaries(
    {
        "placement": st.sampled_from(["shared", "partitioned", "streamed"]),
        "dtype": st.sampled_from(["float32", "float64"]),
        "partition": st.sampled_from(["iid", "iid", "by-label", "dirichlet:0.5", "column:group"]),
        "validation": st.sampled_from([0.0, 0.0, 0.2]),
    }
)


def good(path):
    """A file with nothing wrong: 12 training and 5 test rows of 3 classes, one group packed, or sparse; a column."""
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for group, rows in (("train", 12), ("test", 5)):
            packed = {"chunks": (4, 3), "compression": "gzip"} if group == "train" else {}
            x = random.integers(0, 255, (rows, 3)).astype("u1")
            if path.name == "sparse.h5":
                put_sparse(file.create_group(f"{group}/x"), x * (x < 100))
            else:
                file.create_dataset(f"{group}/x", data=x, **packed)
            file[f"{group}/y"] = np.arange(rows) % 3
        file["train/group"] = np.arange(12) % 2
        # A name of fixed length: of a damaged heap of texts HDF5 2.0 itself takes memory that is not there.
        file.attrs.update(name=np.bytes_("small"), classes=3, scale=1 / 255)


# What an attribute may be. Strategies are made once: to make them anew for each case takes longer than the case.
ARRAY = st.builds(np.full, st.sampled_from([(), 1, 3, (2, 2), 0]), st.sampled_from(ODD))
LISTS, RAW = st.lists(TEXTS, max_size=4), st.builds(np.bytes_, st.binary(max_size=5))
VALUES = st.sampled_from([*ODD, True, False, h5py.Empty("f4")]) | TEXTS | ARRAY | LISTS | RAW
ODD_ONE, NAME, SAID = (
    st.sampled_from(each)
    for each in (ODD, [*NAMES, *PARTS, "train/group"], ["name", "classes", "scale", "vocabulary", "digest", "labels"])
)
LENGTHS = [(12,), (5,), (1,), (), (10**12,)]
SHAPES = st.sampled_from([*LENGTHS, (12, 3), (5, 3), (12, 1), (13, 3), (0, 3), (12, 0), (12, 3, 1), (10**12, 3)])
WHICH = st.sampled_from([*range(13), 7, 7, 7])
KIND, SMALL, ROW = st.sampled_from(KINDS), st.integers(0, 9), st.integers(0, 11)
TARGETS = st.sampled_from([*NAMES, "train", "test", "absent"])
FILES = st.sampled_from(["absent.h5", "bad.h5", "/dev/null"])


@st.composite
def datasets(draw):
    """A function that puts something else in the place of a data set."""
    name, kind, shape, value, chunked = draw(NAME), draw(KIND), draw(SHAPES), draw(ODD_ONE), draw(SMALL) % 2

    def change(file):
        if name in file:
            del file[name]
        huge = 10**12 in shape
        chunks = tuple(max(1, min(4, each)) for each in shape) if chunked and shape else None
        kind_ = h5py.string_dtype() if kind == "O" else kind
        made = file.create_dataset(name, shape, kind_, chunks=chunks, maxshape=(None, *shape[1:]) if chunks else None)
        with np.errstate(all="ignore"):
            if kind not in ("S3", "V5", "O") and (chunks or not huge):
                made[0:5] = np.array(value).astype(kind) if shape else 0

    return change


@st.composite
def changes(draw):
    """A function that changes something in an open file."""
    which, name, value, odd = draw(WHICH), draw(PATHS), draw(VALUES), draw(ODD_ONE)
    other, said, at = draw(TARGETS), draw(SAID), draw(ROW)
    link = h5py.ExternalLink(draw(FILES), f"/{other}") if at % 2 else h5py.SoftLink(f"/{other}")

    def change(file):
        with np.errstate(all="ignore"):
            if which in (0, 1, 2):
                file.attrs[said] = value
            elif which == 3:
                file.attrs.pop(said, None)
            elif which == 4:
                del file[name]
            elif which == 5:
                del file[name]
                file[name] = link
            elif which == 6:
                del file[name]
                file.create_group(name)
            elif which == 7 and isinstance(file[name], h5py.Dataset):
                file[name][at] = np.array(odd).astype(file[name].dtype)
            elif which == 8:
                file[name].attrs["features" if at % 2 else "name"] = value
            else:
                file[other or "train"] = odd

    return draw(DATASETS) if which > 9 else change


DATASETS, CHANGES = datasets(), st.lists(changes(), min_size=1, max_size=3)


def check(path, options):
    """All that a run asks of a data set, if it can be opened; and that it is sound."""
    data = tried(open_data, path, **options)
    if data is None:
        return False

    def read():
        batches = [(batch.x.copy(), batch.y.copy()) for batch in data.batches(0, 5)]
        splits = filter(None, (data.train, data.test, data.validation))
        return [*batches, *(split.rows(0, min(split.examples, 50)) for split in splits)]

    for x, y in (found := tried(read)) or []:
        if isinstance(x, CSR):
            assert (np.diff(x.indptr) >= 0).all() and (x.indices[: x.nnz].astype("u4") < x.shape[1]).all()
        assert np.isfinite(x.data[: x.nnz] if isinstance(x, CSR) else x).all() and np.isfinite(y).all()
        assert x.shape[1:] == (int(np.prod(data.features)),)
        assert not data.classes or ((y >= 0) & (y < data.classes)).all()
    tried(lambda: data.digest)
    data.close()
    return found is not None


@pytest.fixture(scope="module")
def folder():
    """One for all cases, with good files; a case leaves it as it was."""
    with tempfile.TemporaryDirectory() as name:
        for file in GOOD:
            good(Path(name) / file)
        yield Path(name)


@pytest.fixture(autouse=True, scope="module")
def memory():
    """Nothing takes much of it; counted where NumPy and Python allocate."""

    @cases(2)
    @given(text=st.text(), whole=st.integers(), real=st.floats())
    def first(text, whole, real):  # Hypothesis reads a lot, once, which takes minutes where memory is traced
        pass

    first()
    tracemalloc.start(1)
    yield
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < MOST_MEMORY


def emptied(folder, *kept):
    left = {path.name for path in folder.iterdir()} - {*GOOD, *kept}
    assert not left, left


@pytest.mark.long
@cases(150)
@given(made=CHANGES, options=OPTIONS, file=st.sampled_from(GOOD))
def test_files_with_other_things_in_them(folder, made, options, file):
    path = folder / "bad.h5"
    shutil.copy(folder / file, path)
    with h5py.File(path, "a") as file:
        for change in made:
            with contextlib.suppress(Exception):  # HDF5 itself has none of this
                change(file)
    check(path, options)
    path.unlink()
    emptied(folder)


def test_files_that_are_good(folder):
    for placement, partition in itertools.product(("shared", "partitioned"), ("iid", "by-label", "column:group")):
        assert all(check(folder / file, {"placement": placement, "partition": partition}) for file in GOOD)
    assert all(check(folder / file, {"placement": "streamed", "validation": 0.2}) for file in GOOD)


FLIPS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=6)
CUT, INTO = st.floats(0, 1) | st.just(1.0), st.binary(max_size=8)


@st.composite
def damages(draw):
    """A function that flips bits of bytes, cuts off their end, or puts others in."""
    flips, cut, into = draw(FLIPS), draw(CUT), draw(INTO)

    def damage(content):
        for where, bits in flips:
            content = damaged(content, where, bits)
        end = int(cut * len(content))
        return content[:end] + into if end < len(content) else content

    return damage


@cases(80)
@given(damage=damages(), options=OPTIONS, file=st.sampled_from(GOOD))
def test_files_with_damaged_bytes(folder, damage, options, file):
    path = folder / "bad.h5"
    path.write_bytes(damage((folder / file).read_bytes()))
    check(path, options)
    path.unlink()
    emptied(folder)


def prepared(folder, source, prepare, settings, *kept):
    """A source is refused, or its file is sound; nothing else is left."""
    out = folder / "out.h5"
    info = tried(lambda: prepare(source, Output(out), **settings))
    if info is not None:
        with h5py.File(out, "r", locking=False) as file:
            several = any(file[group]["y"].ndim > 1 for group in info.kinds if group != "rows")
            if "table" in file.attrs:
                again(source, file, recipe_of(out))
        assert read_info(out).rows and compute_digest(info) == file_digest(info)
        # Numbers beyond float32's range are right in a file, and learned from in float64 alone.
        assert several or len(info.kinds) < 2 or check(out, {}) or check(out, {"dtype": "float64"})
        out.unlink()
    shutil.rmtree(source) if source.is_dir() else source.unlink()
    emptied(folder, *kept)


def again(source, file, recipe):
    """What was done with a table is done again: the rows of the file are those of the recipe, to the bit."""
    rows = TableRows(source, recipe)
    rows.most = 3
    found = {number: x for call in rows.blocks() for number, x in zip(*(call()[at] for at in (1, 0)), strict=True)}
    for group in file:
        for number, x in zip(file[group]["row"], file[group]["x"], strict=True):
            np.testing.assert_array_equal(found[number], x)


FIELDS = st.sampled_from(
    [
        *("1", "2", "0.5", "-3", "a", "b", "", "nan", "1e400", '"1"', '"', "a\0b", "1_0", " 7 ", "é", "9" * 30),
        *("NA", "2024-01-31", '"1,234"', '"x\ny"', '""', "a\rb"),
    ]
)


def mostly(usual, *others):
    """A strategy for an option that has its usual value nine times of ten."""
    return st.sampled_from([usual] * 9 * len(others) + list(others))


NUMBERS, WORDS = st.sampled_from(["1", "2", "0.5", "", "1e3"]), st.sampled_from(["u", "v", '"x, y"', '"x\ny"', "NA"])
LABELS = mostly("1", "0", "2.5", "a")
COLUMNS = mostly(None, "0", "1", "-1", "a", "0,1", '"', "x\n", "")
TABLE = {
    "label": mostly(None, "-1", "0", "9", "a", "0,1"),
    "header": mostly(None, True, False),
    "delimiter": mostly(",", ";", " ", '"', "\n", ""),
    "regression": mostly(False, True),
    "group": mostly(None, "0", "1"),
    **dict.fromkeys(("id", "columns", "drop", "text"), COLUMNS),
    "one_hot": mostly(64, 0, 1),
    "missing": mostly("mean", "drop", "median", "zero", "refuse", None),
    "test_fraction": mostly(None, 0, 1, 0.3, float("nan")),
}
FILLED = st.tuples(NUMBERS, WORDS, LABELS).map(list)
LINES = st.lists(FILLED, max_size=12) | st.lists(st.lists(FIELDS, max_size=4) | FILLED, max_size=12)
WHOLE = mostly(bytes, bytes) | damages()


@pytest.mark.long
@cases(50)
@given(table=LINES, damage=WHOLE, settings=st.fixed_dictionaries(TABLE))
def test_csv(folder, table, damage, settings):
    source = folder / "in.csv"
    text = "\n".join(",".join(row) for row in [*table, *[["3", "u", "0"], ["5", "v", "1"]] * 5])
    source.write_bytes(damage(text.encode()))
    prepared(folder, source, prepare_table, settings)


CELLS = st.sampled_from([None, 1, -0.5, float("inf"), float("nan"), 10**18, True, "a", "7", "", "2024-01-31", b"\xff"])
PAIR = st.sampled_from([[1, 2], [0.5, None], ["a", "b"], [True, None], [None, "b"]])


@cases(20)
@given(
    columns=st.lists(PAIR | st.lists(CELLS, min_size=2, max_size=2), max_size=3),
    kind=st.sampled_from(["parquet", "feather"]),
    damage=WHOLE,
    settings=st.fixed_dictionaries(TABLE),
)
def test_arrow(folder, columns, kind, damage, settings):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    source = folder / "in.table"
    try:
        table = pa.table({f"c{at}": column * 5 for at, column in enumerate([*columns, [0, 1], ["x", "y"]])})
    except (pa.ArrowInvalid, pa.ArrowTypeError):  # of no type
        return
    write = parquet.write_table if kind == "parquet" else feather.write_feather
    write(table, str(source))
    source.write_bytes(damage(source.read_bytes()))
    prepared(folder, source, prepare_table, settings)


AGAIN = {
    "no_label": st.booleans(),
    "header": mostly(None, False),
    "id": COLUMNS,
    "group": COLUMNS,
    "test_fraction": mostly(None, 0, 1),
}


@pytest.mark.long
@cases(20)
@given(
    table=LINES,
    damage=WHOLE,
    settings=st.fixed_dictionaries(AGAIN),
    missing=st.sampled_from(["mean", "drop", "refuse"]),
    said=mostly("", '"fill": 1e999', '"values": 3', '"number": 99', '"', "[[", "\x7f"),
)
def test_what_is_done_again(folder, table, damage, settings, missing, said):
    """Another table, or a file whose recipe is damaged."""
    source, like = folder / "in.csv", folder / "like.h5"
    source.write_text("number,word,class\n" + "1,u,0\n2,v,1\n" * 6)
    prepare_table(source, Output(like, force=True), missing=missing)
    with h5py.File(like, "a") as file:
        whole = file.attrs["table"]
        file.attrs["table"] = whole.replace('"number": 1', said) if ":" in said else said + whole[len(said) :]
    source.write_bytes(damage("\n".join(["number,word,class", *map(",".join, table)]).encode()))
    prepared(folder, source, prepare_table, settings | {"like": like}, like.name)
    like.unlink()


ARRAYS = st.builds(
    lambda shape, kind, value: np.full(shape, 1).astype(kind) if value is None else filled(shape, kind, value),
    st.sampled_from([(12, 2), (12, 2, 1), (12,), (12, 1), (12, 0), (0, 2), (), (5, 2), (5,)]),
    st.sampled_from(["u1", "i8", "u8", "f2", "f8", "g", "c8", "S3", "U3", "?", "M8[s]", "O"]),
    st.sampled_from([None, *ODD]),
)


def filled(shape, kind, value):
    """0, 1, 2, 0, ... with one other value."""
    array = np.resize(np.arange(3), shape).astype(kind)
    with np.errstate(all="ignore"), contextlib.suppress(ValueError, OverflowError):
        array.flat[-1:] = np.array(value).astype(kind)
    return array


NPZ = st.fixed_dictionaries({"regression": st.booleans(), "test_fraction": st.sampled_from([None, None, 0.3, 0.0])})


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@cases(60)
@given(
    arrays=st.dictionaries(st.sampled_from(["x", "y", "x_test", "y_test", "z"]), ARRAYS, max_size=4),
    damage=damages() | st.just(bytes),
    which=st.sampled_from(["x", "y", "", ""]),
    settings=NPZ,
)
def test_npz(folder, arrays, damage, which, settings):
    """which: the array that is damaged before it is packed, so that no checksum tells; none: the archive."""
    source = folder / "in.npz"
    rows = {"x": np.arange(24.0).reshape(12, 2), "y": np.arange(12) % 3}
    np.savez(source, **rows | arrays)
    if which:
        with zipfile.ZipFile(source) as archive:
            content = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(source, "w") as archive:
            for name in content:
                archive.writestr(name, damage(content[name]) if name == f"{which}.npy" else content[name])
    else:
        source.write_bytes(damage(source.read_bytes()))
    prepared(folder, source, prepare_npz, settings)


@pytest.mark.long
@cases(50)
@given(
    damage=damages(),
    which=st.sampled_from(["train-images", "train-labels", "t10k-images", "t10k-labels"]),
    zipped=st.sampled_from(["", "before", "after"]),
)
def test_idx(folder, damage, which, zipped):
    source = folder / "idx"
    source.mkdir()
    for part, rows in (("train", 6), ("t10k", 4)):
        images = bytes([0, 0, 8, 3, 0, 0, 0, rows, 0, 0, 0, 2, 0, 0, 0, 2]) + bytes(range(4 * rows))
        labels = bytes([0, 0, 8, 1, 0, 0, 0, rows]) + bytes(each % 2 for each in range(rows))
        for name, content in ((f"{part}-images", images), (f"{part}-labels", labels)):
            if name == which and zipped:
                content = gzip.compress(damage(content)) if zipped == "before" else damage(gzip.compress(content))
            elif name == which:
                content = damage(content)
            (source / f"{name}-ubyte{'.gz' if name == which and zipped else ''}").write_bytes(content)
    prepared(folder, source, lambda path, output: prepare_idx(path, output), {})


TEXT = st.fixed_dictionaries(
    {
        "length": st.sampled_from([0, 1, 2, 5, 10**12]),
        "level": st.sampled_from(["character", "byte"]),
        "test_fraction": st.sampled_from([0.1, 0.5, 1e-9, float("nan")]),
        "encoding": st.sampled_from(["utf-8", "latin-1", "utf-16", "cp1252", "idna", "hex", "a\0"]),
    }
)


@pytest.mark.long
@cases(50)
@given(text=st.text(max_size=40) | st.just("abc def " * 8), damage=damages(), settings=TEXT)
def test_text(folder, text, damage, settings):
    source = folder / "in.txt"
    source.write_bytes(damage(text.encode("utf-8", "surrogatepass")))
    prepared(folder, source, prepare_text, settings)
