"""Attention of queries to a block of earlier keys, joined into what other blocks gave: one step of ring attention.

    s_ij = scale q_i k_j        for queries i from `first` on, and the first `keys` keys j of the block: no mask

    forward     lse'_i = log(exp(lse_i) + sum_j exp(s_ij))
                a'_i = (exp(lse_i) a_i + sum_j exp(s_ij) v_j) / exp(lse'_i)

    backward    p_ij = exp(s_ij - lse_i), lse of all blocks     ds_ij = p_ij (da_i v_j - D_i),  D_i = sum_d da_id a_id
                dv_j += sum_i p_ij da_i      dq_i += scale sum_j ds_ij k_j      dk_j += scale sum_i ds_ij q_i

a and lse of any number of blocks, in any order, are those of one softmax over all their keys: (lse, 1, a) is a state of
the online softmax (attention.py), in which a tile of scores is the next block. The tiles are those of attention.py.

qkv, a, da, lse and dqkv are as there: rows of `length` tokens a sequence. kv and dkv are (sequences * length, 2 *
kv_heads * size): k, then v, of the same tokens' places on another rank. Query head h has the keys of head h mod
kv_heads.
(Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for near-infinite context", 2023)"""

import math

import numpy as np

from hpcdl.kernels.attention import (
    TILE,
    dot,
    exponentials,
    padded,
    raise_tops,
    read_head,
    read_keys,
    read_queries,
    scores,
    scores_backward,
    shrink,
    sum_over_keys,
    sum_over_queries,
    write_row,
)
from hpcdl.kernels.bind import block, function
from hpcdl.kernels.register_tile import BYTES


@function
def add_row(x, factor, into):
    """into += factor x."""
    for d in range(into.size):
        into[d] += factor * x[d]


@block("T[:, ::1], T[:, ::1], int64, int64, int64, int64, T, T[:, ::1], T[:, ::1]")
def attend_block(qkv, kv, length, first, keys, size, scale, a, lse):
    """Join the attention of the queries from `first` on, in each sequence, to `keys` keys into a and lse."""
    kind, lanes, width, shared = qkv.dtype.type, BYTES // qkv.itemsize, a.shape[1], kv.shape[1] // 2
    one, count = kind(1), length - first
    tall, deep, wide, tiles = padded(count, lanes), padded(keys, lanes), padded(size, lanes), -(-count // TILE)
    q, total = np.zeros((tall, wide), qkv.dtype), np.zeros((tall, wide), qkv.dtype)
    k, v = np.zeros((deep, wide), qkv.dtype), np.zeros((deep, wide), qkv.dtype)
    q_t, s = np.zeros((tiles, wide, TILE), qkv.dtype), np.zeros((TILE, TILE), qkv.dtype)
    top, factor, norm = np.zeros(TILE, qkv.dtype), np.empty(TILE, qkv.dtype), np.empty(TILE, qkv.dtype)
    for row in range(0, qkv.shape[0], length):
        for key in range(0, shared, size):
            read_keys(kv[row : row + keys], key, shared, size, k, v)
            for at in range(key, width, shared):
                read_queries(qkv[row + first : row + length], at, size, scale, q, q_t)
                read_head(a[row + first : row + length], at, one, total[:count, :size])
                for i0 in range(0, count, TILE):
                    queries = min(TILE, tall - i0)
                    for i in range(min(TILE, count - i0)):
                        top[i] = lse[row + first + i0 + i, at // size]
                    norm[:] = one
                    for j0 in range(0, keys, TILE):
                        inside = min(TILE, keys - j0)
                        scores(k, q_t, j0, i0, padded(inside, lanes), queries, lanes, size, False, s)
                        factor[:] = top
                        raise_tops(s, inside, top)
                        shrink(factor, top, norm, total[i0:])
                        exponentials(s, inside, top, norm)
                        sum_over_keys(s, v, j0, i0, inside, queries, lanes, False, total)
                    for i in range(min(TILE, count - i0)):
                        write_row(total[i0 + i], one / norm[i], a[row + first + i0 + i, at : at + size])
                        lse[row + first + i0 + i, at // size] = top[i] + math.log(norm[i])


@block("T[:, ::1], T[:, ::1], T[:, ::1], T[:, ::1], T[:, ::1], int64, int64, int64, int64, T, T[:, ::1], T[:, ::1]")
def attend_block_backward(qkv, kv, a, da, lse, length, first, keys, size, scale, dqkv, dkv):
    """Add to dq, the first columns of dqkv, and to dkv, the gradients by this block's part of a; lse: of all blocks."""
    kind, lanes, width, shared = qkv.dtype.type, BYTES // qkv.itemsize, a.shape[1], kv.shape[1] // 2
    one, count = kind(1), length - first
    tall, deep, wide, tiles = padded(count, lanes), padded(keys, lanes), padded(size, lanes), -(-count // TILE)
    q, g, dq = np.zeros((tall, wide), qkv.dtype), np.zeros((tall, wide), qkv.dtype), np.zeros((tall, wide), qkv.dtype)
    blocks = np.zeros((4, deep, wide), qkv.dtype)
    k, v, dk, dv = blocks[0], blocks[1], blocks[2], blocks[3]
    q_t, g_t = np.zeros((tiles, wide, TILE), qkv.dtype), np.zeros((tiles, wide, TILE), qkv.dtype)
    along, offset = np.zeros(tiles * TILE, qkv.dtype), np.zeros(tiles * TILE, qkv.dtype)
    s, ds = np.zeros((TILE, TILE), qkv.dtype), np.zeros((TILE, TILE), qkv.dtype)
    for row in range(0, qkv.shape[0], length):
        start = row + first
        for key in range(0, shared, size):
            read_keys(kv[row : row + keys], key, shared, size, k, v)
            blocks[2:] = 0
            for at in range(key, width, shared):
                read_queries(qkv[start : row + length], at, size, scale, q, q_t)
                read_queries(da[start : row + length], at, size, one, g, g_t)
                for i in range(count):
                    along[i], offset[i] = dot(a[start + i, at : at + size], g[i]), lse[start + i, at // size]
                dq[:] = 0
                for j0 in range(0, keys, TILE):
                    inside = min(TILE, keys - j0)
                    for i0 in range(0, count, TILE):
                        queries = min(TILE, tall - i0)
                        scores(k, q_t, j0, i0, padded(inside, lanes), queries, lanes, size, False, s)
                        scores(v, g_t, j0, i0, padded(inside, lanes), queries, lanes, size, False, ds)
                        scores_backward(s, ds, inside, offset[i0:], along[i0:])
                        sum_over_queries(s, g, j0, i0, padded(inside, lanes), queries, lanes, False, dv)
                        sum_over_queries(ds, q, j0, i0, padded(inside, lanes), queries, lanes, False, dk)
                        sum_over_keys(ds, k, j0, i0, inside, queries, lanes, False, dq)
                for i in range(count):
                    add_row(dq[i], scale, dqkv[start + i, at : at + size])
            for j in range(keys):
                add_row(dk[j], one, dkv[row + j, key : key + size])
                add_row(dv[j], one, dkv[row + j, shared + key : shared + key + size])
