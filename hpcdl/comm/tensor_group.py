"""Megatron's operators f and g over ranks that each hold a part of a layer's matrices.

A block of layers is cut twice, so that nothing is exchanged in between: its first matrix A by columns, its second B by
rows. On N ranks, with A = [A1 ... AN] and B = [B1; ...; BN]:

    x -> f -> h = activation(x Ar) -> y = h Br -> g -> sum of all y

f and g are each other's backward. Without sequence parallelism all ranks hold all rows of x:

                forward                     backward
    f           x as it is                  all-reduce of dx (each rank has that of its columns)
    g           all-reduce of y             dy as it is

With it, the rows outside such a block (layer norms, residuals, dropout) are cut too, n = rows / N on each rank, and an
all-reduce becomes its two halves:

                forward                     backward
    f           all-gather of x             reduce-scatter of dx
    g           reduce-scatter of y         all-gather of dy

    cost, K = rows * width        values sent by a rank, ring           messages
    all-reduce                    2 (N-1) K / N                         2 (N-1)
    all-gather, reduce-scatter    (N-1) K / N                           N - 1

Forward and backward together send the same either way; sequence parallelism keeps 1/N of the activations outside the
blocks. (Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model parallelism", 2019.
Sequence parallelism: Korthikanti et al., "Reducing activation recomputation in large transformer models", MLSys 2023.)
"""

from typing import Any

from hpcdl.comm.communicator import Communicator
from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array


class TensorGroup:
    """The ranks of `comm` as the group of a layer that is cut over them.

    x, y, dx, dy are C-contiguous (rows, width), rows a multiple of `size` where they are to be cut; the same shape on
    all ranks. pool: has take(*shape) and give(buffer), as hpcdl.models.pool.Pool. All ranks call the same operators in
    the same order.
    """

    def __init__(self, comm: Communicator, sequence: bool = False):
        self.comm, self.sequence = comm, sequence
        self.rank, self.size = comm.rank, comm.size

    def f(self, x: Array, pool: Any) -> Array:
        """Forward, before a product with a matrix cut by columns: x with all its rows.

        sequence: a new array from the pool, (rows * size, width); x stays with the caller.
        """
        return self._gather(x, pool) if self.sequence else x

    def f_backward(self, dx: Array, pool: Any) -> Array:
        """Backward, after the products of all ranks: their sum, in dx's place.

        sequence: this rank's rows of it, (rows / size, width), a new array from the pool, to which dx goes back.
        """
        return self._sum(dx, pool)

    def g(self, y: Array, pool: Any) -> Array:
        """Forward, after a product with a matrix cut by rows: the sum over all ranks, as `f_backward`."""
        return self._sum(y, pool)

    def g_backward(self, dy: Array, pool: Any) -> Array:
        """Backward, before the products of all ranks: dy with all its rows, as `f`."""
        return self._gather(dy, pool) if self.sequence else dy

    def all_reduce(self, array: Array, op: str = "sum") -> None:
        """Replace `array` by its sum (mean, max, min) over all ranks: what a loss cut over classes needs."""
        self.comm.all_reduce(array, op)

    def _gather(self, part: Array, pool: Any) -> Array:
        n, width = part.shape
        whole = pool.take(n * self.size, width)
        whole[self.rank * n : (self.rank + 1) * n] = part
        self.comm.all_gather(whole)
        return whole

    def _sum(self, whole: Array, pool: Any) -> Array:
        if not self.sequence:
            self.comm.all_reduce(whole)
            return whole
        rows, width = whole.shape
        if rows % self.size:
            raise UsageError(
                f"{rows} rows cannot be cut over {self.size} ranks: sequence parallelism takes multiples of {self.size}"
            )
        part = pool.take(rows // self.size, width)
        part[...] = self.comm.reduce_scatter(whole).reshape(part.shape)
        pool.give(whole)
        return part
