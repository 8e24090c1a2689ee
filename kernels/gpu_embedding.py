"""CUDA twins of embedding.py.

One thread adds to an element of a gradient, in the order of the rows: no conflicts, and a fixed order of additions. For
embed_backward a block takes LANES columns, and its threads form groups of LANES. Of the G groups with the same columns,
group g owns the rows g, g + G, ... of the table. Each group reads all tokens, and adds dy for tokens of its rows."""

import numba

from hpcdl.kernels import embedding, gpu
from hpcdl.kernels.embedding import row_of
from hpcdl.kernels.gpu import BLOCKS, LANES, THREADS, block_sum, cuda, cuda_kernel, cuda_rowwise


@cuda_rowwise("T[:, ::1], T[:, ::1], int64, T[:, ::1]", over="out")
def copy_rows(i, j, tokens, table, first, out):
    """out[i, j] = table[token i - first, j], zero if there is no such row."""
    row = row_of(tokens[i // tokens.shape[1], i % tokens.shape[1]], first, table.shape[0])
    out[i, j] = table[row, j] if row >= 0 else out.dtype.type(0)


@cuda_kernel("T[:, ::1], int64, float64[:, ::1]")
def count_invalid(tokens, vocabulary, partial):
    """partial[k, 0] = the number of invalid tokens that block k reads."""
    invalid, length = 0.0, tokens.shape[1]
    for k in range(cuda.grid(1), tokens.shape[0] * length, cuda.gridsize(1)):
        if row_of(tokens[k // length, k % length], 0, vocabulary) < 0:
            invalid += 1.0
    invalid = block_sum(invalid)
    if cuda.threadIdx.x == 0:
        partial[cuda.blockIdx.x, 0] = invalid


@cuda_kernel("T[:, ::1], T[:, ::1], int64, T[:, ::1], int64")
def add_tokens(tokens, dy, first, gradient, parts):
    """Add dy[k] of all tokens k to their rows of the gradient. A block has LANES columns, and THREADS // LANES groups
    of threads. parts: number of blocks that share the columns, a power of two."""
    shared = cuda.shared.array(THREADS, numba.int64)
    thread, groups, length = cuda.threadIdx.x, parts * (THREADS // LANES), tokens.shape[1]
    own, width = gradient.shape
    size, tiles = tokens.shape[0] * length, (width + LANES - 1) // LANES
    for block in range(cuda.blockIdx.x, tiles * parts, cuda.gridDim.x):
        j = block // parts * LANES + thread % LANES
        group = block % parts * (THREADS // LANES) + thread // LANES
        for start in range(0, size, THREADS):
            k, count = start + thread, size - start
            shared[thread] = row_of(tokens[k // length, k % length], first, own) if k < size else -1
            cuda.syncthreads()
            if j < width:
                for t in range(count if count < THREADS else THREADS):
                    row = shared[t]
                    if row >= 0 and row & (groups - 1) == group:
                        gradient[row, j] += dy[start + t, j]
            cuda.syncthreads()


@cuda_kernel("T[:, ::1], T[:, ::1], int64, int64")
def add_sequences(dy, gradient, length, offset):
    """gradient[(i + offset) mod length] += dy[i], with one thread for each element of the gradient."""
    width = gradient.shape[1]
    for k in range(cuda.grid(1), length * width, cuda.gridsize(1)):
        position, j, total = k // width, k % width, T(0)  # noqa: F821 - see cuda_kernel
        for i in range((position - offset) % length, dy.shape[0], length):
            total += dy[i, j]
        gradient[position, j] += total


@embedding.embed.device(copy_rows, count_invalid, gpu.add_up)
def embed(tokens, table, first, vocabulary, out):
    gpu.launch_over(copy_rows, out, tokens, table, first, out)
    return -1 if gpu.sums_of(count_invalid, tokens.size, 1, tokens, vocabulary)[0] else 0


@embedding.embed_backward.device(add_tokens)
def embed_backward(tokens, dy, first, gradient):
    own, width = gradient.shape
    tiles, parts = -(-width // LANES), 1
    # More groups share the additions, but each reads all tokens: so at most half of BLOCKS, and no group without rows.
    while 2 * parts * tiles <= BLOCKS // 2 and parts * (THREADS // LANES) < own:
        parts *= 2
    add_tokens(tokens.dtype, tiles * parts if tokens.size else 0, tokens, dy, first, gradient, parts)


@embedding.add_positions_backward.device(add_sequences)
def add_positions_backward(dy, gradient, length, offset):
    add_sequences(dy.dtype, -(-length * dy.shape[1] // THREADS), dy, gradient, length, offset)
