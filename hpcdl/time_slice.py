"""Short time slices: what a rank asks of Linux so that waiting costs other processes of its cores little.

A rank that waits yields its core between two polls. A yield reaches the other ranks of its job, but not a process of
another session, as Linux shares out the core among sessions first (autogroups). That process then keeps the core for
its whole slice, 1.4 ms by default on 2 cores and more on several, while a message has long arrived. The scheduler EEVDF
runs next, among those that have had less than their share, whoever asked for the shortest slice (Stoica and
Abdel-Wahab, "Earliest eligible virtual deadline first", 1995). A shorter slice changes the order of turns, not a
process's share of the core.

Linux 6.12 and later take such a wish from any process. Where it cannot be had, waits sleep after a preemption instead
(progress.py)."""

import ctypes
import functools
import platform
import struct

SLICE = 100_000  # nanoseconds: the shortest that Linux gives
NUMBERS = {"x86_64": (315, 314), "aarch64": (275, 274), "riscv64": (275, 274), "ppc64le": (356, 355)}  # of calls
ATTRIBUTES = struct.Struct("IIQiIQQQ")  # struct sched_attr: size, policy, flags, nice, priority, runtime, ...
SIZE, POLICY, RUNTIME = 0, 1, 5
OTHER = 0  # the policy of common processes


@functools.cache
def request_short_slice() -> bool:
    """Ask for short slices for the calling thread and those that it starts; True if the kernel gives them."""
    if platform.system() != "Linux" or platform.machine() not in NUMBERS:
        return False
    read, write = NUMBERS[platform.machine()]
    call, found = ctypes.CDLL(None).syscall, ctypes.create_string_buffer(ATTRIBUTES.size)
    if call(read, 0, found, ATTRIBUTES.size, 0):
        return False
    fields = list(ATTRIBUTES.unpack(found.raw))
    if fields[POLICY] != OTHER or not fields[RUNTIME]:  # an older kernel reports no slice
        return False
    fields[SIZE], fields[RUNTIME] = ATTRIBUTES.size, min(SLICE, fields[RUNTIME])
    return not call(write, 0, ctypes.create_string_buffer(ATTRIBUTES.pack(*fields)), 0)
