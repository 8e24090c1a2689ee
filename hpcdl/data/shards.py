"""A folder of shards: a data set in several files, which programs take in the place of one file.

    OUT/index.json          what the data set is, and of each shard: rows by group, bytes, CRC-32 of the file, digest
    OUT/00000.h5, ...       each a data file by itself (format.py); a shard may lack a group

    shard        0               1         2
    train/x      0 1 2 3 4       5 6       7 8 9      `JoinedSet`: one data set (10 rows), joined along axis 0
    indptr       0 2 2 3         0 1 4     0 2        of sparse rows: 0 2 2 3 4 7 9

`hdf5.open_file` opens a folder as a `ShardFolder`, in which `hdf5.dataset` finds a `JoinedSet` for each name. The index
says how many rows a shard has, so a shard is opened when its rows are read; OPEN_SHARDS of them stay open. `check`
opens all once. The digest of the folder is BLAKE2 over the digests of its shards in order. The index is written last: a
folder with an index is complete."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcdl.csr import START
from hpcdl.errors import UsageError, blamed_on, printable
from hpcdl.files import atomic_write, crc_of, parse_json

INDEX = "index.json"
VERSION = 1  # of the index
SHARD_SIZE = 256 << 20  # bytes of a shard, by default
SHARD_NAME = re.compile(r"[0-9]{5,9}\.h5")
GROUPS = ("train", "test", "rows")  # rows: to be predicted, without labels
OPEN_SHARDS = 8
MOST = 1 << 48  # rows or bytes of a shard; more are a mistake
SCHEMA = ("scale", "classes", "labels", "vocabulary", "table", "base")  # attributes that all shards have alike


@dataclasses.dataclass(frozen=True)
class Shard:
    """A shard, as the index describes it. rows, elements (sparse rows only): by group. checksum: CRC-32 of the file."""

    file: str
    rows: dict[str, int]
    elements: dict[str, int]
    bytes: int
    checksum: str
    digest: str


SHARD_FIELDS = [field.name for field in dataclasses.fields(Shard)]


@dataclasses.dataclass(frozen=True)
class Index:
    """The index of a folder. columns: [type, shape of a row] of each data set, by name (as "train/x"). attributes: of
    the whole, in place of those of the first shard. about: all of the index, JSON data."""

    shards: list[Shard]
    columns: dict[str, tuple[np.dtype, tuple[int, ...]]]
    digest: str
    attributes: dict[str, Any]
    about: dict[str, Any]

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "Index":
        """Read the index of a folder. Raises UsageError."""
        path = Path(folder, INDEX)
        with blamed_on(f"{path} cannot be read"):
            text = path.read_bytes()
        with blamed_on(f"{path} is no index of shards, as prepare-data writes it"):
            about = parse_json(text)
            if about["schema_version"] != VERSION:
                version = printable(about["schema_version"], allowed="")[:20]
                raise UsageError(f"{path} has version {version}; this hpcdl reads version {VERSION}: update it")
            shards = [Shard(**{name: each[name] for name in SHARD_FIELDS}) for each in about["shards"]]
            forms = {str(name): (np.dtype(kind), tuple(shape)) for name, (kind, shape) in about["columns"].items()}
            _check_index(shards, forms)
            attributes = about.get("attributes", {})
            if not (isinstance(attributes, dict) and all(isinstance(each, str) for each in attributes.values())):
                raise ValueError("its attributes are no texts")
            return cls(shards, forms, str(about["digest"]), attributes, about)


def _check_index(shards: list[Shard], columns: dict[str, tuple[np.dtype, tuple[int, ...]]]) -> None:
    """Raise ValueError for a wrong entry."""

    def is_count(number: Any, least: int) -> bool:
        return type(number) is int and least <= number < MOST

    if not shards:
        raise ValueError("it names no shard")
    for shard in shards:
        file, counts = str(shard.file)[:60], [*shard.rows.values(), *shard.elements.values()]
        if not SHARD_NAME.fullmatch(file):
            raise ValueError(f"it names {printable(file, allowed='')!r}; shards lie in the folder, as 00000.h5")
        if not (shard.rows and set(shard.elements) <= set(shard.rows) <= set(GROUPS) and is_count(shard.bytes, 0)):
            raise ValueError(f"the rows or bytes of {file} are no numbers by group")
        if not all(is_count(each, 0) for each in counts) or min(shard.rows.values()) < 1:
            raise ValueError(f"the rows of {file} are no numbers of 1 or more")
        if not (isinstance(shard.checksum, str) and isinstance(shard.digest, str)):
            raise ValueError(f"the checksum or the digest of {file} is no text")
    if len({shard.file for shard in shards}) < len(shards):
        raise ValueError("it names a shard twice")
    for name, (_, shape) in columns.items():
        if name.split("/")[0] not in GROUPS or not all(is_count(each, 0) for each in shape):
            raise ValueError(f"its column {printable(name, allowed='')[:60]!r} has no group or shape")


class ShardFolder:
    """An open folder of shards, with the part of an h5py file's interface that data sets need.

    opener(path): a context that opens a file. find(file, name): a data set of an open file, checked. Reads may come
    from several threads."""

    def __init__(self, path: str, opener: Callable[[Path], AbstractContextManager[h5py.File]], find: Callable):
        """Read the index. Raises UsageError."""
        self.filename, self.index = path, Index.read(path)
        self.opener, self.find, self.lock = opener, find, threading.RLock()
        self.open: dict[
            int, tuple[contextlib.ExitStack, h5py.File, dict[str, Any]]
        ] = {}  # the least recently used first
        self.groups = [group for group in GROUPS if any(group in shard.rows for shard in self.index.shards)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.groups)

    def path(self, number: int) -> Path:
        """Return the path of a shard; UsageError if it does not exist, lies elsewhere, or has another size."""
        shard = self.index.shards[number]
        path = Path(self.filename, shard.file)
        what = f"the index of {self.filename} names {shard.file}"
        with blamed_on(f"shard {path} cannot be read"):
            if not path.exists():
                raise UsageError(f"{what}, which is missing; copy it there, or make the folder again (prepare-data)")
            if path.is_symlink() and Path(os.path.realpath(path)).parent != Path(os.path.realpath(self.filename)):
                raise UsageError(f"{what}, which is a link out of the folder; copy the file into the folder")
            size = path.stat().st_size
        if size != shard.bytes:
            raise UsageError(f"shard {path} has {size:,} bytes, and the index says {shard.bytes:,}; copy it again")
        return path

    def shard(self, number: int) -> h5py.File:
        """Return an open shard, for use under the lock."""
        if number not in self.open:
            while len(self.open) >= OPEN_SHARDS:
                self.open.pop(next(iter(self.open)))[0].close()
            with contextlib.ExitStack() as stack:
                file = stack.enter_context(self.opener(self.path(number)))
                self.open[number] = stack.pop_all(), file, {}
        self.open[number] = self.open.pop(number)
        return self.open[number][1]

    def part(self, number: int, name: str, form: tuple[np.dtype, tuple[int, ...]], length: int) -> Any:
        """Return a data set of a shard, for use under the lock; UsageError if it is not as the index says."""
        file = self.shard(number)
        known = self.open[number][2]
        if name not in known:
            found = self.find(file, name)
            have, said = (found.dtype, tuple(found.shape or ())), (form[0], (length, *form[1]))
            if have != said:
                here, there = (f"{kind} of shape {shape}" for kind, shape in (have, said))
                raise UsageError(f"shard {file.filename}: {name} is {here}, and the index says {there}; copy it again")
            if math.prod(found.shape) and not found.id.get_storage_size():  # a damaged file may claim any shape
                raise UsageError(f"shard {file.filename}: nothing was ever written into {name}")
            known[name] = found
        return known[name]

    def item(self, name: str) -> Any:
        """Return a `JoinedSet`, a `JoinedGroup`, or None. A name outside of the groups is that of the first shard."""
        if name in self.index.columns:
            return JoinedSet(self, name)
        inner = sorted(each.removeprefix(f"{name}/") for each in self.index.columns if each.startswith(f"{name}/"))
        return JoinedGroup(self, name, inner) if inner else None

    def __getitem__(self, name: str) -> Any:
        return self.item(name)

    def __contains__(self, name: str) -> bool:
        return self.item(name) is not None or name in self.shard(0)

    @functools.cached_property
    def attrs(self) -> dict[str, Any]:
        """The attributes of the first shard, and in their place those of the index."""
        with self.lock:
            return dict(self.shard(0).attrs) | self.index.attributes

    def check(self) -> None:
        """Open each shard once; UsageError if one is not as the index says, or differs from the first in its schema."""
        first: dict[str, Any] = {}
        for number, shard in enumerate(self.index.shards):
            with self.lock, blamed_on(f"shard {Path(self.filename, shard.file)} is damaged"):
                file = self.shard(number)
                for name in self.index.columns:
                    if name.split("/")[0] in shard.rows:
                        JoinedSet(self, name).part(number)
                mine = {name: np.asarray(file.attrs[name]) for name in SCHEMA if name in file.attrs}
                mine |= {name: self.find(file, name)[...] for name in file if name not in GROUPS}  # as a tokenizer
                first = first or mine
                if other := [name for name in {*mine, *first} if not _same(mine.get(name), first.get(name))]:
                    raise UsageError(f"shard {file.filename} has another {other[0]} than {self.index.shards[0].file}")
                digest = str(file.attrs.get("digest")).split()[0]
                if digest != shard.digest:
                    raise UsageError(f"shard {file.filename} holds other rows than the index says; copy it again")

    def close(self) -> None:
        while self.open:
            self.open.popitem()[1][0].close()


def _same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return (a is None) == (b is None) and (a is None or b is None or np.array_equal(a, b))


class JoinedGroup:
    """A group of a folder: names of what it holds, and the attributes of the first shard that has it."""

    def __init__(self, folder: ShardFolder, name: str, inner: list[str]):
        self.folder, self.name, self.inner = folder, name, inner

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(each.split("/")[0] for each in self.inner))

    @property
    def attrs(self) -> Any:
        group = self.name.split("/")[0]
        number = next(k for k, shard in enumerate(self.folder.index.shards) if group in shard.rows)
        with self.folder.lock:
            return dict(self.folder.shard(number)[self.name].attrs)


class JoinedSet:
    """The data sets of one name in all shards, joined along axis 0; with the interface of an h5py data set.
    bounds: the first row of each shard, and the number of rows."""

    def __init__(self, folder: ShardFolder, name: str):
        self.folder, self.name, self.form = folder, name, folder.index.columns[name]
        group, _, inner = name.partition("/")
        self.starts = inner == "x/indptr"
        counted = "elements" if inner in ("x/data", "x/indices") else "rows"
        having = [(k, shard) for k, shard in enumerate(folder.index.shards) if group in shard.rows]
        self.numbers = [number for number, _ in having]
        self.lengths = [getattr(shard, counted).get(group, 0) for _, shard in having]
        self.bounds = np.cumsum([0, *self.lengths])
        self.rows = np.cumsum([0, *(shard.rows[group] for _, shard in having)])  # first row of each shard
        # The starts of a shard count from its own first element; the first one of each later shard is left out.
        self.before = np.cumsum([0, *(shard.elements.get(group, 0) for _, shard in having)])
        self.bounds[1:] += self.starts
        self.dtype = START if self.starts else self.form[0]
        self.shape = (int(self.bounds[-1]), *self.form[1])
        self.ndim, self.size = len(self.shape), math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """The chunks of the longest part: shorter ones may have shorter chunks."""
        with self.folder.lock:
            chunks: tuple[int, ...] | None = self.part(self.numbers[int(np.argmax(self.lengths))]).chunks
            return chunks

    def part(self, number: int) -> Any:
        """Return the data set of shard `number`, for use under the lock."""
        return self.folder.part(number, self.name, self.form, self.lengths[self.numbers.index(number)] + self.starts)

    def place(self, row: int) -> tuple[str, int]:
        """Return the path of the shard that holds a row, and the row's number in it."""
        at = int(np.searchsorted(self.rows, row, side="right")) - 1
        return self._path(self.numbers[at]), row - int(self.rows[at])

    def pieces(self, first: int, last: int) -> Iterator[tuple[str, int, slice]]:
        """Yield (name for a message, row of the shard, slice of range(first, last)) for each shard with these rows."""
        begin = first
        while begin < last:
            path, row = self.place(begin)
            end = min(last, int(self.rows[np.searchsorted(self.rows, begin, side="right")]))
            yield f"{path}: {self.name}", row, slice(begin - first, end - first)
            begin = end

    def read_direct(self, into: np.ndarray, rows: slice | None = None) -> None:
        """Read rows (None: all) into an array, converted to its type."""
        begin, last, _ = (rows or slice(None)).indices(len(self))
        at, first = int(np.searchsorted(self.bounds, begin, side="right")) - 1, begin
        while first < last:
            end = min(last, int(self.bounds[at + 1]))
            if first < end:
                here, shift = into[first - begin : end - begin], (self.starts and at > 0) - int(self.bounds[at])
                self._read(self.numbers[at], slice(first + shift, end + shift), here)
                if self.starts:
                    here += self.before[at]
            first, at = end, at + 1

    def _read(self, number: int, rows: slice, into: np.ndarray) -> None:
        with self.folder.lock, blamed_on(f"shard {self._path(number)} is damaged"):
            part = self.part(number)
            if part.dtype.kind == "O":
                into[...] = part[rows]
            else:
                part.read_direct(into, rows)

    def _path(self, number: int) -> str:
        return os.path.join(self.folder.filename, self.folder.index.shards[number].file)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int | np.integer):
            return self[key : key + 1][0]
        rows = key if isinstance(key, slice) else slice(None)
        first, last, step = rows.indices(len(self))
        if step != 1 or not (isinstance(key, slice) or key in ((), Ellipsis)):
            raise IndexError(f"{self.name} of a folder is read by whole slices of rows, not by {key}")
        into = np.empty((max(0, last - first), *self.shape[1:]), self.dtype)
        self.read_direct(into, slice(first, last))
        return into


