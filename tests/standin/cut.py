"""Train models that are cut, on the CPU and on the stand-in for a GPU, and compare losses, scores and parameters.

NUMBA_ENABLE_CUDASIM=1 PYTHONPATH=tests/standin mpiexec -n 2 python tests/standin/cut.py"""

import sys
from functools import partial

import numpy as np
from mpi4py import MPI
from train import GPU, watched

from hpcdl.comm import Communicator
from hpcdl.data import from_arrays
from hpcdl.kernels.device import CPU
from hpcdl.models import make_model
from hpcdl.runs import Options, Run
from hpcdl.strategies import fully_sharded, pipeline, tensor_parallel

MODEL = "gpt:layers=1,width=4,heads=2,context=4"
CASES = {
    "pipeline, recomputing": partial(pipeline.train, schedule="gpipe", microbatches=2, recompute=True),
    "tensor and sequence parallel": partial(tensor_parallel.train, sequence=True),
    "stage 1": partial(fully_sharded.train, stage=1),
    "stage 3": fully_sharded.train,
}


def trained(device, train):
    """The run, and this rank's parameters on the host."""
    how = {"steps": 2, "dtype": "float64", "optimizer": "adam", "lr": 0.01, "clip_norm": 0.5, "progress": "none"}
    options = Options(model=MODEL, batch_size=3, **how)
    comm = Communicator(MPI.COMM_WORLD, "ring", device=device)
    random = np.random.default_rng(4)
    x, y = random.integers(0, 5, (6, 4)), random.integers(0, 5, 6)
    data = from_arrays(x, y, x[:2], y[:2], classes=5, dtype="float64")
    model = make_model(MODEL, data.features, data.classes, "float64", device)
    with watched(Run(comm, options)) as run:
        parameters = train(comm, model, data, run.make_optimizer(model, data, 0), run)
    assert device.holds(parameters) and run.agree is not False
    comm.free()
    return run, device.host(parameters)


def main():
    for name, train in CASES.items():
        (cpu, wanted), (gpu, found) = trained(CPU, train), trained(GPU, train)
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(gpu.losses, cpu.losses, rtol=1e-10, err_msg=name)
        assert gpu.scores.keys() == cpu.scores.keys()
        np.testing.assert_allclose(list(gpu.scores.values()), list(cpu.scores.values()), rtol=1e-10, err_msg=name)
        assert gpu.memory.peak == cpu.memory.peak, name
        sent = [{operation: each.bytes for operation, each in run.comm.traffic.items()} for run in (gpu, cpu)]
        assert sent[0] == sent[1], name
    if MPI.COMM_WORLD.rank == 0:
        print(f"{len(CASES)} cases agree on {MPI.COMM_WORLD.size} ranks")


if __name__ == "__main__":
    sys.exit(main())
