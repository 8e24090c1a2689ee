"""Atomic operations on memory that several threads or processes share, and a spin lock. CPU only.

Addresses are int64; another process may map the same memory to other addresses. `load` and `store`: shared.py."""

import numpy as np
from numba import types
from numba.core.cgutils import ir
from numba.extending import intrinsic

from hpcdl.kernels.bind import function
from hpcdl.kernels.shared import load, sched_yield, store


@intrinsic
def exchange(context, address, value):
    """Write an int64 to this address and return the old value there; memory order: acquire and release."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], arguments[1].type.as_pointer())
        return builder.atomic_rmw("xchg", pointer, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def compare_and_swap(context, address, old, new):
    """Write `new` if this address has the bits of `old`; return True if it had. NaNs with the same bits are equal."""

    def generate(context, builder, signature, arguments):
        integer = ir.IntType(old.bitwidth)
        pointer = builder.inttoptr(arguments[0], integer.as_pointer())
        before, after = (builder.bitcast(each, integer) for each in arguments[1:])
        result = builder.cmpxchg(pointer, before, after, "acq_rel", "monotonic")
        return builder.extract_value(result, 1)

    if isinstance(old, types.Float) and old == new:
        return types.boolean(types.int64, old, new), generate


@intrinsic
def read(context, address, like):
    """Return the float at this address, of the type of the number `like`."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], arguments[1].type.as_pointer())
        return builder.load_atomic(pointer, "monotonic", like.bitwidth // 8)

    return like(types.int64, like), generate


@intrinsic
def atomic_add(context, address, value):
    """Add `value` to the number of its type at this address, atomically (relaxed), if need be by compare-and-swap."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], arguments[1].type.as_pointer())
        kind = "fadd" if isinstance(signature.args[1], types.Float) else "add"
        builder.atomic_rmw(kind, pointer, arguments[1], "monotonic")
        return context.get_dummy_value()

    return types.void(types.int64, value), generate


@function
def place(array, i):
    """Return the address of array[i]."""
    return np.int64(array.ctypes.data) + np.int64(i) * array.itemsize


@function
def lock(address, spins):
    """Spin until this thread holds the lock; after every `spins` polls yield the core to other threads."""
    polls = 0
    while exchange(address, 1) != 0:
        while load(address) != 0:
            polls += 1
            if polls % spins == 0:
                sched_yield()


@function
def unlock(address):
    """Release the lock; what this thread wrote before is visible to the next holder."""
    store(address, 0)