def is_folder(path: str | os.PathLike[str]) -> bool:
    """True for a folder that has an index."""
    return os.path.isfile(os.path.join(path, INDEX))


def shard_paths(path: str | os.PathLike[str]) -> list[str]:
    """Return the paths of the shards of a folder in order; [] if `path` is no folder of shards. Raises UsageError."""
    return [os.path.join(path, shard.file) for shard in Index.read(path).shards] if is_folder(path) else []


def file_that_changes(path: str | os.PathLike[str]) -> str:
    """Return the path of a data file, or of the index of a folder: what is made anew when the data change."""
    return os.path.join(path, INDEX) if os.path.isdir(path) else os.fspath(path)


def checksum(path: Path) -> str:
    """Return the CRC-32 of a file as 8 hexadecimal digits. Raises OSError."""
    return f"{crc_of(path):08x}"


def columns_of(file: h5py.File) -> dict[str, list]:
    """Return [type, shape of a row] of each data set in the groups of a data file, by name (as "train/x")."""
    columns: dict[str, list] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and name.split("/")[0] in GROUPS:
            columns[name] = [item.dtype.str, list(item.shape[1:])]

    file.visititems(visit)
    return columns


def write_index(folder: Path, about: dict[str, Any], shards: list[Shard]) -> None:
    """Write the index of a folder. about: the entries beside version and shards. Raises OSError."""
    entries = {"schema_version": VERSION, **about, "shards": [dataclasses.asdict(shard) for shard in shards]}
    with atomic_write(folder / INDEX) as file:
        file.write(json.dumps(entries, indent=1).encode() + b"\n")


def is_ours(name: str) -> bool:
    """True for the name of a file that a folder of shards holds, also while it is being written."""
    return bool(re.fullmatch(r"[0-9]{5,}\.(h5|json)|index\.json|recipe\.json|\..*\.part", name))


def refuse_replacing(folder: Path, force: bool) -> None:
    """Raise UsageError unless the folder is empty, or a folder of shards that `force` allows to replace."""
    names = [each.name for each in folder.iterdir()]
    strange = next((name for name in sorted(names) if not is_ours(name)), None)
    if strange is not None or (names and INDEX not in names):
        what = f"holds {strange!r}" if strange is not None else f"has no {INDEX}"
        raise UsageError(f"the folder {folder} exists, and is no folder of shards: it {what}; choose another name")
    if names and not force:
        raise UsageError(f"{folder} exists already; choose another name, or --force to replace it")
