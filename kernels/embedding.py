"""Token and position embeddings of a transformer, with their gradients.

                            forward                                        backward
    embed                   out[k] = table[token k - first]                gradient[token k - first] += dy[k]
    add_positions           x[i] += table[(i + offset) mod length]         gradient[(i + offset) mod length] += dy[i]

tokens (sequences, length) are integers from 0 to vocabulary - 1 in the element type of the model (float32 is exact up
to 2^24); k counts them row by row, and out, dy are (tokens, width).

A table of `own` rows holds the rows first .. first + own - 1 of the vocabulary's table. A token of another rank's rows
gives a row of zeros and changes no gradient, so the sum over the ranks that hold the parts is the result of the whole
table (Shoeybi et al., "Megatron-LM", 2019). An invalid token, such as 0.5 or NaN, gives zeros too, and the kernel
returns -1, which the caller reports; nothing is read out of bounds. The order of additions is fixed, on the GPU too.
Bytes moved per element of b bytes: embed and add_positions 2b, embed_backward 3b, add_positions_backward b."""

import numpy as np

from hpcdl.kernels.bind import block, function, rowwise


@function
def row_of(token, first, own):
    """Return the row of this token in a table of the rows first .. first + own - 1; -1 if it is not there."""
    if token >= first and token < first + own:  # false for NaN
        k = np.int64(token)
        return k - first if k == token else np.int64(-1)
    return np.int64(-1)


@block("T[:, ::1], T[:, ::1], int64, int64, T[:, ::1]")
def embed(tokens, table, first, vocabulary, out):
    """out[k] = table[token k - first], zeros if the table has no such row; return -1 if a value is no token, else 0."""
    flat, invalid, zero, end = tokens.reshape(tokens.size), False, tokens.dtype.type(0), tokens.dtype.type(vocabulary)
    for k in range(flat.size):  # a loop of its own, which vectorizes
        invalid |= not ((flat[k] >= zero) & (flat[k] < end) & (np.floor(flat[k]) == flat[k]))
    own, width = table.shape
    for k in range(flat.size):
        row = row_of(flat[k], first, own)
        if row < 0:
            for j in range(width):
                out[k, j] = 0
        else:
            for j in range(width):
                out[k, j] = table[np.uintp(row), j]
    return -1 if invalid else 0


@block("T[:, ::1], T[:, ::1], int64, T[:, ::1]")
def embed_backward(tokens, dy, first, gradient):
    """gradient[token k - first] += dy[k], for the tokens k whose rows the gradient has."""
    flat, (own, width) = tokens.reshape(tokens.size), gradient.shape
    for k in range(flat.size):
        row = row_of(flat[k], first, own)
        if row >= 0:
            for j in range(width):
                gradient[np.uintp(row), j] += dy[k, j]


@rowwise("T[:, ::1], T[:, ::1], int64, int64")
def add_positions(i, j, x, table, length, offset):
    """x[i] += table[(i + offset) mod length], for every row; offset: the position of the first row."""
    x[i, j] += table[(np.int64(i) + offset) % length, j]


@block("T[:, ::1], T[:, ::1], int64, int64")
def add_positions_backward(dy, gradient, length, offset):
    """gradient[(i + offset) mod length] += dy[i]."""
    whole = dy.shape[0] // (4 * length) * 4 * length
    for start in range(0, whole, 4 * length):  # four sequences at once: a fourth of the gradient's traffic
        for i in range(start, start + length):
            row = np.uintp((i + offset) % length)
            for j in range(dy.shape[1]):
                gradient[row, j] += (dy[i, j] + dy[i + length, j]) + (dy[i + 2 * length, j] + dy[i + 3 * length, j])
    for i in range(whole, dy.shape[0]):
        row = np.uintp((i + offset) % length)
        for j in range(dy.shape[1]):
            gradient[row, j] += dy[i, j]
