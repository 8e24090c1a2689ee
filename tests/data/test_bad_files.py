"""Files that someone made wrong, or on purpose: one line each, no memory for mere claims, no way out of the file."""

import os
import struct
import subprocess
import sys
import zipfile

import h5py
import numpy as np
import pytest
from batches import PLACEMENTS

from hpcdl.data import from_arrays, open_data
from hpcdl.data.format import find_data_file
from hpcdl.data.formats.prepare import Output
from hpcdl.data.formats.prepare_idx import prepare_idx
from hpcdl.data.formats.prepare_npz import prepare_npz
from hpcdl.data.formats.prepare_table import prepare_table
from hpcdl.data.formats.prepare_text import prepare_text
from hpcdl.errors import UsageError, blamed_on, printable


def refused(call, *arguments, **options):
    """The one line with which something is refused."""
    with pytest.raises(UsageError) as found:
        call(*arguments, **options)
    said = str(found.value)
    assert "\n" not in said and len(printable(said)) < 1000
    return said


@pytest.fixture
def changed(tmp_path, images, write):
    """A function: a good file of 4 classes, without these data sets, then changed by `change(file)`."""

    def make(change, without=()):
        path = write(tmp_path / "bad.h5", *images())
        with h5py.File(path, "a") as file:
            for name in without:
                del file[name]
            change(file)
        return path

    return make


def put(name, value):
    def change(file):
        if name in file:
            del file[name]
        file[name] = value

    return change


def attribute(name, value):
    return lambda file: file.attrs.__setitem__(name, value)


def both(*changes):
    return lambda file: [change(file) for change in changes]


