"""The digest of a data set's contents, by which a run recognizes its rows under any file name.

    digest of a data set     BLAKE2 over features, classes, scale, vocabulary and the digests of its columns
    digest of a column       BLAKE2 over its elements in the order of rows, little-endian; with its type and shape
    columns                  train/x, train/y, test/x, test/y, rows/x; integer columns of train that a partition reads
                             (sparse x is three columns: x/data, x/indices, x/indptr)

Name, compression, chunks and other attributes do not count. Labels count as int64, targets as float64.

A file stores its digest in an attribute, with a time that is also set as the file's modification time. A later write or
a copy changes that time: the attribute is ignored, the file read, and the digest cached for this path, inode, size and
times. A file that changed in the last seconds is not cached: a later change might get the same time."""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcdl.csr import CSR
from hpcdl.data.format import Info, owner_columns, read_info
from hpcdl.data.formats.sparse_file import PARTS, TYPES
from hpcdl.data.formats.vocabulary import Vocabulary
from hpcdl.data.hdf5 import dataset, open_file, slabs_of
from hpcdl.data.shards import Index, ShardFolder, checksum, is_folder, shard_paths
from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import atomic_write, cache_folder, parse_json

SETTLE_SECONDS = 4.0  # after a change, until a later change gets another time on any file system
ATTRIBUTE = "digest"  # "DIGEST SECONDS"
ATTRIBUTE_PATTERN = re.compile(r"([0-9a-f]{32}) ([0-9]{1,18})")


def blake(content: bytes = b"") -> "hashlib.blake2b":
    return hashlib.blake2b(content, digest_size=16)


class Digest:
    """The digest of a data set. Its columns are added in any order, each from its first rows to its last."""

    def __init__(self) -> None:
        self.columns: dict[str, tuple[np.dtype, tuple[int, ...], Any]] = {}  # type, shape and hash by name

    def add(self, name: str, part: np.ndarray, labels: bool = False) -> None:
        """Add the next rows of a column. labels: True to hash int64 or float64, so that their width has no effect."""
        kind = np.dtype(np.float64 if part.dtype.kind == "f" else np.int64) if labels else part.dtype
        # Long doubles have padding bytes without a meaning.
        kind = np.dtype("<f8") if kind.kind == "f" and kind.itemsize > 8 else kind.newbyteorder("<")
        kind, shape, content = self.columns.get(name, (kind, (0,), blake()))
        content.update(np.ascontiguousarray(part, kind).reshape(-1).view(np.uint8))
        self.columns[name] = kind, (shape[0] + len(part), *part.shape[1:]), content

    def finish(
        self, features: tuple[int, ...], classes: int, scale: float, vocabulary: Vocabulary | None = None
    ) -> str:
        header = [list(features), int(classes), float(scale), vocabulary and vocabulary.description]
        columns = {name: [kind.str, shape, each.hexdigest()] for name, (kind, shape, each) in self.columns.items()}
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
    if isinstance(x, CSR):
        return {f"x/{name}": getattr(x, name)[: x.nnz] for name in ("data", "indices")} | {"x/indptr": x.indptr}
    return {"x": x.reshape(-1, *features)}


def file_digest(info: Info) -> str:
    """Return the digest of a data file, or of a folder of shards: from attributes, the cache, or a pass over files."""
    paths = shard_paths(info.path)
    return joined_digest(map(_digest_of, paths)) if paths else _digest_of(info.path, info)


def _digest_of(path: str, info: Info | None = None) -> str:
    with blamed_on(f"data file {path} cannot be read"):
        before = os.stat(path)
    stored = _stored(path)
    if stored and before.st_mtime_ns == int(stored[2]) * 10**9:
        return stored[1]
    key = _unchanged(path, before)
    entry = cache_folder() / "digests" / f"{blake(os.fsencode(key[0])).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        cached = parse_json(entry.read_text())
        if cached["file"] == key and isinstance(cached["digest"], str):
            return cached["digest"]
    digest = compute_digest(info or read_info(path))
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, no more
        same = _unchanged(path, os.stat(path)) == key
        if same and time.time() - max(before.st_mtime, before.st_ctime) > SETTLE_SECONDS:
            entry.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(entry) as file:
                file.write(json.dumps({"file": key, "digest": digest}).encode())
    return digest


def joined_digest(digests: Iterable[str]) -> str:
    """Return the digest of a folder of shards, from the digests of its shards in order."""
    return blake("".join(digests).encode()).hexdigest()


def _stored(path: str) -> re.Match | None:
    """Return a match of the digest that a file stores (group 1) and of its time (group 2); None: no digest."""
    with open_file(path) as file:
        return ATTRIBUTE_PATTERN.fullmatch(str(file.attrs.get(ATTRIBUTE)))


def _unchanged(path: str, now: os.stat_result) -> list:
    return [os.path.realpath(path), now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns]


def file_signature(path: str) -> str:
    """Return a file's size and stored digest as a text, to compare hosts' files of one path; no rows are read. Of a
    folder: the number of shards and their digest, by its index."""
    if is_folder(path):
        index = Index.read(path)
        return f"{len(index.shards)} shards, digest {index.digest}"
    with blamed_on(f"data file {path} cannot be read"):
        size = os.stat(path).st_size
    stored = _stored(path)
    return f"{size} bytes, {f'digest {stored[1]}' if stored else 'no digest'}"


def compute_digest(info: Info) -> str:
    """Return the digest of a data file, or of a folder of shards, computed from all rows."""
    if paths := shard_paths(info.path):
        return joined_digest(compute_digest(read_info(path)) for path in paths)
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


def damage(path: str) -> Iterator[str]:
    """Yield a line for each damaged shard of a folder (its bytes are read, for their checksum), or for a damaged file
    (its rows are read, for their digest)."""
    damaged = False
    try:
        if is_folder(path):
            with open_file(path) as folder:
                shards = folder.index.shards
                for number, shard in enumerate(shards):
                    if problem := _damage_of_shard(folder, number, shard.checksum):
                        damaged = True
                        yield problem
                if joined_digest(shard.digest for shard in shards) != folder.index.digest:
                    yield f"the index of {path} is damaged: its digest is not that of its shards"
        if not damaged:
            info, stored = read_info(path), None if is_folder(path) else _stored(path)
            if stored and compute_digest(info) != stored[1]:
                yield f"{path} is damaged: it holds other rows than those whose digest prepare-data stored in it"
    except UsageError as error:
        yield str(error)


def _damage_of_shard(folder: ShardFolder, number: int, written: str) -> str:
    """Return what is wrong with the bytes of a shard, or "". written: its checksum."""
    try:
        path = folder.path(number)
        with blamed_on(f"shard {path} cannot be read"):
            good = checksum(path) == written
    except UsageError as error:
        return str(error)
    return "" if good else f"shard {path} is damaged: its checksum is not that of its contents"


def write_digest(file: h5py.File, digest: str) -> int:
    """Store the digest in a new file; return the seconds for `set_digest_time`, to call once the file is closed."""
    seconds = (int(time.time()) - 2) // 2 * 2  # before any change to come, and as coarse as file systems are
    file.attrs[ATTRIBUTE] = f"{digest} {seconds}"
    return seconds


def set_digest_time(path: Path, seconds: int) -> None:
    """Set the file's modification time to the one stored with its digest."""
    with contextlib.suppress(OSError):  # then the digest is computed on demand
        os.utime(path, (seconds, seconds))
