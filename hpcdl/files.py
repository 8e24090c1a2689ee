"""Files that are never seen half-written (a temporary name, a sync to the disk, then the final name); the cache."""

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

full: set[Path] = set()  # folders in which, as a drill has it (faults/inject.py), no space is left


def part(path: Path) -> Path:
    """The temporary name under which this process writes a file."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def refuse_full(path: str | os.PathLike[str]) -> None:
    """Raise OSError where a drill has it that no space is left for this file."""
    if full and not full.isdisjoint(Path(path).resolve().parents):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def from_json(text: str | bytes) -> Any:
    """What JSON says. Raises ValueError where it is none, or nested so deeply that nobody reads it."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def probe(path: str | os.PathLike[str]) -> None:
    """Raise OSError where `path` could not be written; leaves nothing behind, and a file that is there as it is."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():  # a pipe, a device
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    temporary = part(path)
    try:
        temporary.touch()
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the body ends well, sync that file and give it the final name.

    When the body fails, the temporary file is removed and `path` stays as it was. Raises OSError where something else
    than a file bears that name, as a folder or a device: to replace it would take it away.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "it is no file, and stays what it is", str(path))
    refuse_full(path)
    temporary = part(path)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name itself
        finally:
            os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """The same as an open binary file: `with atomic_write(path) as file: file.write(...)`.

    What is there and no file, as a pipe or /dev/stdout, stays what it is, and is written to.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as file:
            yield file
        return
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        yield file


class Sink(io.FileIO):
    """A file to write for a library that cannot bear a full disk: HDF5 ends the process where it cannot write.

    The first error is kept in `error`, and from then on what is written is lost; `check` raises it.
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of it, or note why not."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left and self.error is None:
                left = left[super().write(left) or 0 :]
        except OSError as error:
            self.error = error
        return size

    def truncate(self, size: int | None = None) -> int:
        """Give the file this size, or note why not."""
        try:
            return super().truncate(size) if self.error is None else size or 0
        except OSError as error:
            self.error = error
            return size or 0

    def check(self) -> None:
        """Raise the OSError that was kept, if there is one."""
        if self.error is not None:
            raise self.error


def cache_folder() -> Path:
    """Where what was measured is kept: $HPCDL_CACHE, else $XDG_CACHE_HOME/hpcdl, else ~/.cache/hpcdl.

    For a user without a home, as in some containers, it is a folder beside other temporary ones.
    """
    if os.environ.get("HPCDL_CACHE"):
        return Path(os.environ["HPCDL_CACHE"])
    with contextlib.suppress(RuntimeError):
        found = platformdirs.user_cache_path("hpcdl")
        if found.is_absolute():  # older versions return ~/.cache/hpcdl as it stands
            return found
    return Path(tempfile.gettempdir(), f"hpcdl-{os.getuid()}")