X, Y = np.zeros((100, 6, 5)), np.arange(100) % 4
NAN, LARGE = np.where(np.arange(100) == 17, np.nan, 0)[:, None, None] + X, X + 1e300


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("train/y", np.full(100, 2**40)), "the largest label is 1099511627776, so that there would"),
        (put("train/y", np.full(100, 2**64 - 1, "u8")), "label is 18446744073709551615, so that"),
        (put("train/y", np.full(100, 1 << 24)), "there can be 16777216"),
        (attribute("classes", 2**40), "the number of classes is 1099511627776; there can be 16777216"),
        (attribute("classes", np.uint64(2**64 - 1)), "the number of classes is 18446744073709551615"),
        (attribute("classes", np.arange(5000)), "the number of classes is [ 0 1 2 ... 4997"),
        (attribute("classes", "ten"), "the number of classes is 'ten'"),
        (attribute("scale", np.ones((90, 9))), "the attribute scale is [[1. 1."),
        (attribute("scale", 1e300), "the scale 1e+300 is infinite as float32"),
        (attribute("scale", 1e37), "has numbers up to 199, which the scale makes infinite"),
        (attribute("scale", 2j), "the attribute scale is"),
        (attribute("name", np.bytes_(b"caf\xe9")), "the attribute name is b'caf\\xe9'; it must be a text in UTF-8"),
        (attribute("name", h5py.Empty("f")), "the attribute name is Empty("),
        (attribute("vocabulary", np.arange(4.0)), "the attribute vocabulary is 0.0; it must be a text in UTF-8"),
        (attribute("vocabulary", "x" * 5000), "a vocabulary is a list of single characters, or the text 'bytes'"),
        (put("train/y", np.zeros((), "i4")), "but train/y has shape ()"),
        (put("train/y", np.array(["a"], "O")), "train/y holds elements of type object"),
        (both(lambda file: file.pop("train/y"), lambda file: file.create_group("train/y")), "has no data set train/y"),
        (put("train/x", h5py.Empty("f")), "train/x has shape None"),
        (lambda file: file.pop("train"), "has no rows to train on (group train): it holds test alone"),
        (lambda file: file.pop("test/y"), "no data set test/y"),
        (put("train/y", Y[:-1]), "train/x has 100 rows, but train/y"),
        (put("train/x", X.astype("S3")), "train/x holds elements of type"),
        (put("test/y", Y[:20].astype("S3")), "test/y holds elements of type"),
        (put("train/x", X.astype("c8")), "train/x holds elements of type"),
        (put("train/x", X[:, 0, 0]), "shape (rows, features...)"),
        (put("train/x", X[:, 1:]), "in train/x, but (6, 5) in test/x"),
        (both(put("test/x", X[:0]), put("test/y", Y[:0])), "test has no rows"),
        (put("train/x", NAN.astype("f4")), "train/x has a NaN or an infinity (as float32) in row 17;"),
        (put("test/x", X[:20] + np.inf), "test/x has a NaN or an infinity"),
        (put("train/x", LARGE), "infinity (as float32)"),
        (both(put("train/y", Y + 1), attribute("classes", 4)), "label 4 in row 3; the labels of 4 classes"),
        (put("test/y", Y[:20] - 1), "test/y has the label -1 in row 0"),
        (both(put("train/y", Y / 2), attribute("classes", 4)), "y holds floats"),
        (attribute("scale", 0.0), "scale is 0.0; it must be a number other than 0"),
        (attribute("scale", np.nan), "scale is nan"),
        (attribute("classes", 1), "number of classes is 1;"),
        (attribute("classes", -1), "number of classes is -1"),
        (attribute("classes", 3), "label 3 in row"),
        (attribute("labels", ["cat"]), "labels must hold 4 different names"),
        (attribute("labels", ["a", "b", "c", "a"]), "labels must hold 4 different names"),
        (attribute("table", "{"), "attribute table is no recipe of a table"),
        (attribute("table", "[1]"), "attribute table is no recipe of a table"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_file_says(changed, placement, change, words):
    def use(path):  # a streamed file shows its values when they are read
        data = open_data(path, placement=placement)
        list(data.batches(0, 10))
        data.test.rows(0, 20)

    assert words in refused(use, changed(change))


def test_names_that_are_no_utf_8_come_as_half_characters(changed):
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(4)
    kind.set_cset(h5py.h5t.CSET_UTF8)

    def change(file):
        made = h5py.h5a.create(file.id, b"name", kind, h5py.h5s.create(h5py.h5s.SCALAR))
        made.write(np.array(b"caf\xe9"), mtype=kind)

    assert "the attribute name is" in refused(open_data, changed(change))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("chunks", [None, True])
@pytest.mark.parametrize("written", [False, True])
def test_shapes_that_no_machine_has_memory_for(changed, placement, chunks, written):
    """They cost nothing to declare: a file of some kilobytes. Of a contiguous one, HDF5 writes all or nothing."""

    def change(file):
        for name, shape in (("x", (10**12, 3)), ("y", (10**12,))):
            made = file.create_dataset(f"train/{name}", shape, "f4", chunks=(1000, *shape[1:]) if chunks else None)
            if written and chunks:
                made[:1000] = 1

    path = changed(change, ["train/x", "train/y", "test/x", "test/y"])
    with h5py.File(path, "a") as file:
        file["test/x"], file["test/y"] = np.ones((2, 3)), np.ones(2)
    assert path.stat().st_size < 1 << 20
    words = "train has 1000000000000 rows, whose labels need" if written and chunks else "nothing was ever written"
    assert words in refused(open_data, path, placement=placement)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rows_that_no_machine_has_memory_for(changed, placement):
    def change(file):
        for group, rows in (("train", 100), ("test", 20)):
            file.create_dataset(f"{group}/x", (rows, 10**7, 10**7), "f8", chunks=(1, 10, 10))[0, 0, 0] = 1

    path = changed(change, ["train/x", "test/x"])
    assert "bytes of memory, and this machine has" in refused(open_data, path, placement=placement)


def outside(tmp_path):
    """A file that must not be read: bytes, and as HDF5."""
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["x"] = np.zeros((100, 6, 5))
    return tmp_path / "secret.h5"


def external(file, path):
    file.create_dataset("train/x", (100, 30), "u1", external=[(str(path), 0, 3000)])


def virtual(file, path):
    layout = h5py.VirtualLayout((100, 6, 5), "f8")
    layout[:] = h5py.VirtualSource(str(path), "x", (100, 6, 5))
    file.create_virtual_dataset("train/x", layout)


def external_link(file, path):
    file["train/x"] = h5py.ExternalLink(str(path), "/x")


def behind_a_soft_link(file, path):
    file["there"] = h5py.ExternalLink(str(path), "/")
    file["train/x"] = h5py.SoftLink("/there/x")


def a_whole_group(file, path):
    file["other"] = file["train"]
    del file["train"]
    file["train"] = h5py.ExternalLink(str(path), "/")


def a_loop(file, path):
    file["train/x"], file["train/z"] = h5py.SoftLink("z"), h5py.SoftLink("/train/x")


def a_loop_of_files(file, path):
    file["train/x"] = h5py.ExternalLink(file.filename, "/train/x")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (external, "train/x has its elements in another file ("),
        (virtual, "train/x is put together from other data sets"),
        (external_link, "train/x is a link to another file"),
        (behind_a_soft_link, "train/x is a link to another file"),
        (a_whole_group, "train/x is a link to another file"),
        (a_loop, "train/x is a chain of too many links"),
        (a_loop_of_files, "train/x is a link to another file"),
    ],
)
def test_no_bytes_of_other_files_become_features(changed, tmp_path, change, words):
    path = outside(tmp_path)
    assert words in refused(open_data, changed(lambda file: change(file, path), ["train/x"]))


