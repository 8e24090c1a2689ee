"""A checkpoint in pieces: each rank writes its part to a file of its own; one file joins them into whole vectors.

    rank r        pieces/step-000000080-5f3a09c1-rank-000r.h5    the blocks it speaks for, one after the other
    rank 0 then   checkpoint.h5      parameters, optimizer/NAME: virtual data sets of HDF5 over the pieces
                                     the list of the pieces with the size and the CRC-32 of each

No rank holds, sends or receives more than its own part, and all write at once. Copies that a rank does not speak for,
such as replicas, are not written. A block of a weight that is cut by columns is a strided hyperslab of the whole: a few
numbers in the mapping. Other cuts, one rank or any HDF5 program read the hyperslabs that they need.

Pieces are written first, each under a temporary name, synced and renamed, with names that no earlier checkpoint used.
checkpoint.h5 is replaced when all exist, and pieces that no checkpoint needs are removed then (`sweep`): whenever a run
dies, a complete checkpoint exists. HDF5 only lays out a piece; its numbers are written as plain bytes: a full disk is
an error of the write, and no lock of HDF5 is held meanwhile.

The CRC-32 of checkpoint.h5 is in its first 512 bytes, which HDF5 leaves to the user, and is checked before HDF5 opens
the file: HDF5 may crash on a broken mapping."""

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import h5py
import numpy as np

from hpcdl.data.hdf5 import NewFile
from hpcdl.files import Sink, atomic_path, crc_of, parse_json
from hpcdl.kernels.device import Array, device_of

if TYPE_CHECKING:
    from hpcdl.models.layout import Hyperslab

FOLDER = "pieces"
NAME = re.compile(r"step-[0-9]{9,}-[0-9a-f]{8}-rank-[0-9]{4,}\.h5")
LEFT = re.compile(rf"\.{NAME.pattern}\.\d+\.part")
SLAB = 8 << 20  # bytes read or written at a time
SIGNATURE = b"\x89HDF\r\n\x1a\n"  # of HDF5, at the beginning of its files
BLOCK = 512  # bytes before HDF5's header, in the file that joins the pieces
SEAL = b"hpcdl checkpoint in pieces: "  # begins these bytes
REGULAR = ("v112", "latest")  # versions of the format: from 1.12 on a strided mapping is stored as a few numbers


class ShardBlocks(NamedTuple):
    """Elements of a vector. In `file`: from `at`. In the vector: `blocks` of `length` at start, start + stride, ..."""

    file: str
    at: int
    start: int
    blocks: int
    length: int
    stride: int

    @classmethod
    def of(cls, file: str, at: int, start: int, blocks: int, length: int, stride: int) -> "ShardBlocks":
        """Return these elements in the normal form, in which adjacent blocks are one block."""
        if blocks == 1 or length == stride:
            blocks, length = 1, blocks * length
            stride = length
        return cls(file, at, start, blocks, length, stride)


class WrittenShard(NamedTuple):
    """A piece on disk: its name, its size in bytes, its CRC-32, and the place of its elements, by vector."""

    file: str
    bytes: int
    crc32: int
    rows: dict[str, list[ShardBlocks]]


