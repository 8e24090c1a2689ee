"""Devices: CPU and GPU have the same members with the same effect; a machine without a GPU says so in one line."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hpcdl.errors import UsageError
from hpcdl.kernels import device
from hpcdl.kernels.device import CPU, device_of, on_device, open_device


def test_copies_there_and_back(gpu):
    for place in (CPU, gpu):
        host = np.arange(6, dtype="f4").reshape(2, 3)
        array = place.array(host)
        assert place.holds(array) and place.writable(array) and device_of(array) is place
        assert np.array_equal(place.host(array), host) and isinstance(place.host(array), np.ndarray)
        other, back = place.empty((2, 3), "f4"), place.pinned((2, 3), "f4")
        assert isinstance(back, np.ndarray) and back.flags.carray
        back[...] = 7
        place.copy_in(other, back)
        back[...] = 8  # the copy was done when the call returned
        place.copy_out(other, back)
        assert (back == 7).all() and (place.host(place.zeros(3, "i8")) == 0).all()
        nothing = place.array(np.empty((0, 4)))
        place.copy_out(nothing, place.pinned((0, 4), "f8"))
        assert nothing.shape == (0, 4) and place.pinned((0, 4), "f8").shape == (0, 4)


def test_an_array_belongs_to_one_device(gpu):
    here, there = np.zeros((4, 4)), gpu.zeros((4, 4), "f8")
    assert on_device(there) and not on_device(here) and not on_device(None) and not on_device([1.0])
    assert CPU.holds(here) and not CPU.holds(there) and gpu.holds(there) and not gpu.holds(here)
    second = device.cuda(1)
    assert not second.holds(there) and device_of(there) is gpu
    assert not CPU.writable(there) and not gpu.writable(here) and not gpu.writable(there[:, :2])
    here.flags.writeable = False
    assert CPU.holds(here) and not CPU.writable(here)


def test_names(gpu):
    assert str(CPU) == "cpu" and str(gpu) == "cuda:0 (stand-in)"
    assert open_device("cpu") is CPU
    with pytest.raises(UsageError, match=r"unknown device 'gpu'.*cpu, cuda"):
        open_device("gpu")


def test_ranks_spread_over_the_gpus_of_their_machine(gpu, monkeypatch):
    monkeypatch.setenv("STANDIN_GPUS", "2")
    monkeypatch.setattr(device, "import_compiler", lambda: None)
    for rank in (0, 1, 2, 3, 0):
        opened = open_device("cuda", rank)
        assert opened is device.cuda(rank % 2) and opened.index == int(opened.empty(1, "f4").device) == rank % 2


def test_pinned_memory_belongs_to_the_gpu_in_any_thread(gpu):
    second, before = device.cuda(1), int(gpu.xp.cuda.Device())
    for pin in (lambda: second.pinned(3, "f4"), lambda: ThreadPoolExecutor(1).submit(second.pinned, 3, "f4").result()):
        gpu.xp.counts["pinned by"] = None
        pin()
        assert gpu.xp.counts["pinned by"] == 1 and int(gpu.xp.cuda.Device()) == before


def refused(words):
    with pytest.raises(UsageError, match=words) as caught:
        open_device("cuda")
    assert "\n" not in str(caught.value) and str(caught.value).startswith("device cuda cannot be used: ")


def test_without_what_it_needs(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba_cuda", None)
    refused(r"numba-cuda is missing \(.*numba_cuda.*pip install 'hpcdl\[cuda\]'")
    monkeypatch.setattr(device, "import_compiler", lambda: None)
    monkeypatch.setenv("STANDIN_GPUS", "0")
    refused("this process sees no GPU.*no CUDA-capable device is detected.*nvidia-smi")
    monkeypatch.setattr(gpu.xp.cuda.runtime, "getDeviceCount", lambda: 0)
    refused("this process sees no GPU; look at nvidia-smi")
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it is an ImportError
    refused(r"CuPy is missing \(.*cupy.*pip install 'hpcdl\[cuda\]'")


def test_an_installation_of_cupy_that_is_broken_is_one_line(monkeypatch):
    class Broken:
        def find_spec(self, name, path, target=None):
            if name == "cupy":
                raise ImportError("\n=====\nFailed to import CuPy.\n\nlibcudart is missing\n=====\n")

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    refused(r"CuPy is missing \(Failed to import CuPy.\)")


def test_a_program_on_the_cpu_imports_nothing_of_cuda(launch):
    program = (
        "import sys, hpcdl.kernels.device as device, hpcdl.launch.training, numpy\n"
        "from hpcdl.kernels.reduce import add_into\n"
        "add_into(numpy.ones(3), numpy.ones(3))\n"
        "device.open_device('cpu')\n"
        "assert not [name for name in sys.modules if name.startswith(('cupy', 'numba.cuda.', 'numba_cuda'))]"
    )
    launch(1, "-c", program, check=0)
