"""Files that are never seen half-written: a temporary name, a sync to the disk, then the final name."""

import contextlib
import os
from pathlib import Path


@contextlib.contextmanager
def atomic_path(path):
    """Yield a temporary path beside `path`; when the body ends well, sync that file and give it the final name.

    When the body fails, the temporary file is removed and `path` stays as it was.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
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
def atomic_write(path):
    """The same as an open binary file: `with atomic_write(path) as file: file.write(...)`."""
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        yield file
