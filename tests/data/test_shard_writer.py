"""Shards are the same files from any number of ranks, and a killed call is gone on with."""

import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcdl.csr import CSR
from hpcdl.data.formats.prepare import Output
from hpcdl.data.formats.shard_writer import RowStream, ShardWriter
from hpcdl.errors import UsageError

ROWS, SHARDS = 10, 7  # rows of shard k: numbers 10 k to 10 k + 9; shard 3 is empty, shards 5 and 6 are for tests


def shard(number):
    """The groups of a shard, whose rows spell their own number; x has 3 features, and there are documents."""
    rows = np.arange(number * ROWS, (number + 1) * ROWS)
    x = np.stack([rows, rows % 7, rows % 3], axis=1).astype(np.uint16)
    group = "test" if number >= 5 else "train"
    return {} if number == 3 else {group: (x.shape, [x[:4], x[4:]], rows % 2, {"document": rows // 4})}


def write(writer, numbers):
    for number in numbers:
        writer.write(number, shard(number), np.dtype(np.uint16), 1.0, ["a", "b"], 2)


KILLED = """
import json, os, sys
from hpcdl.data.formats.prepare import Output
from hpcdl.data.formats.shard_writer import ShardWriter
from test_shard_writer import SHARDS, shard, write

writer = ShardWriter(Output(sys.argv[1]), json.loads(sys.argv[2]), SHARDS)
write(writer, [0, 3, 5])
(group, (shape, slabs, *more)), = shard(2).items()

def half():
    yield slabs[0]
    os._exit(9)

writer.write(2, {group: (shape, half(), *more)}, slabs[0].dtype, 1.0, ["a", "b"], 2)
"""  # which ends as a killed process does, in the middle of a shard


def contents(path):
    """All of a data file, or of a folder of shards: attributes and data sets, but for the time beside the digest."""
    if path.is_dir():
        index = json.loads((path / "index.json").read_text())
        return {name: each for name, each in index.items() if name != "shards"} | {
            each["file"]: (each["rows"], each["digest"], contents(path / each["file"])) for each in index["shards"]
        }
    with h5py.File(path) as file:
        found = {name: str(each).split()[0] for name, each in file.attrs.items() if name == "digest"}
        file.visititems(lambda name, item: found.update({name: item[()].tolist() if hasattr(item, "dtype") else None}))
        return found


@pytest.mark.parametrize("out", ["out/", "out.h5"])
def test_any_number_of_ranks_writes_the_same(each_group, mpi_tmp_path, out):
    def body(comm):
        output = Output(f"{mpi_tmp_path}/{comm.size}-{out}", name="numbers", origin="made here")
        writer = ShardWriter(output, {"source": "numbers"}, SHARDS, comm)
        write(writer, writer.missing())
        assert writer.missing() == []
        info = writer.finish()
        assert info.rows == {"train": 40, "test": 20, "rows": 0} and info.schema.labels == ("a", "b")
        if comm.rank == 0:
            assert not list(mpi_tmp_path.glob(".*")), "nothing is left beside the data"
            one = ShardWriter(
                Output(f"{mpi_tmp_path}/one-{out}", name="numbers", origin="made here"), {"source": "numbers"}, SHARDS
            )
            write(one, one.missing())
            one.finish()
            assert contents(output.path) == contents(mpi_tmp_path / f"one-{out}")
            found = contents(output.path)
            if output.folder:
                names = sorted(each.name for each in output.path.iterdir())
                assert names == [f"0000{k}.h5" for k in (0, 1, 2, 4, 5, 6)] + ["index.json"]
                assert found["columns"]["train/document"] == ["<i8", []] and found["recipe"] == {"source": "numbers"}
            else:
                numbers = [row[0] for row in found["train/x"]]
                assert numbers == [*range(30), *range(40, 50)] and found["test/document"] == [
                    n // 4 for n in range(50, 70)
                ]
            for each in (output.path, one.output.path):
                for path in each.iterdir() if each.is_dir() else [each]:
                    path.unlink()
                if each.is_dir():
                    each.rmdir()
        comm.Barrier()

    each_group(body)


def test_a_killed_call_is_gone_on_with(tmp_path):
    """The shards of a call that ended are kept, its half-written file is not; those of another recipe are discarded."""
    recipe, hidden = {"source": "numbers", "length": 3}, tmp_path / ".out.parts"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, f"{tmp_path}/out/", json.dumps(recipe)], cwd=Path(__file__).parent
    )
    (left,) = hidden.glob(".*.part")
    assert done.returncode == 9 and left.name.startswith(".00002.h5.") and not (tmp_path / "out").exists()
    (hidden / "00001.h5").write_bytes(b"its entry was not written")
    kept = (hidden / "00005.h5").stat().st_ino
    again = ShardWriter(Output(f"{tmp_path}/out/"), recipe, SHARDS)
    assert again.missing() == [1, 2, 4, 6] and not left.exists()
    write(again, again.missing())
    again.finish()
    assert (tmp_path / "out" / "00005.h5").stat().st_ino == kept and not hidden.exists()
    with pytest.raises(UsageError, match="exists already"):
        Output(f"{tmp_path}/out/")
    write(ShardWriter(Output(f"{tmp_path}/out/", force=True), recipe, SHARDS), [0, 1])
    other = ShardWriter(Output(f"{tmp_path}/out/", force=True), recipe | {"length": 4}, SHARDS)
    assert other.missing() == list(range(SHARDS))
    write(other, other.missing())
    other.finish()
    assert json.loads((tmp_path / "out" / "index.json").read_text())["recipe"]["length"] == 4
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_no_folder_is_replaced_that_holds_something_else(tmp_path):
    (tmp_path / "out").mkdir()
    Output(f"{tmp_path}/out/")  # an empty folder may be there
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="no folder of shards: it holds 'thesis"):
        Output(f"{tmp_path}/out/", force=True)
    (tmp_path / ".new.parts").mkdir()
    (tmp_path / ".new.parts" / "thesis.tex").write_text("more of it")
    with pytest.raises(UsageError, match="move it away"):
        ShardWriter(Output(f"{tmp_path}/new/"), {}, 1)


def test_a_stream_of_rows_is_cut_anywhere():
    """The parts of a stream, joined, are its rows; a part takes as many as fit, and one row at least."""
    x = np.arange(60, dtype=np.uint8).reshape(20, 3)
    stream = RowStream([x[:7], x[7:8], x[8:]], x.dtype)
    parts = [np.concatenate(list(stream.take(room))) for room in (10, 2, 30, 1000)]
    assert [len(part) for part in parts] == [3, 1, 10, 6] and np.array_equal(np.concatenate(parts), x)
    rows = CSR.of((x % 5 > 1) * x)
    sparse = RowStream([rows[:7], rows[7:]], x.dtype)
    parts = []
    while sparse.taken < 20:
        parts.append(list(sparse.take(70)))
    counts = [sum(len(each) for each in part) for part in parts]
    sizes = [sum(5 * each.nnz + 8 * len(each) for each in part) for part in parts]
    assert sum(counts) == 20 and min(counts) > 1 and max(sizes) <= 70
