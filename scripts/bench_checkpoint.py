"""How fast checkpoints are written, beside plain files: mpiexec -n 2 hpcdl bench-checkpoint --megabytes 512

The state has --megabytes of random numbers: parameters and two vectors of an optimizer. The ways below take turns,
--repeats times, so that other work of the disk meets all of them. Printed are medians with lowest and highest values:

    plain     each rank writes its part as one plain file, 8 MiB at a time, and syncs it: what `dd conv=fsync` does
    pieces    each rank writes its piece, with its checksum, and rank 0 joins them (a model that is cut)
    one file  rank 0 writes the whole state (a model that each rank holds)
    read      each rank checks the pieces and loads its part again, mostly from the system's page cache
    a step pays          seconds that a step waits for a checkpoint of pieces
    in the background    seconds that a step waits with --checkpoint-async, while each rank copies its part

Bandwidths are those of all ranks together, on one disk. The files are made in --folder, and removed."""

import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.checkpoint.shards import SLAB, JoinedPieces, Portion, name_of_piece, read_into, write_at, write_piece
from hpcdl.chunks import chunk
from hpcdl.errors import UsageError, blamed_on
from hpcdl.formatting import counted
from hpcdl.launch.benchmark_table import benchmark, spread
from hpcdl.models.layout import Hyperslab
from hpcdl.runs.options import option, positive

VECTORS = ("parameters", "optimizer/first_moment", "optimizer/second_moment")


@dataclass
class CheckpointBench:
    """Options of bench-checkpoint: how much is written, and where."""

    megabytes: int = option(512, "size of the state, all ranks together, in 10^6 bytes")
    repeats: int = option(5, "rounds, in each of which every way has one turn")
    folder: str = option(".", "a folder on the disk that is measured")
    json: str = option("", "file for the results")

    def __post_init__(self):
        positive(self, "megabytes", "repeats")
        if not os.path.isdir(self.folder):
            raise UsageError(f"--folder {self.folder}: there is no such folder")
        free = shutil.disk_usage(self.folder).free
        if 3 * self.megabytes * 10**6 > free:
            raise UsageError(f"--folder {self.folder} has {free:,} bytes free, and three times --megabytes are written")


def run(world, options: CheckpointBench, _) -> tuple:
    from hpcdl.comm.progress import exempt

    made = None
    if world.rank == 0:
        with blamed_on(f"--folder {options.folder} cannot be written"):
            made = tempfile.mkdtemp(prefix="bench-checkpoint-", dir=options.folder)
    folder = Path(world.bcast(made))
    try:
        with exempt(), blamed_on(f"--folder {options.folder} cannot be written"):
            rows = measured(world, options, folder)
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return f"A state of {options.megabytes:,} MB, written by {counted(world.size, 'rank')} at once", [cells(rows)], rows


def measured(world, options, folder):
    """Return a row for each round, with the seconds of each way of writing and reading."""
    from mpi4py import MPI

    size = options.megabytes * 10**6 // (4 * len(VECTORS))
    own = chunk(size, world.size, world.rank)
    n = own.stop - own.start
    random = np.random.default_rng(world.rank)
    arrays = {name: random.standard_normal(n, dtype="f4") for name in VECTORS}
    portions = {name: Portion(array, [Hyperslab(0, own.start, 1, n, n)], size) for name, array in arrays.items()}
    whole = {name: np.resize(array, size) for name, array in arrays.items()} if world.rank == 0 else {}
    rows = []
    for turn in range(options.repeats):
        ways = [
            ("plain", lambda: plain(folder / f"plain-{world.rank}", arrays)),
            ("pieces", lambda turn=turn: in_pieces(world, folder, turn, portions)),
            ("one_file", lambda: Checkpoint(whole, {}).write(folder / "one.h5") if world.rank == 0 else None),
            ("read", lambda: read(world, folder, own)),
            ("copy", lambda turn=turn: in_background(world, folder, turn, portions)),
        ]
        row = {"round": turn, "megabytes": options.megabytes, "ranks": world.size}
        waiting = []
        for name, body in ways:
            world.Barrier()
            begun = time.perf_counter()
            left = body()
            mine = time.perf_counter() - begun
            if left is not None:
                waiting.append(left)
            row[f"{name}_seconds"] = world.allreduce(mine, MPI.MAX)
        for each in waiting:
            each.join()
        rows.append(row)
        world.Barrier()
        if world.rank == 0:
            for each in folder.glob("*.h5"):
                each.unlink()
            shutil.rmtree(folder / "pieces")
        world.Barrier()
    return rows


def plain(path, arrays):
    """Write the bytes of the arrays into an unlinked file, and sync it."""
    with open(path, "wb", buffering=0) as file:
        path.unlink()
        place = 0
        for array in arrays.values():
            step = SLAB // array.itemsize
            for start in range(0, array.size, step):
                write_at(file.fileno(), array[start : start + step], place)
                place += array[start : start + step].nbytes
        os.fsync(file.fileno())


def in_pieces(world, folder, turn, portions):
    """Write a checkpoint as the ranks of a partitioned model do: each rank writes its piece, and rank 0 joins them."""
    written = world.gather(write_piece(folder, name_of_piece(turn, "00000000", world.rank), portions))
    if world.rank == 0:
        forms = {name: (portion.size, portion.dtype) for name, portion in portions.items()}
        Checkpoint({}, {}, JoinedPieces([each for each in written if each], forms)).write(folder / "checkpoint.h5")


def read(world, folder, own):
    """Check all pieces together, then load this rank's part of each vector; exit if a piece is damaged."""
    found = Checkpoint.read(folder, pieces=False)
    if any(found.problems(True, world.rank, world.size)):
        sys.exit("a piece of the checkpoint is damaged: the disk has not kept what was written")
    n = own.stop - own.start
    with found.vectors.opened() as file:
        for name in VECTORS:
            read_into(file[name], [Hyperslab(0, own.start, 1, n, n)], np.empty(n, "f4"))


def in_background(world, folder, turn, portions):
    """Copy the arrays, as a step does before it continues; return the thread that writes the copies."""
    copies = {name: portion.copied() for name, portion in portions.items()}
    name = name_of_piece(turn, "ffffffff", world.rank)
    thread = threading.Thread(target=write_piece, args=(folder, name, copies))
    thread.start()
    return thread


def cells(rows):
    found = {}
    for name, title in {"plain": "plain", "pieces": "pieces", "one_file": "one file", "read": "read"}.items():
        found[f"{title}, MB/s"] = spread([row["megabytes"] / row[f"{name}_seconds"] for row in rows], ".0f")
    ratios = [row["plain_seconds"] / row["pieces_seconds"] for row in rows]
    found["pieces : plain"] = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    found["a step pays, s"] = spread([row["pieces_seconds"] for row in rows], ".3f")
    found["in the background, s"] = spread([row["copy_seconds"] for row in rows], ".3f")
    return found


main = benchmark("bench-checkpoint", CheckpointBench, __doc__, run)


if __name__ == "__main__":
    main()
