"""Small data sets, as arrays and as files."""

import h5py
import numpy as np
import pytest

from hpcdl.data.digest import compute_digest, file_digest
from hpcdl.data.format import read_info
from hpcdl.scripts import prepare_data


def make_images(rows=100, test=20, classes=4, shape=(6, 5), kind="u1"):
    random = np.random.default_rng(0)
    x, x_test = (random.integers(0, 200, (n, *shape)).astype(kind) for n in (rows, test))
    for part in (x, x_test):
        flat = part.reshape(len(part), -1)
        flat[:, 0], flat[:, 1] = np.divmod(np.arange(len(part)), 200)
    y, y_test = (np.arange(n) * 7 % classes for n in (rows, test))
    return x, y, x_test, y_test


def write_file(path, x, y, x_test, y_test, **attributes):
    with h5py.File(path, "w") as file:
        for name, array in (("train/x", x), ("train/y", y), ("test/x", x_test), ("test/y", y_test)):
            if array is not None:
                file[name] = array
        file.attrs.update(attributes)
    return path


@pytest.fixture
def images():
    """A function: arrays x, y, x_test, y_test, in which the first two pixels of a row spell its number."""
    return make_images


@pytest.fixture
def numbers():
    """A function: the row numbers that the first pixels of `images` spell."""
    return lambda x: np.rint(x[:, 0] * 200 + x[:, 1]).astype(int)


@pytest.fixture
def write():
    """A function: write a data file by hand, without the code under test; what is None is left out."""
    return write_file


@pytest.fixture
def file(tmp_path):
    """A file of this rank's own: 100 training and 20 test images of 4 classes, scale 1."""
    return write_file(tmp_path / "images.h5", *make_images(), classes=4)


@pytest.fixture
def shared_file(world, mpi_tmp_path):
    """The same file, one for all ranks."""
    if world.rank == 0:
        write_file(mpi_tmp_path / "images.h5", *make_images(), classes=4)
    world.Barrier()
    return mpi_tmp_path / "images.h5"


@pytest.fixture
def prepare(tmp_path, capsys):
    """A function: run prepare_data as a user would, and open the file; or return the line it refuses with."""

    def run(*arguments, out="out.h5"):
        arguments = [str(argument) for argument in arguments]
        arguments[2:2] = [str(tmp_path / out)]
        try:
            prepare_data.main(arguments)
        except SystemExit as end:
            assert end.code == 2
            printed = capsys.readouterr()
            assert printed.err.startswith("prepare-data: error: ")
            assert (printed.out, printed.err.count("\n")) == ("", 1)
            return printed.err
        run.summary = capsys.readouterr().out
        assert run.summary.count("\n") == 1
        file = h5py.File(tmp_path / out, "r", locking=False)
        digest, info = file.attrs["digest"].split()[0], read_info(tmp_path / out)
        assert digest == file_digest(info) == compute_digest(info)  # as it was made while the file was written
        return file

    return run
