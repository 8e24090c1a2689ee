"""GPU report: properties, occupancy of our kernels, copy bandwidth, products with and without tensor cores.

    thread -> warp (32 in lockstep) -> block (on one multiprocessor) -> grid (all blocks of a launch)

A multiprocessor hides the latency of some warps behind the steps of others. Occupancy is the resident fraction of its
maximum number of warps, limited by registers, shared memory and blocks:

    blocks = min(threads of an SM / threads of a block, registers / (registers of a thread * threads), ..., 32)
    occupancy = blocks * warps of a block / warps of an SM

Products are cuBLAS's (`gemmEx`, through CuPy), 2 n^3 flops: float32 on the ordinary units; TF32 (float32 in memory, 10
bits of mantissa in the factors) and bfloat16 on tensor cores, which multiply small matrices in one step."""

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hpcdl.kernels.cases import CASES

REPEATS = 11
SIZE, COPIED = 8192, 256 << 20  # size of a product; bytes of a copy
KERNELS = ("add_into", "momentum", "adam", "add_bias_relu", "softmax_cross_entropy", "layer_norm", "causal_attention")
# cudaDataType and cublasComputeType_t: (type of the factors, bytes of an element, type of the sums)
R_32F, R_16BF = 0, 14
COMPUTE_32F, COMPUTE_32F_FAST_TF32 = 68, 77
PRODUCTS = {"float32": (R_32F, 4, COMPUTE_32F), "TF32": (R_32F, 4, COMPUTE_32F_FAST_TF32)}
PRODUCTS["bfloat16"] = R_16BF, 2, COMPUTE_32F
NONE, DEFAULT_ALGORITHM = 0, -1  # no transposition; cuBLAS chooses the algorithm


class Limits(NamedTuple):
    """The limits of one multiprocessor."""

    threads: int
    blocks: int
    registers: int
    shared: int
    warp: int = 32


