"""Faults on purpose: how they are read, drawn, noted, and what each of them does to a run in this process."""

import errno
import json
import os
import resource
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI
from own_time import set_own_time

from hpcdl import drill, files
from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.comm import Communicator
from hpcdl.comm.compression import compressed
from hpcdl.errors import LoneError, TrainingError, UsageError
from hpcdl.faults import bit_flips, inject, network_faults
from hpcdl.faults.bit_flips import rows_of
from hpcdl.runs import Options

pytestmark = pytest.mark.four
LAST = f"rank={MPI.COMM_WORLD.size - 1}"


@pytest.fixture(autouse=True)
def undone():
    """What a drill leaves behind in a process that goes on after it."""
    yield
    drill.begin(drill.Drill())


def test_no_link_is_cut_where_the_host_is_not_emulated(alone, tmp_path):
    """A host's own network is that of its first process."""
    for process, network in (("self", "ours"), ("1", "theirs")):
        (tmp_path / process / "ns").mkdir(parents=True)
        (tmp_path / network).write_text("")
        (tmp_path / process / "ns" / "net").symlink_to(tmp_path / network)
    assert network_faults.obstacle(tmp_path) == ""
    (tmp_path / "theirs").unlink()
    assert network_faults.obstacle(tmp_path) == "this host is not known to be emulated (No such file or directory)"
    (tmp_path / "theirs").hardlink_to(tmp_path / "ours")
    assert network_faults.obstacle(tmp_path) == "this host is not emulated, its network is the machine's own"
    if network_faults.obstacle():
        for text in ("drop:seconds=1", "random:kinds=kill+drop"):
            with pytest.raises(UsageError, match=f"--inject {text.replace('+', '.')}: this host is .*; no link is cut"):
                inject.check(Options(inject=text, out="a"), 2)


def test_what_a_run_cannot_be_struck_by(alone):
    for text, out, said in (
        ("kill:rank=2", "a", "the ranks are 0 to 1, and there is no rank 2"),
        ("diskfull", "none", "nothing is written with --out none"),
        ("corrupt:what=checkpoint", "none", "nothing is written with --out none"),
    ):
        with pytest.raises(UsageError, match=said):
            inject.check(Options(inject=text, out=out), 2)
    inject.check(Options(inject="kill:rank=2", out="a", resume="a"), 2)  # of a run that had more ranks


def test_draws_depend_on_the_seed_alone(alone):
    (fault,) = inject.parse_faults("random:seed=3,kinds=kill+exit+slow,faults=200,first=5,last=9")
    found = inject.expand_random(fault, 4)
    assert found == inject.expand_random(fault, 4)
    assert {each.kind for each in found} == {"kill", "exit", "slow"}
    assert {each.rank for each in found} == {0, 1, 2, 3} and {each.step for each in found} == {5, 6, 7, 8, 9}
    assert len({each.key for each in found}) == 200
    (other,) = inject.parse_faults("random:seed=4,kinds=kill+exit+slow,faults=200,first=5,last=9")
    assert [each.step for each in inject.expand_random(other, 4)] != [each.step for each in found]


@pytest.fixture
def struck(monkeypatch):
    """The steps in which this rank should have been killed."""

    def note(faults, fault, step):
        faults.announce(fault, step, "struck")
        found.append(step)

    found = []
    monkeypatch.setitem(inject.STRIKE, "kill", note)
    return found


def test_steps_at_which_a_rank_is_struck(run, world, mpi_tmp_path, struck, capfd):
    """At each step that is asked for, on the rank that is, once; in the next legs as often as `times` says."""
    out, faults = str(mpi_tmp_path / "a"), f"kill:{LAST},step=3 kill:{LAST},step=7,times=0 kill:step=13,times=2"

    def legs(epochs):
        struck.clear()
        run(out=out, resume=out if epochs > 1 else "", epochs=epochs, inject=faults)
        return list(struck)

    last, first = world.rank == world.size - 1, world.rank == 0
    assert legs(1) == [3] * last  # an epoch has 4 steps
    assert legs(2) == [7] * last  # and the first of them never again
    assert legs(4) == [13] * first
    if first:
        text = (mpi_tmp_path / "a" / "injected.jsonl").read_text()
        lines = [(line["fault"].split("step=")[1], line["step"]) for line in map(json.loads, text.splitlines())]
        assert [each for each in lines if each[1] != 13] == [("3", 3), ("7,times=0", 7)]