@dataclass
class Portion:
    """The part of a vector of `size` elements that one rank writes: `pieces` of its array, merged where adjacent."""

    array: Array
    pieces: "list[Hyperslab]"
    size: int

    def __post_init__(self) -> None:
        self.pieces = merged(self.pieces)

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def elements(self) -> int:
        """The number of elements written."""
        return sum(piece.size for piece in self.pieces)

    def slabs(self) -> Iterator[np.ndarray]:
        """Yield the elements in order, on the host, at most SLAB bytes each; views if possible."""
        device, most = device_of(self.array), max(1, SLAB // self.dtype.itemsize)
        for piece in self.pieces:
            for start in range(piece.local, piece.local + piece.size, most):
                yield device.host(self.array[start : min(start + most, piece.local + piece.size)])

    def copied(self) -> "Portion":
        """Return the portion with its elements copied to the host, where later steps do not change them."""
        values, offset = np.empty(self.elements, self.dtype), 0
        for slab in self.slabs():
            values[offset : offset + slab.size] = slab
            offset += slab.size
        return Portion(values, [piece._replace(local=at) for at, piece in self._offsets()], self.size)

    def _offsets(self) -> "Iterator[tuple[int, Hyperslab]]":
        """Return pairs (elements before the piece, piece) for pieces stored one after the other."""
        return zip(itertools.accumulate((piece.size for piece in self.pieces), initial=0), self.pieces, strict=False)

    def rows(self, file: str) -> list[ShardBlocks]:
        """Return the place of each piece: in the whole vector, and in `file`, where one piece follows the other."""
        return [ShardBlocks.of(file, at, *piece[1:]) for at, piece in self._offsets()]


def merged(pieces: "list[Hyperslab]") -> "list[Hyperslab]":
    """Return non-empty pieces, joined where they are adjacent both in the array and in the whole vector."""
    result: list[Hyperslab] = []
    for piece in pieces:
        if not piece.size:
            continue
        if piece.blocks == 1 or piece.length == piece.stride:
            piece = piece._replace(blocks=1, length=piece.size, stride=piece.size)
            last = result[-1] if result else None
            if last and last.blocks == 1 and (last.local + last.size, last.start + last.size) == piece[:2]:
                size = last.size + piece.size
                result[-1] = last._replace(length=size, stride=size)
                continue
        result.append(piece)
    return result


# -- one piece -------------------------------------------------------------------------------------------------------


def name_of_piece(step: int, token: str, rank: int) -> str:
    """Return the file name of a piece; token: eight hexadecimal digits, unique to the checkpoint."""
    return f"step-{step:09d}-{token}-rank-{rank:04d}.h5"


def write_piece(folder: Path, name: str, portions: dict[str, Portion]) -> WrittenShard | None:
    """Write a rank's portions to folder/pieces/name; return the piece, None if they are empty. Raises OSError."""
    portions = {each: portion for each, portion in portions.items() if portion.elements}
    if not portions:
        return None
    (folder / FOLDER).mkdir(exist_ok=True)
    path, crc, at = folder / FOLDER / name, 0, 0
    with atomic_path(path) as temporary:
        places = laid_out(temporary, portions)
        with open(temporary, "r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            for each, place in places:
                crc, at = zlib.crc32(os.pread(file.fileno(), place - at, at), crc), place
                for slab in portions[each].slabs():
                    write_at(file.fileno(), slab, at)
                    crc, at = zlib.crc32(slab, crc), at + slab.nbytes  # type: ignore[arg-type]
            crc = zlib.crc32(os.pread(file.fileno(), size - at, at), crc)
    return WrittenShard(name, size, crc, {each: portion.rows(name) for each, portion in portions.items()})


def laid_out(path: Path, portions: dict[str, Portion]) -> list[tuple[str, int]]:
    """Create a file with an unfilled data set per portion; return [(name, offset in bytes), ...] in order of offset."""
    places = []
    with Sink(path, "w+") as sink:
        with NewFile(sink) as file:
            for name, portion in portions.items():
                properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
                properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
                dataset = created(file, name, portion.elements, portion.dtype, properties)
                places.append((dataset.get_offset(), name))
        sink.check()
    with open(path, "r+b") as grown:  # HDF5 may leave the last data set beyond the file's end
        end = max(place + portions[name].elements * portions[name].dtype.itemsize for place, name in places)
        grown.truncate(max(end, os.fstat(grown.fileno()).st_size))
    return [(name, place) for place, name in sorted(places)]


def created(file: h5py.File, name: str, size: int, dtype: np.dtype, properties: Any) -> Any:
    """Create a data set (size,) with these creation properties; return its HDF5 identifier."""
    above, _, own = name.rpartition("/")
    group = file.require_group(above) if above else file
    space = h5py.h5s.create_simple((size,))
    return h5py.h5d.create(group.id, own.encode(), h5py.h5t.py_create(dtype), space, properties)


def write_at(file: int, values: np.ndarray, place: int) -> None:
    """Write all values at the offset `place`, in bytes. Raises OSError."""
    left = memoryview(values).cast("B")  # type: ignore[arg-type]
    while left:
        count = os.pwrite(file, left, place)
        if not count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        left, place = left[count:], place + count


def problem_of(folder: Path, piece: WrittenShard, contents: bool = True) -> str:
    """Return a text that names a piece and its fault; "" if it has none. contents: True to read the piece, too."""
    path = folder / FOLDER / piece.file
    try:
        size = path.stat().st_size
        if size != piece.bytes:
            return f"its piece {path} is cut off: {size:,} bytes, not {piece.bytes:,}"
        if contents and crc_of(path) != piece.crc32:
            return f"its piece {path} is damaged: the checksum does not fit the contents"
    except FileNotFoundError:
        return f"its piece {path} is missing"
    except OSError as error:
        return f"its piece {path} cannot be read: {error.strerror}"
    return ""


# -- the pieces of a checkpoint --------------------------------------------------------------------------------------


@dataclass
class JoinedPieces:
    """The pieces of a checkpoint. forms: (size, type), by name, of the vectors that the pieces form."""

    pieces: list[WrittenShard] = dataclasses.field(default_factory=list)
    forms: dict[str, tuple[int, np.dtype]] = dataclasses.field(default_factory=dict)

    def rows(self, name: str) -> list[ShardBlocks]:
        """Return the places of the elements of the vector `name`, in all pieces."""
        return [row for piece in self.pieces for row in piece.rows.get(name, [])]

    def listed(self) -> str:
        """Return the list of pieces as text."""
        return json.dumps([[piece.file, piece.bytes, piece.crc32] for piece in self.pieces])

    def described(self) -> str:
        """Return the pieces and their mapping as text, for a checksum."""
        forms = {name: [size, str(dtype), sorted(self.rows(name))] for name, (size, dtype) in self.forms.items()}
        return self.listed() + json.dumps(forms, sort_keys=True)

    def join(self, file: h5py.File) -> None:
        """Create the virtual data sets and the list of pieces in `file`."""
        for name, (size, dtype) in self.forms.items():
            rows = self.rows(name)
            assert sum(row.blocks * row.length for row in rows) == size, "each element has one rank that writes it"
            properties, ends = h5py.h5p.create(h5py.h5p.DATASET_CREATE), extents(rows)
            for row in rows:
                count = row.blocks * row.length
                whole, source = h5py.h5s.create_simple((size,)), h5py.h5s.create_simple((ends[row.file],))
                whole.select_hyperslab((row.start,), (row.blocks,), (row.stride,), (row.length,))
                source.select_hyperslab((row.at,), (1,), (count,), (count,))
                properties.set_virtual(whole, f"{FOLDER}/{row.file}".encode(), f"/{name}".encode(), source)
            created(file, name, size, dtype, properties)
        file.attrs[FOLDER] = self.listed()

    @classmethod
    def read(cls, file: h5py.File) -> "JoinedPieces":
        """Read the mapping of a file that joins pieces; raises ValueError unless it is as `join` made it."""
        pieces = [WrittenShard(name, size, crc, {}) for name, size, crc in parse_json(file.attrs[FOLDER])]
        known, forms = {piece.file: piece for piece in pieces}, {}
        if not all(isinstance(each.file, str) and NAME.fullmatch(each.file) for each in pieces):
            raise ValueError("its pieces have other names than hpcdl gives")

        def visit(name: str, item: Any) -> None:
            if not isinstance(item, h5py.Dataset) or not item.is_virtual:
                return
            forms[name] = (item.size, item.dtype)
            properties = item.id.get_create_plist()
            for each in range(properties.get_virtual_count()):
                source = properties.get_virtual_filename(each).removeprefix(f"{FOLDER}/")
                if source not in known or properties.get_virtual_dsetname(each) != f"/{name}":
                    raise ValueError("its vectors are made of other files than its pieces")
                (start,), (stride,), (blocks,), (length,) = properties.get_virtual_vspace(each).get_regular_hyperslab()
                (at,), (apart,), (count,), (block,) = properties.get_virtual_srcspace(each).get_regular_hyperslab()
                if (count > 1 and apart != block) or count * block != blocks * length:
                    raise ValueError("its vectors map the pieces in another way than hpcdl does")
                row = ShardBlocks.of(source, at, start, blocks, length, stride)
                known[source].rows.setdefault(name, []).append(row)

        file.visititems(visit)
        return cls(pieces, forms)


def extents(rows: list[ShardBlocks]) -> dict[str, int]:
    """Return how many elements of a vector each file holds, by the vector's `rows`."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.file] = max(counts.get(row.file, 0), row.at + row.blocks * row.length)
    return counts


def read_into(dataset: h5py.Dataset, pieces: "list[Hyperslab]", array: Array) -> bool:
    """Read a rank's pieces of a data set into its array, on a device by slabs; return True if all values are finite."""
    device, most, finite = device_of(array), max(1, SLAB // array.dtype.itemsize), True
    space = dataset.id.get_space()
    for piece in merged(pieces):
        for start in range(piece.local, piece.local + piece.size, most):
            stop = min(start + most, piece.local + piece.size)
            here = array[start:stop]
            values = here if isinstance(here, np.ndarray) else np.empty(stop - start, array.dtype)
            for part in piece.within(slice(start, stop)):
                space.select_hyperslab((part.start,), (part.blocks,), (part.stride,), (part.length,))
                own = values[part.local : part.local + part.size]
                dataset.id.read(h5py.h5s.create_simple(own.shape), space, own)
            finite = finite and bool(np.isfinite(values).all())
            if values is not here:
                device.copy_in(here, values)
    return finite


# -- the file that joins pieces --------------------------------------------------------------------------------------


@contextlib.contextmanager
def joining_file(path: Path) -> Iterator[h5py.File]:
    """Context like `new_file`, for a file that joins pieces; the file is sealed when complete."""
    with atomic_path(path) as temporary:
        with Sink(temporary, "w+") as sink:
            with NewFile(sink, libver=REGULAR, userblock_size=BLOCK) as file:
                yield file
            sink.check()
        seal(temporary)


def seal(path: Path) -> None:
    """Write size and CRC-32 of the contents into the first bytes of the file. Raises OSError."""
    with open(path, "r+b", buffering=0) as file:
        write_at(file.fileno(), np.frombuffer(sealed(path), np.uint8), 0)


def sealed(path: Path) -> bytes:
    """Return the first BLOCK bytes of a file that joins pieces, computed from its contents."""
    text = b"%d bytes, crc32 %08x\n" % (path.stat().st_size, crc_of(path, BLOCK))
    return (SEAL + text).ljust(BLOCK, b"\0")


def joins_pieces(path: Path) -> bool:
    """True if this file joins pieces; False for another HDF5 file. Raises ValueError for a broken one."""
    with open(path, "rb") as file:
        first = file.read(BLOCK)
    if first.startswith(SIGNATURE):
        return False
    if not first.startswith(SEAL):
        raise ValueError("it does not begin as an HDF5 file")
    if first != sealed(path):
        raise ValueError("its checksum does not fit its contents")
    return True


# -- folders ---------------------------------------------------------------------------------------------------------


def files_of(path: Path) -> set[str] | None:
    """Return the names of the pieces that a file needs, possibly none; None if the file is broken."""
    try:
        with open(path, "rb") as first:
            if first.read(len(SEAL)) != SEAL:
                return set()
        joins_pieces(path)
        with h5py.File(path, "r") as file:
            return {each[0] for each in parse_json(file.attrs[FOLDER])}
    except Exception:  # of any type
        return None


def sweep(folder: Path) -> None:
    """Remove the folder's pieces that no checkpoint needs; none if a checkpoint is broken. No rank may write now."""
    pieces, needed = folder / FOLDER, set()
    if not pieces.is_dir() or pieces.is_symlink():
        return
    for each in folder.iterdir():
        if each.suffix == ".h5" and each.is_file():
            names = files_of(each)
            if names is None:
                return
            needed |= names
    for each in pieces.iterdir():
        if each.name not in needed and (NAME.fullmatch(each.name) or LEFT.fullmatch(each.name)):
            each.unlink()
    with contextlib.suppress(OSError):
        pieces.rmdir()  # if it is empty
