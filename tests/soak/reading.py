"""How fast streamed rows are read, beside dd: python tests/soak/reading.py [FOLDER] [TURNS]

A file of 1 GB of bytes is made in FOLDER (by default the current one) and removed. In each turn it is read by dd, as
blocks alone, and as float32 batches of an epoch, each time after the system has forgotten it. The bytes are random, so
that no disk compresses them."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np

from hpcdl.data import open_data
from hpcdl.data.order.readers import BlockMemory

ROWS, WIDTH, PIECE, BATCH = 1_000_000, 1024, 50_000, 512


def write(path):
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        x = file.create_dataset("train/x", (ROWS, WIDTH), "u1")
        for start in range(0, ROWS, PIECE):
            x[start : start + PIECE] = random.integers(0, 256, (PIECE, WIDTH), np.uint8)
        file["train/y"] = np.zeros(ROWS, np.int64)
        file.attrs["scale"], file.attrs["classes"] = 1 / 255, 10


def forget(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def blocks(data):
    """Read each block once, in the order of an epoch, into memory that is used again."""
    rows, order = data._reader.rows, data._reader.order_of(0)
    memory = BlockMemory(rows, 1, None)
    for block in order.blocks:
        start, stop = map(int, rows.starts[block : block + 2])
        rows.read(start, stop, memory.arrays(0, stop - start))


def main(folder=".", turns="9"):
    path = Path(folder) / "reading.h5"
    write(path)
    try:
        data = open_data(path, placement="streamed", standardize=False)
        ways = {
            "dd": lambda: subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=8M"], stderr=subprocess.DEVNULL),
            "blocks": lambda: blocks(data),
            "batches": lambda: sum(len(batch.y) for batch in data.batches(0, BATCH)),
        }
        speeds = {name: [] for name in ways}
        for _ in range(int(turns)):
            for name, read in ways.items():
                forget(path)
                start = time.perf_counter()
                read()
                speeds[name].append(ROWS * WIDTH / (time.perf_counter() - start) / 1e6)
        for name, found in speeds.items():
            print(f"{name}: {statistics.median(found):.0f} MB/s ({min(found):.0f} to {max(found):.0f})")
    finally:
        path.unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
