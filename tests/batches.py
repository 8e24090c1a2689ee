"""Batches for tests of data: copies that stay valid, and the same batch or not."""

import dataclasses

import numpy as np

from hpcdl.csr import CSR

PLACEMENTS = ("shared", "partitioned", "streamed")


def copied(batch):
    """A copy: a batch is valid until the next but one."""
    return dataclasses.replace(batch, x=batch.x.copy(), y=batch.y.copy(), index=batch.index.copy())


def dense(x):
    return x.dense() if isinstance(x, CSR) else x


def assert_same_rows(one, two):
    """Of arrays or sparse rows."""
    assert type(one) is type(two) and one.dtype == two.dtype and one.shape == two.shape
    assert not isinstance(one, CSR) or one.nnz == two.nnz
    np.testing.assert_array_equal(dense(one), dense(two))


def assert_same(one, two):
    for name in ("x", "y", "index"):
        assert_same_rows(getattr(one, name), getattr(two, name))
    assert (one.total, one.epoch, one.step) == (two.total, two.epoch, two.step)
