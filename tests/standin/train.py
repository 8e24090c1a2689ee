"""Train on the CPU and on the stand-in for a GPU, and compare the parameters after every update.

    NUMBA_ENABLE_CUDASIM=1 PYTHONPATH=tests/standin mpiexec -n 2 python tests/standin/train.py

The model's matrix products run on the stand-in, all other computing in the CUDA kernels, in Numba's simulator."""

import sys

import cupy
import numpy as np
from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.csr import CSR, on
from hpcdl.data import from_arrays
from hpcdl.kernels.device import CPU, open_device
from hpcdl.models import make_model
from hpcdl.models.model import ModelWrapper
from hpcdl.runs import Options, Run
from hpcdl.runs.accumulated import accumulated
from hpcdl.strategies import all_reduce, sequential

GPU = open_device("cuda", MPI.COMM_WORLD.rank)
CASES = [
    {"model": "linear", "optimizer": "sgd"},
    {"model": "logistic", "optimizer": "nesterov", "weight_decay": 0.1},
    {"model": "softmax", "optimizer": "adam", "allreduce": "tree"},
    {"model": "mlp:3", "optimizer": "momentum", "clip_norm": 0.05, "accumulate": 2},
    {"model": "mlp:4,3,activation=tanh", "optimizer": "adamw", "weight_decay": 0.1, "allreduce": "mpi"},
    {"model": "mlp:4,activation=gelu", "optimizer": "sgd", "schedule": "constant"},
    {"model": "mlp:4,3", "optimizer": "adam", "allreduce": "ring", "own": {"overlap": True, "bucket_mib": 1e-6}},
    {"model": "linear", "optimizer": "sgd", "dtype": "float32"},
    {"model": "svm", "optimizer": "adagrad", "sparse": True},
]


def watched(run):
    """The run, which keeps the parameters and this rank's loss after every update."""
    run.path, run.losses = [], []

    def keep(run, loss, total):
        assert run.device.holds(run.parameters)
        run.path.append(run.device.host(run.parameters).copy())
        run.losses.append(loss)

    run.observe(keep)
    return run


class OnDevice(ModelWrapper):
    """A model that looks where its batches lie."""

    def loss_and_gradient(self, parameters, batch, gradient, on_ready=None):
        assert self.device.holds(batch.x.data if isinstance(batch.x, CSR) else batch.x) and self.device.holds(batch.y)
        return self.model.loss_and_gradient(parameters, batch, gradient, on_ready)


def data(model, dtype, sparse):
    """11 examples of 3 classes (2 for logistic and svm, none for linear): batches of 4, the last of 3."""
    random = np.random.default_rng(4)
    x, y = random.standard_normal((11, 3)), random.integers(0, 2 if model in ("logistic", "svm") else 3, 11)
    y = x @ np.array([1.0, -2, 3]) if model == "linear" else y
    x = x if model == "linear" else x + y[:, None]
    if sparse:
        x = CSR.of(x * (random.random(x.shape) < 0.5))
    return from_arrays(x, y, x[:5], y[:5], dtype=dtype)


def trained(device, model, own=None, sparse=False, **options):
    options = Options(model=model, **{"batch_size": 4, "epochs": 2, "dtype": "float64", "progress": "none"} | options)
    comm = Communicator(MPI.COMM_WORLD, options.allreduce, device=device)
    source = data(model, options.dtype, sparse)
    made = make_model(options.model, source.features, source.classes, options.dtype, device)
    made = accumulated(OnDevice(made), options.accumulate)
    with watched(Run(comm, options)) as run:
        train = sequential.train if comm.size == 1 and not own else all_reduce.train
        parameters = train(comm, made, source, run.make_optimizer(made, source), run, **(own or {}))
    assert device.holds(parameters) and run.agree is True
    x, _ = source.test.rows(0, 5)
    predicted = device.host(made.predict(parameters, on(device, x)))
    comm.free()
    return run, predicted


def close(found, wanted, tolerance, what):
    error = np.abs(np.subtract(found, wanted)).max() / max(1, np.abs(wanted).max())
    assert error <= tolerance, f"{what}: {error}"


def main():
    for case in CASES:
        tolerance = 1e-10 if case.get("dtype") != "float32" else 1e-5
        (cpu, wanted), (gpu, found) = trained(CPU, **case), trained(GPU, **case)
        assert len(cpu.path) == len(gpu.path) == 6
        for step, (mine, reference) in enumerate(zip(gpu.path, cpu.path, strict=True)):
            close(mine, reference, tolerance, f"{case}, step {step}")
        close(gpu.losses, cpu.losses, tolerance, f"{case}, losses")
        close(list(gpu.scores.values()), list(cpu.scores.values()), tolerance, f"{case}, scores")
        close(found, wanted, tolerance, f"{case}, predictions")
        sent = [{name: each.bytes for name, each in run.comm.traffic.items()} for run in (gpu, cpu)]
        assert sent[0] == sent[1], case
    assert cupy.counts["pinned"] > 0
    if MPI.COMM_WORLD.rank == 0:
        print(f"{len(CASES)} cases agree on {MPI.COMM_WORLD.size} ranks")


if __name__ == "__main__":
    sys.exit(main())
