"""The digest of a data set's contents, by which a run recognizes its rows under any file name.

    digest of a data set     BLAKE2 over features, classes, scale, vocabulary and the digests of its columns
    digest of a column       BLAKE2 over its elements in the order of rows, little-endian; with its type and shape
    columns                  train/x, train/y, test/x, test/y, rows/x; integer columns of train that a partition reads
                             (sparse x is three columns: x/data, x/indices, x/indptr)

Name, compression, chunks and other attributes do not count. Labels count as int64, targets as float64.

A file stores its digest in an attribute, with a time in whole seconds that is also set as its modification time. A
later write changes the file's time, and so does a copy; the attribute is then ignored. In that case one rank reads the
file once, slab by slab, and caches the digest for this path, inode, size and times. A file that changed in the last
seconds is not cached: a later change might get the same time.
"""

import contextlib
import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcdl.csr import CSR
from hpcdl.data.format import Info, owner_columns
from hpcdl.data.formats.sparse_file import PARTS, TYPES
from hpcdl.data.formats.vocabulary import Vocabulary
from hpcdl.data.hdf5 import dataset, open_file, slabs_of
from hpcdl.errors import blamed_on
from hpcdl.files import atomic_write, cache_folder, parse_json

SETTLE_SECONDS = 4.0  # after a change; on any file system a later change then gets another time
ATTRIBUTE = "digest"  # "DIGEST SECONDS"
ATTRIBUTE_PATTERN = re.compile(r"([0-9a-f]{32}) ([0-9]{1,18})")


def blake(content: bytes = b"") -> "hashlib.blake2b":
    """Return a BLAKE2 hash of 16 bytes."""
    return hashlib.blake2b(content, digest_size=16)


