"""prepare_data: each kind there and back, what is inferred, and each refusal as one line."""

import gzip
import struct

import numpy as np
import pytest

from hpcdl.data import hdf5, open_data
from hpcdl.data.formats import prepare as formats_prepare
from hpcdl.data.formats import prepare_npz, table_source

CODES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}


def write_idx(path, array):
    header = struct.pack(f">HBB{array.ndim}I", 0, CODES[array.dtype.str[1:]], array.ndim, *array.shape)
    data = header + array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_idx_folder(folder, x, y, x_test, y_test, end="", test="t10k"):
    folder.mkdir()
    for name, array in (("train", x), (test, x_test)):
        write_idx(folder / f"{name}-images-idx{array.ndim}-ubyte{end}", array)
    for name, array in (("train", y), (test, y_test)):
        write_idx(folder / f"{name}-labels-idx1-ubyte{end}", array.astype("u1"))
    return folder


def attributes(file):
    """But for the digest."""
    return {name: value for name, value in file.attrs.items() if name not in ("digest", "recipe")}


def rows_with_labels(*pairs):
    """The rows (with their labels) as a sorted list, to compare what was split and shuffled."""
    rows = (pair for x, y in pairs for pair in zip(np.array(x), np.array(y), strict=True))
    return sorted((*row.ravel().tolist(), label) for row, label in rows)


# --- idx


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("test", ["t10k", "test"])
def test_idx(tmp_path, images, prepare, end, test, monkeypatch):
    monkeypatch.setattr(hdf5, "SLAB_BYTES", 100)
    x, y, x_test, y_test = images()
    with prepare("idx", write_idx_folder(tmp_path / "in", x, y, x_test, y_test, end, test)) as file:
        assert attributes(file) == {"name": "out", "classes": 4, "scale": 1 / 255}
        assert file["train/x"].dtype == file["test/y"].dtype == np.uint8
        for name, array in (("train/x", x), ("train/y", y), ("test/x", x_test), ("test/y", y_test)):
            np.testing.assert_array_equal(file[name], array)
    data = open_data(tmp_path / "out.h5")
    np.testing.assert_array_equal(data.train.rows(0, 100)[0], x.reshape(100, -1) * np.float32(1 / 255))


@pytest.mark.parametrize("kind", ["i1", "i2", "i4", "f4", "f8"])
def test_idx_of_other_types(tmp_path, images, prepare, kind):
    x, y, x_test, y_test = images()
    x, x_test = x.astype(kind), x_test.astype(kind)
    with prepare("idx", write_idx_folder(tmp_path / "in", x, y + 1, x_test, y_test + 1)) as file:
        assert file["train/x"].dtype == kind and file.attrs["scale"] == 1
        assert list(file.attrs["labels"]) == ["1", "2", "3", "4"]
        np.testing.assert_array_equal(file["train/x"], x)
        np.testing.assert_array_equal(file["train/y"], y)


def test_bad_idx(tmp_path, images, prepare):
    assert "is not a folder" in prepare("idx", tmp_path / "absent")
    folder = write_idx_folder(tmp_path / "in", *images(), end=".gz")
    images_file, labels_file = folder / "train-images-idx3-ubyte.gz", folder / "train-labels-idx1-ubyte.gz"
    whole, labels = images_file.read_bytes(), labels_file.read_bytes()
    for data, message in [
        (whole[:-40], "cannot be read"),
        (whole[:20] + b"\0" * 20 + whole[40:], "cannot be read"),
        (gzip.decompress(whole), "cannot be read: Not a gzipped file"),
    ]:
        images_file.write_bytes(data)
        assert message in prepare("idx", folder)
    images_file.write_bytes(whole)
    write_idx(labels_file, np.zeros(100, "u1"))
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", np.zeros(20, "u1"))
    assert "all rows have the label 0" in prepare("idx", folder)
    labels_file.write_bytes(labels)
    (folder / "emnist-train-images").touch()
    assert "several files that fit: emnist-train-images, train-images-idx3-ubyte" in prepare("idx", folder)
    for name in ("emnist-train-images", images_file.name):
        (folder / name).unlink()
    assert "no file train-images-idx3-ubyte" in prepare("idx", folder)
    assert {path.name for path in tmp_path.iterdir()} == {"in"}  # nothing half-written


# --- npz