def test_a_link_to_what_would_never_end(changed, tmp_path):
    """HDF5 would wait for someone to write into the pipe."""
    os.mkfifo(tmp_path / "pipe")
    change = put("train/x", h5py.ExternalLink(str(tmp_path / "pipe"), "/x"))
    assert "is a link to another file" in refused(open_data, changed(change, ["train/x"]))
    assert "is no file that can be read twice" in refused(open_data, tmp_path / "pipe")


def test_links_within_the_file_are_followed(changed):
    def change(file):
        file["kept/x"] = file["train/x"]
        del file["train/x"]
        file["train/x"], file["short"] = h5py.SoftLink("/short/x"), h5py.SoftLink("kept")

    for placement in PLACEMENTS:
        data = open_data(changed(change), placement=placement)
        assert sum(len(batch.y) for batch in data.batches(0, 10)) == 100
        data.close()


def test_a_column_outside_is_none(changed, tmp_path):
    change = put("train/writer", h5py.ExternalLink(str(outside(tmp_path)), "/x"))
    path = changed(change)
    assert "no whole number for each row in train/writer" in refused(open_data, path, partition="column:writer")
    assert open_data(path).digest


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_values_that_are_finite_in_the_file_and_not_in_the_model(tmp_path, images, write, placement):
    x, y, x_test, y_test = images()
    path = write(tmp_path / "large.h5", x, y * 1e300, x_test, y_test * 1e300)
    assert "/y has a NaN or an infinity (as float32)" in refused(open_data, path, placement=placement)
    data = open_data(path, placement=placement, dtype="float64")
    assert np.isfinite(next(iter(data.batches(0, 100))).y).all()
    data.close()
    assert "y has a NaN" in refused(from_arrays, x, y * 1e300)
    assert "which the scale makes infinite" in refused(from_arrays, x, y, scale=1e37)
    assert "label" in refused(from_arrays, x, np.full(100, 2**64 - 1, "u8"), classes=3)


@pytest.mark.parametrize(
    "name", ["x" * 5000, "x" * 5000 + ".h5", "a\0b.h5", "/a\0b", "x/" * 3000, "café\ud800.h5", "\n.h5"]
)
def test_paths_that_cannot_be(name):
    refused(find_data_file, name)


# --- sources


@pytest.fixture
def prepared(tmp_path):
    """A function: the line with which a source is refused; nothing is left but the source."""

    def run(prepare, source, *options, name="out.h5", **settings):
        before = sorted(path.name for path in tmp_path.iterdir())
        said = refused(lambda: prepare(source, Output(tmp_path / name), **settings))
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        return said

    return run


def test_names_and_origins(tmp_path):
    for options in ({"name": "a\0"}, {"origin": "caf\udce9"}):
        assert "which HDF5 cannot hold" in refused(Output, tmp_path / "out.h5", **options)


def npz(path, **members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)


def npy(header, data=b""):
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data


HEADER = "{'descr': '<f8', 'fortran_order': False, 'shape': (%s), }\n"
ROWS = npy(HEADER % "10, 2", bytes(160))


def test_npz(tmp_path, prepared):
    path, x = tmp_path / "in.npz", np.arange(20.0).reshape(10, 2)
    for members, words in [
        ({"x": ROWS, "y": b"no array"}, "'y' is no array of numpy's"),
        ({"x": npy(HEADER % f"{10**12}, 2"), "y": ROWS}, "cannot be read as npz"),
        ({"x": npy(HEADER % "-1, 2"), "y": ROWS}, "cannot be read as npz"),
        ({"x": npy(" " * 60_000), "y": ROWS}, "cannot be read as npz: Header info length (60000) is large"),
        ({"x": npy("{'descr': '<f8'"), "y": ROWS}, "cannot be read as npz"),
        ({"x": ROWS[:-1], "y": ROWS}, "cannot be read as npz"),
    ]:
        npz(path, **members)
        assert words in prepared(prepare_npz, path)
    for y, words in [
        (np.array([b"a", b"caf\xe9"] * 5), "labels of bytes must be texts in UTF-8"),
        (np.array(["a", "b\ud800"] * 5), "a label is 'b\\ud800', which HDF5 cannot hold"),
        (np.array(["a", 3] * 5, object), "cannot be read as npz: Object arrays cannot be loaded"),
        (np.zeros(10, "M8[s]"), "classes must be integers or texts"),
        (np.array(["x" * 5000] * 10), "all rows have the label"),
    ]:
        np.savez(path, x=x, y=y)
        assert words in prepared(prepare_npz, path)
    np.savez(path, x=x, y=np.arange(10) % 2)
    whole = path.read_bytes()
    encrypted = bytearray(whole)
    for at in (whole.index(b"PK\x03\x04") + 6, whole.index(b"PK\x01\x02") + 8):
        encrypted[at] |= 1  # of the flags
    path.write_bytes(encrypted)
    assert "encrypted" in prepared(prepare_npz, path)
    np.savez(path, x=x, y=np.array([b"rose", b"caf\xc3\xa9"] * 5))
    prepare_npz(path, Output(tmp_path / "good.h5"))
    with h5py.File(tmp_path / "good.h5") as file:
        assert list(file.attrs["labels"]) == ["café", "rose"]


