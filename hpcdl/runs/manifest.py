"""started.json: what a run is, written when it begins, for who looks at it while it goes on, or when it was killed.

summary.json says the same, and what became of it, when the run has ended. Each leg writes it anew: `first_step` is the
step after which this leg began, `steps` the last one as planned.
"""

import os
import time
from typing import TYPE_CHECKING

from hpcdl.models import name_of
from hpcdl.models.model_wrapper import plain
from hpcdl.programs import of_strategy
from hpcdl.runs.folder import environment

if TYPE_CHECKING:
    from hpcdl.runs.run import Run

NAME, SCHEMA_VERSION = "started.json", 1


def started(run: "Run") -> dict:
    """What a run is that begins now, after the step that it has gone on from.

    started, ends: seconds since 1970, UTC; ends: when Slurm ends the job, null where it does not say. time_limit: in
    seconds, 0: none. hosts: of the ranks that train. job: Slurm's number of it, or null.
    """
    model, options, ends = plain(run.model), run.options, os.environ.get("SLURM_JOB_END_TIME", "")
    return {
        "schema_version": SCHEMA_VERSION,
        "strategy": run.strategy,
        "program": of_strategy(run.strategy),
        "ranks": run.everyone.size,
        "workers": run.workers,
        "data": run.data.name,
        "model": name_of(model),
        "parameters": int(model.layout.size),
        "dtype": str(model.layout.dtype),
        "seed": options.seed,
        "batch_size": run.batch,
        "first_step": run.step,
        "steps": run.steps,
        "steps_per_epoch": run.per_epoch,
        "started": time.time(),
        "time_limit": options.time_limit,
        "ends": int(ends) if ends.isdecimal() else None,
        "hosts": run.legs.hosts,
        "job": os.environ.get("SLURM_JOB_ID"),
        "environment": environment(),
    }
