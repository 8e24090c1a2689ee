"""CUDA twins of attention.py: a block has a tile of queries, or of keys, and goes along the other tiles.

    forward, dq      block: TILE queries        for each tile of keys up to the diagonal
    dk, dv           block: TILE keys           for each tile of queries from the diagonal on

A block's threads form a square; each computes 2 x 2 scores, from parts of q and k, DEPTH elements deep, in shared
memory. Results grow in the arrays themselves, in rows that no other block has: the sums need no atomics, and a call
gives the same bits each time. dq and dk, dv are two kernels, which both compute the scores again. A block of the second
goes along the tiles of all query heads that share its head of keys."""

import math

from hpcdl.kernels import attention
from hpcdl.kernels.elementary import exp
from hpcdl.kernels.gpu import THREADS, cuda, cuda_kernel, group_max, group_sum

SIDE = math.isqrt(THREADS)
DEPTH, TILE = SIDE, 2 * SIDE
WIDE, DEEP = TILE + 1, DEPTH + 1  # of rows in shared memory: neighbouring rows begin in other banks


def least(a, b):
    """Return the smaller number: the built-in function does not compile here."""
    return a if a < b else b


def load(x, row, column, rows, columns, into):
    """into[r, d] <- x[row + r, column + d], zero from `rows` and `columns` on."""
    for n in range(cuda.threadIdx.x, TILE * DEPTH, THREADS):
        r, d = n // DEPTH, n % DEPTH
        into[r, d] = x[row + r, column + d] if r < rows and d < columns else x.dtype.type(0)


def scores(x, row, column, rows, y, y_row, y_column, y_rows, size, factor, parts, s):
    """s[r, c] <- factor times the sum over d of x[row + r, column + d] y[y_row + c, y_column + d]."""
    n = SIDE
    thread = cuda.threadIdx.x % (n * n)  # if THREADS is no square, some compute the same twice
    r, c, a00 = thread // n, thread % n, x.dtype.type(0)
    a01 = a10 = a11 = a00
    for d0 in range(0, size, DEPTH):
        cuda.syncthreads()
        load(x, row, column + d0, rows, size - d0, parts[0])
        load(y, y_row, y_column + d0, y_rows, size - d0, parts[1])
        cuda.syncthreads()
        for d in range(DEPTH):
            x0, x1, y0, y1 = parts[0, r, d], parts[0, r + n, d], parts[1, c, d], parts[1, c + n, d]
            a00 += x0 * y0
            a01 += x0 * y1
            a10 += x1 * y0
            a11 += x1 * y1
    s[r, c], s[r, c + n], s[r + n, c], s[r + n, c + n] = factor * a00, factor * a01, factor * a10, factor * a11
    cuda.syncthreads()


def add_product(s, along, y, y_row, y_column, y_rows, size, factor, into, row, column, rows, parts):
    """into[row + r, column + d] += factor times the sum over c of s[r, c] y[y_row + c, y_column + d].
    along: 1 for s[r, c], 0 for s[c, r] in its place."""
    for d0 in range(0, size, DEPTH):
        cuda.syncthreads()
        load(y, y_row, y_column + d0, y_rows, size - d0, parts[0])
        cuda.syncthreads()
        for n in range(cuda.threadIdx.x, TILE * DEPTH, THREADS):
            r, d = n // DEPTH, n % DEPTH
            if r < rows and d0 + d < size:
                total = y.dtype.type(0)
                for c in range(y_rows):
                    total += (s[r, c] if along else s[c, r]) * parts[0, c, d]
                into[row + r, column + d0 + d] += factor * total


def clear(into, row, column, rows, size, factors, many):
    """Multiply the block of `into` by factors[r] in row r, or write zeros if not `many`."""
    for n in range(cuda.threadIdx.x, rows * size, THREADS):
        r, d = n // size, n % size
        if many:
            into[row + r, column + d] *= factors[r]
        else:
            into[row + r, column + d] = 0
    cuda.syncthreads()