@pytest.mark.parametrize("names", [("x", "y"), ("x_train", "y_train")])
def test_npz_with_a_test_set(tmp_path, images, prepare, names):
    arrays = images()
    np.savez_compressed(tmp_path / "in.npz", **dict(zip((*names, "x_test", "y_test"), arrays, strict=True)))
    with prepare("npz", tmp_path / "in.npz", "--name", "mine", "--scale", "1/16", "--origin", "a test") as file:
        assert attributes(file) == {"name": "mine", "classes": 4, "scale": 1 / 16, "source": "a test"}
        for name, array in zip(("train/x", "train/y", "test/x", "test/y"), arrays, strict=True):
            np.testing.assert_array_equal(file[name], array)
    assert "leave --test-fraction out" in prepare("npz", tmp_path / "in.npz", "--test-fraction", "0.2", "--force")


def test_npz_is_split_by_class_and_shuffled(tmp_path, images, prepare, monkeypatch):
    monkeypatch.setattr(hdf5, "SLAB_BYTES", 100)
    x, y, _, _ = images()
    order = np.argsort(y, kind="stable")
    np.savez(tmp_path / "in.npz", x=x[order], y=y[order][:, None])
    orders = {}
    for seed in (0, 0, 1):
        with prepare("npz", tmp_path / "in.npz", "--test-fraction", "0.3", "--seed", seed, "--force") as file:
            train, test = ((file[group]["x"], file[group]["y"]) for group in ("train", "test"))
            assert rows_with_labels(train, test) == rows_with_labels((x, y))
            assert list(np.bincount(test[1])) in ([8, 7, 8, 7], [8, 8, 7, 7])
            assert (np.diff(train[1][...].astype(int)) < 0).sum() > 10  # shuffled, so that it can be streamed
            order = tuple(train[0][:, 0, 1])
            assert orders.setdefault(seed, order) == order
    assert orders[0] != orders[1]


def test_npz_infers_types(tmp_path, prepare):
    x = np.arange(40).reshape(20, 2)
    y = np.arange(20) % 2
    for rows, labels, kind, scale, classes, names in [
        (x, y, "u1", 1 / 255, 2, None),
        (x % 2, y, "u1", 1, 2, None),
        (x % 2 == 0, y == 1, "u1", 1, 2, None),
        (x - 1, y * 2 - 1, "i8", 1, 2, ["-1", "1"]),
        (x * 10, y + 1, "i8", 1, 2, ["1", "2"]),
        (x.astype("f4"), np.array(["dog", "cat"])[y], "f4", 1, 2, ["cat", "dog"]),
        (x.astype(">f8"), np.array([b"dog", b"cat"])[y], "f8", 1, 2, ["cat", "dog"]),
        (x / 3, y / 2, "f8", 1, 0, None),
    ]:
        np.savez(tmp_path / "in.npz", x=rows, y=labels)
        with prepare("npz", tmp_path / "in.npz", "--force") as file:
            assert file["train/x"].dtype == kind and file.attrs["scale"] == scale and file.attrs["classes"] == classes
            assert list(file.attrs.get("labels", [])) == (names or [])
            if classes:
                known = np.unique(labels)
                got = [(x[...], known[y[...]]) for x, y in ((file[g]["x"], file[g]["y"]) for g in ("train", "test"))]
            else:
                got = [(file[g]["x"], file[g]["y"]) for g in ("train", "test")]
            assert rows_with_labels(*got) == rows_with_labels((rows, labels))
    np.savez(tmp_path / "in.npz", x=x, y=x[:, 0])
    for fraction, group in ((0, "train"), (1, "test")):
        with prepare("npz", tmp_path / "in.npz", "--force", "--regression", "--test-fraction", fraction) as file:
            assert list(file) == [group] and len(file[group]["x"]) == 20
    with prepare("npz", tmp_path / "in.npz", "--force", "--regression") as file:
        assert file.attrs["classes"] == 0 and file["train/y"].dtype == float


