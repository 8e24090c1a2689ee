"""Messages from and to arrays on a GPU: through pinned memory of the host, or straight from the GPU.

    staged    array on the GPU -> copy -> pinned host vector -> the operation, as ever -> copy -> array on the GPU
    direct    the operation is handed the GPU's array, and the MPI library reads and writes it there

Staged is what always works: the algorithms and the library see a host vector and know nothing of a GPU. It costs a copy
of the K values each way, K * itemsize / (bandwidth of the bus) seconds, which count as seconds of the operation;
waiting until the array is computed does not. On one rank a collective operation changes nothing, so nothing is copied.

Direct is taken where three things hold: the all-reduce algorithm says that it only hands its vector on (it has a member
`direct`, as MPI's own has); the MPI library says, on every rank, that it is CUDA-aware (`says_aware`); and what the
library does with arrays on the GPU has been seen to be right (`self_test`). A library that does not say so is never
handed such an array, for it would crash.

An array of the host whose elements lie at odd addresses, as np.frombuffer with an offset makes, is staged, too: neither
mpi4py nor compiled loops take it.
"""

import ctypes
import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar, overload

import numpy as np
from mpi4py import MPI

from hpcdl.comm.progress import activity
from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, Device, device_of, on_device

NVIDIA = 0  # MPIX_GPU_SUPPORT_CUDA in MPICH's mpi.h
Start = TypeVar("Start", bound=Callable[..., Any])


@overload
def staged(start: Start) -> Start: ...


@overload
def staged(
    *, out: bool = True, back: bool = True, collective: bool = True, direct: bool = False
) -> Callable[[Start], Start]: ...


def staged(
    start: Any = None, *, out: bool = True, back: bool = True, collective: bool = True, direct: bool = False
) -> Any:
    """Decorate a method that starts an operation on its first argument, so that this array may lie on a GPU, or askew.

    out, back: whether the operation reads the array, and whether it writes it. collective: whether it leaves the array
    as it is when there is one rank. direct: whether it runs the communicator's algorithm, which may take the array as
    it is. A result that is a part of the array is given as that part of the GPU's array.
    """
    if start is None:
        return functools.partial(staged, out=out, back=back, collective=collective, direct=direct)

    @functools.wraps(start)
    def on_host(self: Any, array: Any = None, *arguments: Any, **options: Any) -> Any:
        if not on_device(array) and (not isinstance(array, np.ndarray) or array.flags.aligned):
            return start(self, array, *arguments, **options)
        if not array.flags.c_contiguous:
            raise UsageError(f"a buffer of shape {array.shape} is not contiguous; pass a contiguous part")
        device, vector = device_of(array), array.reshape(-1)
        device.synchronize()
        if direct and on_device(array) and self.exchange == "direct":
            return start(self, vector, *arguments, **options)
        begin, alone = time.perf_counter(), collective and self.size == 1
        host = (CPU if alone else device).pinned(vector.shape, vector.dtype)
        if out and not alone:
            device.copy_out(vector, host)
        if locked := isinstance(vector, np.ndarray) and not vector.flags.writeable:
            host.flags.writeable = False
        copied = time.perf_counter() - begin
        request = start(self, host, *arguments, **options)

        def finish(result: Any) -> Any:
            if back and not alone and not locked:
                device.copy_in(vector, host)
            if isinstance(result, np.ndarray):
                first = (result.ctypes.data - host.ctypes.data) // max(1, host.itemsize)
                return vector[first : first + result.size]
            return result

        begin = time.perf_counter()
        request.then(finish)  # copies back at once, when the operation is complete already
        request.counters.seconds += copied + time.perf_counter() - begin
        return request

    return on_host


def says_aware() -> bool:
    """Whether the MPI library says that it takes arrays on NVIDIA's GPUs (Open MPI's question, then MPICH's)."""
    library = ctypes.CDLL(MPI.__file__)  # the names are looked up in the library that this module is linked to
    if hasattr(library, "MPIX_Query_cuda_support"):
        return library.MPIX_Query_cuda_support() == 1
    if hasattr(library, "MPIX_GPU_query_support"):
        answer = ctypes.c_int(0)
        return library.MPIX_GPU_query_support(NVIDIA, ctypes.byref(answer)) == 0 and answer.value == 1
    return False


def self_test(comm: MPI.Intracomm, device: Device) -> bool:
    """Whether a sum over all ranks and a message around the ring come out right from arrays on the GPU; collective."""
    rank, size = comm.Get_rank(), comm.Get_size()
    values = np.arange(1000, dtype=np.float32)
    mine, sums, received = device.array(values + rank), device.array(values + rank), device.zeros(1000, np.float32)
    device.synchronize()
    try:
        comm.Allreduce(MPI.IN_PLACE, sums)
        comm.Sendrecv(mine, (rank + 1) % size, 0, received, (rank - 1) % size, 0)
    except MPI.Exception:
        return False
    wanted = size * values + size * (size - 1) // 2
    return bool(
        np.array_equal(device.host(sums), wanted) and np.array_equal(device.host(received), values + (rank - 1) % size)
    )


def takes_device_arrays(comm: MPI.Intracomm, device: Device) -> bool:
    """Whether all ranks may hand arrays on their GPUs to the MPI library; collective. Some may have none: servers."""
    with activity.inside("self-test of messages from the GPU"):
        if not comm.allreduce(device is not CPU, MPI.LAND):
            return False
        return all(comm.allgather(says_aware())) and all(comm.allgather(self_test(comm, device)))
