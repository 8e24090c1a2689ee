"""What a data set holds, as one short text: by it a run knows its rows again, whatever their file is called.

    digest of a data set     BLAKE2 over features, classes, scale, vocabulary and the digests of its columns
    digest of a column       BLAKE2 over its elements in the order of rows, little-endian; with its type and shape
    columns                  train/x, train/y, test/x, test/y, rows/x; whole numbers of train, as a partition reads them
                             (of sparse data x is three: x/data, x/indices, x/indptr)

So name, compression and chunks do not count, nor other attributes. Labels count as int64, values to predict as float64.

A file bears its digest as an attribute, with a time in whole seconds, and is given that time as its last change.
Whoever writes into the file changes its time, and the attribute is believed no more; nor is it in a copy with a time of
its own. Then the file is read once, slab by slab, by one rank, and the digest kept in the cache, for this path, inode,
size and times. What changed within the last seconds is not kept: a change to come might bear the same time.
"""

import contextlib
import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import numpy as np

from hpcdl.csr import CSR
from hpcdl.data.format import Info, dataset, open_file, slabs_of
from hpcdl.data.formats.vocabulary import Vocabulary
from hpcdl.errors import blamed_on
from hpcdl.files import atomic_write, cache_folder, from_json

if TYPE_CHECKING:
    from hpcdl.data.placement import MemoryRows

SETTLED = 4.0  # seconds after a change until times tell the next one from it on any file system
ATTRIBUTE = "digest"  # "DIGEST SECONDS"
SAID = re.compile(r"([0-9a-f]{32}) ([0-9]{1,18})")


def blake(content: bytes = b"") -> "hashlib.blake2b":
    """The hash that all of this is made of."""
    return hashlib.blake2b(content, digest_size=16)


