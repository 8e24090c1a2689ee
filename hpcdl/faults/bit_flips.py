"""Injected bit flips (--inject corrupt): in a vector, in data rows, in a checkpoint file, in a message.

    a float         the highest bit of its mantissa; the number stays finite
    an integer      the lowest bit
    in a file       any bit of a checkpoint's parameters
    in a message    a bit of the next message with training data: the received data differ from the sent data

If the receiver forwards a changed message, as in the first half of a ring, all ranks get the same wrong sum, which no
comparison of replicas detects. If the receiver keeps it, as in the second half, the replicas differ from then on."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hpcdl.comm.communicator import Communicator


def rows_of(run: Any) -> Any:
    """Return the writable training rows in this rank's memory (sparse rows: their values); None if it holds no rows."""
    train = getattr(run.data, "train", None)  # the run of a data server has no data
    x: Any = getattr(getattr(train, "source", None), "x", None)
    x = getattr(x, "data", x) if not isinstance(x, np.ndarray) else x  # the values of sparse rows
    base = getattr(x, "base", None)  # x is a read-only view of writable memory
    if not isinstance(base, np.ndarray) or not base.flags.writeable or not base.flags.c_contiguous:
        return None
    return np.ndarray(x.shape, x.dtype, base.data, x.ctypes.data - base.ctypes.data, x.strides)


def flip(vector: np.ndarray, index: int) -> None:
    """Flip a bit of element `index`: the highest mantissa bit of a float, which stays finite; else the lowest bit."""
    at = np.unravel_index(index, vector.shape)
    kind = vector.dtype
    bits, mask = np.dtype(f"u{kind.itemsize}"), 1 << (np.finfo(kind).nmant - 1) if kind.kind == "f" else 1
    number = vector[at].view(bits) ^ bits.type(mask)
    vector[at] = number.view(kind)


def flip_in_file(path: Path, generator: np.random.Generator) -> tuple[int, int]:
    """Flip a random bit of a checkpoint's parameters, in its file or first shard; return byte offset and bit."""
    import h5py  # imported here: reading options needs no HDF5

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


def flip_in_message(comm: "Communicator", generator: np.random.Generator, codes: bool = False) -> None:
    """Flip a bit of the next message with floats that `comm` or a group of it sends; shared memory has no messages.
    Integers are spared: a wrong value in a protocol has arbitrary effects. codes: True if bytes are compressed."""
    from hpcdl.comm.counting import CountingIntracomm  # imported here: reading options starts no MPI

    struck = False

    class FaultyIntracomm(CountingIntracomm):
        def Isend(self, buf: Any, dest: int, tag: int = 0) -> Any:
            nonlocal struck
            numbers = isinstance(buf, np.ndarray) and buf.size > 0
            if numbers and not struck and (buf.dtype.kind == "f" or (codes and buf.dtype == np.uint8)):
                struck = True
                buf = buf.copy()  # the request keeps the copy alive
                flip(buf, int(generator.integers(buf.size)))
            return super().Isend(buf, dest, tag)

    for group in comm.family():
        if group.traffic is comm.traffic:  # not bookkeeping
            group.send_through(FaultyIntracomm)
