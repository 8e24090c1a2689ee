"""Train with the layers of the model on consecutive ranks:
mpiexec -n 4 python scripts/train_model_parallel.py --model mlp:64,64,64

One rank computes at a time, as a student would cut a model that does not fit; train-pipeline fills the time.
"""

from hpcdl.launch.training import Training  # first: it takes over the signals before MPI starts

# isort: split
from dataclasses import dataclass
from typing import Literal

from hpcdl.models.balance import cut_layers
from hpcdl.parallel.cut_model import check_same_rows
from hpcdl.runs.options import Options, option
from hpcdl.strategies.model_parallel import train


@dataclass
class ModelOptions(Options):
    balance: Literal["parameters", "measured"] = option(
        "parameters", "by what the layers are cut evenly: their parameters, or the time that they take"
    )


def start(comm, model, data, optimizer, run):
    train(comm, model, data, optimizer, run, run.options.balance)


def fits(options, ranks, model):
    check_same_rows(options, ranks)
    cut_layers(model, ranks)


TRAINING = Training("train-model-parallel", ModelOptions, __doc__, start, check=fits, cut=True)
main = TRAINING.main


if __name__ == "__main__":
    main()