def test_bad_npz(tmp_path, prepare):
    path, x, y = tmp_path / "in.npz", np.eye(6), np.arange(6) % 2
    assert "does not exist" in prepare("npz", path)
    for content in (b"no archive", b"PK\x03\x04 no archive", b""):
        path.write_bytes(content)
        assert "cannot be read as npz" in prepare("npz", path)
    with path.open("wb") as single:
        np.save(single, x)
    assert "holds one array" in prepare("npz", path)
    for arrays, message in [
        ({"a": x}, "has no array x or x_train; it has a"),
        ({"x": x}, "has no array y or y_train"),
        ({"x": x, "y": y, "x_test": x}, "has x_test alone"),
        ({"x": x, "y": y[:3]}, "x has 6 rows, but y has shape (3,)"),
        ({"x": x, "y": x}, "but y has shape (6, 6)"),
        ({"x": x[0], "y": y}, "must hold numbers (rows, features...)"),
        ({"x": x.astype(str), "y": y}, "must hold numbers"),
        ({"x": x[:0], "y": y[:0]}, "must hold numbers"),
        ({"x": x, "y": y, "x_test": x[:, 1:], "y_test": y}, "must hold numbers"),
        ({"x": x, "y": y * 0}, "all rows have the label 0"),
        ({"x": np.where(x == 1, np.nan, x), "y": y}, "has a NaN"),
        ({"x": x, "y": y + np.inf}, "has a NaN or an infinity"),
        ({"x": np.zeros((4001, 1)), "y": np.arange(4001) * 2}, "there are 4001 different labels; if they are values"),
    ]:
        np.savez(path, **arrays)
        assert message in prepare("npz", path)
    np.savez(path, x=x, y=y)
    for fraction, message in [("-0.1", "between 0 and 1"), ("nan", "between 0 and 1"), ("0.01", "would have no rows")]:
        assert message in prepare("npz", path, f"--test-fraction={fraction}")
    assert {entry.name for entry in tmp_path.iterdir()} == {"in.npz"}


@pytest.mark.parametrize("own_test", [True, False])
def test_a_folder_of_arrays_is_mapped(tmp_path, images, prepare, monkeypatch, own_test):
    """It gives the file that an archive of the same arrays gives, and is read slab by slab."""
    names = ("x", "y", "x_test", "y_test") if own_test else ("x", "y")
    arrays = dict(zip(names, images(), strict=False))
    np.savez(tmp_path / "in.npz", **arrays)
    folder = tmp_path / "arrays"
    folder.mkdir()
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    (folder / "notes.txt").write_text("ignored")
    monkeypatch.setattr(hdf5, "SLAB_BYTES", 300)  # 10 rows
    sizes, select = [], prepare_npz.select_rows

    def selected(x, rows, kind):
        assert isinstance(x, np.memmap)
        for part in select(x, rows, kind):
            sizes.append(len(part))
            yield part

    with prepare("npz", tmp_path / "in.npz", out="archive.h5") as archive, monkeypatch.context() as patch:
        patch.setattr(prepare_npz, "select_rows", selected)
        patch.setattr(formats_prepare, "select_rows", selected)
        with prepare("npz", folder, out="folder.h5") as mapped:
            assert mapped.attrs["digest"].split()[0] == archive.attrs["digest"].split()[0]
            assert sum(sizes) == len(mapped["train/x"]) + len(mapped["test/x"]) and max(sizes) == 10
    content = (folder / "x.npy").read_bytes()
    (folder / "x.npy").write_bytes(content[:-1])
    assert "x.npy cannot be read: mmap length is greater than file size" in prepare("npz", folder)
    np.save(folder / "x.npy", np.array([None] * 100))
    assert "x.npy cannot be read" in prepare("npz", folder)
    (folder / "x.npy").unlink()
    assert f"{folder} has no array x or x_train; it has " in prepare("npz", folder)


# --- csv


@pytest.mark.parametrize(
    ("text", "label", "column"),
    [
        ("3,1,0\n7,2,0\n4,1,9\n8,2,8\n5,1,1\n", "1", 1),
        ("3,1,0\n7,2,0\n4,1,9\n8,2,8\n5,1,1\n", "-2", 1),
        ('a,"the class",b\n3,1,0\n7,2,0\n4,1,9\n8,2,8\n5,1,1\n', "the class", 1),
        ('a,b,"c"\n3,"1",0\n7,2,0\n4,"1",9\n8,2,8\n5,1,1\n', "1", 1),
    ],
)
def test_csv_label_columns(tmp_path, prepare, text, label, column):
    (tmp_path / "in.csv").write_text(text)
    with prepare("csv", tmp_path / "in.csv", "--label", label, "--test-fraction", "0.4") as file:
        assert file["train/x"].dtype == np.uint8 and file.attrs["scale"] == 1 / 255
        got = rows_with_labels(*((file[group]["x"], file[group]["y"]) for group in ("train", "test")))
        assert got == [(3, 0, 0), (4, 9, 0), (5, 1, 0), (7, 0, 1), (8, 8, 1)]
        assert list(file.attrs["labels"]) == ["1", "2"]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["1_0", "10"], ["10", "1_0"]),
        (["01", "1"], ["01", "1"]),
        (["007", "7", "1"], ["007", "1", "7"]),
        (["0x1", "1"], ["0x1", "1"]),
        (["10", "9"], ["9", "10"]),
        (["-1", "+1"], ["-1", "1"]),
    ],
)
def test_csv_labels_are_their_texts_unless_all_are_numbers(tmp_path, prepare, labels, names):
    (tmp_path / "in.csv").write_text("".join(f"0.5,{label}\n" * 3 for label in labels))
    with prepare("csv", tmp_path / "in.csv", "--test-fraction", "0.4", "--no-header") as file:
        assert list(file.attrs["labels"]) == names


