"""What --check collectives and the flight recorder cost: mpiexec -n 2 python cost_of_checking.py [ROUNDS]

Each round times a blocking all_reduce as it is, recorded, and compared, one after the other, so that what else the
machine does meets all three alike; printed are the times of the quietest round, of the slowest rank.
"""

import sys
import tempfile
import time
from pathlib import Path

from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.comm.diagnostics.flight_recorder import FlightRecorder
from hpcdl.comm.progress import record_with

ROUNDS = int(sys.argv[1]) if sys.argv[1:] else 200
world = MPI.COMM_WORLD


def once(comm, vector, calls):
    """Microseconds of a call on the slowest rank."""
    comm.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        comm.all_reduce(vector)
    return world.allreduce((time.perf_counter() - start) / calls * 1e6, MPI.MAX)


plain, checked = Communicator(check=False), Communicator(check=True)
with tempfile.TemporaryDirectory() as folder:
    recorder = FlightRecorder(Path(folder, f"rank-{world.rank:04d}.bin"), world.rank, world.size, 1000, plain.family())
    ways = {"as it is": (plain, None), "recorded": (plain, recorder), "compared": (checked, None)}
    for size in (256, 1 << 18):
        vectors, took = {comm: comm.empty(size) for comm in (plain, checked)}, {way: [] for way in ways}
        for vector in vectors.values():
            vector[:] = 0
        for _ in range(ROUNDS):
            for way, (comm, recorder) in ways.items():
                record_with(recorder)
                took[way].append(once(comm, vectors[comm], 100 if size == 256 else 10))
        if world.rank == 0:
            each = ", ".join(f"{way} {min(found):.1f} us" for way, found in took.items())
            print(f"{4 * size} bytes, {world.size} ranks: {each}")
    record_with(None)
