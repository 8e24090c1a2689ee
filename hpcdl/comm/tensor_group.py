"""Tensor parallelism by messages: Megatron's operators f and g over the ranks that share a layer.

The first matrix A of a block is cut by columns, the second B by rows, so that nothing is exchanged between them. On N
ranks, with A = [A1 ... AN] and B = [B1; ...; BN]:

    x -> f -> h = activation(x Ar) -> y = h Br -> g -> sum of all y

f and g are each other's backward. With sequence parallelism the rows outside a block (layer norms, residuals, dropout)
are cut, too, rows / N on each rank, and an all-reduce is split into its two halves:

           every rank holds all rows of x                 with sequence parallelism
           forward             backward                   forward                 backward
    f      x                   all-reduce of dx           all-gather of x         reduce-scatter of dx
    g      all-reduce of y     dy                         reduce-scatter of y     all-gather of dy

On a ring a rank sends 2 (N-1) K / N values, K = rows * width, in the 2 (N-1) messages of an all-reduce, and half of
both in each of its halves: the same in total. Sequence parallelism stores 1/N of the activations outside the blocks.
(Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model parallelism", 2019. Sequence
parallelism: Korthikanti et al., "Reducing activation recomputation in large transformer models", MLSys 2023)"""

from typing import Any

from hpcdl.comm.communicator import Communicator
from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array


class TensorGroup:
    """The `LayerGroup` (hpcdl/models/group.py) of the ranks of `comm`, which make the same calls in the same order. x,
    y, dx, dy: C-contiguous (rows, width), of equal shape on all ranks. pool: as hpcdl.models.pool.Pool."""

    def __init__(self, comm: Communicator, sequence: bool = False):
        self.comm, self.sequence = comm, sequence
        self.rank, self.size = comm.rank, comm.size

    def f(self, x: Array, pool: Any) -> Array:
        """Return all rows of x: forward, before the product with A. With sequence parallelism they come in a new array
        from the pool, (rows * size, width); the caller keeps x."""
        if not self.sequence:
            return x
        n, width = x.shape
        array = pool.take(n * self.size, width)
        array[self.rank * n : (self.rank + 1) * n] = x
        self.comm.all_gather(array)
        return array

    def f_backward(self, dx: Array, pool: Any) -> Array:
        """Replace dx by its sum over all ranks; return it: backward, after the product. With sequence parallelism give
        dx to the pool; return this rank's rows of it, (rows / size, width). UsageError if size does not divide rows."""
        if not self.sequence:
            self.comm.all_reduce(dx)
            return dx
        rows, width = dx.shape
        if rows % self.size:
            takes = f"sequence parallelism needs a multiple of {self.size} rows"
            raise UsageError(f"{rows} rows cannot be cut over {self.size} ranks: {takes}")
        part = pool.take(rows // self.size, width)
        part[...] = self.comm.reduce_scatter(dx).reshape(part.shape)
        pool.give(dx)
        return part

    def g(self, y: Array, pool: Any) -> Array:
        """Return the sum of y over all ranks, as `f_backward`: forward, after the product with B."""
        return self.f_backward(y, pool)

    def g_backward(self, dy: Array, pool: Any) -> Array:
        """Return all rows of dy, as `f` does of x. The backward pass calls it before its products with dy."""
        return self.f(dy, pool)

    def all_reduce(self, array: Array, op: str = "sum") -> None:
        """Replace `array` by its sum (mean, max, min) over all ranks, for a loss cut over classes."""
        self.comm.all_reduce(array, op)
