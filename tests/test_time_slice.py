"""Short time slices, as the kernel reports them."""

import ctypes
import platform
import threading

import pytest

from hpcdl import time_slice
from hpcdl.time_slice import ATTRIBUTES, NUMBERS, RUNTIME, SLICE, request_short_slice


def slice_of_thread():
    found = ctypes.create_string_buffer(ATTRIBUTES.size)
    assert ctypes.CDLL(None).syscall(NUMBERS[platform.machine()][0], 0, found, ATTRIBUTES.size, 0) == 0
    return ATTRIBUTES.unpack(found.raw)


def in_thread(function):
    """Call the function in a thread of its own, whose slice ends with it."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.skipif(platform.machine() not in NUMBERS, reason="unknown numbers of system calls")
def test_a_thread_and_those_that_it_starts_have_short_slices():
    def asked():
        before, granted, after = slice_of_thread(), request_short_slice.__wrapped__(), slice_of_thread()
        return before, granted, after, in_thread(slice_of_thread)

    before, granted, after, started = in_thread(asked)
    assert granted == bool(before[RUNTIME])  # an older kernel reports none
    wanted = list(before)
    wanted[RUNTIME] = min(SLICE, before[RUNTIME])
    assert list(after) == wanted and after == started  # policy and niceness stay


@pytest.mark.parametrize("case", ["system", "machine", "refused"])
def test_where_the_kernel_gives_none_it_says_so(case, monkeypatch):
    monkeypatch.setattr(time_slice.platform, "system", lambda: "Darwin" if case == "system" else "Linux")
    monkeypatch.setattr(time_slice.platform, "machine", lambda: "z80" if case == "machine" else "x86_64")
    monkeypatch.setattr(time_slice, "NUMBERS", {"x86_64": (-1, -1)})
    assert request_short_slice.__wrapped__() is False
