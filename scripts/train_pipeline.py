"""Train by pipeline parallelism: mpiexec -n 4 python scripts/train_pipeline.py --model gpt --data text --microbatches 8

Schedules: naive, gpipe, 1f1b, interleaved (--chunks 2), pipedream. --draw shows a step as planned and as it was.
"""

from hpcdl.launch.training import Training  # first: it takes over the signals before MPI starts

# isort: split
from dataclasses import dataclass
from typing import Literal

from hpcdl.errors import UsageError
from hpcdl.models.balance import cut_layers
from hpcdl.parallel.cut_model import check_same_rows
from hpcdl.runs.options import Options, option
from hpcdl.strategies.pipeline import check_schedule, train
from hpcdl.strategies.pipeline_schedules import SCHEDULES


@dataclass
class PipelineOptions(Options):
    schedule: str = option(
        "1f1b", f"of the pipeline: {', '.join(SCHEDULES)}; that of the learning rate is --lr-schedule"
    )
    lr_schedule: str = option("cosine", "constant, step, cosine, 1/t or polynomial; settings as in cosine:warmup=2")
    microbatches: int = option(4, "parts of a batch, which follow each other through the stages")
    chunks: int = option(1, "chunks of layers that each stage has, for --schedule interleaved")
    recompute: bool = option(False, "keep only the input of a micro-batch, and compute the rest anew for its backward")
    balance: Literal["parameters", "measured"] = option(
        "parameters", "by what the layers are cut evenly: their parameters, or the time that they take"
    )
    draw: bool = option(False, "print the schedule as planned, and the last step as it was")

    def __post_init__(self):
        super().__post_init__()
        if self.schedule.partition(":")[0] in ("constant", "step", "cosine", "1/t"):
            raise UsageError(
                f"--schedule {self.schedule}: here it is the pipeline's; write --lr-schedule {self.schedule}"
            )

    def plan(self, ranks, data):
        """The same; and no micro-batch is empty from the first."""
        found = super().plan(ranks, data)
        if self.schedule != "pipedream":
            self.refuse_more_parts("microbatches", min(found[0], data.examples))
        return found

    @property
    def rate_schedule(self):
        return self.lr_schedule


def check_pipeline(options, stages, model):
    """Raise UsageError where schedule, stages and model do not go together."""
    check_schedule(options.schedule, options.microbatches, options.chunks, stages, model, options)
    cut_layers(model, stages * options.chunks)


def start(comm, model, data, optimizer, run):
    names = "schedule", "microbatches", "chunks", "recompute", "balance", "draw"
    train(comm, model, data, optimizer, run, **{name: getattr(run.options, name) for name in names})


def fits(options, ranks, model):
    check_same_rows(options, ranks)
    check_pipeline(options, ranks, model)


TRAINING = Training("train-pipeline", PipelineOptions, __doc__, start, check=fits, cut=True)
main = TRAINING.main


if __name__ == "__main__":
    main()
