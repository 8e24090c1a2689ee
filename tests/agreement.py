"""A kernel beside its reference in numpy."""

import numpy as np

TOLERANCE = {"float32": 2e-5, "float64": 1e-11, "int64": 0}


class OnDevice(np.ndarray):
    """As far as a kernel can see, an array on a GPU."""

    __numba_array_subtype_dispatch__ = True  # or Numba would take it for one of numpy's own

    @property
    def __cuda_array_interface__(self):
        return {**self.__array_interface__, "version": 3}


def agrees(case, args, expected, tolerance):
    """Call the kernel with args and its reference with expected, a copy, and compare what they return and write."""
    with np.errstate(all="ignore"):
        result, wanted = case.kernel(*args), case.reference(*expected)
    if wanted is not None:
        np.testing.assert_allclose(result, wanted, rtol=tolerance, atol=tolerance)
    for got, want in zip(args, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
