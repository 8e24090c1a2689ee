"""started.json: what a run is, written when it begins, for who looks at it while it goes on, or when it was killed.

summary.json says the same, and what became of it, when the run has ended. Each leg writes it anew: `first_step` is the
step after which this leg began, `steps` the last one as planned.
"""

import os
import time
from dataclasses import dataclass
from typing import Any

from hpcdl.models.model import name_of, unwrapped
from hpcdl.programs import of_strategy
from hpcdl.runs.folder import environment
from hpcdl.runs.options import Options

NAME, SCHEMA_VERSION = "started.json", 1


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


def started(setup: RunSetup, first: int, steps: int, hosts: list[str]) -> dict:
    """What a run is that begins now, after the step that it has gone on from.

    started, ends: seconds since 1970, UTC; ends: when Slurm ends the job, null where it does not say. time_limit: in
    seconds, 0: none. hosts: of the ranks that train. job: Slurm's number of it, or null.
    """
    ends = os.environ.get("SLURM_JOB_END_TIME", "")
    return {
        "schema_version": SCHEMA_VERSION,
        **setup.described(),
        "program": of_strategy(setup.strategy),
        "first_step": first,
        "steps": steps,
        "steps_per_epoch": setup.per_epoch,
        "started": time.time(),
        "time_limit": setup.options.time_limit,
        "ends": int(ends) if ends.isdecimal() else None,
        "hosts": hosts,
        "job": os.environ.get("SLURM_JOB_ID"),
        "environment": environment(),
    }
