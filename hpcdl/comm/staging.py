"""Messages from and to arrays on a GPU: staged through pinned host memory, or directly by a CUDA-aware MPI.

    staged    array on the GPU -> copy -> pinned host vector -> the operation -> copy -> array on the GPU
    direct    the operation receives the GPU's array, and the MPI library reads and writes it

Staging always works. It costs K * itemsize / (bandwidth of the bus) seconds each way, which count as seconds of the
operation; the wait for the array's computation does not. A collective operation on one rank copies nothing. Host arrays
at unaligned addresses (np.frombuffer with an offset) are staged, too: mpi4py and compiled loops refuse them.

Direct is used if the all-reduce algorithm passes its vector to MPI unread (`direct` in its record), the MPI library
declares itself CUDA-aware on every rank (`is_cuda_aware`; others would crash), and a test succeeds (`self_test`)."""

import ctypes
import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from hpcdl.comm.progress import activity
from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU, Device, device_of, on_device

NVIDIA = 0  # MPIX_GPU_SUPPORT_CUDA in MPICH's mpi.h
Start = TypeVar("Start", bound=Callable[..., Any])


def staged(
    *, out: bool = True, back: bool = True, collective: bool = True, direct: bool = False
) -> Callable[[Start], Start]:
    """Decorate a method that starts an operation on its first argument: the array may then be on a GPU, or unaligned.
    out: the operation reads the array. back: it writes it. collective: it does nothing on one rank. direct: it uses the
    chosen algorithm, which may take GPU arrays. A result in the host vector becomes that part of the array."""

    def decorate(start: Any) -> Any:
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
            request.then(finish)  # copies back now if the operation is already complete
            request.counters.seconds += copied + time.perf_counter() - begin
            return request

        return on_host

    return decorate


def is_cuda_aware() -> bool:
    """True if the MPI library is CUDA-aware, by Open MPI's query function or MPICH's."""
    library = ctypes.CDLL(MPI.__file__)  # finds symbols of the MPI library linked to it
    if hasattr(library, "MPIX_Query_cuda_support"):
        return library.MPIX_Query_cuda_support() == 1
    if hasattr(library, "MPIX_GPU_query_support"):
        answer = ctypes.c_int(0)
        return library.MPIX_GPU_query_support(NVIDIA, ctypes.byref(answer)) == 0 and answer.value == 1
    return False


def self_test(comm: MPI.Intracomm, device: Device) -> bool:
    """True if an all-reduce and a ring message of GPU arrays give correct results; collective."""
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
    came = np.array_equal(device.host(received), values + (rank - 1) % size)
    return bool(came and np.array_equal(device.host(sums), wanted))


def supports_device_arrays(comm: MPI.Intracomm, device: Device) -> bool:
    """True if all ranks may pass GPU arrays to the MPI library; collective. A rank without a GPU: False on all."""
    with activity.inside("self-test of messages from the GPU"):
        if not comm.allreduce(device is not CPU, MPI.LAND):
            return False
        return all(comm.allgather(is_cuda_aware())) and all(comm.allgather(self_test(comm, device)))