class ColumnDigest:
    """The digest of a column, updated part by part."""

    def __init__(self, kind: np.dtype):
        # Long doubles have padding bytes without a meaning.
        self.kind = np.dtype("<f8") if kind.kind == "f" and kind.itemsize > 8 else kind.newbyteorder("<")
        self.hash = blake()
        self.shape: tuple[int, ...] = (0,)

    def add(self, part: np.ndarray) -> None:
        """Add the next rows."""
        self.hash.update(np.ascontiguousarray(part, self.kind).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        self.shape = (self.shape[0] + len(part), *part.shape[1:])

    def summary(self) -> list:
        """Return type, shape and hash of the column."""
        return [self.kind.str, self.shape, self.hash.hexdigest()]


class Digest:
    """The digest of a data set, updated by parts of columns in any order."""

    def __init__(self) -> None:
        self.columns: dict[str, ColumnDigest] = {}

    def add(self, name: str, part: np.ndarray, labels: bool = False) -> None:
        """Add the next rows of a column. labels: the values count, not their type."""
        if name not in self.columns:
            label = np.dtype(np.float64 if part.dtype.kind == "f" else np.int64)
            self.columns[name] = ColumnDigest(label if labels else part.dtype)
        self.columns[name].add(part)

    def finish(
        self, features: tuple[int, ...], classes: int, scale: float, vocabulary: Vocabulary | None = None
    ) -> str:
        """Return the digest; all columns are complete."""
        header = [list(features), int(classes), float(scale), vocabulary and vocabulary.characters]
        columns = {name: column.summary() for name, column in self.columns.items()}
        return blake(json.dumps([header, columns], sort_keys=True).encode()).hexdigest()


def rows_digest(features: tuple[int, ...], classes: int, scale: float, groups: dict[str, Any]) -> str:
    """Return the digest of rows in memory; groups: the `MemoryRows`, or None, of "train" and "test"."""
    digest = Digest()
    for group, rows in groups.items():
        if rows is not None:
            for name, part in columns_of(rows.x, features).items():
                digest.add(f"{group}/{name}", part)
            digest.add(f"{group}/y", rows.y, labels=True)
    return digest.finish(features, classes, scale)


def columns_of(x: "CSR | np.ndarray", features: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return the columns of rows x by name."""
    if isinstance(x, CSR):
        return {f"x/{name}": getattr(x, name)[: x.nnz] for name in ("data", "indices")} | {"x/indptr": x.indptr}
    return {"x": x.reshape(-1, *features)}


def file_digest(info: Info) -> str:
    """Return the digest of a data file: from its attribute, the cache, or a pass over the file."""
    with blamed_on(f"data file {info.path} cannot be read"):
        before = os.stat(info.path)
    return (
        _from_attribute(info, before)
        or _from_cache(info.path, before)
        or _into_cache(info.path, before, compute_digest(info))
    )


def file_signature(path: str) -> str:
    """Return size and stored digest as a text: it tells files of one path on different hosts apart, without a read."""
    with blamed_on(f"data file {path} cannot be read"):
        size = os.stat(path).st_size
    with open_file(path) as file:
        match = ATTRIBUTE_PATTERN.fullmatch(str(file.attrs.get(ATTRIBUTE)))
    return f"{size} bytes, {f'digest {match[1]}' if match else 'no digest'}"


def compute_digest(info: Info) -> str:
    """Return the digest of a data file from one pass over it."""
    digest = Digest()
    with open_file(info.path) as file:
        xs = [f"x/{part}" for part in PARTS] if info.sparse else ["x"]
        names = [f"{group}/{each}" for group in info.kinds for each in (*xs, "y") if (group, each) != ("rows", "y")]
        for name in (*names, *(f"train/{each}" for each in (owner_columns(file) if "train" in info.kinds else ()))):
            column = dataset(file, name)
            kind = TYPES.get(name.partition("/x/")[2], column.dtype)
            for slab in slabs_of(column):
                digest.add(name, column[slab].astype(kind, copy=False), labels=name.split("/")[1] != "x")
    return digest.finish(info.features, info.classes, info.scale, info.vocabulary)


def write_digest(file: h5py.File, digest: str) -> int:
    """Store the digest in a new file; return the time to set once it is closed (`set_digest_time`)."""
    seconds = (int(time.time()) - 2) // 2 * 2  # before any change to come, and as coarse as file systems are
    file.attrs[ATTRIBUTE] = f"{digest} {seconds}"
    return seconds


def set_digest_time(path: Path, seconds: int) -> None:
    """Set the file's modification time to the one stored with its digest."""
    with contextlib.suppress(OSError):  # then the digest is computed on demand
        os.utime(path, (seconds, seconds))


def _from_attribute(info: Info, now: os.stat_result) -> str | None:
    """Return the digest stored in the file, if the file is unchanged since."""
    with open_file(info.path) as file:
        match = ATTRIBUTE_PATTERN.fullmatch(str(file.attrs.get(ATTRIBUTE)))
    return match[1] if match and now.st_mtime_ns == int(match[2]) * 10**9 else None


def _cache_entry(path: str, now: os.stat_result) -> tuple[Path, list]:
    """Return the path of a file's cache entry, and the key that identifies the unchanged file."""
    real = os.path.realpath(path)
    name = blake(os.fsencode(real)).hexdigest()
    key = [real, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns]
    return cache_folder() / "digests" / f"{name}.json", key


def _from_cache(path: str, now: os.stat_result) -> str | None:
    where, key = _cache_entry(path, now)
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        entry = parse_json(where.read_text())
        return entry["digest"] if entry["file"] == key and isinstance(entry["digest"], str) else None
    return None


def _into_cache(path: str, before: os.stat_result, digest: str) -> str:
    where, key = _cache_entry(path, before)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, no more
        same = _cache_entry(path, os.stat(path))[1] == key
        if same and time.time() - max(before.st_mtime, before.st_ctime) > SETTLE_SECONDS:
            where.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(where) as file:
                file.write(json.dumps({"file": key, "digest": digest}).encode())
    return digest
