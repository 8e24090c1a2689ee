"""CUDA twins of norm.py: every block sums its elements, then one block adds the blocks' sums."""

from hpcdl.kernels import norm
from hpcdl.kernels.gpu import add_up, block_sum, cuda, cuda_kernel, sums_of


@cuda_kernel("T[::1], float64[:, ::1]")
def squares(x, partial):
    """partial[k, 0] = the sum of x[i]^2 over the elements of block k."""
    total = 0.0
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        value = float(x[i])
        total += value * value
    total = block_sum(total)
    if cuda.threadIdx.x == 0:
        partial[cuda.blockIdx.x, 0] = total


@norm.sum_of_squares.device(squares, add_up)
def sum_of_squares(x):
    """Return the sum of x[i]^2 as float64."""
    return sums_of(squares, x.size, 1, x)[0]
