"""A vector of which each rank holds a part: how a checkpoint collects it and gives the parts back.

    rank 0    # # # # . . . . . . . .        speaks for the first four elements
    rank 1    + + + + . . . . . . . .        holds a copy, and sends nothing when the vector is gathered
    rank 2    . . . . # # . . # # . .        two blocks, of a weight that is cut by columns
    rank 3    . . . . . . # # . . # #

A checkpoint has the whole vector in the order of the layout, so that any other cut can load it. Each rank writes the
elements that it speaks for (`portion`) and reads its own part (`read`). If the ranks do not see the same files, or
there is only one rank, the whole vector passes through host memory of rank 0 (`gather`, `scatter`)."""

from typing import TYPE_CHECKING

import numpy as np

from hpcdl.checkpoint.checkpoint_file import Stored
from hpcdl.checkpoint.shards import Portion, read_into
from hpcdl.comm import Communicator
from hpcdl.kernels.device import Array, device_of

if TYPE_CHECKING:
    from hpcdl.models.layout import Hyperslab


class CutVector:
    """This rank's part `array` of a vector of `size` elements; a `Tracked` (state.py). Its constructor is collective.
    pieces: [(hpcdl.models.layout.Hyperslab, True if this rank speaks for it), ...]; each element has one speaker."""

    def __init__(self, comm: Communicator, array: Array, pieces: "list[tuple[Hyperslab, bool]]", size: int):
        self.array, self.pieces, self.size = array, pieces, size
        with comm.inside("gather the cut"):
            self.everyone = comm.mpi.gather(pieces)

    def stored(self, name: str) -> str:
        return name

    def form(self, ranks: int) -> tuple[tuple[int, ...], np.dtype]:
        return (self.size,), self.array.dtype

    def portion(self) -> Portion:
        """Return the elements that this rank writes to a checkpoint."""
        return Portion(self.array, [piece for piece, speaks in self.pieces if speaks], self.size)

    def read(self, name: str, stored: Stored) -> bool:
        """Read this rank's part; True if all values are finite. Raises UsageError if the checkpoint has changed."""
        with stored.opened() as file:
            return read_into(file[name], [piece for piece, _ in self.pieces], self.array)

    def gather(self, comm: Communicator) -> np.ndarray | None:
        own_part: np.ndarray = self.portion().copied().array
        if comm.rank > 0:
            comm.push(own_part, 0)
            return None
        assert self.everyone is not None
        whole = np.empty(self.size, own_part.dtype)
        for rank, pieces in enumerate(self.everyone):
            if rank > 0:
                own_part = np.empty(sum(piece.size for piece, speaks in pieces if speaks), whole.dtype)
                comm.wait(own_part, rank)
            place(own_part, [piece for piece, speaks in pieces if speaks], whole)
        return whole

    def scatter(self, comm: Communicator, whole: np.ndarray | None) -> None:
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


def blocks(whole: np.ndarray, piece: "Hyperslab") -> np.ndarray:
    """Return a view, of shape (blocks, length), of a piece's elements in the whole vector."""
    item = whole.itemsize
    shape, strides = (piece.blocks, piece.length), (piece.stride * item, item)
    return np.lib.stride_tricks.as_strided(whole[piece.start :], shape, strides)


def place(values: np.ndarray, pieces: "list[Hyperslab]", whole: np.ndarray) -> None:
    """Write `values`, the elements of the pieces one after another, to their places in the whole vector."""
    start = 0
    for piece in pieces:
        if piece.size:
            blocks(whole, piece)[...] = values[start : start + piece.size].reshape(piece.blocks, piece.length)
        start += piece.size


def take(whole: np.ndarray, pieces: "list[Hyperslab]") -> np.ndarray:
    """Return the elements that the pieces have in the whole vector, one piece after another."""
    return np.concatenate([np.empty(0, whole.dtype), *(blocks(whole, each).ravel() for each in pieces if each.size)])
