"""Train by data, pipeline and tensor parallelism on a grid of ranks:
mpiexec -n 4 python scripts/train_grid.py --model gpt --data text --grid data=2,tensor=2

Axes data, pipeline and tensor, whose product is the number of ranks; ZeRO along the data axis: --stage 1, 2 or 3.
"""

from hpcdl.launch.training import Training  # first: it takes over the signals before MPI starts

# isort: split
from dataclasses import dataclass

from hpcdl.comm.grid import parse_grid
from hpcdl.errors import UsageError
from hpcdl.parallel.cut_model import check_same_rows
from hpcdl.runs.options import option
from hpcdl.scripts.train_pipeline import PipelineOptions, check_pipeline
from hpcdl.scripts.train_tensor_parallel import check_tensor
from hpcdl.strategies.grid import train


@dataclass
class GridOptions(PipelineOptions):
    grid: str = option("data=1", "ranks along each axis, as in data=2,pipeline=2,tensor=2")
    stage: int = option(0, "of ZeRO, along the data axis: 0, 1, 2 or 3")
    sequence_parallel: bool = option(False, "cut what lies between the parts of layers by tokens (gpt)")

    def __post_init__(self):
        super().__post_init__()
        if self.stage not in range(4):
            raise UsageError(f"--stage is 0, 1, 2 or 3, not {self.stage}")
        if self.schedule == "pipedream":
            raise UsageError("--schedule pipedream updates each stage by itself: train-pipeline has it, a grid has not")


def start(comm, model, data, optimizer, run):
    options = run.options
    names = "schedule", "microbatches", "chunks", "recompute", "balance", "draw", "stage"
    more = {name: getattr(options, name) for name in names} | {"sequence": options.sequence_parallel}
    train(comm, model, data, optimizer, run, parse_grid(options.grid, comm.size), **more)


def fits(options, ranks, model):
    grid = parse_grid(options.grid, ranks)
    check_same_rows(options, grid["pipeline"] * grid["tensor"])
    check_pipeline(options, grid["pipeline"], model)
    check_tensor(model, grid["tensor"], options.sequence_parallel)


TRAINING = Training("train-grid", GridOptions, __doc__, start, check=fits, cut=True)
main = TRAINING.main


if __name__ == "__main__":
    main()
