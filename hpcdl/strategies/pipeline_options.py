"""Options of a pipeline of stages, alone or on a grid with other axes, and the check of its schedule."""

from dataclasses import dataclass
from typing import Any, Literal

from hpcdl.errors import UsageError
from hpcdl.runs.options import Options, option, refuse
from hpcdl.strategies.pipeline_schedules import SCHEDULES, actions_of, placement


@dataclass(frozen=True)
class PipelineOptions(Options):
    schedule: str = option(
        "1f1b", f"schedule of the pipeline: {', '.join(SCHEDULES)}, auto; the learning rate has --lr-schedule"
    )
    lr_schedule: str = option("cosine", "constant, step, cosine, 1/t or polynomial; settings as in cosine:warmup=2")
    fit: str = option("", "memory of a rank, as 8GiB, for --schedule auto, which takes the fastest schedule that fits")
    microbatches: int = option(4, "parts of a batch, which follow each other through the stages")
    chunks: int = option(1, "chunks of layers that each stage has, for interleaved schedules")
    recompute: bool = option(False, "keep only the input of a micro-batch, and compute the rest anew for its backward")
    balance: Literal["parameters", "measured"] = option(
        "parameters", "what the stages have in equal parts: parameters, or measured time of the layers"
    )
    draw: bool = option(False, "print the schedule as planned, and the last step as it was")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule.partition(":")[0] in ("constant", "step", "cosine", "1/t"):
            raise UsageError(
                f"--schedule is the pipeline's, not the learning rate's: write --lr-schedule {self.schedule}"
            )

        if self.fit and self.schedule != "auto":
            raise UsageError("--fit is for --schedule auto: leave it out, or ask hpcdl plan memory what a line holds")

    def plan(self, ranks: int, data: Any) -> tuple[int, int, int]:
        """Return the plan as `Options` does; UsageError if a batch has fewer examples than --microbatches parts."""
        found = super().plan(ranks, data)
        if self.schedule != "pipedream":
            self.refuse_more_parts("microbatches", min(found[0], data.examples))
        return found

    @property
    def cut(self) -> dict[str, Any]:
        """The values of the options that are fields of `Cut` (description.py), by name."""
        return {name: getattr(self, name) for name in ("schedule", "microbatches", "chunks", "recompute")}

    @property
    def rate_schedule(self) -> str:
        return self.lr_schedule


def check_pipeline(options: PipelineOptions, stages: int, model: Any) -> None:
    """Raise UsageError if schedule, stages and model do not go together."""
    from hpcdl.models.balance import cut_layers

    several = options.schedule == "pipedream" and stages > 1
    microbatches = None if options.schedule == "pipedream" else options.microbatches
    actions_of(options.schedule, stages, 0, microbatches, options.chunks)
    shared = "--schedule pipedream: the first and the last stage cannot share weights that they update at different "
    refuse(
        (options.accumulate > 1, "--accumulate: a pipeline cuts its batches by --microbatches; leave it out"),
        (several and any(layer.tied for layer in model.layers), f"{shared}times; take a model gpt:head=own"),
        (several and options.clip_norm, "--schedule pipedream: stages wait for no common norm; leave out --clip-norm"),
    )
    cut_layers(model, placement(options.schedule, stages, options.chunks).last + 1)
