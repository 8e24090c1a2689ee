"""A scrambled Sobol sequence: points that fill the unit cube evenly, any number of them.

Of 2^m points that begin at a multiple of 2^m, each of the 2^m equal intervals of a coordinate holds exactly one, and so
does, in the first two coordinates, each of the 2^m boxes of any one shape 2^-a by 2^-(m-a): a (0, m, 2)-net.

    point i, coordinate j     x_ij = XOR of the direction numbers v_jk over the bits k of i that are set
    direction numbers         v_jk = m_jk / 2^k, from a primitive polynomial of degree s over GF(2) with coefficients a:
                              m_k = 2 a_1 m_(k-1) ^ 4 a_2 m_(k-2) ^ ... ^ 2^s m_(k-s) ^ m_(k-s)
    scrambling                a hash of the bits before bit k of a coordinate decides if bit k is flipped: any two
                              points keep the boxes that they share, so a net stays one, and each point is uniform

Sobol, "On the distribution of points in a cube and the approximate evaluation of integrals", USSR Comput. Math. 1967;
Owen, "Randomly permuted (t,m,s)-nets and (t,s)-sequences", 1995; polynomials and first m: Joe and Kuo, "Constructing
Sobol sequences with better two-dimensional projections", SIAM J. Sci. Comput. 2008."""

import hashlib
from functools import reduce
from operator import xor

import numpy as np

from hpcdl.errors import UsageError

BITS = 32
# Of each dimension after the first: coefficients a as bits, then the first m.
TABLE = """
    0 1 | 1 1 3 | 1 1 3 1 | 2 1 1 1 | 1 1 1 3 3 | 4 1 3 5 13 | 2 1 1 5 5 17 | 4 1 1 5 5 5 | 7 1 1 7 11 19 |
    11 1 1 5 1 1 | 13 1 1 1 3 11 | 14 1 3 5 5 31 | 1 1 3 3 9 7 49 | 13 1 1 1 15 21 21 | 16 1 3 1 13 27 49 |
    19 1 1 1 15 7 5 | 22 1 3 1 15 13 25 | 25 1 1 5 5 19 61 | 1 1 3 7 11 23 15 103 | 4 1 3 7 13 13 15 69
"""
DIRECTIONS = [[int(number) for number in row.split()] for row in TABLE.split("|")]
DIMENSIONS = 1 + len(DIRECTIONS)


class Sobol:
    """`Sobol(dimensions, seed)(i)` is point i < 2^32 in [0, 1); seed None: unscrambled. UsageError above DIMENSIONS."""

    def __init__(self, dimensions: int, seed: int | None):
        if dimensions > DIMENSIONS:
            raise UsageError(
                f"random:sobol has {DIMENSIONS} dimensions, and the space {dimensions} parameters: give --method random"
            )
        self.seed = seed
        self.directions = [_directions(dimension) for dimension in range(dimensions)]

    def __call__(self, number: int) -> np.ndarray:
        """Return point `number`: float64 (dimensions,)."""
        coordinates = []
        for dimension, directions in enumerate(self.directions):
            x = reduce(xor, (each for k, each in enumerate(directions) if number >> k & 1), 0)
            coordinates.append(x if self.seed is None else self._scrambled(x, dimension))
        return np.array(coordinates) / 2.0**BITS

    def _scrambled(self, x: int, dimension: int) -> int:
        flips = 0
        for bit in range(BITS):
            text = repr((self.seed, "sobol", dimension, bit, x >> (BITS - bit)))
            flips = flips << 1 | hashlib.blake2b(text.encode(), digest_size=1).digest()[0] & 1
        return x ^ flips


def _directions(dimension: int) -> list[int]:
    """Return a dimension's direction numbers v_1 = 1/2, v_2, ..., times 2^32, as integers."""
    if dimension == 0:
        m = [1] * BITS
    else:
        a, *m = DIRECTIONS[dimension - 1]
        degree = len(m)
        for k in range(degree, BITS):
            new = m[k - degree] ^ m[k - degree] << degree
            for i in range(1, degree):
                if a >> (degree - 1 - i) & 1:
                    new ^= m[k - i] << i
            m.append(new)
    return [each << (BITS - 1 - k) for k, each in enumerate(m)]
