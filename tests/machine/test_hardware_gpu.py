"""A GPU's rows, on what stands in for one: sizes and counts; how fast one is, is never tested."""

from types import SimpleNamespace

import numpy as np
import pytest

from hpcdl.machine import hardware_gpu
from hpcdl.machine.hardware_gpu import Limits, occupancy

H100 = Limits(threads=2048, blocks=32, registers=65536, shared=233472)


@pytest.mark.parametrize(
    "threads, registers, shared, part",
    [
        (256, 32, 0, 1.0),  # 64 warps, the registers just suffice
        (256, 33, 0, 0.75),  # portions of 256 registers: 40 a thread, 51 warps, 6 blocks
        (256, 64, 0, 0.5),
        (256, 255, 0, 0.125),
        (256, 32, 100 << 10, 0.25),  # two blocks by shared memory
        (32, 16, 0, 0.5),  # 32 blocks of one warp
        (33, 16, 0, 1.0),  # two warps, the second nearly empty
        (1024, 255, 0, 0.0),  # not one block
    ],
)
def test_occupancy(threads, registers, shared, part):
    assert occupancy(threads, registers, shared, H100) == part


def array(size):
    """Of a GPU; its address is its size, so that calls tell it."""
    data = SimpleNamespace(ptr=size, copy_from_device_async=lambda *args: None)
    return SimpleNamespace(data=data, set=lambda host: None, get=lambda out: None)


@pytest.fixture
def device():
    """Something that is asked what a GPU is asked, and notes the products."""
    called = []
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    about = {"name": b"made", "multiProcessorCount": 4, "maxThreadsPerMultiProcessor": 2048, "warpSize": 32}
    about |= {"regsPerMultiprocessor": 65536, "sharedMemPerMultiprocessor": 100, "l2CacheSize": 5, "totalGlobalMem": 6}
    cuda = SimpleNamespace(
        Event=lambda: event,
        get_elapsed_time=lambda a, b: 4.0,  # milliseconds of four calls
        cublas=SimpleNamespace(gemmEx=lambda *args: called.append(args)),
        device=SimpleNamespace(get_cublas_handle=lambda: "handle"),
        runtime=SimpleNamespace(getDeviceProperties=lambda index: about),
    )
    made = SimpleNamespace(xp=SimpleNamespace(cuda=cuda), index=0, called=called)
    made.zeros = lambda size, dtype: array(size)
    made.pinned = lambda size, dtype: np.empty(size, dtype)
    return made


def test_rows(device, monkeypatch):
    monkeypatch.setattr(hardware_gpu, "occupancies", lambda device, limits: [])
    monkeypatch.setattr(hardware_gpu, "copies", lambda device: [])
    rows = hardware_gpu.gpu(device)
    assert [row["what"] for row in rows] == ["gpu", "product", "product", "product"]
    assert rows[0]["multiprocessors"] == 4 and rows[0]["name"] == "made" and rows[0]["warp"] == 32
    cells = hardware_gpu.cells(rows)
    assert cells[1] == ["GPU", "made, 4 multiprocessors of 2048 threads in warps of 32"]
    assert cells[-1] == ["product bfloat16", "1099.5 TFLOP/s"]  # 2 * 8192^3 in a millisecond


def test_products_name_types_and_sizes(device):
    rows = hardware_gpu.products(device, n=16)
    assert [row["type"] for row in rows] == ["float32", "TF32", "bfloat16"]
    assert all(row["gflops"] == pytest.approx(2 * 16**3 / 1e-3 / 1e9) for row in rows)
    each = device.called[:: len(device.called) // 3]
    for args, (kind, itemsize, compute) in zip(each, hardware_gpu.PRODUCTS.values(), strict=True):
        handle, _, _, m, n, k, _, a, a_type, lda, b, b_type, ldb, _, c, c_type, ldc, computed, _ = args
        assert handle == "handle" and (m, n, k, lda, ldb, ldc) == (16,) * 6
        assert a == b == c == itemsize * 16 * 16 and (a_type, b_type, c_type) == (kind,) * 3 and computed == compute


def test_copies_count_what_is_read_and_written(device):
    rows = {row["way"]: row for row in hardware_gpu.copies(device, size=1000)}
    assert rows["within the GPU"]["bytes"] == 2000 and rows["host to GPU, pinned"]["bytes"] == 1000
    assert rows["GPU to host, pinned"]["gigabytes_per_second"] == pytest.approx(1e-3)
