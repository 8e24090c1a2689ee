"""Low-rank factors of a matrix: orthonormal columns, and the product of two factors.

    orthogonalize   columns p_1, ..., p_r of P, one after the other, twice:  p_k <- p_k - (p_j . p_k) p_j,  j < k
                    then p_k <- p_k / |p_k|
    expand          M <- P Q^T,   E <- E - share P Q^T

P is (n, r), Q (m, r), M and E (n, m). Once is not enough in floating point: the rest of a column that nearly depends on
the ones before is their rounding error. After the second time a column is orthogonal to working precision, or it
depends on them and becomes zero. (Gram-Schmidt, twice: Giraud, Langou and Rozloznik, 2005; Kahan's criterion: Parlett,
"The symmetric eigenvalue problem", 1980, section 6.9)

expand moves 4b bytes per element of b bytes."""

import math

import numpy as np

from hpcdl.kernels.bind import block, rowwise


@block("T[:, ::1]")
def orthogonalize(p):
    """Make the columns of p orthonormal, in place; a column that depends on those before becomes zero."""
    for k in range(p.shape[1]):
        before, after = 0.0, 0.0
        for _ in range(2):
            for j in range(k):
                along = 0.0
                for i in range(p.shape[0]):
                    along += np.float64(p[i, j]) * np.float64(p[i, k])
                for i in range(p.shape[0]):
                    p[i, k] -= along * p[i, j]
            before, after = after, 0.0
            for i in range(p.shape[0]):
                after += np.float64(p[i, k]) ** 2
        factor = 0.0 if after <= 0.25 * before else 1.0 / math.sqrt(after)
        for i in range(p.shape[0]):
            p[i, k] *= factor


@rowwise("T[:, ::1], T[:, ::1], T[:, ::1], T[:, ::1], T")
def expand(i, j, m, e, p, q, share):
    """m <- p q^T, e <- e - share p q^T."""
    value = p[i, 0] * q[j, 0]
    for k in range(1, p.shape[1]):
        value += p[i, k] * q[j, k]
    m[i, j] = value
    e[i, j] -= share * value