def exponentials(s, lanes, keys, ahead, many, top, norm, factor):
    """s[r, c] <- exp(s[r, c] - top[r]) for the keys c < ahead + r of query r, zero for others; the state of the online
    softmax goes on: top the largest score so far, norm the sum of exponentials, factor that of the sums before.
    many: 0 for the first tile, before which top and norm hold nothing. `lanes` neighbouring threads share a query."""
    thread, zero = cuda.threadIdx.x, s.dtype.type(0)
    r = thread // lanes
    count = least(keys, ahead + r)
    highest = -math.inf
    for c in range(thread % lanes, count, lanes):
        if s[r, c] > highest:
            highest = float(s[r, c])
    highest = group_max(highest, lanes)
    if many and top[r] > highest:
        highest = float(top[r])
    total, shift = 0.0, s.dtype.type(highest)
    for c in range(thread % lanes, TILE, lanes):
        p = exp(s[r, c] - shift) if c < count else zero
        s[r, c] = p
        total += float(p)
    total = group_sum(total, lanes)
    if thread % lanes == 0:
        factor[r] = exp(top[r] - shift) if many else zero
        norm[r] = s.dtype.type(total) + (norm[r] * factor[r] if many else zero)
        top[r] = shift
    cuda.syncthreads()


def normalize(a, lse, row, head, rows, size, top, norm, factor):
    """Divide the block of `a` by norm, and write lse = top + log(norm)."""
    for r in range(cuda.threadIdx.x, rows, THREADS):
        lse[row + r, head] = top[r] + lse.dtype.type(math.log(float(norm[r])))
        factor[r] = lse.dtype.type(1) / norm[r]
    cuda.syncthreads()
    clear(a, row, head * size, rows, size, factor, 1)


