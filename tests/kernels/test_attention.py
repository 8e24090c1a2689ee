"""Attention in tiles against the plain one in numpy (references.py), across tiles and heads; large scores, NaN.

Small shapes, and the CUDA twins: test_cases.py, test_cuda_simulator.py. Gradients by differences: test_layered.py."""

import numpy as np
import pytest

from hpcdl.kernels import references
from hpcdl.kernels.attention import TILE, causal_attention, causal_attention_backward

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
# (sequences, length, heads, size): one token; parts of vectors and of tiles; sizes below, at and above a vector
SHAPES = [(3, 1, 2, 4), (2, 9, 3, 5), (2, TILE, 1, 16), (1, TILE + 1, 2, 33), (2, 3 * TILE + 7, 2, 20)]


def draw(sequences, length, heads, size, dtype):
    """Return qkv, a and lse by the plain attention, and da."""
    random, rows = np.random.default_rng(1), sequences * length
    qkv, da = (random.standard_normal((rows, n * heads * size)).astype(dtype) for n in (3, 1))
    a, lse = np.empty_like(da), np.empty((rows, heads), dtype)
    references.causal_attention(qkv, length, size, size**-0.5, a, lse)
    return qkv, a, lse, da


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_the_plain_one(shape, dtype):
    _, length, _, size = shape
    qkv, a, lse, da = draw(*shape, dtype)
    scale, close = size**-0.5, {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    found, found_lse = np.full_like(a, np.nan), np.full_like(lse, np.nan)
    causal_attention(qkv, length, size, scale, found, found_lse)
    np.testing.assert_allclose(found, a, **close)
    np.testing.assert_allclose(found_lse, lse, **close)
    dqkv, wanted = np.full_like(qkv, np.nan), np.empty_like(qkv)
    causal_attention_backward(qkv, found, da, found_lse, length, size, scale, dqkv)
    references.causal_attention_backward(qkv, a, da, lse, length, size, scale, wanted)
    np.testing.assert_allclose(dqkv, wanted, **close)


def test_a_token_has_no_influence_on_earlier_ones(dtype):
    """To the bit, in the same tile and in others."""
    length, size = 2 * TILE + 5, 8
    qkv, before, lse, _ = draw(1, length, 1, size, dtype)
    causal_attention(qkv, length, size, 1, before, lse)
    for token in (1, 40, TILE, length - 1):
        changed, after = qkv.copy(), np.empty_like(before)
        changed[token] += 1
        causal_attention(changed, length, size, 1, after, lse)
        np.testing.assert_array_equal(after[:token], before[:token])
        assert (after[token:] != before[token:]).any(axis=1).all()


def test_large_scores_do_not_overflow(dtype):
    """The first score is the largest or the smallest: the sums so far stay, or shrink to nothing."""
    length = TILE + 2
    qkv = np.zeros((length, 3), dtype)
    qkv[:, 0], qkv[0, 1], qkv[:, 2] = [-1, 1] * (length // 2), 1e30, np.arange(length)
    a, lse = np.empty((length, 1), dtype), np.empty((length, 1), dtype)
    causal_attention(qkv, length, 1, 1, a, lse)
    np.testing.assert_allclose(a[1::2, 0], 0)  # the first key alone
    np.testing.assert_allclose(a[2::2, 0], np.arange(2, length, 2) / 2 + 0.5)  # the mean of all but the first
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("part", [0, 1, 2])
def test_nan_is_not_hidden(part, dtype):
    """NaN in q of a token is seen in its own output; in k or v, also in all later ones."""
    length, size, token = TILE + 9, 4, TILE - 3
    qkv, a, lse, _ = draw(1, length, 1, size, dtype)
    qkv[token, part * size + 1] = np.nan
    causal_attention(qkv, length, size, 1, a, lse)
    assert np.isnan(a[token : token + 1 if part == 0 else length]).any(axis=1).all()
    assert np.isfinite(a[: TILE // 2]).all()


@pytest.mark.parametrize("kv", [1, 2, 3])
def test_shared_keys_are_copies_of_them(kv, dtype):
    """Query head h has the keys of head h mod kv: the same bits as with a copy for each; gradients of copies add up."""
    group, size, length = 2, 5, TILE + 9
    qkv, _, _, da = draw(2, length, group * kv, size, dtype)
    width, columns = da.shape[1], (group + 2) * kv * size
    qkv = np.ascontiguousarray(qkv[:, :columns])
    q, k, v = np.split(qkv, [width, width + kv * size], axis=1)
    copied, found = np.concatenate([q, k, k, v, v], axis=1), []
    for each in (qkv, copied):
        a, lse, dqkv = np.empty_like(da), np.empty((len(da), group * kv), dtype), np.full_like(each, np.nan)
        causal_attention(each, length, size, 0.5, a, lse)
        causal_attention_backward(each, a, da, lse, length, size, 0.5, dqkv)
        found.append((a, lse, dqkv))
    for one, other in zip(*(each[:2] for each in found), strict=True):
        np.testing.assert_array_equal(one, other)
    dq, dk, dv = np.split(found[1][2], [width, 2 * width], axis=1)
    dk, dv = (each.reshape(len(each), group, -1).sum(axis=1) for each in (dk, dv))
    wanted = np.concatenate([dq, dk, dv], axis=1)
    np.testing.assert_allclose(found[0][2], wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
