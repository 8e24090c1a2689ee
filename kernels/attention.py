"""Causal attention in tiles with an online softmax: no array of length x length exists, forward or backward.

    forward     s_ij = scale q_i k_j        p_ij = exp(s_ij - lse_i) for j <= i, else 0        a_i = sum_j p_ij v_j
                lse_i = log sum_j<=i exp(s_ij)

    backward    D_i = sum_d da_id a_id      ds_ij = p_ij (da_i v_j - D_i)          dv_j = sum_i p_ij da_i
                                            dq_i = scale sum_j ds_ij k_j           dk_j = scale sum_i ds_ij q_i

                    keys                i: queries of a sequence, j: its keys, for each head; d: elements of a head
      queries   0   1   2   3           A tile is TILE x TILE scores; those above the diagonal are never computed.
         0      #                       Forward goes along a row of tiles. It knows the largest score so far, top_i,
         1      #   #                   and sums up to there; a larger score in the next tile shrinks both by
         2      #   #   #               exp(old top - new top) (Milakov and Gimelshein, "Online normalizer calculation
         3      #   #   #   #           for softmax", 2018). Backward computes p again, from lse, down the columns.

Memory beside the arguments: O(length) numbers for one head. (Dao, Fu, Ermon, Rudra and Re, "FlashAttention", 2022)

qkv and its gradient are (sequences * length, (heads + 2 kv) * size): q of all heads, then k, then v of the kv heads of
keys. a and da are (sequences * length, heads * size), lse (sequences * length, heads). The shapes of a and qkv tell
heads and kv. Query head h reads k and v of the kv head h mod kv: kv = heads is multi-head attention, kv = 1 is
multi-query, and between them heads / kv queries share a key (Ainslie et al., "GQA", 2023). dk and dv are sums over the
queries that share them. Per score, forward does 4 size flops and an exponential, backward 10 size and an exponential.
NaN in k or v of a token makes later outputs NaN, and maybe others of its tile."""

import math

import numpy as np

from hpcdl.kernels.bind import block, function
from hpcdl.kernels.elementary import exp
from hpcdl.kernels.gather import LINE, prefetch
from hpcdl.kernels.register_tile import BYTES, ROWS, add_tile, write_tile

AHEAD = 16  # rows between a prefetch and its use: no hardware prefetcher follows short parts of long rows
TILE = 64  # queries and keys of a tile, a multiple of BYTES