def test_a_leg_that_is_done_again_is_struck_as_often_as_told(alone, run, tmp_path, struck):
    out = str(tmp_path / "a")
    how = {"epochs": 1, "checkpoint_every": 2, "keep": 3, "inject": "kill:step=3 exit:step=99 kill:step=4,times=2"}
    run(out=out, **how)
    for _ in range(3):
        run(out=out, resume=f"{out}/checkpoint-000000002.h5", **how)
    assert struck == [3, 4, 4]


def test_nothing_is_asked_of_a_run_without_faults(alone, run):
    run(epochs=1, inject="slow:step=99")
    assert not run(epochs=1).observers and type(drill.current) is drill.Drill


def test_an_exception_a_slow_rank_and_a_clock_that_jumps(alone, run, monkeypatch, capfd):
    with pytest.raises(inject.InjectedFault, match="--inject exception:step=2: rank 0, step 2"):
        run(inject="exception:step=2")
    assert capfd.readouterr().err == "inject: rank 0, step 2: an exception is raised\n"
    slept = []
    set_own_time(monkeypatch, inject, sleep=slept.append)
    run(epochs=2, inject="slow:step=3,seconds=0.25")
    assert slept.count(0.25) == 6  # steps 3 to 8
    stopped = run(epochs=2, time_limit=1e6, inject="clock:step=3,seconds=2e6")
    assert stopped.stopped == "time limit" and 3 <= stopped.step < 8
    assert run(epochs=2, time_limit=1e6, inject="clock:step=3,seconds=-2e6").stopped == "finished"


def test_signals_and_exits(alone, run, monkeypatch):
    done = []
    monkeypatch.setattr(os, "kill", lambda pid, number: done.append((pid, number)))
    monkeypatch.setattr(os, "_exit", done.append)
    run(epochs=1, inject="kill:step=2 stop:step=3 exit:step=4,status=7")
    assert done == [(os.getpid(), signal.SIGKILL), (os.getpid(), signal.SIGSTOP), 7]
    with pytest.raises(SystemExit) as caught:
        run(epochs=1, inject="exit:step=2,status=8,how=sys")
    assert caught.value.code == 8


def test_a_flipped_bit_of_the_parameters_is_found_where_replicas_must_agree(run, world):
    faults = f"corrupt:{LAST},step=3,seed=5"
    if world.size == 1:
        before, after = run(epochs=1).parameters, run(epochs=1, inject=faults).parameters
        assert not np.array_equal(before, after) and np.allclose(before, after, atol=1)
    else:
        with pytest.raises(TrainingError, match="the replicas do not agree"):
            run(epochs=1, inject=faults)


def test_a_flipped_bit_of_the_data(alone, run, data):
    before, tested = data.train.source.x.copy(), data.test.source.x.copy()
    run(epochs=1, inject="corrupt:what=data")
    assert np.count_nonzero(before != data.train.source.x) == 1
    assert np.array_equal(tested, data.test.source.x)


def test_rows_that_are_a_part_of_what_lies_in_memory(alone):
    """What is flipped is in the part, not before it."""
    whole = np.zeros((10, 3))
    part = whole[4:7].view()
    part.flags.writeable = False
    of_run = SimpleNamespace(data=SimpleNamespace(train=SimpleNamespace(source=SimpleNamespace(x=part))))
    bit_flips.rows_of(of_run)[2, 1] = 5
    assert np.argwhere(whole).tolist() == [[6, 1]]
    of_run.data.train.source.x = object()  # of a file
    assert bit_flips.rows_of(of_run) is None


