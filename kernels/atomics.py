"""Operations on memory that several threads, or processes, use at once: each is done whole, or not at all.

    exchange(address, value)                   the int64 there, in whose place `value` is now
    compare_and_swap(address, old, new)        whether the float there was `old`, to the bit; if so it is `new` now
    atomic_add(address, value)                 the number there gains `value`
    read(address, like)                        the float there, read anew at each call
    lock, unlock                               a word that is 1 while somebody is between the two

CPU only. Addresses are numbers: those of another process's view of the same memory differ. `load` and `store` of flags
are in shared.py.
"""

import numpy as np
from numba import types
from numba.core.cgutils import ir
from numba.extending import intrinsic

from hpcdl.kernels.bind import function
from hpcdl.kernels.shared import load, sched_yield, store


@intrinsic
def exchange(context, address, value):
    """Write an int64 and return what was there; what others wrote before they wrote that is visible afterwards."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], arguments[1].type.as_pointer())
        return builder.atomic_rmw("xchg", pointer, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def compare_and_swap(context, address, old, new):
    """Write `new` if `old` is there, bit by bit: whether it was. A NaN with the same bits counts as the same."""

    def generate(context, builder, signature, arguments):
        whole = ir.IntType(old.bitwidth)
        pointer = builder.inttoptr(arguments[0], whole.as_pointer())
        before, after = (builder.bitcast(each, whole) for each in arguments[1:])
        found = builder.cmpxchg(pointer, before, after, "acq_rel", "monotonic")
        return builder.extract_value(found, 1)

    if isinstance(old, types.Float) and old == new:
        return types.boolean(types.int64, old, new), generate


@intrinsic
def read(context, address, like):
    """The float at this address, of the type of the number `like`."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], arguments[1].type.as_pointer())
        return builder.load_atomic(pointer, "monotonic", like.bitwidth // 8)

    return like(types.int64, like), generate


@intrinsic
def atomic_add(context, address, value):
    """The number of value's type at this address gains `value`, in one step that no other thread can divide.

    On its way others may read the number as it was or as it is; what else a thread reads and writes has no order
    against it. Where a processor has no addition of this kind, it compares and exchanges until nobody came between.
    """

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], arguments[1].type.as_pointer())
        kind = "fadd" if isinstance(signature.args[1], types.Float) else "add"
        builder.atomic_rmw(kind, pointer, arguments[1], "monotonic")
        return context.get_dummy_value()

    return types.void(types.int64, value), generate


@function
def place(array, i):
    """The address of array[i]."""
    return np.int64(array.ctypes.data) + np.int64(i) * array.itemsize


@function
def lock(address, spins):
    """Wait until the word is this one's; after so many looks others are offered the core."""
    looks = 0
    while exchange(address, 1) != 0:
        while load(address) != 0:
            looks += 1
            if looks % spins == 0:
                sched_yield()


@function
def unlock(address):
    """Give it back; what was written before is visible to whoever has it next."""
    store(address, 0)
