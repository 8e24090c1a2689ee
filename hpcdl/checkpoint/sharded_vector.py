"""A vector of which each rank holds a part: how a checkpoint collects it and gives the parts back.

    rank 0    # # # # . . . . . . . .        speaks for the first four elements
    rank 1    + + + + . . . . . . . .        holds a copy, and sends nothing when the vector is gathered
    rank 2    . . . . # # . . # # . .        two blocks, of a weight that is cut by columns
    rank 3    . . . . . . # # . . # #

A checkpoint has the whole vector in the order of the layout, whatever the cut, so that any other cut can load it. Each
rank writes what it speaks for (`portion`) and reads its own part (`read`), so that no memory holds more. If the ranks
do not see the same files, and on one rank, `gather` collects the whole vector on rank 0 (on the host, if others are on
GPUs), and `scatter` gives it back.
"""

from typing import TYPE_CHECKING

import numpy as np

from hpcdl.checkpoint.checkpoint_file import Stored
from hpcdl.checkpoint.shards import Portion, read_into
from hpcdl.comm import Communicator
from hpcdl.comm.progress import activity
from hpcdl.kernels.device import Array, device_of

if TYPE_CHECKING:
    from hpcdl.models.layout import Hyperslab


class CutVector:
    """The part `array` of this rank of a vector of `size` elements, and its place there.

    The constructor is collective.

    pieces: [(hpcdl.models.layout.Hyperslab, True if this rank speaks for it), ...]. Exactly one rank speaks for each
    element.
    """

    def __init__(self, comm: Communicator, array: Array, pieces: "list[tuple[Hyperslab, bool]]", size: int):
        self.array, self.pieces, self.size = array, pieces, size
        with activity.inside("gather the cut", comm):
            self.everyone = comm.mpi.gather(pieces)

    def stored(self, name: str) -> str:
        """Return the name: a whole vector is stored under its own."""
        return name

    def form(self, ranks: int) -> tuple[tuple[int, ...], np.dtype]:
        """Return shape and type of the whole vector, for any number of ranks."""
        return (self.size,), self.array.dtype

    def portion(self) -> Portion:
        """Return what this rank writes to a checkpoint."""
        return Portion(self.array, [piece for piece, speaks in self.pieces if speaks], self.size)

    def read(self, name: str, stored: Stored) -> bool:
        """Read this rank's part from a checkpoint that it sees; True if all values are finite.

        Raises UsageError if the checkpoint has changed meanwhile.
        """
        with stored.opened() as file:
            return read_into(file[name], [piece for piece, _ in self.pieces], self.array)

    def gather(self, comm: Communicator) -> np.ndarray | None:
        """Return the whole vector on rank 0, None elsewhere; collective."""
        host = device_of(self.array).host(self.array)
        own_part = packed(host, self.pieces)
        if comm.rank > 0:
            comm.push(own_part, 0)
            return None
        assert self.everyone is not None
        whole = np.empty(self.size, host.dtype)
        for rank, pieces in enumerate(self.everyone):
            if rank > 0:
                own_part = np.empty(sum(piece.size for piece, speaks in pieces if speaks), whole.dtype)
                comm.wait(own_part, rank)
            place(own_part, [piece for piece, speaks in pieces if speaks], whole)
        return whole

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        """Give all ranks their parts of rank 0's vector; collective."""
        if comm.rank == 0:
            assert whole is not None and self.everyone is not None
            parts = [take(whole, [piece for piece, _ in pieces]) for pieces in self.everyone]
            for rank in range(1, comm.size):
                comm.push(parts[rank], rank)
            own_part = parts[0]
        else:
            own_part = np.empty(sum(piece.size for piece, _ in self.pieces), self.array.dtype)
            comm.wait(own_part, 0)
        host, start = np.empty(self.array.size, self.array.dtype), 0
        for piece, _ in self.pieces:
            host[piece.local : piece.local + piece.size] = own_part[start : start + piece.size]
            start += piece.size
        device_of(self.array).copy_in(self.array, host)


def packed(array: np.ndarray, pieces: "list[tuple[Hyperslab, bool]]") -> np.ndarray:
    """Return the elements of the pieces that this rank speaks for, one after another."""
    parts = [array[piece.local : piece.local + piece.size] for piece, speaks in pieces if speaks]
    return np.concatenate([np.empty(0, array.dtype), *parts])


def blocks(whole: np.ndarray, piece: "Hyperslab") -> np.ndarray:
    """Return the elements of a piece in the whole vector, as a view (blocks, length)."""
    item = whole.itemsize
    shape, strides = (piece.blocks, piece.length), (piece.stride * item, item)
    return np.lib.stride_tricks.as_strided(whole[piece.start :], shape, strides)


def place(values: np.ndarray, pieces: "list[Hyperslab]", whole: np.ndarray) -> None:
    """Write packed values to the places of the pieces."""
    start = 0
    for piece in pieces:
        if piece.size:
            blocks(whole, piece)[...] = values[start : start + piece.size].reshape(piece.blocks, piece.length)
        start += piece.size


def take(whole: np.ndarray, pieces: "list[Hyperslab]") -> np.ndarray:
    """Return the elements of the pieces, packed."""
    return np.concatenate([np.empty(0, whole.dtype), *(blocks(whole, each).ravel() for each in pieces if each.size)])