def test_csv_header_as_told(tmp_path, prepare):
    (tmp_path / "in.csv").write_text("0,1\n1,0\n2,1\n3,0\n4,1\n5,0\n")
    for option, rows in ((None, 6), ("--no-header", 6), ("--header", 5)):
        with prepare("csv", tmp_path / "in.csv", "--force", *filter(None, [option])) as file:
            assert len(file["train/x"]) + len(file["test/x"]) == rows


def test_csv_is_judged_as_a_whole(tmp_path, prepare, monkeypatch):
    monkeypatch.setattr(table_source, "BLOCK_ROWS", 2)
    for first, kind in (("0.5", "f8"), ("-1", "f8"), ("256", "f8"), ("255", "u1")):
        (tmp_path / "in.csv").write_text(f"0,1,kind\n{first},1,a\n" + "1,2,b\n2,3,a\n" * 5)
        with prepare("csv", tmp_path / "in.csv", "--label", "kind", "--force") as file:
            assert file["train/x"].dtype == kind and len(file["train/x"]) + len(file["test/x"]) == 11


def test_csv_regression(tmp_path, prepare):
    (tmp_path / "in.csv").write_text("".join(f"{i},{i / 4}\n" for i in range(10)))
    with prepare("csv", tmp_path / "in.csv") as file:
        assert file.attrs["classes"] == 0 and "labels" not in file.attrs
        got = rows_with_labels(*((file[group]["x"], file[group]["y"]) for group in ("train", "test")))
        assert got == [(i, i / 4) for i in range(10)]
    with prepare("csv", tmp_path / "in.csv", "--label", "0", "--regression", "--force") as file:
        assert file.attrs["classes"] == 0 and sorted([*file["train/y"], *file["test/y"]]) == list(range(10))


# --- all kinds


def test_an_existing_file_is_replaced_only_by_force(tmp_path, prepare):
    np.savez(tmp_path / "in.npz", x=np.eye(20), y=np.arange(20) % 2)
    (tmp_path / "out.h5").write_text("precious")
    assert "exists already; choose another name, or --force" in prepare("npz", tmp_path / "in.npz")
    assert (tmp_path / "out.h5").read_text() == "precious"
    # A source that cannot be read leaves the old file as it is.
    assert "does not exist" in prepare("npz", tmp_path / "absent.npz", "--force")
    assert (tmp_path / "out.h5").read_text() == "precious"
    with prepare("npz", tmp_path / "in.npz", "--force") as file:
        assert len(file["train/x"]) == 16


def test_compressed_files_hold_the_same(tmp_path, images, prepare):
    np.savez(tmp_path / "in.npz", x=images(rows=20000)[0], y=images(rows=20000)[1])
    with (
        prepare("npz", tmp_path / "in.npz") as plain,
        prepare("npz", tmp_path / "in.npz", "--compress", out="z.h5") as z,
    ):
        assert z["train/x"].compression == "gzip" and plain["train/x"].compression is None
        assert z["train/x"].chunks[0] < 16000
        np.testing.assert_array_equal(z["train/x"], plain["train/x"])
    for place in ("shared", "streamed"):
        one, two = (open_data(tmp_path / name, placement=place) for name in ("out.h5", "z.h5"))
        np.testing.assert_array_equal(one.train.rows(0, 16000)[0], two.train.rows(0, 16000)[0])
        one.close()
        two.close()


def test_mpi_is_not_started(tmp_path):
    import subprocess
    import sys

    program = "import sys; from hpcdl.scripts import prepare_data; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False).returncode == 0
