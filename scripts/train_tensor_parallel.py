"""Train by tensor parallelism: mpiexec -n 4 python scripts/train_tensor_parallel.py --model gpt --data text"""

from hpcdl.launch.training import Training  # first: it takes over the signals before MPI starts

# isort: split
from dataclasses import dataclass

from hpcdl.models.group import IdentityGroup
from hpcdl.models.part import ModelPart
from hpcdl.parallel.cut_model import check_same_rows
from hpcdl.runs.options import Options, option
from hpcdl.strategies.tensor_parallel import train


@dataclass
class TensorOptions(Options):
    sequence_parallel: bool = option(False, "cut what lies between the parts of layers by tokens, too (gpt)")


def check_tensor(model, ranks, sequence):
    """Raise UsageError where so many ranks cannot share the layers of the model."""
    group = IdentityGroup()
    group.size, group.sequence = ranks, sequence
    ModelPart(model, share=(0, ranks), group=group)


def start(comm, model, data, optimizer, run):
    train(comm, model, data, optimizer, run, run.options.sequence_parallel)


def fits(options, ranks, model):
    check_same_rows(options, ranks)
    check_tensor(model, ranks, options.sequence_parallel)


TRAINING = Training("train-tensor-parallel", TensorOptions, __doc__, start, check=fits, cut=True)
main = TRAINING.main


if __name__ == "__main__":
    main()
