"""Ranks that are told different things refuse together, before anything starts, and say which and where."""

import dataclasses

import numpy as np
import pytest

from hpcdl.comm.diagnostics.call_signature import format_ranks
from hpcdl.data import open_data
from hpcdl.data.formats.prepare import Output
from hpcdl.data.formats.prepare_npz import prepare_npz
from hpcdl.errors import AgreedError, UsageError
from hpcdl.launch.launch_consistency import described, reading, refuse_unlike, values_told
from hpcdl.runs.options import Options


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name, value", [("lr", ["0.06"]), ("batch_size", ["33"]), ("standardize", [])])
def test_the_option_and_the_ranks_are_named(name, value, world):
    last = world.size - 1
    mine = [f"--{name.replace('_', '-')}", *value] if world.rank == last else []
    with pytest.raises(AgreedError) as refusal, reading(world) as parse:
        options = parse(Options, "a-program", "", mine)
    first, other = (repr(world.bcast(getattr(options, name), root)) for root in (0, last))
    dashed, others = name.replace("_", "-"), format_ranks(range(last))
    said = str(refusal.value)
    assert said.startswith(
        f"the ranks were started differently: --{dashed} is {first} on {others}, {other} on rank {last};"
    )
    assert len(set(world.allgather(said))) == 1


@pytest.mark.mpi(min_size=2)
def test_programs_versions_and_many_options(world):
    options = Options(**{"seed": 1, "lr": 0.5, "steps": 3, "keep": 3} if world.rank == 0 else {})
    with pytest.raises(AgreedError, match=r"--steps is 3 on rank 0, 0 on .*; and 1 more differ; start"):
        refuse_unlike(world, described("train", options))
    with pytest.raises(AgreedError, match="the program is train on rank 0, evaluate on"):
        refuse_unlike(world, described("evaluate" if world.rank else "train", Options()))
    mine = described("train", Options()) | ({"the version of numpy": "1.0"} if world.rank == 0 else {})
    with pytest.raises(AgreedError, match=r"the version of numpy is 1\.0 on rank 0, "):
        refuse_unlike(world, mine)


def test_the_same_goes_on_and_a_bad_one_is_refused(world):
    with reading(world) as parse:
        options = parse(Options, "a-program", "", ["--seed", "4"])
    assert options.seed == 4
    with pytest.raises(AgreedError, match="--lr: expected a number"), reading(world) as parse:
        parse(Options, "a-program", "", ["--lr", "x"] if world.rank == 0 else [])


def test_all_that_a_program_is_told_counts():
    told = described("train", Options(seed=5))
    assert told["--seed"] == "5" and told["--batch-size"] == "32" and told["the program"] == "train"
    assert set(told) >= {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Options)}
    assert {"the version of python", "the version of numpy", "the version of hpcdl"} <= set(told)
    assert values_told(["1", "2", "1", None]) == "1 on ranks 0 and 2, 2 on rank 1, not known on rank 3"


@pytest.mark.mpi(min_size=2)
def test_other_files_under_one_name(world, mpi_tmp_path, monkeypatch):
    """As on hosts with disks of their own: each rank in a folder of its own."""
    folder = mpi_tmp_path / str(world.rank)
    folder.mkdir()
    monkeypatch.chdir(folder)
    random = np.random.default_rng(0)
    np.savez("all.npz", x=random.normal(size=(40, 3)), y=np.arange(40) % 2)
    prepare_npz("all.npz", Output("data.h5"), seed=world.rank // (world.size - 1))
    world.Barrier()
    with pytest.raises(UsageError, match=rf"data.h5 differs between rank {world.size - 1} \(\d+ bytes, digest \w+\)"):
        open_data("data.h5", comm=world)
