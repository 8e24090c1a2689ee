"""CUDA twins of block_attention.py: a block has a tile of queries, or of keys, and goes along the other tiles.

    forward, dq      block: TILE queries        for each tile of the block's keys
    dk, dv           block: TILE keys           for each tile of queries, of all query heads with these keys

As in gpu_attention.py, results grow in the arrays themselves, in rows that no other block has. The first state of the
online softmax is (lse, 1, a)."""

from hpcdl.kernels import block_attention
from hpcdl.kernels.gpu import THREADS, cuda, cuda_kernel
from hpcdl.kernels.gpu_attention import (
    DEEP,
    TILE,
    WIDE,
    add_product,
    clear,
    exponentials,
    least,
    normalize,
    scores,
    tile_backward,
)


@cuda_kernel("T[:, ::1], T[:, ::1], int64, int64, int64, int64, T, T[:, ::1], T[:, ::1]")
def join_tiles(qkv, kv, length, first, keys, size, scale, a, lse):
    """Join into a and lse; a block takes one tile of queries of one head at a time."""
    s = cuda.shared.array((TILE, WIDE), T)  # noqa: F821 - see cuda_kernel
    parts = cuda.shared.array((2, TILE, DEEP), T)  # noqa: F821
    top = cuda.shared.array(TILE, T)  # noqa: F821
    norm = cuda.shared.array(TILE, T)  # noqa: F821
    factor = cuda.shared.array(TILE, T)  # noqa: F821
    thread, count, shared = cuda.threadIdx.x, length - first, kv.shape[1] // 2
    tiles, heads, lanes = (count + TILE - 1) // TILE, a.shape[1] // size, THREADS // TILE
    for block in range(cuda.blockIdx.x, qkv.shape[0] // length * heads * tiles, cuda.gridDim.x):
        row, head, i0 = block // tiles // heads * length, block // tiles % heads, block % tiles * TILE
        at, queries, start = head * size, least(TILE, count - i0), row + first + i0
        key = at % shared
        for r in range(thread, TILE, THREADS):
            top[r] = lse[start + r, head] if r < queries else T(0)  # noqa: F821
            norm[r] = T(1)  # noqa: F821
        cuda.syncthreads()
        for j0 in range(0, keys, TILE):
            inside = least(TILE, keys - j0)
            scores(qkv, start, at, queries, kv, row + j0, key, inside, size, scale, parts, s)
            exponentials(s, lanes, inside, inside, 1, top, norm, factor)
            clear(a, start, at, queries, size, factor, 1)
            add_product(s, 1, kv, row + j0, shared + key, inside, size, T(1), a, start, at, queries, parts)  # noqa: F821
            cuda.syncthreads()
        normalize(a, lse, start, head, queries, size, top, norm, factor)


BACKWARD = "T[:, ::1], T[:, ::1], T[:, ::1], T[:, ::1], T[:, ::1], int64, int64, int64, int64, T, T[:, ::1], T[:, ::1]"


@cuda_kernel(BACKWARD)
def query_tiles(qkv, kv, a, da, lse, length, first, keys, size, scale, dqkv, dkv):
    """Add to dq; a block takes one tile of queries of one head at a time."""
    s = cuda.shared.array((TILE, WIDE), T)  # noqa: F821
    ds = cuda.shared.array((TILE, WIDE), T)  # noqa: F821
    parts = cuda.shared.array((2, TILE, DEEP), T)  # noqa: F821
    along = cuda.shared.array(TILE, T)  # noqa: F821
    count, shared, heads = length - first, kv.shape[1] // 2, a.shape[1] // size
    tiles = (count + TILE - 1) // TILE
    for block in range(cuda.blockIdx.x, qkv.shape[0] // length * heads * tiles, cuda.gridDim.x):
        row, at, i0 = block // tiles // heads * length, block // tiles % heads * size, block % tiles * TILE
        queries, q, key = least(TILE, count - i0), row + first + i0, at % shared
        for j0 in range(0, keys, TILE):
            inside, k = least(TILE, keys - j0), row + j0
            tile_backward(
                qkv, kv, a, da, lse, q, at, queries, k, key, shared, inside, inside, size, scale, along, parts, s, ds
            )
            add_product(ds, 1, kv, k, key, inside, size, scale, dqkv, q, at, queries, parts)
            cuda.syncthreads()


@cuda_kernel(BACKWARD)
def key_tiles(qkv, kv, a, da, lse, length, first, keys, size, scale, dqkv, dkv):
    """Add to dk and dv; a block takes one tile of keys of one head at a time."""
    s = cuda.shared.array((TILE, WIDE), T)  # noqa: F821
    ds = cuda.shared.array((TILE, WIDE), T)  # noqa: F821
    parts = cuda.shared.array((2, TILE, DEEP), T)  # noqa: F821
    along = cuda.shared.array(TILE, T)  # noqa: F821
    count, shared = length - first, kv.shape[1] // 2
    tiles, heads = (keys + TILE - 1) // TILE, shared // size
    for block in range(cuda.blockIdx.x, qkv.shape[0] // length * heads * tiles, cuda.gridDim.x):
        row, key, j0 = block // tiles // heads * length, block // tiles % heads * size, block % tiles * TILE
        inside = least(TILE, keys - j0)
        for at in range(key, a.shape[1], shared):
            for i0 in range(0, count, TILE):
                queries, q, k = least(TILE, count - i0), row + first + i0, row + j0
                tile_backward(
                    qkv,
                    kv,
                    a,
                    da,
                    lse,
                    q,
                    at,
                    queries,
                    k,
                    key,
                    shared,
                    inside,
                    inside,
                    size,
                    scale,
                    along,
                    parts,
                    s,
                    ds,
                )
                add_product(ds, 0, qkv, q, at, queries, size, scale, dkv, k, key, inside, parts)
                add_product(s, 0, da, q, at, queries, size, T(1), dkv, k, shared + key, inside, parts)  # noqa: F821
                cuda.syncthreads()


def tiles_of(rows: int, length: int, columns: int, count: int) -> int:
    """Return the number of tiles of `count` tokens of each sequence, of so many heads."""
    return rows // length * columns * -(-count // TILE)


@block_attention.attend_block.device(join_tiles)
def attend_block(qkv, kv, length, first, keys, size, scale, a, lse):
    """Join into a and lse."""
    blocks = tiles_of(len(qkv), length, a.shape[1] // size, length - first)
    join_tiles(qkv.dtype, blocks, qkv, kv, length, first, keys, size, scale, a, lse)


@block_attention.attend_block_backward.device(query_tiles, key_tiles)
def attend_block_backward(qkv, kv, a, da, lse, length, first, keys, size, scale, dqkv, dkv):
    """Add to dq and dkv."""
    rows, shared = len(qkv), kv.shape[1] // 2
    for kernel, blocks in (
        (query_tiles, tiles_of(rows, length, a.shape[1] // size, length - first)),
        (key_tiles, tiles_of(rows, length, shared // size, keys)),
    ):
        kernel(qkv.dtype, blocks, qkv, kv, a, da, lse, length, first, keys, size, scale, dqkv, dkv)