@function
def padded(count, lanes):
    """Return the count, or the next larger multiple of `lanes`."""
    return -(-count // lanes) * lanes


@function
def read_head(x, column, factor, into):
    """into <- factor times the block of x from its first row and this column on; rows further down are prefetched."""
    base, width = np.uintp(x[0, column:].ctypes.data), np.uintp(x.shape[1] * x.itemsize)
    for t in range(into.shape[0]):
        for offset in range(0, into.shape[1] * x.itemsize, LINE):
            prefetch(base + np.uintp(t + AHEAD) * width + np.uintp(offset))
        write_row(x[t, column : column + into.shape[1]], factor, into[t])


@function
def transpose(x, into):
    """into[n, d, t] <- x[n TILE + t, d]; tile by tile, as rows of whole sequences would share few sets of a cache."""
    for n in range(into.shape[0]):
        part = x[n * TILE :]
        for d in range(x.shape[1]):
            for t in range(min(TILE, part.shape[0])):
                into[n, d, t] = part[t, d]


@function
def read_keys(qkv, column, past, size, k, v):
    """k, v <- a head of keys and values of a sequence. column: of the head in qkv; past: columns from k to v."""
    length, one = qkv.shape[0], qkv.dtype.type(1)
    read_head(qkv, column, one, k[:length, :size])
    read_head(qkv, column + past, one, v[:length, :size])


@function
def read_queries(x, column, size, factor, q, q_t):
    """q <- factor times a head of a sequence, from this column of x on; q_t: q as `transpose` writes it."""
    read_head(x, column, factor, q[: x.shape[0], :size])
    transpose(q, q_t)


@function
def scores(a, b, j0, i0, keys, queries, lanes, size, diagonal, s):
    """s[j, i] <- sum_d a[j0 + j, d] b[d, i0 + i]; on the diagonal, only for i from the first full vector below j on."""
    wide = a.shape[1]
    for j in range(0, keys, ROWS):
        for i in range(first_query(j, lanes, diagonal), queries, lanes):
            write_tile(a, (j0 + j) * wide, wide, 1, b, i0 * wide + i, TILE, s, j * TILE + i, TILE, size)


@function
def sum_over_keys(s, b, j0, i0, keys, queries, lanes, diagonal, c):
    """c[i0 + i, d] += sum_j s[j, i] b[j0 + j, d]."""
    wide = b.shape[1]
    for i in range(0, queries, ROWS):
        count = min(keys, i + ROWS) if diagonal else keys
        for d in range(0, wide, lanes):
            add_tile(s, i, 1, TILE, b, j0 * wide + d, wide, c, (i0 + i) * wide + d, wide, count)


@function
def sum_over_queries(s, b, j0, i0, keys, queries, lanes, diagonal, c):
    """c[j0 + j, d] += sum_i s[j, i] b[i0 + i, d]."""
    wide = b.shape[1]
    for j in range(0, keys, ROWS):
        first = first_query(j, lanes, diagonal)
        for d in range(0, wide, lanes):
            add_tile(
                s,
                j * TILE + first,
                TILE,
                1,
                b,
                (i0 + first) * wide + d,
                wide,
                c,
                (j0 + j) * wide + d,
                wide,
                queries - first,
            )


@function
def first_query(j, lanes, diagonal):
    """Return the first query for which `scores` computes key j of a tile; diagonal: the tile's place."""
    return j // ROWS * ROWS // lanes * lanes if diagonal else 0


# The loops below go over whole tiles, also where `queries` is less: the compiler knows how long they are.


@function
def raise_tops(s, keys, top):
    """top[i] <- the largest of top[i] and column i of s; NaN is ignored."""
    for j in range(keys):
        for i in range(TILE):
            top[i] = s[j, i] if s[j, i] > top[i] else top[i]


@function
def shrink(factor, top, norm, total):
    """factor[i] <- exp(factor[i] - top[i]), the factor for norm[i] and row i of total."""
    for i in range(TILE):
        factor[i] = exp(factor[i] - top[i])
        norm[i] *= factor[i]
    for i in range(min(TILE, total.shape[0])):
        for d in range(total.shape[1]):
            total[i, d] *= factor[i]


@function
def exponentials(s, keys, top, norm):
    """s[j, i] <- exp(s[j, i] - top[i]), which is added to norm[i]."""
    for j in range(keys):
        for i in range(TILE):
            p = exp(s[j, i] - top[i])
            s[j, i] = p
            norm[i] += p


@function
def scores_backward(s, ds, keys, lse, along):
    """s[j, i] <- p = exp(s[j, i] - lse[i]); ds[j, i] <- p (ds[j, i] - along[i])."""
    for j in range(keys):
        for i in range(TILE):
            p = exp(s[j, i] - lse[i])
            s[j, i] = p
            ds[j, i] = p * (ds[j, i] - along[i])


@function
def clear_above(s, keys, value):
    """Write this value where query i, on the diagonal, comes before key j."""
    for j in range(keys):
        s[j, :j] = value


@function
def dot(x, y):
    """Return the sum of x[d] y[d]."""
    total = x.dtype.type(0)
    for d in range(x.size):
        total += x[d] * y[d]
    return total


@function
def write_row(x, factor, into):
    """into <- factor x."""
    for d in range(into.size):
        into[d] = factor * x[d]


@block("T[:, ::1], int64, int64, T, T[:, ::1], T[:, ::1]")
def causal_attention(qkv, length, size, scale, a, lse):
    """Write a, and lse for backward."""
    kind, lanes, width = qkv.dtype.type, BYTES // qkv.itemsize, a.shape[1]
    one, lowest, shared = kind(1), kind(np.finfo(qkv.dtype).min), (qkv.shape[1] - width) // 2
    tall, wide, tiles = padded(length, lanes), padded(size, lanes), -(-length // TILE)
    q, k = np.zeros((tall, wide), qkv.dtype), np.zeros((tall, wide), qkv.dtype)
    v, total = np.zeros((tall, wide), qkv.dtype), np.zeros((tall, wide), qkv.dtype)
    q_t, s = np.zeros((tiles, wide, TILE), qkv.dtype), np.zeros((TILE, TILE), qkv.dtype)
    top, factor, norm = np.empty(TILE, qkv.dtype), np.empty(TILE, qkv.dtype), np.empty(TILE, qkv.dtype)
    for row in range(0, qkv.shape[0], length):
        for key in range(0, shared, size):
            read_keys(qkv[row : row + length], width + key, shared, size, k, v)
            for at in range(key, width, shared):
                read_queries(qkv[row : row + length], at, size, scale, q, q_t)
                total[:] = 0
                for i0 in range(0, length, TILE):
                    queries = min(TILE, tall - i0)
                    top[:], norm[:] = lowest, 0
                    for j0 in range(0, i0 + 1, TILE):
                        keys = min(TILE, tall - j0)
                        scores(k, q_t, j0, i0, keys, queries, lanes, size, i0 == j0, s)
                        factor[:] = top
                        if i0 == j0:
                            clear_above(s, keys, -np.inf)
                        raise_tops(s, keys, top)
                        if j0 > 0:
                            shrink(factor, top, norm, total[i0:])
                        exponentials(s, keys, top, norm)
                        sum_over_keys(s, v, j0, i0, keys, queries, lanes, i0 == j0, total)
                    for i in range(min(TILE, length - i0)):
                        write_row(total[i0 + i], one / norm[i], a[row + i0 + i, at : at + size])
                        lse[row + i0 + i, at // size] = top[i] + math.log(norm[i])


@block("T[:, ::1], T[:, ::1], T[:, ::1], T[:, ::1], int64, int64, T, T[:, ::1]")
def causal_attention_backward(qkv, a, da, lse, length, size, scale, dqkv):
    """Write dqkv, the gradient by qkv, from da, the gradient by a."""
    kind, lanes, width = qkv.dtype.type, BYTES // qkv.itemsize, a.shape[1]
    one, tall, wide, tiles = kind(1), padded(length, lanes), padded(size, lanes), -(-length // TILE)
    inputs, results = np.zeros((4, tall, wide), qkv.dtype), np.zeros((3, tall, wide), qkv.dtype)
    q, k, v, g, dq, dk, dv = inputs[0], inputs[1], inputs[2], inputs[3], results[0], results[1], results[2]
    q_t, g_t = np.zeros((tiles, wide, TILE), qkv.dtype), np.zeros((tiles, wide, TILE), qkv.dtype)
    along, offset = np.zeros(tiles * TILE, qkv.dtype), np.zeros(tiles * TILE, qkv.dtype)
    s, ds = np.zeros((TILE, TILE), qkv.dtype), np.zeros((TILE, TILE), qkv.dtype)
    shared = (qkv.shape[1] - width) // 2
    for row in range(0, qkv.shape[0], length):
        for key in range(0, shared, size):
            read_keys(qkv[row : row + length], width + key, shared, size, k, v)
            results[1:] = 0
            for at in range(key, width, shared):
                read_queries(qkv[row : row + length], at, size, scale, q, q_t)
                read_queries(da[row : row + length], at, size, one, g, g_t)
                for i in range(length):
                    along[i], offset[i] = dot(a[row + i, at : at + size], g[i]), lse[row + i, at // size]
                dq[:] = 0
                for j0 in range(0, length, TILE):
                    keys = min(TILE, tall - j0)
                    for i0 in range(j0, length, TILE):
                        queries = min(TILE, tall - i0)
                        scores(k, q_t, j0, i0, keys, queries, lanes, size, i0 == j0, s)
                        scores(v, g_t, j0, i0, keys, queries, lanes, size, i0 == j0, ds)
                        scores_backward(s, ds, keys, offset[i0:], along[i0:])
                        if i0 == j0:
                            clear_above(s, keys, 0)
                            clear_above(ds, keys, 0)
                        sum_over_queries(s, g, j0, i0, keys, queries, lanes, i0 == j0, dv)
                        sum_over_queries(ds, q, j0, i0, keys, queries, lanes, i0 == j0, dk)
                        sum_over_keys(ds, k, j0, i0, keys, queries, lanes, i0 == j0, dq)
                for i in range(length):
                    write_row(dq[i], scale, dqkv[row + i, at : at + size])
            for i in range(length):
                write_row(dk[i], one, dqkv[row + i, width + key : width + key + size])
                write_row(dv[i], one, dqkv[row + i, width + shared + key : width + shared + key + size])
