"""Train by minibatch SGD with all-reduce: mpiexec -n 4 python scripts/train_allreduce.py --allreduce ring"""

from hpcdl.launch.training import Training  # first: it takes over the signals before MPI starts

# isort: split
import math
from dataclasses import dataclass
from typing import Literal

from hpcdl.errors import UsageError
from hpcdl.recovery.options import SurvivingOptions
from hpcdl.runs.noise_scale import refuse_no_parts
from hpcdl.runs.options import option
from hpcdl.strategies.all_reduce import train


@dataclass
class AllReduceOptions(SurvivingOptions):
    compress: Literal["none", "float16", "bfloat16"] = option(
        "none", "send gradients in 16 bits, with error feedback, by an all-reduce made for it instead of --allreduce"
    )
    overlap: bool = option(False, "reduce the gradient in buckets of layers while the layers before are computed")
    bucket_mib: float = option(1.0, "MiB that a bucket of --overlap has at least; layers are not cut")
    noise_scale: bool = option(False, "measure the gradient noise scale: the largest batch that is worth taking")

    def __post_init__(self):
        super().__post_init__()
        if not (self.bucket_mib > 0 and math.isfinite(self.bucket_mib)):
            raise UsageError(f"--bucket-mib must be greater than 0, not {self.bucket_mib}")

    @property
    def advice(self):
        if self.compress == "float16":
            return "its messages hold nothing above 65504: --compress bfloat16 may help, or a smaller --lr"
        return super().advice


def start(comm, model, data, optimizer, run):
    options = run.options
    train(comm, model, data, optimizer, run, options.compress, options.overlap, options.bucket_mib, options.noise_scale)


def fits(options, ranks, model):
    if options.noise_scale:
        batch = options.batch_per_rank * ranks or (ranks if options.batch_size == "full" else options.batch_size)
        refuse_no_parts(ranks, batch, options.overlap)


TRAINING = Training("train-allreduce", AllReduceOptions, __doc__, start, check=fits)
main = TRAINING.main


if __name__ == "__main__":
    main()
