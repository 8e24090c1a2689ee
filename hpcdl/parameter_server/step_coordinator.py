"""The lead of a parameter store: on rank 0, a server, it decides how many steps there are and which may begin.

    lead                              server of rank 0
        begin(store, step)      <---      the store is ready
        steps, limit            --->      which steps are given out
        admit(push)             <---      a push has arrived
        done(loss, total)       <---      a step is complete: all of its pushes are applied
        signalled()             <---      a client has received a signal
        sent(rank, ...)         <---      total traffic of a rank
        told(rank, numbers)     <---      the further numbers of a client's push, `beside` of them
        note()                  --->      state for a successor, if there are replicas

A training counts, scores and saves in `done`; no requests are answered until it returns.
"""

import math
from collections import deque
from typing import Protocol

import numpy as np

from hpcdl.parameter_server.store_messages import Push


class Notes:
    """Recent notes of a lead by step: the last one, and earlier ones of steps that are not known yet."""

    def __init__(self) -> None:
        self.entries: deque[tuple[int, bytes]] = deque()

    def add(self, step: int, noted: bytes, known: int) -> None:
        """Add the note after a step; steps up to `known` are known."""
        self.entries.append((step, noted))
        while len(self.entries) > 1 and self.entries[0][0] <= known:
            self.entries.popleft()


class LedStore(Protocol):
    """The store's interface for a lead."""

    @property
    def granted(self) -> int:
        """Steps below have been given out."""

    def gather(self, whole: np.ndarray, which: int = 0, needs: float = -math.inf, finish: bool = False) -> None:
        """Set `whole` to the servers' vectors (see `ParameterStore.gather`)."""


class Lead:
    """A lead without limits; subclasses decide.

    steps: no step from here on is given out. limit: steps from here on wait until it is raised; infinity: none waits.
    apart_seconds: time spent in `done` on other work than steps. All three may change in `begin` and `done`.
    """

    beside = 0  # further numbers that each push carries to the lead (ParameterStore)
    steps: float = math.inf
    limit: float = math.inf
    apart_seconds: float = 0.0

    def begin(self, store: LedStore, step: int) -> None:
        """The store is ready; `step` is the first one."""

    def admit(self, push: Push) -> None:
        """A push has arrived and is about to be applied."""

    def done(self, loss: float, total: float) -> None:
        """The next step is complete: sum of its pushes' losses, number of its examples."""

    def note(self) -> tuple[bytes, int]:
        """Return the state for a successor after the last `done`, b"" if there is none.

        And the step up to which earlier notes are no longer needed.
        """
        return b"", 0

    def signalled(self) -> None:
        """A client has reported that a rank received a signal."""

    def sent(self, rank: int, bytes: float, messages: float) -> None:
        """A rank has reported its total traffic: a client with each request, a server when its slice is gathered."""

    def told(self, rank: int, numbers: np.ndarray) -> None:
        """A client's push has carried these numbers, float64."""
