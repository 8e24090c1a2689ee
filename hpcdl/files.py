"""Atomic file writes (a temporary name, fsync, then the final name), the files of a folder, and the cache folder."""

import contextlib
import errno
import io
import json
import math
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import platformdirs

from hpcdl import drill

CRC_BYTES = 256 << 10  # of a file that are read at a time
LITTER = ("Thumbs.db", "desktop.ini")  # of file managers


def temporary_name(path: Path) -> Path:
    """Return the temporary name under which this process writes a file."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def hidden(name: str) -> bool:
    """True for names that users do not see, as they begin with a dot or belong to a file manager."""
    return name.startswith(".") or name in LITTER


def files_below(folder: str, part: str = "") -> list[str]:
    """Return the paths of the files below a part of the folder, relative to the folder, sorted, but for hidden ones.
    Links are followed. OSError: a folder cannot be read."""
    found, visited, start = list[str](), set[str](), os.path.join(folder, "")

    def fail(error: OSError) -> None:
        raise error

    for where, below, names in os.walk(start + part, onerror=fail, followlinks=True):
        below[:] = [name for name in below if not hidden(name)]
        if (real := os.path.realpath(where)) in visited:  # a link to a folder above
            below.clear()
            continue
        visited.add(real)
        found += [os.path.join(where, name)[len(start) :] for name in names if not hidden(name)]
    return sorted(found)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError for invalid JSON, also if it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def json_value(value: Any) -> Any:
    """Return the value as JSON data: numpy numbers as numbers, non-finite numbers as None, other objects as text."""
    if isinstance(value, dict):
        return {str(name): json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:
        value = value.item()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def finite(value: Any) -> float | None:
    """Return the value as a float; None if it is not a finite number."""
    with contextlib.suppress(OverflowError):  # an integer beyond all floats
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


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


def unwritable_parent(path: Path) -> Path | None:
    """Return the first existing one of `path` and its parents; None if it is a folder in which this user may write."""
    path = path.absolute()
    while not os.path.exists(path):  # unlike Path.exists, no error if a folder may not be searched
        path = path.parent
    return None if os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK) else path


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; after the body, fsync the temporary file and rename it to `path`.
    If the body fails, `path` stays unchanged. Raises OSError if `path` exists and is no regular file."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "it is no regular file, and is not replaced", str(path))
    drill.current.check_room(path)
    temporary = temporary_name(path)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable. Raises OSError."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield an open binary file with the guarantees of `atomic_path`; a pipe or a device is written to directly."""
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as file:
            yield file
        return
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        yield file


class Sink(io.FileIO):
    """An output file for a library that cannot handle write errors: HDF5 aborts the process if a write fails.
    The first error is kept in `error`, and later writes are dropped; `check` raises the error."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left and self.error is None:
                left = left[super().write(left) or 0 :]
        except OSError as error:
            self.error = error
        return size

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size) if self.error is None else size or 0
        except OSError as error:
            self.error = error
            return size or 0

    def check(self) -> None:
        """Raise the kept OSError, if any."""
        if self.error is not None:
            raise self.error


def crc_of(path: Path, first: int = 0) -> int:
    """Return the CRC-32 of a file from byte `first` on. Raises OSError."""
    crc, buffer = 0, memoryview(bytearray(CRC_BYTES))
    with open(path, "rb", buffering=0) as file:
        file.seek(first)
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return crc


def cache_folder() -> Path:
    """Return the folder of cached measurements: $HPCDL_CACHE, else $XDG_CACHE_HOME/hpcdl, else ~/.cache/hpcdl.
    A user without a home, as in some containers, gets a folder among the temporary files."""
    if os.environ.get("HPCDL_CACHE"):
        return Path(os.environ["HPCDL_CACHE"])
    with contextlib.suppress(RuntimeError):
        found = platformdirs.user_cache_path("hpcdl")
        if found.is_absolute():  # older platformdirs return ~/.cache/hpcdl with the ~
            return found
    return Path(tempfile.gettempdir(), f"hpcdl-{os.getuid()}")
