"""The legs of a run: from its beginning, or a resumption, to its end, or to the checkpoint of the next resumption.

    leg 1, on 4 ranks          leg 2, on 6 ranks       leg 3, on 4 ranks
    |-----------o-----x        |-----------o           |---------------|          o  a checkpoint
                |     killed   ^           | a signal  ^               |          the end: summary.json
                +--------------+           +-----------+
    legs kept:  1                          1, 2                          1, 2, 3

A checkpoint keeps the legs up to it; what was spent after it is lost with its steps. The cost of rank r is the sum over
the legs that had a rank r, None if a part is unknown. At a checkpoint the ranks that meet sum up a table, a row per
rank. The costs of other ranks (on_one_rank.py, data servers) are known only when the run ends in good order."""

import dataclasses
import math
import resource
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.checkpoint.attributes import COUNTS, SUMMED
from hpcdl.comm import Communicator
from hpcdl.kernels.device import CPU, Device
from hpcdl.machine.versions import versions
from hpcdl.memory import KINDS, Memory
from hpcdl.runs.progress import Progress
from hpcdl.runs.stopwatch import Stopwatch


@dataclasses.dataclass
class Legs:
    """The legs before this one, and the known costs of this one. everyone: the communicator of all ranks in the run's
    summary. comm: of the ranks of this rank's kind, which train or serve. bookkeeping: of the same ranks, for the run's
    own messages. stopwatch, memory: of this rank. device: where it computes. earlier: legs kept by a checkpoint. first:
    the step after which this leg began. sent: bytes and messages of this leg as of the last agreement or checkpoint, of
    all ranks that met there. own: further costs of this leg on this rank, as NAME_per_rank, for the summary."""

    everyone: Communicator
    comm: Communicator
    bookkeeping: Communicator
    stopwatch: Stopwatch
    memory: Memory

    def __post_init__(self) -> None:
        self.device: Any = CPU
        self.first, self.own = 0, dict[str, Any]()
        self.earlier, self.hosts = list[dict](), list[str]()
        self.table: list[dict] = [{}] * self.everyone.size  # what each rank spent, as of the last checkpoint, if known
        self.sent = self.sent_earlier = (0.0, 0.0)

    def begin(self, device: Device) -> None:
        """Begin a leg: gather the names of hosts; collective."""
        self.device = device
        with self.bookkeeping.inside("gather the hosts"):
            self.hosts = sorted(set(self.bookkeeping.mpi.allgather(MPI.Get_processor_name())))

    def measured(self) -> dict:
        """Return what this leg cost this rank, by the names in summary.json."""
        traffic, stopwatch, device = self.comm.traffic, self.stopwatch, self.device
        gpu = {} if device is CPU else {"device_per_rank": str(device), "device_memory_bytes_per_rank": device.memory()}
        return {
            "bytes_sent_per_rank": traffic.bytes,
            "messages_per_rank": traffic.messages,
            "bookkeeping_bytes_per_rank": self.bookkeeping.traffic.bytes,
            "compute_seconds_per_rank": stopwatch.step_seconds - stopwatch.communication_seconds,
            "communication_seconds_per_rank": stopwatch.communication_seconds,
            "idle_seconds_per_rank": stopwatch.idle_seconds,
            "data_seconds_per_rank": stopwatch.data_seconds,
            "bookkeeping_seconds_per_rank": stopwatch.apart_seconds,
            "peak_memory_bytes_per_rank": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            **gpu,
            **self.own,
            "traffic_per_rank": {name: dataclasses.asdict(counters) for name, counters in traffic.items()},
            "sent_to_per_rank": self.everyone.sent_to,
            "message_sizes_per_rank": traffic.message_sizes,
            "host": MPI.Get_processor_name(),
            "memory": {kind: self.memory.peak[kind] for kind in KINDS},
        }

    def go_on_from(self, attributes: dict) -> None:
        """Begin the leg after a checkpoint's legs; their costs are unknown if an older hpcdl wrote the checkpoint."""
        self.first = attributes["step"]
        unknown = leg(None, self.first, attributes["seconds"], None, None, None)
        self.earlier = attributes.get("legs", [unknown])
        sent = [attributes.get("sent", {}).get(name) for name in ("bytes", "messages")]
        before, messages = (math.nan if each is None else each for each in sent)
        self.sent_earlier = before, messages

    def gather(self, comm: Communicator) -> None:
        """Tell the ranks of `comm` what each of them has spent in this leg; collective over them."""
        own, table = self.measured(), np.zeros((self.everyone.size, 1 + len(SUMMED)))
        row = [math.nan if own[name] is None else own[name] for name in SUMMED]
        table[self.everyone.rank] = [1, *row]
        comm.all_reduce(table.ravel())
        self.table = [dict(zip(SUMMED, row[1:].tolist(), strict=True)) if row[0] else {} for row in table]
        self.sent = float(table[:, 1].sum()), float(table[:, 2].sum())

    def so_far(self, progress: Progress, table: list[dict], hosts: list[str] | None = None) -> list[dict]:
        """Return all legs. table: what each rank has spent in this leg. hosts: of this leg; None: `self.hosts`."""
        steps, seconds = progress.step - self.first, progress.seconds - self.stopwatch.earlier_seconds
        return [*self.earlier, leg(self.everyone.size, steps, seconds, table, hosts or self.hosts, versions())]

    @property
    def bytes(self) -> float:
        """Bytes sent in all legs, summed over ranks at the last agreement or checkpoint; NaN if unknown."""
        return self.sent_earlier[0] + self.sent[0]

    @property
    def sent_so_far(self) -> dict:
        """Bytes and messages of all legs, summed over ranks at the last agreement or checkpoint; None if unknown."""
        before, now = self.sent_earlier, self.sent
        return {name: known(a + b, True) for name, a, b in zip(("bytes", "messages"), before, now, strict=True)}


def leg(
    ranks: int | None, steps: int, seconds: float, table: list[dict] | None, hosts: list[str] | None, used: dict | None
) -> dict:
    """Return a leg as in summary.json and checkpoints. table: each rank's costs. used: versions. None: unknown."""
    spent: dict[str, Any] = dict.fromkeys(SUMMED)
    if table is not None:
        spent = {name: [known(row.get(name), name in COUNTS) for row in table] for name in SUMMED}
    return {"ranks": ranks, "steps": steps, "seconds": seconds} | spent | {"hosts": hosts, "versions": used}


def known(value: float | None, count: bool) -> float | int | None:
    """Return the value, as a whole number if it is a `count`; None for None or NaN."""
    if value is None or math.isnan(value):
        return None
    return int(value) if count else float(value)


def summed(legs: list[dict]) -> dict[str, list]:
    """Return what each rank has spent in all legs that it took part in; None if a part is unknown."""

    def total(name: str, rank: int) -> float | None:
        took_part = [of for of in legs if of["ranks"] is None or rank < of["ranks"]]
        parts: list[Any] = [None if of.get(name) is None else of[name][rank] for of in took_part]
        return None if None in parts else sum(parts)

    most = max(of["ranks"] or 0 for of in legs)
    return {name: [total(name, rank) for rank in range(most)] for name in SUMMED}
