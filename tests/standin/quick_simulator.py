"""Import this before a kernel runs in Numba's simulator: it becomes several times faster, and loses its races.

(Seen in Numba 0.68; numba-cuda 0.30 has the first of the two races.)

Speed. The loop that looks after a block's threads polls them, and each has to wait until the interpreter interrupts the
loop: after 5 ms, unless it is told to do so sooner.

Races. The first threads that come to a `cuda.shared.array` each make one when they come at once, and all but the last
sum into arrays that no one reads. And a device function's globals get the simulator's `cuda` while a thread runs it,
so that the first thread to leave takes it away from the others.
"""

import contextlib
import sys
import threading

import numpy as np
from numba.core import types
from numba.np.numpy_support import as_dtype

from hpcdl.kernels import gpu  # first: it chooses which package is Numba's CUDA

# isort: split
from numba.cuda.simulator import kernel, kernelapi

plain = kernelapi.FakeCUDAShared.array
lock, swapped = threading.Lock(), {}


def array(self, shape, dtype):
    """The shared array of this line of a kernel; `setdefault` makes one only, however many threads come at once."""
    if shape == 0:  # the dynamic one
        return plain(self, shape, dtype)
    caller = sys._getframe(1)
    kind = as_dtype(dtype) if isinstance(dtype, types.Type) else dtype
    return self._allocations.setdefault((caller.f_code, caller.f_lineno), np.empty(shape, kind))


@contextlib.contextmanager
def swapped_cuda_module(function, simulated):
    """Let `cuda` be the simulator's for a function's code, while there are threads in it."""
    space = function.__globals__
    with lock:
        count, names = swapped.get(id(space), (0, [name for name, value in space.items() if value is gpu.cuda]))
        space.update(dict.fromkeys(names, simulated))
        swapped[id(space)] = count + 1, names
    try:
        yield
    finally:
        with lock:
            count, names = swapped.pop(id(space))
            if count > 1:
                swapped[id(space)] = count - 1, names
            else:
                space.update(dict.fromkeys(names, gpu.cuda))


kernelapi.FakeCUDAShared.array = array
kernel.swapped_cuda_module = swapped_cuda_module
sys.setswitchinterval(1e-4)
