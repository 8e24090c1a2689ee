"""Files are whole under their names; where the cache lies."""

import os
import pwd
import stat
import tempfile
from pathlib import Path

import pytest

from hpcdl.files import atomic_path, atomic_write, cache_folder, check_writable, parse_json


def test_a_file_gets_its_name_when_it_is_whole(mpi_tmp_path, world):
    path = mpi_tmp_path / f"file-{world.rank}"
    with atomic_write(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    with pytest.raises(ValueError, match="midway"), atomic_write(path) as file:
        file.write(b"half of t")
        raise ValueError("midway")
    with pytest.raises(ValueError, match="midway"), atomic_path(path):
        raise ValueError("midway")  # nothing was written at all
    assert path.read_bytes() == b"one"
    assert not list(mpi_tmp_path.glob(f".file-{world.rank}.*"))


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HPCDL_CACHE": "/here", "XDG_CACHE_HOME": "/there", "HOME": "/home/me"}, "/here"),
        ({"HPCDL_CACHE": "", "XDG_CACHE_HOME": "/there", "HOME": "/home/me"}, "/there/hpcdl"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/hpcdl"),
        ({"HOME": "/home/me"}, "/home/me/.cache/hpcdl"),
    ],
)
def test_the_cache_folder(monkeypatch, variables, folder):
    for name in ("HPCDL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_the_cache_folder_of_a_user_without_a_home(monkeypatch):
    def none(number):
        raise KeyError(number)

    for name in ("HPCDL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", none)
    expected = Path(tempfile.gettempdir(), f"hpcdl-{os.getuid()}")
    assert cache_folder() == expected
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: Path("~/.cache", name))  # as before version 4.14
    assert cache_folder() == expected


def test_what_is_no_file_is_never_replaced(tmp_path):
    """A pipe, a folder: replaced, it would be gone, and so would /dev/null."""
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder):
        with pytest.raises(OSError), atomic_path(path) as temporary:
            temporary.write_text("x")
    assert stat.S_ISFIFO(os.stat(pipe).st_mode) and sorted(os.listdir(tmp_path)) == ["folder", "pipe"]
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with atomic_write(pipe) as file:  # it is written to as it is
        file.write(b"abc")
    assert os.read(reader, 9) == b"abc" and stat.S_ISFIFO(os.stat(pipe).st_mode)
    os.close(reader)


def test_a_probe_says_what_writing_would_and_leaves_nothing(tmp_path):
    (tmp_path / "there").write_text("kept")
    check_writable(tmp_path / "there")
    check_writable(tmp_path / "new")
    for path in (tmp_path, tmp_path / "no" / "x", tmp_path / ("x" * 250), tmp_path / "there" / "x"):
        with pytest.raises(OSError):
            check_writable(path)
    assert os.listdir(tmp_path) == ["there"] and (tmp_path / "there").read_text() == "kept"


@pytest.mark.parametrize("text", ["[" * 100_000, b'{"a":' * 100_000, "{", b"\xff", ""])
def test_what_is_no_json_is_a_wrong_value_however_deep(text):
    assert parse_json('{"a": [1]}') == {"a": [1]}
    with pytest.raises(ValueError):
        parse_json(text)