def occupancy(threads: int, registers: int, shared: int, limits: Limits) -> float:
    """Return the fraction of a multiprocessor's warps filled by blocks of `threads` threads; 0 if no block fits.
    registers: per thread, allocated to a warp in units of 256. shared: bytes per block."""
    warps = -(-threads // limits.warp)
    of_warp = -(-registers * limits.warp // 256) * 256
    blocks = min(limits.blocks, limits.threads // (warps * limits.warp))
    if of_warp:
        blocks = min(blocks, limits.registers // of_warp // warps)
    if shared:
        blocks = min(blocks, limits.shared // shared)
    return blocks * warps / (limits.threads // limits.warp)


def gpu(device: Any) -> list[dict]:
    """Return the rows of a GPU opened by `open_device`."""
    xp = device.xp
    attributes = xp.cuda.runtime.getDeviceProperties(device.index)
    limits = Limits(
        attributes["maxThreadsPerMultiProcessor"],
        attributes.get("maxBlocksPerMultiProcessor", 32),
        attributes["regsPerMultiprocessor"],
        attributes["sharedMemPerMultiprocessor"],
        attributes["warpSize"],
    )
    name = attributes["name"]
    row = {
        "what": "gpu",
        "name": name.decode() if isinstance(name, bytes) else name,
        "multiprocessors": attributes["multiProcessorCount"],
        "threads_per_multiprocessor": limits.threads,
        "warp": limits.warp,
        "registers_per_multiprocessor": limits.registers,
        "shared_bytes_per_multiprocessor": limits.shared,
        "l2_bytes": attributes["l2CacheSize"],
        "memory_bytes": attributes["totalGlobalMem"],
    }
    return [row, *occupancies(device, limits), *copies(device), *products(device)]


def occupancies(device: Any, limits: Limits) -> list[dict]:
    """Return rows of our kernels: registers per thread and the resulting occupancy."""
    from hpcdl.kernels import gpu as launched

    rows = []
    for name in KERNELS:
        for each in launched.functions(CASES[name].kernel):
            compiled, _ = each.compile(np.dtype("float32"))
            registers, shared = largest(compiled.get_regs_per_thread()), largest(compiled.get_shared_mem_per_block())
            part = occupancy(launched.THREADS, registers, shared, limits)
            row = {"what": "occupancy", "kernel": name, "function": each.name, "threads_per_block": launched.THREADS}
            rows.append(row | {"registers_per_thread": registers, "shared_bytes": shared, "occupancy": part})
    return rows


def largest(versions: Any) -> int:
    """Return the largest value over a kernel's compiled versions; numba-cuda gives a number if there is one version."""
    return int(max(versions.values()) if isinstance(versions, dict) else versions)


def timed(xp: Any, call: Callable[[], Any], calls: int) -> float:
    """Return the seconds of a call: the median of REPEATS measurements of `calls` calls between two events."""
    start, end, taken = xp.cuda.Event(), xp.cuda.Event(), []
    call()
    for _ in range(REPEATS):
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        taken.append(xp.cuda.get_elapsed_time(start, end) / 1e3 / calls)
    return statistics.median(taken)


def copies(device: Any, size: int = COPIED) -> list[dict]:
    """Return rows of copies within the GPU's memory (read and write), and over the link to and from the host."""
    xp = device.xp
    a, b = device.zeros(size, np.uint8), device.zeros(size, np.uint8)
    host, pageable = device.pinned(size, np.uint8), np.zeros(size, np.uint8)
    host[:] = 0
    ways: dict[str, tuple[Callable[[], Any], int]] = {
        "within the GPU": (lambda: a.data.copy_from_device_async(b.data, size), 2 * size),
        "host to GPU, pinned": (lambda: a.set(host), size),
        "GPU to host, pinned": (lambda: a.get(out=host), size),
        "host to GPU, pageable": (lambda: a.set(pageable), size),
    }
    return [
        {"what": "copy", "way": way, "bytes": moved, "gigabytes_per_second": 1e-9 * moved / timed(xp, call, 4)}
        for way, (call, moved) in ways.items()
    ]


def products(device: Any, n: int = SIZE) -> list[dict]:
    """Return rows of an n x n product for each type of PRODUCTS."""
    xp = device.xp
    cublas, rows = xp.cuda.cublas, []
    handle = xp.cuda.device.get_cublas_handle()
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    for name, (kind, itemsize, compute) in PRODUCTS.items():
        a, b, c = (device.zeros(itemsize * n * n, np.uint8) for _ in range(3))
        addresses = [array.data.ptr for array in (a, b, c)]

        def call(kind: int = kind, compute: int = compute, at: list[int] = addresses) -> None:
            alpha, beta = one.ctypes.data, zero.ctypes.data
            factors, product = (at[0], kind, n, at[1], kind, n), (at[2], kind, n, compute, DEFAULT_ALGORITHM)
            cublas.gemmEx(handle, NONE, NONE, n, n, n, alpha, *factors, beta, *product)

        taken = timed(xp, call, 4)
        rows.append({"what": "product", "type": name, "n": n, "gflops": 2e-9 * math.pow(n, 3) / taken})
    return rows


def cells(rows: list[dict]) -> list[list[str]]:
    """Return the lines of the table for a terminal."""
    made = [["GPU", "found"]]
    for row in rows:
        if row["what"] == "gpu":
            attributes = f"{row['multiprocessors']} multiprocessors of {row['threads_per_multiprocessor']} threads"
            made.append(["GPU", f"{row['name']}, {attributes} in warps of {row['warp']}"])
        elif row["what"] == "occupancy":
            name = f"occupancy, {row['kernel']}" + f" ({row['function']})" * (row["function"] != row["kernel"])
            made.append([name, f"{100 * row['occupancy']:.0f}%, {row['registers_per_thread']} registers a thread"])
        elif row["what"] == "copy":
            made.append([f"copy {row['way']}", f"{row['gigabytes_per_second']:.1f} GB/s"])
        elif row["what"] == "product":
            made.append([f"product {row['type']}", f"{row['gflops'] / 1e3:.1f} TFLOP/s"])
    return made
