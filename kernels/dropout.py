"""Dropout masks from a counter-based generator: a row's mask depends on the row's key alone.

    SplitMix64, element j of a row with the key k      z <- k + (j + 1) 0x9E3779B97F4A7C15
        z <- (z ^ z >> 30) 0xBF58476D1CE4E5B9;         z <- (z ^ z >> 27) 0x94D049BB133111EB;      z <- z ^ z >> 31
    mask                                               value where the first 24 bits of z are at least `least`, else 0

So each row gets the same mask in any division of a batch. (Steele et al., OOPSLA 2014; Srivastava et al., JMLR 2014)"""

import numpy as np

from hpcdl.kernels.bind import function, rowwise

STEP, FIRST, SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
A, B, C, BITS = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(40)
ONE = np.uint64(1)
STEPS = 1 << 24  # probabilities are multiples of 1 / STEPS


@function
def split_mix(z):
    """Return SplitMix64's output for a state; both are uint64."""
    z = (z ^ (z >> A)) * FIRST
    z = (z ^ (z >> B)) * SECOND
    return z ^ (z >> C)


@rowwise("T[:, ::1], int64[::1], int64, T")
def dropout_mask(i, j, mask, keys, least, value):
    """mask[i, j] <- 0 with probability least / 2^24, else value, by row i's key. Bytes per element of b bytes: b."""
    z = split_mix(np.uint64(keys[i]) + (np.uint64(j) + ONE) * STEP)
    mask[i, j] = value if np.int64(z >> BITS) >= least else 0


def row_keys(key: int, rows: np.ndarray) -> np.ndarray:
    """Return the keys, int64 (rows,), of the rows with these numbers: SplitMix64 with the seed `key` at each number."""
    with np.errstate(over="ignore"):
        return split_mix.py_func((rows.astype(np.uint64) + ONE) * STEP + np.uint64(key)).view(np.int64)
