"""Rotary position embedding (Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021).

    angle    t_j = p base^(-2 j / size)              p: position of a token        j = 0 .. size / 2 - 1
    rotate   a, b <- a cos t_j - b sin t_j, a sin t_j + b cos t_j        a, b: elements 2 j and 2 j + 1 of a head

A head of `size` elements is size / 2 points of a plane, and each turns at a speed of its own. The product of a query at
position p and a key at position r then depends on p - r alone. A rotation's inverse, by -t, takes the gradient back.

`rotations` writes the table of cosines and sines, (length, size), for an array of positions (length,), int64. Row i of
x has row i mod length of the table. Bytes moved per rotated element of b bytes: 2b."""

import math

import numpy as np

from hpcdl.kernels.bind import block, rowwise


@rowwise("T[:, ::1], int64[::1], float64")
def rotations(i, j, table, positions, base):
    """table[i, 2 j], table[i, 2 j + 1] <- cosine and sine of t_j at positions[i], computed in float64."""
    angle = positions[i] * base ** (-(j - j % 2) / table.shape[1])
    table[i, j] = math.sin(angle) if j % 2 else math.cos(angle)


@block("T[:, ::1], T[:, ::1], int64, int64")
def rotate(x, table, columns, sign):
    """Rotate the heads in the first `columns` columns of each row of x, by t (sign 1) or by -t (sign -1)."""
    length, size, turn = table.shape[0], table.shape[1], x.dtype.type(sign)
    for i in range(x.shape[0]):
        angles = table[i % length]
        for at in range(0, columns, size):
            head = x[i, at : at + size]
            for j in range(size // 2):
                even, odd = np.uintp(2 * j), np.uintp(2 * j + 1)  # signed indices do not vectorize
                a, b = head[even], head[odd]
                cosine, sine = angles[even], turn * angles[odd]
                head[even] = a * cosine - b * sine
                head[odd] = a * sine + b * cosine
