"""Attention by blocks of keys against the plain one in numpy (references.py), and against attention to all keys.

Small shapes, and the CUDA twins: test_cases.py, test_cuda_simulator.py."""

import numpy as np
import pytest

from hpcdl.kernels import references
from hpcdl.kernels.attention import TILE, causal_attention, causal_attention_backward
from hpcdl.kernels.block_attention import attend_block, attend_block_backward

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
# (sequences, length, first query, keys, heads, heads of keys, size): a token, parts of vectors and of tiles
SHAPES = [
    (3, 2, 1, 1, 2, 2, 4),
    (2, 9, 0, 5, 3, 1, 5),
    (1, 2 * TILE + 7, 3, TILE + 9, 4, 2, 20),
    (1, 70, 0, 70, 2, 2, 33),
]


def draw(sequences, length, heads, sharing, size, dtype):
    """Return qkv and kv of equally long sequences, da, and a state (a, lse) of earlier blocks."""
    random, rows = np.random.default_rng(1), sequences * length
    columns = (heads + 2 * sharing, 2 * sharing, heads, heads)
    qkv, kv, da, a = (random.standard_normal((rows, n * size)).astype(dtype) for n in columns)
    return qkv, kv, da, a, random.standard_normal((rows, heads)).astype(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_the_plain_one(shape, dtype):
    sequences, length, first, keys, heads, sharing, size = shape
    qkv, kv, da, a, lse = draw(sequences, length, heads, sharing, size, dtype)
    where, close = (length, first, keys, size, size**-0.5), {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    wanted, wanted_lse = a.copy(), lse.copy()
    attend_block(qkv, kv, *where, a, lse)
    references.attend_block(qkv, kv, *where, wanted, wanted_lse)
    np.testing.assert_allclose(a, wanted, **close)
    np.testing.assert_allclose(lse, wanted_lse, **close)
    found = [np.ones_like(qkv), np.ones_like(kv)]  # the gradients are added
    expected = [each.copy() for each in found]
    attend_block_backward(qkv, kv, a, da, lse, *where, *found)
    references.attend_block_backward(qkv, kv, wanted, da, wanted_lse, *where, *expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, **close)


def test_two_halves_are_one_sequence(dtype):
    """Causal attention to a sequence = to the second half of it, then to the first half, whose keys are all earlier."""
    half, heads, size, scale = TILE + 11, 2, 20, 20**-0.5
    qkv, _, da, a, _ = draw(1, 2 * half, heads, heads, size, dtype)
    lse, dqkv = np.empty((2 * half, heads), dtype), np.empty_like(qkv)
    causal_attention(qkv, 2 * half, size, scale, a, lse)
    causal_attention_backward(qkv, a, da, lse, 2 * half, size, scale, dqkv)
    own, kv = qkv[half:].copy(), qkv[:half, heads * size :].copy()
    found, found_lse = np.empty_like(a[half:]), np.empty_like(lse[half:])
    causal_attention(own, half, size, scale, found, found_lse)
    attend_block(own, kv, half, 0, half, size, scale, found, found_lse)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    np.testing.assert_allclose(found, a[half:], **close)
    np.testing.assert_allclose(found_lse, lse[half:], **close)
    d_own, d_kv, earlier = np.empty_like(own), np.zeros_like(kv), np.empty_like(own)
    causal_attention_backward(own, found, da[half:], found_lse, half, size, scale, d_own)
    attend_block_backward(own, kv, found, da[half:], found_lse, half, 0, half, size, scale, d_own, d_kv)
    np.testing.assert_allclose(d_own, dqkv[half:], **close)
    causal_attention_backward(qkv[:half], a[:half], da[:half], lse[:half], half, size, scale, earlier)
    np.testing.assert_allclose(d_kv + earlier[:, heads * size :], dqkv[:half, heads * size :], **close)
