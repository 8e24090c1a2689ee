"""Replicas of the slices of a parameter store: slice i on the servers i, i + 1, ..., i + R - 1 of a ring of S.

    worker               server i, the primary             server i + 1, a backup
      | push n, values ------> | stores it                      |
      |                        | copy of n, values -----------> | stores it
      |                        | <------------------------ held |
      | <-------------- receipt|                                |
      | (receipts of all slices have arrived: n is complete)    |
      | pull n + 1 ----------> | applies n                      |
      |                        | commit n --------------------> | applies n
      | <------- values after n|                                |

Primary-backup replication: a push is on all R servers after two messages, in a chain after R; a server sends the same
bytes, R - 1 copies of what is pushed to it. The gradient travels, not the new slice: a backup does the same updates in
the same order, and so has the same bits of the values and of the optimizer's vectors.

A push is applied only when its worker sends its next request, and so has all receipts. Until then no server has applied
it, from then on all servers have it. If a server fails, each push is on all slices and is applied, or it is dropped
from all, and its worker recomputes it (hpcdl/recovery/server_failover.py). Its number is the worker's clock; a store
accepts only the next one, so none is applied twice.

Costs of a step, S servers, W workers, K values of k bytes: a server sends R - 1 copies of the W K k / S bytes that are
pushed to it, with headers of 96 bytes, and 8 bytes for each push as a backup and 8 as the primary. A push waits for two
more messages. (Alsberg and Day, ICSE 1976; Li et al., OSDI 2014: their servers form a chain; they
also name the saving if the pushes of a round are added up before they are copied)"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.framing import Inbox
from hpcdl.comm.requests import Request
from hpcdl.errors import TrainingError
from hpcdl.parameter_server.clocks import Clocks
from hpcdl.parameter_server.slice_state import SliceState
from hpcdl.parameter_server.store_messages import AMOUNTS, COPY, Push, StoreOperation, StoreTag

if TYPE_CHECKING:
    from hpcdl.memory import Memory


def backups(primary: int, servers: int, replicas: int) -> list[int]:
    """Return the servers that hold replicas of the slice of server `primary`."""
    return [(primary + each) % servers for each in range(1, replicas)]


Notes = deque[tuple[int, bytes]]  # notes of rank 0's run by step: the last, and all after the last agreed step


def add_note(notes: Notes, step: int, noted: bytes, known: int) -> None:
    """Add `noted`, the note after step `step`; drop older notes up to step `known`: their losses are agreed on."""
    notes.append((step, noted))
    while len(notes) > 1 and notes[0][0] <= known:
        notes.popleft()


@dataclass
class PendingPush:
    """A push that is not complete yet. waits: for the replicas' acknowledgements. receipted: known to its client."""

    push: Push
    buffer: np.ndarray
    waits: list[Request] = field(default_factory=list)
    receipted: bool = False


class SliceReplica(SliceState):
    """Replica of a slice: stores pushes until they are complete. led: True for rank 0's slice, whose losses stay until
    noted. pending: pushes not applied yet, by client. taken: events processed. notes: of the run, for a new rank 0."""

    def __init__(self, values: np.ndarray, clocks: Clocks, update: Callable, led: bool, memory: "Memory | None" = None):
        super().__init__(values, clocks, update, memory=memory)
        self.keeps_losses, self.taken, self.notes = led, 0, Notes()
        self.pending: dict[int, PendingPush] = {}

    def note(self, noted: bytes, step: int, known: int) -> None:
        """Store rank 0's note after `step`, and delete the losses of earlier steps. known: as in `add_note`."""
        add_note(self.notes, step, noted, known)
        for each in [each for each in self.losses if each < step]:
            del self.losses[each]


def commit(state: SliceState, kept: dict[int, PendingPush], client: int) -> bool:
    """Apply the client's push in `kept`; return False if there is none. TrainingError if its number is not the next."""
    if client not in kept:
        return False
    push, buffer = kept[client].push, kept[client].buffer
    due = state.clocks.of_client[client]
    if push.clock != due:
        raise TrainingError(f"a server was told to apply push {push.clock} of rank {client}, whose next push is {due}")
    del kept[client]
    state.take_in(push, buffer)
    return True


