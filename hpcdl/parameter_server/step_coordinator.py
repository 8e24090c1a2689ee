"""Who leads a parameter store: on rank 0, which serves, the one that says how many steps there are and which may begin.

    lead                              server of rank 0
        begin(store, step)      <---      the store is ready
        steps, limit            --->      which steps are given out
        admit(push)             <---      a push has come
        done(loss, total)       <---      a step is complete: all of its pushes are applied
        signalled()             <---      a client has had a signal
        sent(rank, ...)         <---      so much has this rank sent in all
        told(rank, numbers)     <---      what a client's push carries beside its values, `beside` numbers
        note()                  --->      what who takes its place has to know, where there are replicas

A training counts, scores and saves in `done`; until it returns, nobody is answered.
"""

import math
from collections import deque
from typing import Protocol

import numpy as np

from hpcdl.parameter_server.store_messages import Push


class Notes:
    """What a lead has noted of late, by steps: the last one, and before it those of steps that are not known yet."""

    def __init__(self) -> None:
        self.kept: deque[tuple[int, bytes]] = deque()

    def add(self, step: int, noted: bytes, known: int) -> None:
        """What was noted after a step; steps up to `known` are."""
        self.kept.append((step, noted))
        while len(self.kept) > 1 and self.kept[0][0] <= known:
            self.kept.popleft()


class LedStore(Protocol):
    """What a lead may ask of its store."""

    @property
    def granted(self) -> int:
        """Steps below have been given out."""

    def gather(self, whole: np.ndarray, which: int = 0, needs: float = -math.inf, finish: bool = False) -> None:
        """whole <- the servers' vectors (see `ParameterStore.gather`)."""


class Lead:
    """A lead that lets all steps begin, for ever, and does nothing; derive from it what decides.

    steps: no step from here on is given out. limit: steps from here on wait until it is raised; infinite where none
    ever waits. apart_seconds: what `done` has spent on other things than steps. All three may change in `begin` and
    `done`.
    """

    beside = 0  # how many numbers each push carries to the lead beside its values (ParameterStore)
    steps: float = math.inf
    limit: float = math.inf
    apart_seconds: float = 0.0

    def begin(self, store: LedStore, step: int) -> None:
        """The store is ready; `step` is the first one."""

    def admit(self, push: Push) -> None:
        """A push has come, and is about to be applied."""

    def done(self, loss: float, total: float) -> None:
        """The next step is complete: the sum of its pushes' losses, and its examples."""

    def note(self) -> tuple[bytes, int]:
        """What who takes this one's place has to know after the last `done`, nothing where nobody does.

        And up to which step nothing needs to be known any more of what was noted before.
        """
        return b"", 0

    def signalled(self) -> None:
        """A client has told that a rank was sent a signal to end."""

    def sent(self, rank: int, bytes: float, messages: float) -> None:
        """A rank has told what it has sent in all: a client with each request, a server when its slice is gathered."""

    def told(self, rank: int, numbers: np.ndarray) -> None:
        """A client's push has carried these numbers, float64."""