@cuda_kernel("T[:, ::1], int64, int64, T, T[:, ::1], T[:, ::1]")
def forward_tiles(qkv, length, size, scale, a, lse):
    """Write a and lse; a block takes one tile of queries of one head at a time."""
    s = cuda.shared.array((TILE, WIDE), T)  # noqa: F821 - see cuda_kernel
    parts = cuda.shared.array((2, TILE, DEEP), T)  # noqa: F821
    top = cuda.shared.array(TILE, T)  # noqa: F821
    norm = cuda.shared.array(TILE, T)  # noqa: F821
    factor = cuda.shared.array(TILE, T)  # noqa: F821
    width, tiles = a.shape[1], (length + TILE - 1) // TILE
    heads, lanes, shared = width // size, THREADS // TILE, (qkv.shape[1] - width) // 2
    for block in range(cuda.blockIdx.x, qkv.shape[0] // length * heads * tiles, cuda.gridDim.x):
        row, head, i0 = block // tiles // heads * length, block // tiles % heads, block % tiles * TILE
        at, queries = head * size, least(TILE, length - i0)
        key = width + at % shared
        clear(a, row + i0, at, queries, size, factor, 0)
        for j0 in range(0, i0 + 1, TILE):
            keys = least(TILE, length - j0)
            scores(qkv, row + i0, at, queries, qkv, row + j0, key, keys, size, scale, parts, s)
            exponentials(s, lanes, keys, i0 - j0 + 1, j0 > 0, top, norm, factor)
            if j0 > 0:
                clear(a, row + i0, at, queries, size, factor, 1)
            add_product(s, 1, qkv, row + j0, key + shared, keys, size, T(1), a, row + i0, at, queries, parts)  # noqa: F821
            cuda.syncthreads()
        normalize(a, lse, row + i0, head, queries, size, top, norm, factor)


def tile_backward(
    qkv, kv, a, da, lse, start, at, queries, row, key, shared, keys, ahead, size, scale, along, parts, s, ds
):
    """s <- p, ds <- its gradient's product with p, for a tile of queries from row `start`, of keys from `row`.
    along[r]: D of its queries. at: column of q, a and da; key, key + shared: columns of k and v in kv. Query r sees the
    keys c < ahead + r."""
    scores(qkv, start, at, queries, kv, row, key, keys, size, scale, parts, s)
    scores(da, start, at, queries, kv, row, key + shared, keys, size, scale / scale, parts, ds)
    for r in range(cuda.threadIdx.x, queries, THREADS):
        total = s.dtype.type(0)
        for d in range(size):
            total += a[start + r, at + d] * da[start + r, at + d]
        along[r] = total
    cuda.syncthreads()
    for n in range(cuda.threadIdx.x, TILE * TILE, THREADS):
        r, c = n // TILE, n % TILE
        if r < queries and c < keys and c < ahead + r:
            p = exp(s[r, c] - lse[start + r, at // size])
            s[r, c], ds[r, c] = p, p * (ds[r, c] - along[r])
        else:
            s[r, c] = ds[r, c] = 0
    cuda.syncthreads()


BACKWARD = "T[:, ::1], T[:, ::1], T[:, ::1], T[:, ::1], int64, int64, T, T[:, ::1]"


@cuda_kernel(BACKWARD)
def query_tiles(qkv, a, da, lse, length, size, scale, dqkv):
    """Write dq; a block takes one tile of queries of one head at a time."""
    s = cuda.shared.array((TILE, WIDE), T)  # noqa: F821
    ds = cuda.shared.array((TILE, WIDE), T)  # noqa: F821
    parts = cuda.shared.array((2, TILE, DEEP), T)  # noqa: F821
    along = cuda.shared.array(TILE, T)  # noqa: F821
    width, tiles = a.shape[1], (length + TILE - 1) // TILE
    heads, shared = width // size, (qkv.shape[1] - width) // 2
    for block in range(cuda.blockIdx.x, qkv.shape[0] // length * heads * tiles, cuda.gridDim.x):
        row, at, i0 = block // tiles // heads * length, block // tiles % heads * size, block % tiles * TILE
        queries, key = least(TILE, length - i0), width + at % shared
        clear(dqkv, row + i0, at, queries, size, along, 0)
        for j0 in range(0, i0 + 1, TILE):
            keys, ahead, q, k = least(TILE, length - j0), i0 - j0 + 1, row + i0, row + j0
            tile_backward(
                qkv, qkv, a, da, lse, q, at, queries, k, key, shared, keys, ahead, size, scale, along, parts, s, ds
            )
            add_product(ds, 1, qkv, k, key, keys, size, scale, dqkv, q, at, queries, parts)
            cuda.syncthreads()


@cuda_kernel(BACKWARD)
def key_tiles(qkv, a, da, lse, length, size, scale, dqkv):
    """Write dk and dv; a block takes one tile of keys of one head at a time."""
    s = cuda.shared.array((TILE, WIDE), T)  # noqa: F821
    ds = cuda.shared.array((TILE, WIDE), T)  # noqa: F821
    parts = cuda.shared.array((2, TILE, DEEP), T)  # noqa: F821
    along = cuda.shared.array(TILE, T)  # noqa: F821
    width, tiles = a.shape[1], (length + TILE - 1) // TILE
    shared = (qkv.shape[1] - width) // 2
    heads = shared // size
    for block in range(cuda.blockIdx.x, qkv.shape[0] // length * heads * tiles, cuda.gridDim.x):
        row, first, j0 = block // tiles // heads * length, block // tiles % heads * size, block % tiles * TILE
        keys, key = least(TILE, length - j0), width + first
        clear(dqkv, row + j0, key, keys, size, along, 0)
        clear(dqkv, row + j0, key + shared, keys, size, along, 0)
        for at in range(first, width, shared):
            for i0 in range(j0, length, TILE):
                queries, ahead, q, k = least(TILE, length - i0), i0 - j0 + 1, row + i0, row + j0
                tile_backward(
                    qkv, qkv, a, da, lse, q, at, queries, k, key, shared, keys, ahead, size, scale, along, parts, s, ds
                )
                add_product(ds, 0, qkv, q, at, queries, size, scale, dqkv, k, key, keys, parts)
                add_product(s, 0, da, q, at, queries, size, T(1), dqkv, k, key + shared, keys, parts)  # noqa: F821
                cuda.syncthreads()


def blocks(rows: int, heads: int, length: int) -> int:
    """Return the number of tiles of queries, or of keys, of all heads."""
    return rows // length * heads * -(-length // TILE)


@attention.causal_attention.device(forward_tiles)
def causal_attention(qkv, length, size, scale, a, lse):
    """Write a and lse."""
    forward_tiles(qkv.dtype, blocks(len(qkv), a.shape[1] // size, length), qkv, length, size, scale, a, lse)


@attention.causal_attention_backward.device(query_tiles, key_tiles)
def causal_attention_backward(qkv, a, da, lse, length, size, scale, dqkv):
    """Write dqkv."""
    shared = (qkv.shape[1] - a.shape[1]) // 2
    for kernel, width in ((query_tiles, a.shape[1]), (key_tiles, shared)):
        kernel(qkv.dtype, blocks(len(qkv), width // size, length), qkv, a, da, lse, length, size, scale, dqkv)
