"""What a data server cannot answer ends the job in one line, as any bad input; sparse rows from one, and without."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from sparse_files import make_sparse, write_sparse

from hpcdl.checkpoint.checkpoint_file import Checkpoint

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
from mpi4py import MPI
from hpcdl.comm import Communicator
from hpcdl.data import open_data
from hpcdl.data_server.batch_server import introduce, serve
from hpcdl.data_server.remote_data import RemoteData

everyone = Communicator(MPI.COMM_WORLD)
part = MPI.COMM_WORLD.Split(int(everyone.rank == 0))
path, placement, *share = sys.argv[1:]
if everyone.rank == 0:
    opened = open_data(path, comm=part, placement=placement, parts=([0, 1], 2))
    introduce(everyone, opened, [1, 2])
    serve(everyone, opened, [1, 2])
else:
    data = RemoteData(everyone, 0)
    for batch in data.batches(0, 10, (everyone.rank - 1, int(share[0]))):
        pass
    data.close()
"""


@pytest.mark.long
def test_a_damaged_block_and_a_share_that_is_not_held(launch, tmp_path):
    with h5py.File(tmp_path / "bad.h5", "w") as file:
        for part in ("train", "test"):
            file[f"{part}/x"], file[f"{part}/y"] = np.ones((100, 3), "f4"), np.arange(100) % 2
        file["train/x"][60] = np.inf
    for arguments, words in [
        (("bad.h5", "streamed", "2"), "bad.h5: train/x has a NaN or an infinity (as float32) in row 60"),
        (("digits", "partitioned", "3"), "holds the rows of share (0, 2), (1, 2), not "),
    ]:
        done = launch(3, "-c", PROGRAM, *arguments, check=2)
        assert words in done.stderr and "Traceback" not in done.stderr


LONG = [  # some seconds each
    pytest.param("train_local_sgd", ["--sync-every", 3], marks=pytest.mark.exhaustive),
    pytest.param("train_fully_sharded", ["--stage", 3], marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("script", "more"), [("train_allreduce", []), ("train_gossip", ["--topology", "ring"]), *LONG])
def test_sparse_rows_train_the_same_from_a_server(run_on, tmp_path, script, more):
    """The parameters of two workers are those without a server, to the bit, under each strategy."""
    write_sparse(tmp_path / "sparse.h5", *make_sparse(), attributes={"classes": 3})
    given = ["--data", "sparse.h5", "--model", "mlp:8", "--epochs", 2, "--batch-size", 12, "--progress", "none"]
    found = []
    for ranks, servers in ((2, []), (3, ["--data-servers", 1])):
        options = [*given, *more, *servers, "--out", f"run{ranks}"]
        run_on(ranks, ROOT / "scripts" / f"{script}.py", *options, check=0)
        found.append(Checkpoint.read(tmp_path / f"run{ranks}").vectors["parameters"])
    np.testing.assert_array_equal(*found)
    assert np.isfinite(found[0]).all()