def test_a_flipped_bit_of_a_checkpoint_is_found(alone, run, tmp_path):
    out = tmp_path / "a"
    with pytest.raises(inject.InjectedFault):
        run(out=str(out), checkpoint_every=2, inject="corrupt:what=checkpoint exception:step=4")
    with pytest.raises(UsageError, match="is damaged or cut off"):
        Checkpoint.read(out)
    (line, _) = map(json.loads, (out / "injected.jsonl").read_text().splitlines())
    assert line["step"] == 3  # the first one that begins with a checkpoint


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.uint8, np.int64, np.float16])
def test_flip(alone, kind):
    vector = np.arange(1, 7, dtype=kind).reshape(2, 3)
    changed = vector.copy()
    bit_flips.flip(changed, 4)
    assert np.flatnonzero(vector != changed).tolist() == [4]
    assert 0.5 <= changed[1, 1] / vector[1, 1] <= 1.5  # neither sign nor exponent
    bit_flips.flip(changed, 4)
    assert np.array_equal(vector, changed)


def test_a_full_disk(alone, run, tmp_path):
    out = tmp_path / "a"
    with pytest.raises((LoneError, TrainingError), match=f"cannot be written: {os.strerror(errno.ENOSPC)}"):
        run(out=str(out), checkpoint_every=2, inject="diskfull:step=3")
    assert Checkpoint.read(out).attributes["step"] == 2
    assert not [each.name for each in out.iterdir() if each.name.endswith(".part")]
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)), files.atomic_write(out / "file"):
        pass
    (tmp_path / "elsewhere").mkdir()
    with files.atomic_write(tmp_path / "elsewhere" / "file") as file:  # of the folder of the run alone
        file.write(b"whole")


def test_memory_that_is_used_up(alone, run):
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with pytest.raises(MemoryError, match="rank 0 has no memory left at step"):
            run(epochs=50, inject="memory:step=3,mib=40")
        assert resource.getrlimit(resource.RLIMIT_AS) == before
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.mpi(min_size=2)
def test_a_flipped_bit_of_a_message(world):
    """One message of numbers arrives otherwise, of those that the training counts; its sender holds what it held."""
    comm = Communicator(world, "ring")
    other = comm.duplicate("other")
    if world.rank == 0:
        bit_flips.flip_in_message(comm, np.random.default_rng(1))
    integers, floats = np.arange(1, 9), np.arange(1.0, 9.0)
    for each, numbers, changes in ((other, floats, 0), (comm, integers, 0), (comm, floats, 1), (comm, floats, 0)):
        vector = numbers.copy()
        if world.rank == 0:
            each.push(vector, 1)
            assert np.array_equal(vector, numbers)
        elif world.rank == 1:
            each.wait(vector, 0)
            assert np.count_nonzero(vector != numbers) == changes and np.isfinite(vector).all()
    comm.free()


@pytest.mark.mpi(min_size=2)
def test_a_flipped_bit_of_a_compressed_message(world):
    """The messages are bytes; the sums then differ from those of the same call without the flip."""
    sums = []
    for flipped in (False, True):
        comm = Communicator(world, "ring")
        if flipped and world.rank == 0:
            bit_flips.flip_in_message(comm, np.random.default_rng(1), codes=True)
        vector = np.arange(1.0, 9.0)
        comm.all_reduce_compressed(vector, compressed("int8", 8, "float64"))
        sums.append(vector)
        comm.free()
    assert any(world.allgather(not np.array_equal(*sums)))


@pytest.mark.mpi(min_size=2)
def test_where_a_ring_keeps_what_it_got_the_replicas_differ(run, world):
    """Of the second half of a ring; of the first half all get the same sum, which nobody knows to be wrong."""
    with pytest.raises(TrainingError, match="the replicas do not agree"):
        run(epochs=2, allreduce="tree", inject="corrupt:what=message,step=3,seed=2")  # rank 0 sends to who keeps it
    if world.size == 2:
        wrong = run(epochs=1, allreduce="tree", inject="corrupt:what=message,rank=1,step=3,seed=2").parameters.copy()
        assert not np.array_equal(wrong, run(epochs=1, allreduce="tree").parameters)


def test_a_data_server_has_no_rows_to_flip():
    assert rows_of(SimpleNamespace(data=None)) is None
