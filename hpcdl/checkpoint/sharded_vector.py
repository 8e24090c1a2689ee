"""A vector of which each rank holds a part: how a checkpoint gets the whole of it, and the ranks their parts again.

    rank 0    # # # # . . . . . . . .        speaks for the first four elements
    rank 1    + + + + . . . . . . . .        holds the same, and says nothing when the vector is gathered
    rank 2    . . . . # # . . # # . .        two blocks, of a weight that is cut by columns
    rank 3    . . . . . . # # . . # #

A checkpoint is the whole vector in the order of the layout, whatever the cut was, so that any other cut can go on from
it. Each rank writes what it speaks for (`portion`) and reads what is its own (`read`), so that no memory holds more.
Where the ranks do not see the same files, and on one rank, `gather` puts the whole vector into the memory of rank 0 (on
the host, where the others are on GPUs), and `scatter` gives it back.
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
    """The part `array` that this rank holds of a vector of `size` elements, and where it lies there.

    Making one is a collective call.

    pieces: [(hpcdl.models.layout.Piece, whether this rank speaks for it), ...]. Of each element of the vector, exactly
    one rank speaks.
    """

    def __init__(self, comm: Communicator, array: Array, pieces: "list[tuple[Hyperslab, bool]]", size: int):
        self.array, self.pieces, self.size = array, pieces, size
        with activity.inside("gather the cut", comm):
            self.everyone = comm.mpi.gather(pieces)

    def stored(self, name: str) -> str:
        """A whole vector is stored under its own name."""
        return name

    def form(self, ranks: int) -> tuple[tuple[int, ...], np.dtype]:
        """Whole, on any number of ranks."""
        return (self.size,), self.array.dtype

    def portion(self) -> Portion:
        """What this rank writes of a checkpoint."""
        return Portion(self.array, [piece for piece, speaks in self.pieces if speaks], self.size)

    def read(self, name: str, found: Stored) -> bool:
        """Fill in what is this rank's, from a checkpoint that it sees; whether all of that are finite numbers.

        Raises UsageError where the checkpoint is no longer what it was.
        """
        with found.opened() as file:
            return read_into(file[name], [piece for piece, _ in self.pieces], self.array)

    def gather(self, comm: Communicator) -> np.ndarray | None:
        """The whole vector on rank 0, None elsewhere; collective."""
        host = device_of(self.array).host(self.array)
        mine = packed(host, self.pieces)
        if comm.rank > 0:
            comm.push(mine, 0)
            return None
        assert self.everyone is not None
        whole = np.empty(self.size, host.dtype)
        for rank, pieces in enumerate(self.everyone):
            if rank > 0:
                mine = np.empty(sum(piece.size for piece, speaks in pieces if speaks), whole.dtype)
                comm.wait(mine, rank)
            place(mine, [piece for piece, speaks in pieces if speaks], whole)
        return whole

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
        """Give all ranks their parts of the vector that rank 0 has; collective."""
        if comm.rank == 0:
            assert whole is not None and self.everyone is not None
            parts = [take(whole, [piece for piece, _ in pieces]) for pieces in self.everyone]
            for rank in range(1, comm.size):
                comm.push(parts[rank], rank)
            mine = parts[0]
        else:
            mine = np.empty(sum(piece.size for piece, _ in self.pieces), self.array.dtype)
            comm.wait(mine, 0)
        host, start = np.empty(self.array.size, self.array.dtype), 0
        for piece, _ in self.pieces:
            host[piece.local : piece.local + piece.size] = mine[start : start + piece.size]
            start += piece.size
        device_of(self.array).copy_in(self.array, host)


def packed(array: np.ndarray, pieces: "list[tuple[Hyperslab, bool]]") -> np.ndarray:
    """The elements of the pieces that this rank speaks for, one after another."""
    parts = [array[piece.local : piece.local + piece.size] for piece, speaks in pieces if speaks]
    return np.concatenate([np.empty(0, array.dtype), *parts])


def blocks(whole: np.ndarray, piece: "Hyperslab") -> np.ndarray:
    """The elements of a piece in the whole vector, as a view (blocks, length)."""
    item = whole.itemsize
    shape, strides = (piece.blocks, piece.length), (piece.stride * item, item)
    return np.lib.stride_tricks.as_strided(whole[piece.start :], shape, strides)


def place(values: np.ndarray, pieces: "list[Hyperslab]", whole: np.ndarray) -> None:
    """Write values, packed, where the pieces lie."""
    start = 0
    for piece in pieces:
        if piece.size:
            blocks(whole, piece)[...] = values[start : start + piece.size].reshape(piece.blocks, piece.length)
        start += piece.size


def take(whole: np.ndarray, pieces: "list[Hyperslab]") -> np.ndarray:
    """The elements of the pieces, packed."""
    return np.concatenate([np.empty(0, whole.dtype), *(blocks(whole, each).ravel() for each in pieces if each.size)])
