"""Ranks that take turns in this process, with messages that carry values, for any number of them without MPI.

A message passes when both sides are posted: an algorithm fails here if it needs buffered sends, changes a vector that
it is sending, or receives into it."""

import math
from collections import defaultdict, deque

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.comm.operations import SUM
from hpcdl.comm.primitives.all_to_all import saves_time


class LocalComm:
    """One rank's communicator, as far as algorithms use it. messages, values: sent so far."""

    def __init__(self, rank, size, posted):
        self.rank, self.size, self.posted = rank, size, posted
        self.messages = self.values = 0
        self.sending = []

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def Isend(self, vector, to, tag=0):
        self.messages, self.values = self.messages + 1, self.values + vector.size
        request = self.post("sends", "receives", (self.rank, to, tag), vector)
        self.sending.append((request, vector))
        return request

    Issend = Isend

    def Irecv(self, vector, source, tag=0):
        self.sending = [(request, sent) for request, sent in self.sending if not request[0]]
        overlaps = any(np.may_share_memory(sent, vector) for _, sent in self.sending)
        assert not overlaps, f"rank {self.rank} receives into what it is sending"
        return self.post("receives", "sends", (source, self.rank, tag), vector)

    def post(self, mine, others, ends, vector):
        request, waiting = [False], self.posted[others, ends]
        if not waiting:
            self.posted[mine, ends].append((request, vector))
            return request
        other, values = waiting.popleft()
        into, values = (vector, values) if mine == "receives" else (values, vector)
        assert into.size == values.size, f"message {ends}: {values.size} values for a receive of {into.size}"
        into[...] = values
        request[0] = other[0] = True
        return request


def run_locally(steps, vectors, *arguments):
    """Run steps(comm, vector, *arguments) on a rank for each vector; return the communicators, and the rounds that
    the slowest rank has waited."""
    posted = defaultdict(deque)
    comms = [LocalComm(rank, len(vectors), posted) for rank in range(len(vectors))]
    runs = [steps(comm, vector, *arguments) for comm, vector in zip(comms, vectors, strict=True)]
    waits, yields = [next(run, None) for run in runs], 0
    while any(wait is not None for wait in waits):
        free = [rank for rank, wait in enumerate(waits) if wait is not None and all(request[0] for request in wait)]
        assert free, f"ranks {[rank for rank, wait in enumerate(waits) if wait is not None]} wait for each other"
        yields += 1
        for rank in free:
            waits[rank] = next(runs[rank], None)
    assert not any(posted.values()), "messages that nobody receives"
    return comms, yields


def reduced_locally(algorithm, rows):
    """Run an all-reduce of these rows, one for each rank, in place, as `run_locally`."""
    return run_locally(algorithm.steps, list(rows), SUM)


def of_chunks(length, size, first, count):
    """The values of `count` chunks from `first` on, modulo `size`, and the messages in which they go."""
    cut = [chunk(length, size, (first + i) % size) for i in range(count)]
    return sum(part.stop - part.start for part in cut), 1 + (first % size + count > size)


def all_to_all_rows(size, row):
    """How many rows of so many bytes a rank sends in an all-to-all: short ones pass several ranks (Bruck)."""
    return sum(i.bit_count() for i in range(size)) if saves_time(size, row) else size - 1


def circulant_traffic(length, size, rank):
    """Values and messages that a rank sends in the reduce-scatter and in the all-gather, by the ranges of the paper."""
    scatter, gather, active = [], [], size
    while active > 1:
        keep = math.ceil(active / 2)
        scatter.append(of_chunks(length, size, rank + keep, active - keep))
        gather.append(of_chunks(length, size, rank, active - keep))
        active = keep
    assert len(scatter) == math.ceil(math.log2(size))
    return tuple(np.array(each or [(0, 0)]).sum(axis=0) for each in (scatter, gather))
