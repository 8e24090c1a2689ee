"""The data file: what it may hold, each refusal, and that no half-written file is ever seen."""

import h5py
import numpy as np
import pytest

from hpcdl.data import format as data_format
from hpcdl.data import hdf5, open_data
from hpcdl.data.format import read_info
from hpcdl.data.hdf5 import new_file, slabs
from hpcdl.errors import UsageError


def test_digits_are_the_embedded_default():
    data = open_data("digits")
    assert (data.name, data.features, data.classes) == ("digits", (8, 8), 10)
    assert (data.train.examples, data.test.examples, data.validation) == (1438, 359, None)
    x, y = map(np.concatenate, zip(data.train.rows(0, 1438), data.test.rows(0, 359), strict=True))
    assert x.dtype == np.float32 and x.min() == 0 and x.max() == 1
    # What is known of the whole set: the classes' sizes and the sum of all pixels.
    counts = np.bincount(y)
    np.testing.assert_array_equal(counts, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180])
    assert x.sum(dtype=float) * 16 == 561718
    assert (np.abs(np.bincount(data.test.rows(0, 359)[1]) - counts * 359 / 1797) < 1).all()
    with h5py.File(data_format.KNOWN["digits"]) as file:
        assert "CC BY 4.0" in file.attrs["source"] and file["train/x"].dtype == np.uint8
    data.close()


def test_attributes_have_defaults(tmp_path, images, write):
    info = read_info(write(tmp_path / "bare.h5", *images()))
    assert (info.name, info.scale, info.classes, info.rows) == ("bare", 1.0, 4, {"train": 100, "test": 20, "rows": 0})
    x, y, x_test, y_test = images()
    assert read_info(write(tmp_path / "values.h5", x, y + 0.5, x_test, y_test + 0.5)).classes == 0
    info = read_info(write(tmp_path / "named.h5", *images(), name=np.bytes_("it"), scale=2, classes=9))
    assert (info.name, info.scale, info.classes) == ("it", 2.0, 9)


@pytest.mark.parametrize("kind", ["u1", "i1", ">i2", "u4", "i8", "f2", ">f4", "f8", "g"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_real_type_can_be_read(tmp_path, images, write, kind, dtype):
    x, y, x_test, y_test = images()
    x, x_test = (x // 2).astype(kind), (x_test // 2).astype(kind)
    path = write(tmp_path / "typed.h5", x, y.astype(">u2"), x_test, y_test.astype("i1"), scale=0.5)
    for placement in ("shared", "partitioned", "streamed"):
        data = open_data(path, placement=placement, dtype=dtype)
        (batch,) = data.batches(0, 100)
        assert batch.x.dtype == dtype and batch.x.flags.c_contiguous and batch.y.dtype == np.int64
        np.testing.assert_array_equal(batch.x, x[batch.index].reshape(100, -1).astype(dtype) / 2)
        np.testing.assert_array_equal(batch.y, y[batch.index])
        np.testing.assert_array_equal(data.test.take([3, 1])[0], x_test[[3, 1]].reshape(2, -1).astype(dtype) / 2)
        data.close()


def test_what_is_not_a_data_file_is_refused(tmp_path, file):
    (tmp_path / "text.h5").write_text("no HDF5")
    (tmp_path / "damaged.h5").write_bytes(file.read_bytes()[:-2000])
    for name, message in [
        ("digts", "unknown data set 'digts' \\(did you mean 'digits'\\?\\); known: digits, text, or the path"),
        ("absent.h5", "'absent.h5' does not exist"),
        (tmp_path / "absent", "does not exist"),
        (tmp_path, "is a folder"),
        (tmp_path / "text.h5", "is not an HDF5 file"),
        (tmp_path / "damaged.h5", "is damaged"),
    ]:
        with pytest.raises(UsageError, match=message) as error:
            open_data(name)
        assert "\n" not in str(error.value)


def test_bad_options_are_refused(file):
    for options, message in [
        ({"placement": "share"}, "unknown placement 'share' \\(did you mean 'shared'"),
        ({"partition": "dirichlet:0"}, "alpha must be greater than 0"),
        ({"augment": "flop"}, "unknown augment"),
        ({"dtype": "int32"}, "dtype must be float32 or float64"),
        ({"dtype": "real"}, "dtype must be float32 or float64"),
        ({"validation": 1.0}, "validation must be a fraction"),
        ({"validation": 0.001}, "would hold out 0 of 100"),
        ({"validation": 0.999}, "would hold out 100 of 100"),
        ({"placement": "streamed", "partition": "by-label"}, "needs placement shared or partitioned"),
    ]:
        with pytest.raises(UsageError, match=message):
            open_data(file, **options)


def test_a_file_that_could_not_be_finished_is_not_seen(tmp_path):
    path = tmp_path / "new.h5"
    path.write_text("what was there before")
    with pytest.raises(ZeroDivisionError), new_file(path) as file:
        file["x"] = np.arange(10)
        raise ZeroDivisionError
    assert [entry.name for entry in tmp_path.iterdir()] == ["new.h5"]
    assert path.read_text() == "what was there before"
    with new_file(path) as file:
        file["x"] = np.arange(10)
        assert path.read_text() == "what was there before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["new.h5"]
    with h5py.File(path) as file:
        assert file["x"][9] == 9


def test_slabs_cut_everything_once(monkeypatch):
    monkeypatch.setattr(hdf5, "SLAB_BYTES", 100)
    assert list(slabs(25, 10)) == [slice(0, 10), slice(10, 20), slice(20, 25)]
    assert list(slabs(25, 10, 4)) == [slice(0, 8), slice(8, 16), slice(16, 24), slice(24, 25)]
    assert list(slabs(2, 1000)) == [slice(0, 1), slice(1, 2)]
    assert list(slabs(0, 10)) == []
