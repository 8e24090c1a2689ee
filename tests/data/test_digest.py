"""The digest: the same for the same rows, however they are stored; another one for others; never a stale one."""

import json
import os
import shutil
import time

import h5py
import numpy as np
import pytest

from hpcdl.data import digest as data_digest
from hpcdl.data import from_arrays, hdf5, open_data
from hpcdl.data.digest import compute_digest, file_digest, set_digest_time
from hpcdl.data.format import read_info
from hpcdl.data.hdf5 import new_file
from hpcdl.files import cache_folder


def of(path):
    return compute_digest(read_info(path))


@pytest.fixture
def passes(monkeypatch):
    """How many passes over a file were made."""
    made = []
    monkeypatch.setattr(data_digest, "compute_digest", lambda info: made.append(info.path) or compute_digest(info))
    return made


@pytest.fixture
def old(monkeypatch):
    """What has just been written counts as written long ago."""
    monkeypatch.setattr(data_digest, "SETTLE_SECONDS", -1.0)


def test_what_the_model_sees_counts_and_nothing_else(tmp_path, images, write, monkeypatch):
    x, y, x_test, y_test = images()
    test = x_test, y_test
    plain = of(write(tmp_path / "a.h5", x, y, *test, classes=4))
    same = [
        ((x, y, *test), {"name": "other", "source": "there"}),  # classes: 4 by the labels
        ((x, y.astype("u1"), x_test, y_test.astype(">i2")), {}),
    ]
    with h5py.File(tmp_path / "packed.h5", "w") as file:
        for name, array in (("train/x", x), ("train/y", y), ("test/x", x_test), ("test/y", y_test)):
            file.create_dataset(name, data=array, chunks=(7, *array.shape[1:]), compression="gzip")
    other = [
        ((x[::-1], y[::-1], *test), {}),
        ((x, y, x[:20], y_test), {}),
        ((x, np.where(np.arange(100) == 9, 3 - y, y), *test), {}),
        ((x, y, *test), {"scale": 2.0}),
        ((x, y, *test), {"classes": 5}),
        ((x.reshape(100, 30), y, x_test.reshape(20, 30), y_test), {}),
        ((x.astype("i2"), y, x_test.astype("i2"), y_test), {}),
        ((x, y + 0.0, x_test, y_test + 0.0), {}),
    ]
    shutil.copy(tmp_path / "a.h5", tmp_path / "column.h5")
    with h5py.File(tmp_path / "column.h5", "a") as file:
        file["train/writer"] = y
    monkeypatch.setattr(hdf5, "SLAB_BYTES", 100)  # slabs make no difference
    found = [of(write(tmp_path / "b.h5", *arrays, **attributes)) for arrays, attributes in same + other]
    assert {*found[:2], of(tmp_path / "packed.h5")} == {plain}
    digests = [*found[2:], of(tmp_path / "column.h5")]
    assert plain not in digests and len(set(digests)) == len(digests)


def test_all_ways_to_open_give_the_same(file, images):
    placed = [open_data(file, placement=placement) for placement in ("shared", "partitioned", "streamed")]
    arrays = [from_arrays(*images(), classes=4, **options) for options in ({}, {"seed": 3, "validation": 0.1})]
    assert {each.digest for each in placed + arrays} == {of(file)}
    x, y, _, _ = images()
    assert from_arrays(x, y).digest != placed[0].digest
    assert from_arrays(x, y, scale=2).digest != from_arrays(x, y).digest
    for data in placed:
        data.close()
        assert data.digest == of(file)  # known by now


def test_it_is_computed_once_for_a_file_that_says_nothing(file, passes, old):
    assert file_digest(read_info(file)) == file_digest(read_info(file)) == of(file) and len(passes) == 1
    link = file.with_name("link.h5")
    link.symlink_to(file)
    assert file_digest(read_info(link)) == of(file) and len(passes) == 1


def change(path, name="train/x"):
    with h5py.File(path, "a") as file:
        file[name][3] = 1 - np.minimum(file[name][3], 1)


def test_what_is_changed_in_place_is_seen(file, passes, old):
    before, times = file_digest(read_info(file)), os.stat(file)
    for name in ("train/x", "test/y"):
        change(file, name)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as who hides it: size and time are as they were
        after = file_digest(read_info(file))
        assert after == of(file) != before
        before = after


def test_what_has_just_changed_is_not_kept(file, passes):
    """Another change in the same moment might not be told from it."""
    assert file_digest(read_info(file)) == file_digest(read_info(file)) and len(passes) == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"file": 1, "digest": 2}', "null", "\x00"])
def test_a_cache_that_is_damaged(file, passes, old, content):
    known = file_digest(read_info(file))
    where = cache_folder() / "digests" / f"{data_digest.blake(os.fsencode(file)).hexdigest()}.json"
    assert json.loads(where.read_text())["digest"] == known
    where.write_text(content)
    assert file_digest(read_info(file)) == known and len(passes) == 2


def test_a_cache_that_cannot_be_written(file, monkeypatch, old):
    monkeypatch.setenv("HPCDL_CACHE", str(file / "below a file"))
    assert file_digest(read_info(file)) == of(file)


@pytest.fixture
def said(tmp_path, images):
    """A file that says its digest, which is 0, so that it shows who believes it."""
    path = tmp_path / "said.h5"
    with new_file(path) as file:
        for name, array in zip(("train/x", "train/y", "test/x", "test/y"), images(), strict=True):
            file[name] = array
        seconds = data_digest.write_digest(file, "0" * 32)
    set_digest_time(path, seconds)
    assert 2 <= time.time() - seconds < 100
    return path


def test_a_file_is_believed_as_long_as_nobody_changes_it(said, passes, tmp_path):
    assert file_digest(read_info(said)) == "0" * 32 and not passes
    assert file_digest(read_info(shutil.copy2(said, tmp_path / "with its time.h5"))) == "0" * 32 and not passes
    assert file_digest(read_info(shutil.copy(said, tmp_path / "with another.h5"))) == of(said) and len(passes) == 1
    change(said)
    assert file_digest(read_info(said)) == of(said) and len(passes) == 2


@pytest.mark.parametrize("value", [3, "0" * 32, "0" * 32 + " x", "g" * 32 + " 1", np.arange(3), h5py.Empty("f")])
def test_a_digest_that_is_none(said, value):
    with h5py.File(said, "a") as file:
        file.attrs["digest"] = value
    assert file_digest(read_info(said)) == of(said)


def test_the_sum_of_a_known_set():
    """It must stay as it is: checkpoints hold it."""
    x = np.arange(12, dtype="u1").reshape(3, 4)
    assert from_arrays(x, [0, 1, 0], x[:1], [1]).digest == "9798e437d73d4e36558f5ba66e3a981c"
