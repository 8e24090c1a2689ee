"""Atomic file writes (a temporary name, fsync, then the final name), and the cache folder."""

import contextlib
import errno
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import platformdirs

full_folders: set[Path] = set()  # folders that a fault drill (faults/inject.py) declares full


def temporary_name(path: Path) -> Path:
    """Return the temporary name under which this process writes a file."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def refuse_full(path: str | os.PathLike[str]) -> None:
    """Raise OSError if a fault drill has declared the disk of this file full."""
    if full_folders and not full_folders.isdisjoint(Path(path).resolve().parents):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError for invalid JSON, also if it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise OSError if `path` cannot be written; an existing file stays unchanged, and no new one remains."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():  # a pipe, a device
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    temporary = temporary_name(path)
    try:
        temporary.touch()
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; after the body, fsync that file and rename it to `path`.

    If the body fails, the temporary file is removed and `path` stays unchanged. Raises OSError if `path` is not a
    regular file, such as a folder or a device.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "it is no file, and stays what it is", str(path))
    refuse_full(path)
    temporary = temporary_name(path)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # makes the rename durable
        finally:
            os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield an open binary file with the guarantees of `atomic_path`: `with atomic_write(path) as file: ...`.

    A pipe or a device such as /dev/stdout is written to directly.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as file:
            yield file
        return
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        yield file


class Sink(io.FileIO):
    """An output file for a library that cannot handle write errors: HDF5 aborts the process if a write fails.

    The first error is kept in `error`, and later writes are dropped; `check` raises it.
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all data, or keep the error."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left and self.error is None:
                left = left[super().write(left) or 0 :]
        except OSError as error:
            self.error = error
        return size

    def truncate(self, size: int | None = None) -> int:
        """Set the file's size, or keep the error."""
        try:
            return super().truncate(size) if self.error is None else size or 0
        except OSError as error:
            self.error = error
            return size or 0

    def check(self) -> None:
        """Raise the kept OSError, if there is one."""
        if self.error is not None:
            raise self.error


def cache_folder() -> Path:
    """Return the folder of cached measurements: $HPCDL_CACHE, else $XDG_CACHE_HOME/hpcdl, else ~/.cache/hpcdl.

    For a user without a home, as in some containers, it lies in the folder of temporary files.
    """
    if os.environ.get("HPCDL_CACHE"):
        return Path(os.environ["HPCDL_CACHE"])
    with contextlib.suppress(RuntimeError):
        found = platformdirs.user_cache_path("hpcdl")
        if found.is_absolute():  # older versions return ~/.cache/hpcdl as it stands
            return found
    return Path(tempfile.gettempdir(), f"hpcdl-{os.getuid()}")