def idx(sizes, data=b"", kind=8, zero=b"\0\0"):
    return zero + bytes([kind, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes) + data


def test_idx(tmp_path, prepared):
    folder = tmp_path / "idx"
    folder.mkdir()
    good = {"images": idx([6, 2, 2], bytes(24)), "labels": idx([6], bytes([0, 1] * 3))}
    big = 2**32 - 1
    for what, content, words in [
        ("images", idx([1] * 41, bytes(1)), "says that it has rank 41; HDF5 has rank 32 at most"),
        ("images", idx([6, big, big, big]), "a row would need"),
        ("images", idx([big, big]), "but train-labels"),
        ("labels", idx([big]), "it ends in row 0 of 4294967295"),
        ("images", good["images"][:-1], "it ends in row 5 of 6"),
        ("images", good["images"][:7], "the header ends early"),
        ("images", idx([6, 4], bytes(24), zero=b"\1\0"), "is not an idx file"),
        ("images", idx([6, 4], bytes(24), kind=7), "is not an idx file"),
        ("labels", idx([0]), "labels-idx-ubyte has no rows"),
        ("images", idx([0, 2, 2]), "has 0 rows, but train-labels-idx-ubyte has 6"),
        ("labels", idx([6, 1], bytes(6)), "one whole number per row"),
        ("images", good["labels"], "holds one number for each row, as labels are"),
        ("images", idx([6, 0]), "but train-images-idx-ubyte has rows of shape (0,)"),
    ]:
        for part, prefix in (("train", "train"), ("test", "t10k")):
            for each in ("images", "labels"):
                bad = each == what and part == "train"
                (folder / f"{prefix}-{each}-idx-ubyte").write_bytes(content if bad else good[each])
        assert words in prepared(prepare_idx, folder)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "x" * 250])
@pytest.mark.parametrize("prepare", [prepare_table, prepare_idx, prepare_npz, prepare_text])
def test_paths_of_sources_and_outputs(tmp_path, prepared, prepare, name):
    prepared(prepare, tmp_path / name)
    (tmp_path / "in.csv").write_text("1,2\n3,4\n" * 20)
    said = prepared(prepare_table, tmp_path / "in.csv", name=name)
    assert ("HDF5 cannot hold" if "\0" in name else "cannot be written") in said


def test_text_of_an_encoding_that_cannot_be(tmp_path, prepared):
    (tmp_path / "in.txt").write_bytes(b"abc" * 2000)
    for encoding in ("a\0b", "hex", "undefined", "utf-99"):
        prepared(prepare_text, tmp_path / "in.txt", encoding=encoding)
    for length in (10**12, 10**30):
        prepared(prepare_text, tmp_path / "in.txt", length=length)


FULL = """
import contextlib, os, resource
from hpcdl.scripts import prepare_data
for limit in (2000, 100_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for kind in (["npz"], ["npz", "--compress"], ["csv"], ["text"]):
        with contextlib.suppress(SystemExit):
            prepare_data.main([kind[0], f"in.{kind[0]}", "out.h5", "--force", *kind[1:]])
            print("written")
        print(*sorted(os.listdir()), open("out.h5").read())
"""


def test_a_disk_that_is_full_is_not_the_sources_fault(tmp_path):
    """HDF5 itself would end the process by a fault in memory; and the last that is written is the end of the file."""
    x = np.random.default_rng(0).standard_normal((3000, 20))
    np.savez(tmp_path / "in.npz", x=x, y=np.arange(3000) % 3)
    np.savetxt(tmp_path / "in.csv", np.c_[x, np.arange(3000) % 3], fmt="%.6g", delimiter=",")
    (tmp_path / "in.text").write_text("abc def" * 20_000)
    (tmp_path / "out.h5").write_text("precious")
    done = subprocess.run([sys.executable, "-c", FULL], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines() == ["prepare-data: error: out.h5 cannot be written: File too large"] * 8
    assert done.stdout.splitlines() == ["in.csv in.npz in.text out.h5 precious"] * 8


def test_what_a_library_says_at_length_is_cut():
    """As zipfile does of an archive whose parts do not fit: it shows them."""

    def read():
        with blamed_on("in.npz cannot be read"):
            raise ValueError("x" * 5000)

    assert refused(read).endswith("x...")
