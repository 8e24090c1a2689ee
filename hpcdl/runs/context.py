"""A run's surroundings beside its options (`RunContext`), and its constants once it has begun (`RunSetup`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcdl.comm import Communicator
from hpcdl.models.model import name_of, unwrapped
from hpcdl.runs.options import Options


@dataclass(frozen=True)
class RunContext:
    """The surroundings of a run. everyone: the communicator of all ranks in the summary, if some ranks serve the ranks
    that train; None: all train. workers: how many ranks compute; 0: all. survivor: what surviving ranks continue from
    (hpcdl/recovery/survivor.py). pause: the epoch after which this leg ends; 0: the last. heir: True if the run
    continues a run that had other options. repeated: True inside a job of many runs, which restarts a killed run with
    --force. data_seed: an argument of `open_data`. prepare(data, options, workers): called once the data are open;
    returns the data to train on, and the options."""

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
    """What a run trains, by which strategy and on how many ranks: constant from its first step to its last. batch:
    examples of a step. per_epoch: steps of an epoch. readers: how many ranks read a part of each batch. fixed: the
    reported entries that a resumed run must have unchanged."""

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
        """A text on the order of rows in an epoch; None if each client has an order of its own."""
        if "clients" in self.fixed:
            return None
        text: str = self.data.order.replace("{ranks}", str(self.readers))
        return text

    @property
    def used(self) -> dict:
        """The entries data and model as really used: a program may pass others than its options name."""
        of = {} if hasattr(self.data, "environment") else {"data": self.data.source or self.data.name}
        return of | {"model": name_of(unwrapped(self.model))}

    def described(self) -> dict:
        """Return the entries that started.json and summary.json have in common."""
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
