"""What a run is given: its context beside the options, and its setup, once it has begun."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcdl.comm import Communicator
from hpcdl.models.model import name_of, unwrapped
from hpcdl.runs.options import Options


@dataclass(frozen=True)
class RunContext:
    """The surroundings of a run.

    everyone: the communicator of all ranks that the summary speaks of, where others serve those that train; None: only
    these. workers: how many ranks compute; 0: all. survivor: what the ranks that are left go on from when others are
    gone (hpcdl/recovery/survivor.py). pause: the epoch after which this leg ends; 0: the last. heir: True if the run
    goes on from one that had other options. repeated: True inside a job of many runs, which begins a run anew with
    --force after it was killed. data_seed: as `open_data` takes it. prepare(data, options, workers): called once
    the data are open; returns the data to train on, and the options.
    """

    everyone: Communicator | None = None
    workers: int = 0
    survivor: Any = None
    pause: float = 0.0
    heir: bool = False
    repeated: bool = False
    data_seed: int | None = None
    prepare: Callable[[Any, Options, int], tuple[Any, Options]] | None = None


@dataclass(frozen=True)
class RunSetup:
    """What a run trains, by which strategy and on how many ranks: what stays as it is from its first step to its last.

    batch: examples of a step. per_epoch: steps. readers: how many ranks read a part of each batch. fixed: of what the
    run reports, what a run that goes on must have as it was.
    """

    strategy: str
    options: Options
    model: Any
    data: Any
    ranks: int
    workers: int
    batch: int
    per_epoch: int
    readers: int
    fixed: dict

    @property
    def order(self) -> str | None:
        """How the rows of an epoch are ordered; None where clients visit theirs, whatever an epoch is."""
        if "clients" in self.fixed:
            return None
        text: str = self.data.order.replace("{ranks}", str(self.readers))
        return text

    @property
    def used(self) -> dict:
        """Of the options, what the run has really used: a program may hand it a model and data of its own."""
        of = {} if hasattr(self.data, "environment") else {"data": self.data.source or self.data.name}
        return of | {"model": name_of(unwrapped(self.model))}

    def described(self) -> dict:
        """What summary.json says of it, too."""
        return {
            "strategy": self.strategy,
            "ranks": self.ranks,
            "workers": self.workers,
            "data": self.data.name,
            "model": name_of(unwrapped(self.model)),
            "parameters": int(self.model.layout.size),
            "dtype": str(self.model.layout.dtype),
            "seed": self.options.seed,
            "batch_size": self.batch,
        }
