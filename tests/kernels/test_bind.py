"""Bodies as kernels: the version that runs, the arguments that fit, the lock of the compiler and its cache."""

import fcntl
import os
import stat
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from agreement import OnDevice

from hpcdl.kernels import bind, reduce, updates
from hpcdl.kernels.bind import block, elementwise, rowwise


@elementwise("T[::1], T[::1], T")
def add_scaled(i, into, values, factor):
    """into[i] += factor * values[i]"""
    into[i] += factor * values[i]


@rowwise("T[:, ::1], T[::1]", sums=True)
def double(i, j, z, total):
    """Twice z; total gains the sums of it."""
    z[i, j] *= z.dtype.type(2)
    return z[i, j]


@block("Array(T, 1, 'C', True), int64")
def pick(x, k):
    """x[k]"""
    return x[k]


def test_a_kernel_is_what_its_body_was():
    assert add_scaled.__name__ == "add_scaled" and add_scaled.__module__ == __name__
    assert add_scaled.__doc__ == "into[i] += factor * values[i]"


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8"])
def test_a_version_for_each_type(dtype):
    into, values = np.arange(5).astype(dtype), np.full(5, 3, dtype)
    add_scaled(into, values, 2)
    assert into.dtype == dtype
    np.testing.assert_array_equal(into, np.arange(5) + 6)
    assert np.dtype(dtype) in add_scaled.compiled


@pytest.mark.parametrize("factor", [2, 2.0, np.float32(2), np.float64(2), np.int32(2), True + 1])
def test_numbers_are_taken_as_the_elements_type(factor):
    into = np.zeros(3, "float32")
    add_scaled(into, np.ones(3, "float32"), factor)
    np.testing.assert_array_equal(into, 2)
    into = np.zeros(1, "float32")
    add_scaled(into, np.full(1, 3, "float32"), 0.1)
    assert into[0] == np.float32(3) * np.float32(0.1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: (x, x.astype("float64"), 1.0),
        lambda x: (x, x[::2], 1.0),
        lambda x: (x.reshape(2, 3), x, 1.0),
        lambda x: (x[::2], x[:3], 1.0),
        lambda x: (x, x.tolist(), 1.0),
        lambda x: (x, x),
    ],
)
def test_what_does_not_fit_is_a_type_error(wrong):
    add_scaled.compile("float32")
    versions = len(add_scaled.signatures)
    with pytest.raises(TypeError):
        add_scaled(*wrong(np.ones(6, "float32")))
    assert len(add_scaled.signatures) == versions  # no version was compiled


def test_an_array_that_is_only_read_may_be_locked_or_not():
    x = np.arange(4.0)
    locked = x.copy()
    locked.flags.writeable = False
    assert pick(x, 2) == pick(locked, 2) == 2.0
    with pytest.raises(TypeError):
        add_scaled(locked, x, 1.0)
    assert x.flags.writeable


def test_every_element_is_visited_once_wherever_an_array_begins():
    memory = np.zeros(400, "float32")
    for start in range(20):
        for size in (0, 1, 5, 15, 16, 17, 100):
            part = memory[start : start + size]
            add_scaled(part, np.ones(size, "float32"), 1.0)
            expected = np.zeros(400)
            expected[start : start + size] = 1
            np.testing.assert_array_equal(memory, expected)
            memory[:] = 0


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (5, 1), (1, 5), (7, 33)])
def test_sums_over_rows(shape):
    z = np.arange(np.prod(shape), dtype="float64").reshape(shape)
    expected, total = 2 * z, np.ones(shape[1])
    double(z, total)
    np.testing.assert_array_equal(z, expected)
    np.testing.assert_array_equal(total, 1 + expected.sum(axis=0))


def test_kept_in_a_class_it_is_no_method():
    class Holder:
        kernel = add_scaled

    into = np.zeros(2)
    Holder().kernel(into, np.ones(2), 1.0)
    np.testing.assert_array_equal(into, 1)


def test_the_array_chooses_the_twin(monkeypatch):
    launched = []
    monkeypatch.setitem(add_scaled.twins, np.dtype("float32"), lambda *args: launched.append(args))
    for _ in range(2):  # before and after there is a version for the CPU
        array = np.zeros(3, "float32").view(OnDevice)
        add_scaled(array, array, 1.0)
        assert launched.pop()[0] is array
        add_scaled(np.zeros(3, "float32"), np.ones(3, "float32"), 1.0)
        assert not launched


def test_another_file_of_the_folder_renews_what_is_cached(monkeypatch):
    """The folder's stamp lies in the closure, which is a part of the key of Numba's cache."""
    loop = bind.generate("elementwise", "body({names})", updates.sgd.body, body=None)
    assert [cell.cell_contents for cell in loop.__closure__] == [bind.STAMP]
    assert bind.stamp() == bind.STAMP
    monkeypatch.setattr(bind, "__file__", __file__)
    assert bind.stamp() != bind.STAMP


@pytest.fixture
def lock_file(tmp_path, monkeypatch):
    """Return the path of a kernel's lock file, in a temporary folder of this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with bind.compile_lock("pick"):
        (path,) = tmp_path.iterdir()
    return path


def held(path):
    """Return True if a process holds the lock on this file."""
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_a_lock_is_its_users_alone(lock_file):
    assert stat.S_IMODE(lock_file.stat().st_mode) == 0o600
    lock_file.chmod(0o644)  # an older version made such files
    with bind.compile_lock("pick"):
        assert held(lock_file) and stat.S_IMODE(lock_file.stat().st_mode) == 0o600
    assert not held(lock_file)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_lock_changes_no_file_that_a_link_leads_to(lock_file, tmp_path, link):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    lock_file.unlink()
    link(precious, lock_file)
    with bind.compile_lock("pick"):
        assert held(precious) == (link is os.link)
    assert precious.read_text() == "kept"


def test_a_lock_of_another_user_is_not_waited_for(lock_file, monkeypatch):
    other = os.geteuid() + 1
    theirs = lock_file.rename(str(lock_file).replace(f"-{os.geteuid()}-", f"-{other}-"))
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with bind.compile_lock("pick"):
        assert not held(theirs)


def test_a_pipe_in_the_place_of_a_lock_is_not_waited_for(lock_file):
    lock_file.unlink()
    os.mkfifo(lock_file)
    with bind.compile_lock("pick"):
        pass


def test_cached_code_is_loaded_without_what_only_compiling_needs():
    """Numba's tables of functions, whose filling imports scipy.linalg; code that is not cached still finds them."""
    reduce.add_into.compile("float32")  # now in the cache
    program = """
import sys
import numpy as np
from hpcdl.kernels import reduce
total = np.ones(3, np.float32)
reduce.add_into(total, total.copy())
print(total.tolist(), "numba.np.arraymath" in sys.modules, "scipy.linalg" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[2.0, 2.0, 2.0] False False\n"