class ColumnDigest:
    """The digest of a column, whose rows are handed over part by part."""

    def __init__(self, kind: np.dtype):
        # The long doubles of a machine have bytes that mean nothing.
        self.kind = np.dtype("<f8") if kind.kind == "f" and kind.itemsize > 8 else kind.newbyteorder("<")
        self.hash = blake()
        self.shape: tuple[int, ...] = (0,)

    def add(self, part: np.ndarray) -> None:
        """The next rows."""
        self.hash.update(np.ascontiguousarray(part, self.kind).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        self.shape = (self.shape[0] + len(part), *part.shape[1:])

    def described(self) -> list:
        """What counts of it."""
        return [self.kind.str, self.shape, self.hash.hexdigest()]


class Digest:
    """The digest of a data set, whose columns are handed over part by part, in any order."""

    def __init__(self) -> None:
        self.columns: dict[str, ColumnDigest] = {}

    def add(self, name: str, part: np.ndarray, labels: bool = False) -> None:
        """The next rows of a column; of labels, of whatever type, the values count."""
        if name not in self.columns:
            label = np.dtype(np.float64 if part.dtype.kind == "f" else np.int64)
            self.columns[name] = ColumnDigest(label if labels else part.dtype)
        self.columns[name].add(part)

    def finish(
        self, features: tuple[int, ...], classes: int, scale: float, vocabulary: Vocabulary | None = None
    ) -> str:
        """The digest of columns that are complete."""
        about = [list(features), int(classes), float(scale), vocabulary and vocabulary.characters]
        columns = {name: column.described() for name, column in self.columns.items()}
        return blake(json.dumps([about, columns], sort_keys=True).encode()).hexdigest()


def of_rows(features: tuple[int, ...], classes: int, scale: float, groups: "dict[str, MemoryRows | None]") -> str:
    """The digest of rows in memory, "train" and "test"."""
    digest = Digest()
    for group, rows in groups.items():
        if rows is not None:
            for name, part in columns_of(rows.x, features).items():
                digest.add(f"{group}/{name}", part)
            digest.add(f"{group}/y", rows.y, labels=True)
    return digest.finish(features, classes, scale)


def columns_of(x: "CSR | np.ndarray", features: tuple[int, ...]) -> dict[str, np.ndarray]:
    """The columns that rows are, by name."""
    if isinstance(x, CSR):
        return {f"x/{name}": getattr(x, name)[: x.nnz] for name in ("data", "indices")} | {"x/indptr": x.indptr}
    return {"x": x.reshape(-1, *features)}


def of_file(info: Info) -> str:
    """The digest of a data file: what it says, what was found before, or what it holds."""
    with blamed_on(f"data file {info.path} cannot be read"):
        before = os.stat(info.path)
    return _said(info, before) or _kept(info.path, before) or _keep(info.path, before, computed(info))


def at_a_glance(path: str) -> str:
    """What tells other files under the same name, as those of other hosts, without reading them: size and attribute."""
    with blamed_on(f"data file {path} cannot be read"):
        size = os.stat(path).st_size
    with open_file(path) as file:
        said = SAID.fullmatch(str(file.attrs.get(ATTRIBUTE)))
    return f"{size} bytes, {f'digest {said[1]}' if said else 'no digest'}"


def computed(info: Info) -> str:
    """The digest of a data file, from one pass over it."""
    from hpcdl.data.formats.sparse_file import PARTS, TYPES
    from hpcdl.data.placement import columns

    digest = Digest()
    with open_file(info.path) as file:
        xs = [f"x/{part}" for part in PARTS] if info.sparse else ["x"]
        names = [f"{group}/{each}" for group in info.kinds for each in (*xs, "y") if (group, each) != ("rows", "y")]
        for name in (*names, *(f"train/{each}" for each in (columns(file) if "train" in info.kinds else ()))):
            found = dataset(file, name)
            kind = TYPES.get(name.partition("/x/")[2], found.dtype)
            for slab in slabs_of(found):
                digest.add(name, found[slab].astype(kind, copy=False), labels=name.split("/")[1] != "x")
    return digest.finish(info.features, info.classes, info.scale, info.vocabulary)


def write(file: h5py.File, digest: str) -> int:
    """Let a new file bear its digest; returns the time that it must be given once it is closed (`settle`)."""
    seconds = (int(time.time()) - 2) // 2 * 2  # before any change to come, and as coarse as file systems are
    file.attrs[ATTRIBUTE] = f"{digest} {seconds}"
    return seconds


def settle(path: Path, seconds: int) -> None:
    """Give a file the time that it says it was written at."""
    with contextlib.suppress(OSError):  # then its digest is computed when it is asked for
        os.utime(path, (seconds, seconds))


def _said(info: Info, now: os.stat_result) -> str | None:
    """What the file says of itself, if it is as it was when it said so."""
    with open_file(info.path) as file:
        said = SAID.fullmatch(str(file.attrs.get(ATTRIBUTE)))
    return said[1] if said and now.st_mtime_ns == int(said[2]) * 10**9 else None


def _entry(path: str, now: os.stat_result) -> tuple[Path, list]:
    """Where the cache keeps the digest of a file, and by what it is known to be the same file still."""
    real = os.path.realpath(path)
    name = blake(os.fsencode(real)).hexdigest()
    key = [real, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns]
    return cache_folder() / "digests" / f"{name}.json", key


def _kept(path: str, now: os.stat_result) -> str | None:
    where, key = _entry(path, now)
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        found = from_json(where.read_text())
        return found["digest"] if found["file"] == key and isinstance(found["digest"], str) else None
    return None


def _keep(path: str, before: os.stat_result, digest: str) -> str:
    where, key = _entry(path, before)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, no more
        same = _entry(path, os.stat(path))[1] == key
        if same and time.time() - max(before.st_mtime, before.st_ctime) > SETTLED:
            where.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(where) as file:
                file.write(json.dumps({"file": key, "digest": digest}).encode())
    return digest
