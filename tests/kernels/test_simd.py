"""The loops on the CPU are vectorized: their machine code computes in the widest registers that the compiler uses here.

Which those are, the plainest loop shows: LLVM has reasons not to take AVX-512's on some processors that have them."""

import functools
import re

import numba
import numpy as np
import pytest
from numba.core.registry import cpu_target

from hpcdl.kernels.bind import FASTMATH, NESTED, OPTIONS, function, generate
from hpcdl.kernels.cases import CASES

TRIPLE, _, FEATURES = cpu_target.target_context.codegen().magic_tuple()
pytestmark = pytest.mark.skipif(
    not TRIPLE.startswith("x86_64"), reason=f"reads x86-64 machine code, not that of {TRIPLE}"
)

# Packed arithmetic, comparisons and conversions of floating-point numbers, the shifts and widenings of bfloat16, and
# products of 64-bit integers; no moves, which are packed in any copy.
FLOATING = r"v?(?:add|sub|mul|div|sqrt|max|min|cmp\w*?|fn?m(?:add|sub)\d+|cvt\w+2)p[sd]"
PACKED = re.compile(rf"\b(?:{FLOATING}|v?p(?:sll[dq]|movzx\w+|mullq|muludq))\b.*%([xyz])mm")


def compiled(function, types):
    """Return the machine code; compiled here, as Numba cannot show the code that it loaded from its cache."""
    loop_alone = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # wrappers take a third of the compile time
    dispatcher = numba.njit(fastmath=FASTMATH, **OPTIONS, **loop_alone)(function)
    dispatcher.compile(types)
    return dispatcher.inspect_asm(dispatcher.signatures[0])


def packed(machine_code):
    """Return the number of packed arithmetic instructions by register: x 128 bits, y 256, z 512."""
    found = [match[1] for match in PACKED.finditer(machine_code)]
    return {width: found.count(width) for width in "xyz"}


def add(x, y):
    for i in range(x.size):
        x[i] += y[i]


@pytest.fixture(scope="module")
def widest():
    """Return the widest registers that LLVM uses in the plainest loop: x, y or z."""
    count = packed(compiled(add, (numba.float32[::1], numba.float32[::1])))
    found = max(width for width in "xyz" if count[width])
    least = "y" if "+avx2" in FEATURES.split(",") else "x"
    assert found >= least
    return found


def test_the_scan_tells_scalar_from_packed():
    vector = "\tvaddps\t(%rax), %zmm0, %zmm1\n\taddpd %xmm1, %xmm2\n\tvcvtps2pd (%rax), %ymm1"
    scalar = "\tvaddss\t%xmm1, %xmm0, %xmm0\n\tvmovups\t%zmm1, (%rax)\n\tvxorps %xmm0, %xmm0, %xmm0"
    assert packed(vector) == {"x": 1, "y": 1, "z": 1} and packed(scalar) == {"x": 0, "y": 0, "z": 0}


def dependent(x, y):
    for i in range(1, x.size):
        x[i] = x[i - 1] * y[i]


def test_a_loop_that_cannot_vectorize_is_seen():
    assert not any(packed(compiled(dependent, (numba.float32[::1], numba.float32[::1]))).values())


@functools.cache
def machine_code(kernel, element):
    """Return the machine code of the kernel's loop; several cases share a kernel."""
    loop = kernel.py_func
    if kernel.kind in NESTED:  # alone: the loop for a single column could vectorize in its place
        loop = generate(kernel.kind, NESTED[kernel.kind], kernel.body, body=function(kernel.body))
    return compiled(loop, kernel.types(element))


def marked(name):
    """Return the case, for --all only if memory bounds its speed, which then depends less on vectorization."""
    return pytest.param(name, marks=[pytest.mark.exhaustive] * (CASES[name].limit == "memory"))


# Loops that LLVM does not vectorize: they fetch or store at indices, shift codes of several values into a byte, or call
# the sine.
SCALAR = ("take", "add_at", "quantize", "pack", "add_codes", "rotations")
SCALAR += ("count_choices", "place_choices", "gather_choices", "add_placed", "scale_choices")


@pytest.mark.long
@pytest.mark.parametrize("kind", [0, 1])  # which of its element types
@pytest.mark.parametrize("name", [marked(name) for name in CASES if name.split()[0] not in SCALAR])
@pytest.mark.in_turn("kind")
def test_vectorized(name, kind, widest):
    case, kernel = CASES[name], CASES[name].kernel
    dtype = case.dtypes[kind % len(case.dtypes)]
    element = case.make(1, 3, dtype, np.random.default_rng(0))[0].dtype
    count = packed(machine_code(kernel, element))
    print(f"\n{name} {dtype}: packed instructions {count}", end="")
    wide = sum(count[name] for name in "xyz" if name >= widest)  # a conversion may take wider ones than a plain loop
    assert wide, f"{count}: nothing in the widest registers, {widest}mm"
