"""Every kernel has a case (kernels/cases.py) and computes what its reference in numpy computes."""

import copy
import importlib
import pkgutil

import numpy as np
import pytest
from agreement import TOLERANCE, agrees
from bad_values import with_bad

import hpcdl.kernels
from hpcdl.kernels.bind import KERNELS
from hpcdl.kernels.cases import CASES

PAIRS = [(name, dtype) for name, case in CASES.items() for dtype in case.dtypes]


def test_no_kernel_is_left_out():
    for module in pkgutil.iter_modules(hpcdl.kernels.__path__):
        if not module.name.startswith("gpu"):  # these need CUDA, and hold only twins
            importlib.import_module(f"hpcdl.kernels.{module.name}")
    # These call MPI, or work on flags and windows of a node's memory: CPU only, and tested in tests/comm.
    of_comm = "hpcdl.kernels.shared", "hpcdl.kernels.schedule"
    ours = {k for k in KERNELS if k.__module__.startswith("hpcdl.kernels") and k.__module__ not in of_comm}
    assert ours == {case.kernel for case in CASES.values()}


def compared(case, args, tolerance):
    agrees(case, args, copy.deepcopy(args), tolerance)


@pytest.mark.parametrize("name, dtype", PAIRS)
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (7, 5), (37, 21), (5, 130)], ids=str)
def test_as_numpy(name, dtype, shape):
    compared(CASES[name], CASES[name].make(*shape, dtype, np.random.default_rng(0)), TOLERANCE[dtype])


@pytest.mark.parametrize("name, dtype", [(name, dtype) for name, dtype in PAIRS if CASES[name].nan])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("shape", [(1, 1), (5, 40)], ids=str)  # 40: the vectorized part and the rest of a loop
def test_nan_and_infinity_are_not_hidden(name, dtype, bad, shape):
    args = CASES[name].make(*shape, dtype, np.random.default_rng(0))
    compared(CASES[name], with_bad(args, bad), TOLERANCE[dtype])


BY_PLACE = (  # an element uses others, or its own place
    *("langevin", "quantize", "pack", "add_codes", "take", "add_at"),
    *("choose_experts_backward", "count_choices", "place_choices", "dot_choices"),
)
OF_ELEMENTS = [
    each for each in PAIRS if CASES[each[0]].kernel.kind == "elementwise" and not each[0].startswith(BY_PLACE)
]


@pytest.mark.parametrize("name, dtype", OF_ELEMENTS)
def test_a_slice_is_computed_to_the_same_bits(name, dtype):
    """Noise and codes depend on the place of a slice (test_noise.py, test_quantize.py)."""
    case = CASES[name]
    whole = case.make(1, 1000, dtype, np.random.default_rng(0))
    parts = copy.deepcopy(whole)
    case.kernel(*whole)
    for cut in (slice(0, 1), slice(1, 334), slice(334, 1000)):
        case.kernel(*(each[cut] if isinstance(each, np.ndarray) else each for each in parts))
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name, dtype", PAIRS)
def test_can_be_repeated(name, dtype):
    """So that a benchmark measures neither subnormal numbers nor infinities."""
    case = CASES[name]
    args = case.make(8, case.columns, dtype, np.random.default_rng(0))
    for _ in range(1000):
        case.kernel(*args)
    for array in args:
        if isinstance(array, np.ndarray) and array.dtype.kind == "f":
            assert np.isfinite(array).all()
            assert (np.abs(array[array != 0]) > 1e-30).all()


@pytest.mark.parametrize("name", CASES)
def test_traffic_grows_with_the_rows(name):
    case = CASES[name]
    sizes = [case.traffic(*case.make(rows, 21, case.dtypes[0], np.random.default_rng(0))) for rows in (10, 110, 210)]
    assert 0 < sizes[1] - sizes[0] == sizes[2] - sizes[1]
