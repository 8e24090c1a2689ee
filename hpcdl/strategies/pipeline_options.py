"""Options of a pipeline of stages, with or without other axes beside it, and what goes together with its schedule."""

from dataclasses import dataclass
from typing import Any, Literal

from hpcdl.errors import UsageError
from hpcdl.runs.options import Options, option
from hpcdl.strategies.pipeline_schedules import SCHEDULES, actions_of


@dataclass(frozen=True)
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule.partition(":")[0] in ("constant", "step", "cosine", "1/t"):
            raise UsageError(
                f"--schedule {self.schedule}: here it is the pipeline's; write --lr-schedule {self.schedule}"
            )

    def plan(self, ranks: int, data: Any) -> tuple[int, int, int]:
        """The same; and no micro-batch is empty from the first."""
        found = super().plan(ranks, data)
        if self.schedule != "pipedream":
            self.refuse_more_parts("microbatches", min(found[0], data.examples))
        return found

    @property
    def cut(self) -> dict[str, Any]:
        """Entries of a Cut (description.py)."""
        return {name: getattr(self, name) for name in ("schedule", "microbatches", "chunks", "recompute")}

    @property
    def rate_schedule(self) -> str:
        return self.lr_schedule


def check_pipeline(options: PipelineOptions, stages: int, model: Any) -> None:
    """Raise UsageError where schedule, stages and model do not go together."""
    from hpcdl.models.balance import cut_layers

    check_schedule(options.schedule, options.microbatches, options.chunks, stages, model, options)
    cut_layers(model, stages * options.chunks)


def check_schedule(schedule: str, microbatches: int, chunks: int, stages: int, model: Any, options: Options) -> None:
    """Raise UsageError where stages, model and options do not go with the schedule."""
    actions_of(schedule, stages, 0, None if schedule == "pipedream" else microbatches, chunks)
    if options.accumulate > 1:
        raise UsageError("--accumulate: a pipeline cuts its batches by --microbatches; leave it out")
    if schedule == "pipedream":
        if any(layer.tied for layer in model.layers) and stages > 1:
            raise UsageError(
                "--schedule pipedream: the first and the last stage cannot share weights that they update at "
                "different times; take a model gpt:head=own"
            )
        if options.clip_norm and stages > 1:
            raise UsageError("--schedule pipedream: no stage waits for the norm of the others; leave out --clip-norm")
