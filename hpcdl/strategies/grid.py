"""Data, pipeline, context, expert and tensor parallelism together, on a grid of ranks.

    axis          its ranks hold                                       they exchange
    data d        copies of the model, each with a share of a batch    the gradient's sum once a step, or as ZeRO does
    pipeline p    stages of consecutive layers                         activations, for each micro-batch
    context c     copies, each with some tokens of every sequence      keys and values, for each attention; and as data
    expert e      copies but for experts, with shares of a batch       tokens, for each mixture; gradients once a step
    tensor t      parts of each layer                                  sums within layers, for each micro-batch

    for each batch: each copy cuts its share into m micro-batches
        each stage takes them through its layers in the schedule's order; the t ranks of a stage work on each layer
        sum the gradient over the copies; that of tied weights also over the stages that share them; update

The product of the axes is the number of ranks. With data alone the grid is all-reduce SGD or fully sharded, with
pipeline alone hpcdl/strategies/pipeline.py, with tensor alone hpcdl/strategies/tensor_parallel.py; the steps are the
same for any grid. stage: the stage of ZeRO over data times context (hpcdl/parallel/zero.py). (Narayanan et al.,
"Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021)"""

from dataclasses import dataclass
from typing import Any, Literal

from hpcdl.errors import UsageError
from hpcdl.kernels.device import Array
from hpcdl.runs.options import check_zero_stage, option
from hpcdl.strategies.description import Communicator, Cut, Data, Optimizer, Run, Strategy
from hpcdl.strategies.pipeline_options import PipelineOptions, check_pipeline
from hpcdl.strategies.pipeline_schedules import actions_of, pictures, placement


def train(
    comm: Communicator,
    model: Any,
    data: Data,
    optimizer: Optimizer,
    run: Run,
    grid: dict[str, int] | str,
    schedule: str = "1f1b",
    microbatches: int = 4,
    chunks: int = 1,
    recompute: bool = False,
    sequence: bool = False,
    stage: int = 0,
    attention: str = "ring",
    balance: str = "parameters",
    draw: bool = False,
) -> Array:
    """Train on all ranks of `comm`, a grid of the shape `grid`; return the parameters that this rank holds."""
    from hpcdl.comm.grid import AXES, Grid, parse_grid
    from hpcdl.parallel.context import costs
    from hpcdl.parallel.expert import sent_along
    from hpcdl.parallel.pipelined import pipelined

    groups = run.until_end(Grid(comm, **(parse_grid(grid, comm.size) if isinstance(grid, str) else grid)))
    stages, p = groups.pipeline.size, groups.pipeline.rank
    how: Any = {"zero": stage, "attention": attention, "microbatches": microbatches}
    where = placement(schedule, stages, chunks)
    held, layers = pipelined(run, model, data, optimizer, groups, where, balance, recompute, sequence, **how)
    run.report(grid=dict(zip(AXES, groups.shape, strict=True)), stage=stage)
    run.report(schedule=schedule, microbatches=microbatches, chunks=where.chunks, recompute=recompute)
    run.begin("grid", held, data)
    held.part.experts.clear()

    for batch in run.batches(data, held.share):
        held.zero_gradient()
        loss = layers.run(actions_of(schedule, stages, p, microbatches, chunks), batch.split(microbatches))
        held.part.experts.end_step(held.part.pool)
        held.update(batch.total)
        run.record(loss if held.reports_loss else 0.0, batch.total)
        run.boundary()
    run.report(**layers.costs(held.peers))
    if groups.context.size > 1:
        run.report(**costs(held.part.context, held.peers))
    if groups.expert.size > 1:
        run.report(**sent_along(held.part.experts, held.peers))
    if draw and groups.data.rank == groups.context.rank == groups.expert.rank == groups.tensor.rank == 0:
        run.say(pictures(schedule, stages, microbatches, chunks, layers.gather_spans()))
    return held.parameters


@dataclass(frozen=True)
class GridOptions(PipelineOptions):
    grid: str = option("data=1", "ranks along each axis, as in data=2,pipeline=2,context=2,tensor=2; or expert=2")
    stage: int = option(0, "stage of ZeRO along the axes data and context: 0, 1, 2 or 3")
    sequence_parallel: bool = option(False, "cut the activations between the parts of layers by tokens (gpt)")
    attention: Literal["ring", "ulysses", "auto"] = option(
        "ring", "attention along the axis context; auto: the faster of both, as tried at the start"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_zero_stage(self.stage)
        if self.schedule == "pipedream":
            raise UsageError("--schedule pipedream updates each stage by itself: take train-pipeline, not a grid")


def fits(options: GridOptions, ranks: int, model: Any) -> None:
    from hpcdl.comm.grid import parse_grid
    from hpcdl.parallel.context import check_context
    from hpcdl.parallel.cut_model import check_same_rows, check_tensor
    from hpcdl.parallel.expert import check_experts

    grid = parse_grid(options.grid, ranks)
    check_same_rows(options, grid["pipeline"] * grid["context"] * grid["tensor"])
    check_pipeline(options, grid["pipeline"], model)
    check_tensor(model, grid["tensor"], options.sequence_parallel)
    check_context(model, grid["context"], options.attention, grid["tensor"])
    check_experts(model, grid["expert"])


def cut(options: GridOptions, ranks: int) -> Cut:
    from hpcdl.comm.grid import parse_grid

    data, pipeline, context, expert, tensor = parse_grid(options.grid, ranks).values()
    own: Any = options.cut | {"context": context, "attention": options.attention, "expert": expert}
    return Cut((data, pipeline, tensor), options.stage, tensor=True, sequence=options.sequence_parallel, **own)


SMALL = "--model mlp:32 --batch-per-rank 8 --microbatches 2 --grid data={ranks}"
RENAMED = {"sequence": "sequence_parallel"}
STRATEGY = Strategy("train-grid", GridOptions, train, cut=cut, check=fits, renamed=RENAMED, small=SMALL)
