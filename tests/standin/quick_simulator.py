"""Import this before a kernel runs in Numba's simulator: it becomes many times faster, and loses its races.

(Seen in Numba 0.68; numba-cuda 0.30 has the first of the two races.)

Speed. The simulator starts a thread for each thread of a block, and a loop polls them all. Here one of them runs at a
time, up to its next barrier, then the next: in threads that stay up, or, where a kernel has no barrier, as plain calls
one after the other. In every other block of a kernel the last thread comes first, so that one that lacks a barrier is
wrong, in one order or the other, each time.

Races. The first threads that come to a `cuda.shared.array` each make one when they come at once, and all but the last
sum into arrays that no one reads. And a device function's globals get the simulator's `cuda` while a thread runs it,
so that the first thread to leave takes it away from the others."""

import collections
import contextlib
import functools
import sys
import threading
from types import FunctionType, SimpleNamespace

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


class Thread(threading.Thread):
    """A thread that stays up and plays one thread of a block after another.
    Those of a block stand in a ring. Who comes to a barrier wakes the next; when it is its turn again, all have come.
    Who ends leaves the ring; the last one wakes the caller."""

    def __init__(self):
        super().__init__(daemon=True)
        self.turn = threading.Lock()
        self.turn.acquire()
        self.start()

    def run(self):
        while True:
            self.turn.acquire()
            try:
                self.body()
            except BaseException as error:
                self.failed.append(error)
            self.before.after, self.after.before = self.after, self.before
            (self.caller if self.failed or self.after is self else self.after.turn).release()

    def syncthreads(self):
        self.after.turn.release()
        self.turn.acquire()


@functools.cache
def has_barrier(function) -> bool:
    """Whether a kernel, or a function that it calls, has its threads wait for each other."""
    names = function.__code__.co_names
    called = [function.__globals__.get(name) for name in names]
    called += [cell.cell_contents for cell in function.__closure__ or ()]
    inner = [getattr(each, "fn", each) for each in called]
    return any("sync" in name for name in names) or any(
        isinstance(each, FunctionType) and each is not function and has_barrier(each) for each in inner
    )


threads = []
first_is_first = collections.Counter()  # of each kernel, odd or even


def run(self, block, *arguments):
    """All threads of a block, one at a time."""
    body = functools.partial(self._f, *arguments)
    places = [
        SimpleNamespace(blockIdx=kernel.Dim3(*block), threadIdx=kernel.Dim3(*point), thread_id=number)
        for number, point in enumerate(np.ndindex(*self._block_dim))
    ]
    first_is_first[self._f] += 1
    if first_is_first[self._f] % 2:
        places.reverse()
    if not has_barrier(self._f):
        mine, here = threading.get_ident(), threading.current_thread()
        try:
            for place in places:
                threading._active[mine] = place  # what threading.current_thread returns
                body()
        finally:
            threading._active[mine] = here
        return
    threads.extend(Thread() for _ in range(len(places) - len(threads)))
    playing, failed, caller = threads[: len(places)], [], threading.Lock()
    caller.acquire()
    for number, (thread, place) in enumerate(zip(playing, places, strict=True)):
        thread.__dict__ |= vars(place) | {"body": body, "failed": failed, "caller": caller}
        thread.before, thread.after = playing[number - 1], playing[(number + 1) % len(playing)]
    playing[0].turn.release()
    caller.acquire()
    if failed:
        threads.clear()  # those that wait at a barrier will not be used again
        raise failed[0]


kernelapi.FakeCUDAShared.array = array
kernel.swapped_cuda_module = swapped_cuda_module
kernel.BlockManager.run = run
