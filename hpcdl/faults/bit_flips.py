"""Bits that are flipped on purpose, by --inject corrupt: of a vector, of rows, of a checkpoint's file, of a message.

    of a float      the highest bit of its mantissa: another number, and a finite one
    of another      the lowest bit
    in a file       any bit of a checkpoint's parameters
    in a message    of the next one that carries numbers of the training: what arrives differs from what was sent

A message is changed in a copy, as by a cable: its sender holds what it held. Where the other rank passes on what it
got, as in the first half of a ring, all ranks have the same wrong sum, and only who knows the right one sees it; where
it keeps it, as in the second half, the replicas differ from then on.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hpcdl.comm.trace import Traffic

CODES = np.uint16  # the type of what --compress sends


def rows_of(run: Any) -> Any:
    """The training rows in this rank's memory, to be written; None where they are read as they are needed."""
    train = getattr(run.data, "train", None)  # a data server's run has no data: its rows are made into messages
    x: Any = getattr(getattr(train, "source", None), "x", None)
    x = getattr(x, "data", x) if not isinstance(x, np.ndarray) else x  # of sparse rows, their values
    base = getattr(x, "base", None)  # x is a view that may not be written, of memory that may
    if not isinstance(base, np.ndarray) or not base.flags.writeable or not base.flags.c_contiguous:
        return None
    return np.ndarray(x.shape, x.dtype, base.data, x.ctypes.data - base.ctypes.data, x.strides)


def flip(vector: np.ndarray, index: int) -> None:
    """Flip a bit of a number: of a float the highest of its mantissa, which leaves it finite; of another the lowest."""
    at = np.unravel_index(index, vector.shape)
    kind = vector.dtype
    if kind.kind == "f":
        bits = np.dtype(f"u{kind.itemsize}")
        mask = 1 << (np.finfo(kind).nmant - 1)
    else:
        bits, mask = np.dtype(f"u{kind.itemsize}"), 1
    number = vector[at].view(bits) ^ bits.type(mask)
    vector[at] = number.view(kind)


def flip_in_file(path: Path, generator: np.random.Generator) -> tuple[int, int]:
    """Flip a bit of a checkpoint's parameters, in its file, or in the first piece of it; returns byte and bit there."""
    import h5py  # here: who only reads options needs no HDF5

    from hpcdl.checkpoint.shards import FOLDER, files_of

    if pieces := sorted(files_of(path) or ()):
        path = path.parent / FOLDER / pieces[0]
    with h5py.File(path, "r", locking=False) as file:
        where: Any = file["parameters"].id
        begin, size = where.get_offset(), where.get_storage_size()
    place, bit = begin + int(generator.integers(size)), int(generator.integers(8))
    with open(path, "r+b") as raw:
        raw.seek(place)
        byte = raw.read(1)[0]
        raw.seek(place)
        raw.write(bytes([byte ^ 1 << bit]))
    return place, bit


def flip_in_message(traffic: "Traffic", generator: np.random.Generator) -> None:
    """Flip a bit of the next message of numbers that is counted here; none leaves where ranks share their memory.

    Whole numbers stay as they are: those of the protocols, of which a wrong one could be anything.
    """
    from hpcdl.comm.counting import CountingIntracomm  # here: who only reads options starts no MPI

    plain = CountingIntracomm.Isend

    def once(self: CountingIntracomm, buf: Any, dest: int, tag: int = 0) -> Any:
        ours = any(self.counters is each for each in traffic.values())
        if ours and isinstance(buf, np.ndarray) and buf.size and (buf.dtype.kind == "f" or buf.dtype == CODES):
            CountingIntracomm.Isend = plain  # type: ignore[method-assign]
            buf = buf.copy()  # the request keeps it until it has left
            flip(buf, int(generator.integers(buf.size)))
        return plain(self, buf, dest, tag)

    CountingIntracomm.Isend = once  # type: ignore[method-assign]
