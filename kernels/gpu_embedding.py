"""CUDA twins of embedding.py.

Each element of a gradient belongs to one thread, which adds to it in the order of the rows: so threads do not conflict,
and the order of additions is fixed. For embed_backward a block takes LANES columns, and its threads form groups of
LANES. Of the groups with the same columns, group g owns the rows of the table whose number, modulo the
number of groups, is g. All groups read all tokens, and each adds those of its rows.
"""

import numba
import numpy as np

from hpcdl.kernels import embedding
from hpcdl.kernels.embedding import row_of
from hpcdl.kernels.gpu import (
    BLOCKS,
    LANES,
    THREADS,
    add_up,
    block_sum,
    cuda,
    cuda_kernel,
    cuda_rowwise,
    scratch,
    total_of,
)


@cuda_rowwise("T[:, ::1], T[:, ::1], int64, T[:, ::1]", over="out")
def copy_rows(i, j, tokens, table, first, out):
    """out[i, j] = table[token i - first, j], zero if there is no such row."""
    row = row_of(tokens[i // tokens.shape[1], i % tokens.shape[1]], first, table.shape[0])
    out[i, j] = table[row, j] if row >= 0 else out.dtype.type(0)


@cuda_kernel("T[:, ::1], int64, float64[:, ::1]")
def count_invalid(tokens, vocabulary, partial):
    """partial[k, 0] = number of invalid tokens that block k has read."""
    invalid, length = 0.0, tokens.shape[1]
    for k in range(cuda.grid(1), tokens.shape[0] * length, cuda.gridsize(1)):
        if row_of(tokens[k // length, k % length], 0, vocabulary) < 0:
            invalid += 1.0
    invalid = block_sum(invalid)
    if cuda.threadIdx.x == 0:
        partial[cuda.blockIdx.x, 0] = invalid


@cuda_kernel("T[:, ::1], T[:, ::1], int64, T[:, ::1], int64")
def add_tokens(tokens, dy, first, gradient, parts):
    """Block (tile, part): LANES columns, and THREADS // LANES of the groups of rows; parts is a power of two."""
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


@embedding.embed.device(copy_rows, count_invalid, add_up)
def embed(tokens, table, first, vocabulary, out):
    """out[k] = table[token k - first]; return -1 if a value is no token, else 0."""
    blocks = min(BLOCKS, -(-tokens.size // THREADS))
    partial = scratch("float64", blocks, 1)
    copy_rows(tokens.dtype, -(-out.size // THREADS), tokens, table, first, out)
    count_invalid(tokens.dtype, blocks, tokens, vocabulary, partial)
    return -1 if np.any(total_of(partial)) else 0


@embedding.embed_backward.device(add_tokens)
def embed_backward(tokens, dy, first, gradient):
    """gradient[token k - first] += dy[k], for the tokens whose row is here."""
    own, width = gradient.shape
    tiles, parts = -(-width // LANES), 1
    # More groups share the additions, but each reads all tokens: so at most half of BLOCKS, and no group without rows.
    while 2 * parts * tiles <= BLOCKS // 2 and parts * (THREADS // LANES) < own:
        parts *= 2
    add_tokens(tokens.dtype, tiles * parts if tokens.size else 0, tokens, dy, first, gradient, parts)


@embedding.add_positions_backward.device(add_sequences)
def add_positions_backward(dy, gradient, length, offset):
    """gradient[(i + offset) mod length] += dy[i]."""
    add_sequences(dy.dtype, -(-length * dy.shape[1] // THREADS), dy, gradient, length, offset)
