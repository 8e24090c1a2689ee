"""The legs of a run: from its beginning, or from a resumption, to its end or to the checkpoint that is gone on from.

    leg 1, on 4 ranks          leg 2, on 6 ranks       leg 3, on 4 ranks
    |-----------o-----x        |-----------o           |---------------|          o  a checkpoint
                |     killed   ^           | a signal  ^               |          the end: summary.json
                +--------------+           +-----------+
    legs kept:  1                          1, 2                          1, 2, 3

A leg says how many ranks it had, on which hosts and with which versions, how many steps it did in how many seconds, and
what each rank spent. A checkpoint keeps the legs up to it, so that a run that was killed has them, too; what was spent
beyond it is lost with its steps. What a run has cost rank r is the sum over the legs in which there was a rank r: the
lists are as long as the most ranks that a leg had. A sum of which a part is not known is None.

At a checkpoint the ranks that meet add up a table in one message of the run's own, a row for each rank. Ranks that do
not meet (on_one_rank.py, data servers) are not known there; they are when the run ends in good order.
"""

import dataclasses
import math
import resource
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl.checkpoint.attributes import COUNTS, SUMMED
from hpcdl.comm import Communicator
from hpcdl.comm.progress import activity
from hpcdl.kernels.device import CPU, Device
from hpcdl.machine.versions import versions
from hpcdl.memory import KINDS, Memory
from hpcdl.runs.progress import Progress
from hpcdl.runs.stopwatch import Stopwatch


class Legs:
    """The legs before this one, and what is known of this one's costs.

    everyone: all ranks that the run's summary speaks of. comm: those of this rank's kind, which train or serve.
    bookkeeping: their communicator of the run's own messages. stopwatch, memory: of this rank. device: where it
    computes. earlier: as a checkpoint has kept them. first: the step that this leg began after. sent: bytes and
    messages of this leg as of the last agreement or checkpoint, of all ranks that met there. own: more of this leg's
    costs of this rank, as NAME_per_rank, for the summary.
    """

    device: Any = CPU

    def __init__(
        self,
        everyone: Communicator,
        comm: Communicator,
        bookkeeping: Communicator,
        stopwatch: Stopwatch,
        memory: Memory,
    ):
        self.everyone, self.comm, self.bookkeeping, self.stopwatch = everyone, comm, bookkeeping, stopwatch
        self.memory, self.first = memory, 0
        self.own: dict[str, Any] = {}
        self.earlier: list[dict] = []
        self.hosts: list[str] = []
        self.table: list[dict] = [{}] * everyone.size  # as of the last checkpoint: what each rank spent, where known
        self.sent = self.sent_earlier = (0.0, 0.0)

    def begin(self, device: Device) -> None:
        """A leg begins; collective."""
        self.device = device
        with activity.inside("gather the hosts", self.bookkeeping):
            self.hosts = sorted(set(self.bookkeeping.mpi.allgather(MPI.Get_processor_name())))

    def measured(self) -> dict:
        """What this leg cost this rank, in the names of summary.json: bytes, seconds of steps by their parts, and
        between."""
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
        """Another leg, after those that a checkpoint has kept; of an older version's it says what can be known."""
        self.first = attributes["step"]
        unknown = leg(None, self.first, attributes["seconds"], None, None, None)
        self.earlier = attributes.get("legs", [unknown])
        sent = [attributes.get("sent", {}).get(name) for name in ("bytes", "messages")]
        before, messages = (math.nan if each is None else each for each in sent)
        self.sent_earlier = before, messages

    def gather(self, comm: Communicator) -> None:
        """Let the ranks of `comm` know what each of them has spent in this leg; collective over them."""
        own, table = self.measured(), np.zeros((self.everyone.size, 1 + len(SUMMED)))
        row = [math.nan if own[name] is None else own[name] for name in SUMMED]
        table[self.everyone.rank] = [1, *row]
        comm.all_reduce(table.ravel())
        self.table = [dict(zip(SUMMED, row[1:].tolist(), strict=True)) if row[0] else {} for row in table]
        self.sent = float(table[:, 1].sum()), float(table[:, 2].sum())

    def attributes(self, progress: Progress) -> dict:
        """What a checkpoint of the run as it stands keeps."""
        return {"legs": self.so_far(progress, self.table), "sent": self.sent_so_far}

    def so_far(self, progress: Progress, table: list[dict], hosts: list[str] | None = None) -> list[dict]:
        """All legs, of which the ranks of this one have spent what the table says. hosts: where those were that the
        table is of, if more than have begun the leg."""
        steps, seconds = progress.step - self.first, progress.seconds - self.stopwatch.earlier_seconds
        return [*self.earlier, leg(self.everyone.size, steps, seconds, table, hosts or self.hosts, versions())]

    @property
    def complete(self) -> bool:
        """Whether the last checkpoint knows what each rank had spent in this leg."""
        return all(self.table)

    @property
    def bytes(self) -> float:
        """Sent in all legs by then, of all ranks that met there; NaN where it is not known."""
        return self.sent_earlier[0] + self.sent[0]

    @property
    def sent_so_far(self) -> dict:
        """Bytes and messages of all legs by then, of all ranks that met there; None where they are not known."""
        before, now = self.sent_earlier, self.sent
        return {name: known(a + b, True) for name, a, b in zip(("bytes", "messages"), before, now, strict=True)}


def leg(
    ranks: int | None,
    steps: int,
    seconds: float,
    table: list[dict] | None,
    hosts: list[str] | None,
    used: dict | None,
) -> dict:
    """A leg, as summary.json and a checkpoint's attributes tell it. table: what each rank has spent, where known."""
    spent: dict[str, Any] = dict.fromkeys(SUMMED)
    if table is not None:
        spent = {name: [known(row.get(name), name in COUNTS) for row in table] for name in SUMMED}
    return {"ranks": ranks, "steps": steps, "seconds": seconds} | spent | {"hosts": hosts, "versions": used}


def known(value: float | None, count: bool) -> float | int | None:
    """The value, a count as a whole number; None where it is not known (None, or no number)."""
    if value is None or math.isnan(value):
        return None
    return int(value) if count else float(value)


def summed(legs: list[dict]) -> dict[str, list]:
    """What each rank has spent in all legs in which it took part; None where a part of that is not known."""

    def total(name: str, rank: int) -> float | None:
        took_part = [of for of in legs if of["ranks"] is None or rank < of["ranks"]]
        parts: list[Any] = [None if of.get(name) is None else of[name][rank] for of in took_part]
        return None if None in parts else sum(parts)

    most = max(of["ranks"] or 0 for of in legs)
    return {name: [total(name, rank) for rank in range(most)] for name in SUMMED}
