"""Tensor parallelism by messages: Megatron's operators f and g over the ranks that share a layer.

The first matrix A of a block is cut by columns, the second B by rows, so that nothing is exchanged between them. On N
ranks, with A = [A1 ... AN] and B = [B1; ...; BN]:

    x -> f -> h = activation(x Ar) -> y = h Br -> g -> sum of all y

f and g are each other's backward. Without sequence parallelism every rank holds all rows of x:

                forward                     backward
    f           x as it is                  all-reduce of dx (each rank has that of its columns)
    g           all-reduce of y             dy as it is

With sequence parallelism the rows outside a block (layer norms, residuals, dropout) are cut, too, n = rows / N on each
rank, and an all-reduce is split into its two halves:

                forward                     backward
    f           all-gather of x             reduce-scatter of dx
    g           reduce-scatter of y         all-gather of dy

    cost, K = rows * width        values sent by a rank, ring           messages
    all-reduce                    2 (N-1) K / N                         2 (N-1)
    all-gather, reduce-scatter    (N-1) K / N                           N - 1

Both send the same in forward and backward together; sequence parallelism stores 1/N of the activations outside the
blocks. (Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model parallelism", 2019.
Sequence parallelism: Korthikanti et al., "Reducing activation recomputation in large transformer models", MLSys 2023.)
"""

from typing import Any

from hpcdl.comm.communicator import Communicator
from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array


class TensorGroup:
    """The `LayerGroup` (hpcdl/models/group.py) of the ranks of `comm`.

    x, y, dx, dy are C-contiguous (rows, width), of the same shape on all ranks; rows that are cut are a multiple of
    `size`. pool: has take(*shape) and give(buffer), as hpcdl.models.pool.Pool. All ranks call the same operators in the
    same order.
    """

    def __init__(self, comm: Communicator, sequence: bool = False):
        self.comm, self.sequence = comm, sequence
        self.rank, self.size = comm.rank, comm.size

    def f(self, x: Array, pool: Any) -> Array:
        """Return x with all its rows: forward, before a product with a matrix cut by columns.

        With sequence parallelism it is a new array from the pool, (rows * size, width); the caller keeps x.
        """
        return self._gather(x, pool) if self.sequence else x

    def f_backward(self, dx: Array, pool: Any) -> Array:
        """Return the sum of dx over all ranks, in dx's place: backward, after the product.

        With sequence parallelism: this rank's rows of the sum, (rows / size, width), in exchange for dx, from the pool.
        """
        return self._sum(dx, pool)

    def g(self, y: Array, pool: Any) -> Array:
        """Return the sum over all ranks, as `f_backward`: forward, after a product with a matrix cut by rows."""
        return self._sum(y, pool)

    def g_backward(self, dy: Array, pool: Any) -> Array:
        """Return dy with all its rows, as `f`: backward, before the product."""
        return self._gather(dy, pool) if self.sequence else dy

    def all_reduce(self, array: Array, op: str = "sum") -> None:
        """Replace `array` by its sum (mean, max, min) over all ranks, for a loss cut over classes."""
        self.comm.all_reduce(array, op)

    def _gather(self, part: Array, pool: Any) -> Array:
        n, width = part.shape
        array = pool.take(n * self.size, width)
        array[self.rank * n : (self.rank + 1) * n] = part
        self.comm.all_gather(array)
        return array

    def _sum(self, array: Array, pool: Any) -> Array:
        if not self.sequence:
            self.comm.all_reduce(array)
            return array
        rows, width = array.shape
        if rows % self.size:
            raise UsageError(
                f"{rows} rows cannot be cut over {self.size} ranks: sequence parallelism takes multiples of {self.size}"
            )
        part = pool.take(rows // self.size, width)
        part[...] = self.comm.reduce_scatter(array).reshape(part.shape)
        pool.give(array)
        return part