class ReplicaSender:
    """Sends the messages of a server to the replicas of its slice on `backups`.
    careful: True if pushes are acknowledged and wait until they are complete; otherwise there are no backups."""

    def __init__(self, comm: Communicator, state: SliceState):
        self.comm, self.state, self.careful = comm, state, False
        self.backups: list[int] = []
        self.pending: dict[int, PendingPush] = {}
        self.notes = Notes()

    def keep(self, push: Push, buffer: np.ndarray) -> None:
        """Send a new push to all replicas, and store it until it is complete."""
        pending = self.pending[push.client] = PendingPush(push, buffer)
        numbers = {name: getattr(push, name) for name in ("client", "clock", "seen", "version", *AMOUNTS)}
        part = {"start": push.part.start, "stop": push.part.stop, "which": push.drawn}
        header = COPY.header(operation=StoreOperation.PUSH, **numbers, **part)
        for backup in self.backups:
            pending.waits.append(self.comm.iwait(np.empty(1), backup, StoreTag.HELD))
            pending.waits += COPY.send(self.comm, backup, header, buffer[: push.size])

    def held(self) -> list[PendingPush]:
        """Return the pushes that all replicas have, and whose clients have no receipt yet."""
        waiting = [push for push in self.pending.values() if not push.receipted]
        return [push for push in waiting if all(each.done for each in push.waits)]

    def acknowledge(self) -> None:
        """Send the receipts that are due."""
        for each in self.held():
            each.receipted = True
            self.comm.ipush(np.array([float(each.push.clock)]), each.push.client, StoreTag.RECEIPT)

    def commit(self, client: int) -> None:
        """Apply the pending push of this client, if any, here and on all replicas."""
        if commit(self.state, self.pending, client):
            self.tell(StoreOperation.COMMIT, client)

    def tell(self, operation: StoreOperation, client: int) -> None:
        """Send an event of this slice to all replicas."""
        for backup in self.backups:
            COPY.send(self.comm, backup, COPY.header(operation=operation, client=client))

    def note(self, noted: bytes, known: int) -> None:
        """Store the note of rank 0's run, and send it to all replicas; losses up to step `known` are agreed on."""
        counted = self.state.clocks.counted
        add_note(self.notes, counted, noted, known)
        for backup in self.backups:
            header = COPY.header(operation=StoreOperation.NOTE, clock=counted, seen=known, stop=len(noted))
            COPY.send(self.comm, backup, header, np.frombuffer(noted, np.uint8))

    def begin(self) -> None:
        """Send the whole slice to its replicas."""
        for backup in self.backups:
            for vector in self.state.vectors:
                COPY.send_payloads(self.comm, backup, vector.copy())


class SliceReplicas:
    """The replicas, on this server, of other servers' slices, by rank."""

    def __init__(self, comm: Communicator):
        self.comm, self.of = comm, {}  # type: Communicator, dict[int, SliceReplica]
        self.inbox = Inbox(comm, COPY, ())

    @property
    def open(self) -> bool:
        """True if pushes may still arrive."""
        return any(each.clocks.open for each in self.of.values())

    def begin(self) -> None:
        """Receive the whole slices."""
        for primary, replica in self.of.items():
            for vector in replica.vectors:
                COPY.fill(self.comm, primary, vector)
        self.inbox = Inbox(self.comm, COPY, self.of)

    def attend(self) -> None:
        """Process the messages that have arrived."""
        for primary in self.inbox.arrived():
            self.follow(primary, self.inbox.take(primary))
            if self.of[primary].clocks.open:
                self.inbox.listen(primary)

    def follow(self, primary: int, header: np.ndarray) -> None:
        """Process one event of the slice of server `primary`."""
        replica, operation, client = self.of[primary], header["operation"], int(header["client"])
        if operation == StoreOperation.PUSH:
            push, buffer = Push.read(header, client), replica.buffer()
            COPY.fill(self.comm, primary, buffer[: push.size])
            replica.pending[client] = PendingPush(push, buffer)
            self.comm.ipush(np.array([float(push.clock)]), primary, StoreTag.HELD)
        elif operation == StoreOperation.COMMIT:
            commit(replica, replica.pending, client)
        elif operation == StoreOperation.NOTE:
            noted = np.empty(int(header["stop"]), np.uint8)
            COPY.fill(self.comm, primary, noted)
            replica.note(noted.tobytes(), int(header["clock"]), int(header["seen"]))
        else:
            replica.clocks.open.discard(client)
        for _ in replica.end_steps():
            pass
        replica.taken += 1
