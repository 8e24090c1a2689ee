"""Parameter servers take the very steps of all-reduce SGD where they must, and stay within their bounds elsewhere."""

import shutil
import time

import numpy as np
import pytest
from mpi4py import MPI
from paths import agree
from written_runs import lines

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.chunks import chunks
from hpcdl.comm import Communicator
from hpcdl.models import make_model
from hpcdl.parameter_server.consistency import BSP, Consistency
from hpcdl.parameter_server.parameter_store import ParameterStore
from hpcdl.parameter_server.slice_server import SliceServer
from hpcdl.parameter_server.store_messages import ANSWER, REQUEST
from hpcdl.runs import Options, Run, signals
from hpcdl.strategies import all_reduce

pytestmark = pytest.mark.four

ASYNC, SSP0 = Consistency("async"), Consistency("ssp", 0)
STEPS = 4 * 3


def placements(size):
    """How so many ranks may be divided: with 1, 2 and 3 servers, and with every rank a worker and a server."""
    return [{"servers": servers} for servers in (1, 2, 3) if servers < size] + [{"on_workers": True}]


def halves(size):
    """Of the placements, those with several workers and, where the ranks are many enough, several servers."""
    return [{"on_workers": True}] + ([{"servers": size // 2}] if size > 1 else [])


# -- what is the same as without servers ---------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adam"])
def test_bsp_is_sequential_step_by_step_for_any_number_of_servers(optimizer, serve, alone, comm):
    reference, every = alone(optimizer=optimizer), optimizer == "adam"
    if every or comm.size > 2:  # the others differ from it in what a server computes of its slice alone
        for own in (placements if every else halves)(comm.size):
            run = serve(comm, own, optimizer=optimizer)
            if comm.rank == 0:
                agree(run, reference)
                assert run.reported["staleness_histogram"] == [STEPS * run.workers]
                assert run.summary["train_loss"] == pytest.approx(reference.summary["train_loss"], rel=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.05, "optimizer": "adamw", "weight_decay": 0.1},
        {"weight_decay": 0.1},
        {"accumulate": 3},
        {"schedule": "step:every=1,factor=0.5,warmup=1"},
        {"batch_size": "full", "epochs": 6},
        {"batch_size": 2},  # fewer examples than workers in every batch
        {"steps": 5, "checkpoint_every": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.in_turn("place")
def test_bsp_with_other_options(options, place, serve, alone, world):
    reference = alone(**options)
    run = serve(world, halves(world.size)[place % world.size], **options)
    if world.rank == 0:
        agree(run, reference)


def test_bsp_whose_servers_send_without_being_asked(serve, world):
    for own in halves(world.size):
        asked, unasked = (serve(world, own | {"broadcast_every": every}) for every in (0, 1))
        if world.rank == 0:
            agree(unasked, asked, 0)


def test_bsp_on_float32_is_the_same_on_all_who_hold_the_whole(serve, alone, world):
    run, reference = serve(world, {"servers": 1} if world.size > 1 else {"on_workers": True}, dtype="float32"), None
    assert run.agree is True
    assert all(np.array_equal(run.parameters, other) for other in world.allgather(run.parameters))
    reference = alone(dtype="float32")
    if world.rank == 0:
        agree(run, reference, 2e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_ssp_with_staleness_0_is_bsp_to_the_bit(optimizer, serve, world):
    for own in halves(world.size):
        wanted = serve(world, own, optimizer=optimizer)
        run = serve(world, own | {"consistency": SSP0}, optimizer=optimizer)
        if world.rank == 0:
            agree(run, wanted, 0)
            assert run.reported["staleness_histogram"] == wanted.reported["staleness_histogram"]


@pytest.mark.parametrize("consistency", [ASYNC, Consistency("ssp", 3), BSP], ids=lambda each: each.name)
@pytest.mark.parametrize("options", [{}, {"optimizer": "adam", "clip_norm": 0.05, "checkpoint_every": 5}], ids=str)
@pytest.mark.in_turn("options")
def test_one_worker_is_sequential_to_the_bit_where_nothing_is_cut(consistency, options, serve, alone, comm):
    reference = alone(**options)
    own = {"servers": comm.size - 1} if comm.size > 1 else {"on_workers": True}
    run = serve(comm, own | {"consistency": consistency}, **options)
    assert run.workers == 1
    if comm.rank == 0:
        agree(run, reference, 1e-10 if consistency.in_rounds else 0)
        assert run.reported["staleness_histogram"] == [STEPS]


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.05}, {"weight_decay": 0.1}], ids=str)
def test_a_worker_reads_its_own_writes_whenever_servers_send(options, serve, alone, comm, caplog):
    """One worker under ssp, 3 clocks ahead of what it is sent, is sequential where its updates are additive.
    Where they are not, a line says so."""
    options = {"optimizer": "sgd"} | options
    reference = alone(**options)
    caplog.clear()
    own = {"servers": comm.size - 1} if comm.size > 1 else {"on_workers": True}
    run = serve(comm, own | {"consistency": Consistency("ssp", 3), "broadcast_every": 4}, **options)
    if comm.rank == 0:
        said = "may miss the effect of its own last pushes, which ssp promises" in caplog.text
        far = np.abs(run.path[-1] - reference.path[-1]).max()
        assert (said, far < 1e-10) == ("weight_decay" in options, "weight_decay" not in options)


# -- what is late, and by how much ---------------------------------------------------------------------------------


def delayed(model, data, steps, delay, aware=False, lr=0.1, batch=13):
    """w(t+1) = w(t) - lr g(w(t - delay)) / (1 + min(t, delay) if aware), by plain numpy; the path w(1), w(2), ..."""
    path, per_epoch = [model.initialize(Run(Communicator(MPI.COMM_SELF, "ring"), Options()).random)], -(-29 // batch)
    cursor = data.cursor(batch, (0, 1), ahead=False)
    for t in range(steps):
        taken, g = cursor.take(*divmod(t, per_epoch)), np.zeros(model.layout.size)
        model.loss_and_gradient(path[max(0, t - delay)], taken, g)
        path.append(path[-1] - lr / (1 + min(t, delay) * aware) * g / taken.total)
    return path[1:]


@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize("consistency", [BSP, ASYNC], ids=lambda each: each.name)
@pytest.mark.in_turn("aware")
def test_a_fixed_delay_is_the_formula_and_loses_nothing(consistency, aware, serve, follow, world):
    delay, data = 3, follow.examples("float64")
    wanted = delayed(make_model("mlp:5", data.features, data.classes, "float64"), data, STEPS, delay, aware)
    for own in (halves if consistency == BSP else placements)(world.size):
        if consistency == ASYNC and world.size - own.get("servers", 0) > 1:
            continue  # only with one worker is it known which version a gradient is of
        own |= {"consistency": consistency, "delay": delay, "aware": aware}
        run = serve(world, own, optimizer="sgd", lr=0.1, schedule="constant")
        if world.rank == 0:
            late = [run.path[0]] * delay + wanted[: STEPS - 1 - delay]  # versions that are so many steps behind
            agree(run.path, [*late, wanted[-1]])  # in the end all is applied
            each = run.workers if consistency == BSP else 1
            assert run.reported["staleness_histogram"] == [each] * delay + [each * (STEPS - delay)]
            assert np.array_equal(run.path[0], run.path[delay - 1])


@pytest.fixture
def before_push(monkeypatch):
    """A function: call `body(store)` on this rank before each push of its worker."""

    def install(body):
        original = ParameterStore.push

        def push(store, *arguments, **keywords):
            body(store)
            original(store, *arguments, **keywords)

        monkeypatch.setattr(ParameterStore, "push", push)

    return install


@pytest.mark.parametrize("options", [{"batch_size": 13}, {"batch_size": 2}, {"batch_size": "full"}], ids=str)
def test_under_ssp_a_push_counts_as_its_share_of_the_batch(options, serve, alone, before_push, world):
    """Where all compute the first step from the same parameters, the sum of their updates is one of the whole batch."""
    settings = {"optimizer": "sgd", "steps": 1, "schedule": "step:every=1,warmup=1"} | options
    reference, workers = alone(**settings), {}

    def meet(store):
        """Nobody pushes before all have pulled."""
        meeting = workers["now"].Ibarrier()
        while not meeting.Test():
            store.attend()

    before_push(meet)
    for own in halves(world.size):
        workers["now"] = world.Split(own.get("on_workers", False) or world.rank >= own["servers"])
        run = serve(world, own | {"consistency": Consistency("ssp", 1)}, **settings)
        workers["now"].Free()
        if world.rank == 0:
            agree(run, reference)


@pytest.fixture
def hear(world):
    """A function: wait for a sign of rank `source`, and serve meanwhile where this rank is a server, too."""

    def run(store, source):
        while not world.iprobe(source):
            store.attend()
        world.recv(source=source)

    return run


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.parametrize("own", [{"servers": 1}, {"on_workers": True}], ids=str)
@pytest.mark.in_turn("own")
def test_ssp_reaches_its_bound_and_never_exceeds_it(own, every, serve, before_push, hear, world):
    """The last worker makes its first push when the one before has gone as far ahead as it may."""
    bound, slow, fast = 3, world.size - 1, world.size - 2

    def hold(store):
        if world.rank == fast and store.clock == bound:  # its last push before it has to wait
            world.send(None, slow)
        if world.rank == slow and store.clock == 0:
            hear(store, fast)

    before_push(hold)
    run = serve(world, own | {"consistency": Consistency("ssp", bound), "broadcast_every": every}, lr=0.01)
    if world.rank == 0:
        found = run.reported["staleness_histogram"]
        assert len(found) == bound + 1 and all(found)
        assert sum(found) == STEPS * run.workers and len(run.path) == STEPS


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("every", [0, 1, 3])
@pytest.mark.parametrize("own", [{"servers": 1}, {"on_workers": True}], ids=str)
@pytest.mark.in_turn("own")
def test_async_counts_the_versions_that_a_gradient_has_missed(own, every, serve, before_push, hear, world):
    """The last worker pushes what it computed from the first version when the one before has made four pushes."""
    missed, slow, fast = 4, world.size - 1, world.size - 2

    def hold(store):
        if world.rank == fast and store.clock == 0:
            hear(store, slow)  # has pulled
        if world.rank == fast and store.clock == missed:
            world.send(None, slow)
        if world.rank == slow and store.clock == 0:
            world.send(None, fast)
            hear(store, fast)

    before_push(hold)
    steps = 10 * world.size
    run = serve(world, own | {"consistency": ASYNC, "broadcast_every": every}, lr=0.01, steps=steps)
    if world.rank == 0:
        found = run.reported["staleness_histogram"]
        assert every or len(found) > missed  # who is not asked may not know yet what has been pushed
        assert sum(found) == len(run.path) == run.optimizer.step == steps


# -- bytes ---------------------------------------------------------------------------------------------------------


def theory(rank, comm_size, own, size, steps, gathers):
    """Bytes and messages that a rank pushes under bsp: as a client, as a server (1/S of the values), for rank 0."""
    holders = comm_size if own.get("on_workers") else own["servers"]
    workers = range(comm_size) if own.get("on_workers") else range(holders, comm_size)
    length = [8 * (cut.stop - cut.start) for cut in chunks(size, holders)]
    sent = []
    if rank in workers:
        for server in set(range(holders)) - {rank}:
            sent += [REQUEST.bytes, REQUEST.bytes, length[server]] * steps  # pull; push
            sent += [REQUEST.bytes] * 2  # the pull that says that it is over; close
    if rank < holders:
        sent += [ANSWER.bytes, length[rank]] * (steps + 2) * len(set(workers) - {rank})
    if rank == 0:
        sent += length[1:]  # initial values
        sent += [REQUEST.bytes] * (holders - 1) * (gathers + 1)  # gathers; that it is over
    elif rank < holders:
        sent += [ANSWER.bytes, length[rank]] * gathers
    return sum(sent), len(sent)


def test_bytes_and_messages_are_those_of_theory(serve, monkeypatch, world):
    gathers, original = [], ParameterStore.gather

    def gather(*arguments, **keywords):
        gathers.append(1)
        original(*arguments, **keywords)

    monkeypatch.setattr(ParameterStore, "gather", gather)
    for own in placements(world.size):
        gathers.clear()
        run = serve(world, own, model="mlp:300")
        counted = run.comm.traffic["push"]
        count = world.bcast(len(gathers))
        wanted = theory(world.rank, world.size, own, run.model.layout.size, STEPS, count)
        assert (counted.bytes, counted.messages) == wanted


# -- going on ------------------------------------------------------------------------------------------------------


def rewind(world, folder, step):
    """As if the run had been killed after that checkpoint."""
    world.Barrier()
    if world.rank == 0:
        (folder / f"checkpoint-{step:09d}.h5").replace(folder / "checkpoint.h5")
    world.Barrier()


def recorded(folder):
    return [line["step"] for line in lines(folder) if "test_loss" not in line]


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("consistency", [BSP, SSP0], ids=lambda each: each.name)
@pytest.mark.in_turn("optimizer")
def test_resumed_is_never_stopped_to_the_bit(optimizer, consistency, serve, follow, world, mpi_tmp_path):
    parts, copied = mpi_tmp_path / "parts", mpi_tmp_path / "copied"
    settings = {"optimizer": optimizer, "schedule": "constant", "clip_norm": 1.0}
    for own, other in zip(halves(world.size), reversed(halves(world.size)), strict=True):
        own |= {"consistency": consistency}
        first = serve(world, own, out=str(parts), checkpoint_every=5, keep=9, **settings)
        rewind(world, parts, 5)
        if world.rank == 0:
            shutil.copytree(parts, copied)
        world.Barrier()
        second = serve(world, own, out=str(parts), resume=str(parts), **settings)
        if world.rank == 0:
            agree(second, first.path[5:], 0)
            assert recorded(parts) == list(range(1, STEPS + 1))
            assert sum(second.reported["staleness_histogram"]) == (STEPS - 5) * second.workers
            found = Checkpoint.read(parts)
            assert (found.attributes["step"], found.attributes["updates"]) == (STEPS, STEPS)
            assert np.array_equal(found.vectors["parameters"], first.path[-1])
        elsewhere = serve(world, other, resume=str(copied), **settings)
        reduced = follow(world, all_reduce.train, resume=str(copied), allreduce="ring", **settings)
        if world.rank == 0:
            agree(elsewhere, first.path[5:])
            agree(reduced, first.path[5:])
            for folder in (parts, copied):
                shutil.rmtree(folder)
        world.Barrier()


@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.parametrize("consistency", [Consistency("ssp", 2), ASYNC], ids=lambda each: each.name)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.in_turn("place")
def test_checkpoints_are_of_just_their_steps_and_the_rest_is_done_once(
    consistency, every, place, serve, world, mpi_tmp_path
):
    settings = {"schedule": "constant", "batch_size": 15, "epochs": 6}  # no worker goes without examples
    own = halves(world.size)[place % world.size]
    out = mpi_tmp_path / str(own)
    own |= {"consistency": consistency, "broadcast_every": every}
    serve(world, own, out=str(out), checkpoint_every=5, keep=9, **settings)
    rewind(world, out, 5)
    found = Checkpoint.read(out)
    each = world.size - own.get("servers", 0) if consistency.clocked else 1  # updates of a step
    assert (found.attributes["step"], found.attributes["updates"]) == (5, 5 * each)
    world.Barrier()
    run = serve(world, own, out=str(out), resume=str(out), **settings)
    if world.rank == 0:
        assert run.step == STEPS and recorded(out) == list(range(1, STEPS + 1))
        assert sum(run.reported["staleness_histogram"]) == (STEPS - 5) * each
        again = Checkpoint.read(out).attributes
        assert (again["step"], again["updates"]) == (STEPS, STEPS * each)
    world.Barrier()
    over = serve(world, own, out=str(out), resume=str(out), **settings)  # nothing is left to do
    assert over.step in (STEPS, 5) and over.agree is True


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("every", [0, 2])
def test_nobody_is_let_past_a_checkpoint(every, serve, before_push, world, mpi_tmp_path):
    """While the last worker is late for a checkpoint's step, the others could go ahead by two clocks, and must not."""
    slow = world.size - 1

    def hold(store):
        if world.rank == slow and store.clock == 4:
            deadline = time.monotonic() + 0.2  # what must not happen never gives a sign
            while time.monotonic() < deadline:
                store.attend()

    before_push(hold)
    for own in halves(world.size):
        out = mpi_tmp_path / str(own)
        own |= {"consistency": Consistency("ssp", 2), "broadcast_every": every}
        run = serve(world, own, out=str(out), checkpoint_every=5, keep=9, batch_size=15, epochs=6)
        if world.rank == 0:
            found = Checkpoint.read(out / "checkpoint-000000005.h5")
            assert found.attributes["updates"] == 5 * run.workers
            assert np.array_equal(found.vectors["parameters"], run.path[4])
        world.Barrier()


# -- ending before the end -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "consistency, every",
    [(BSP, 0), (Consistency("ssp", 2), 0), (Consistency("ssp", 2), 3), (ASYNC, 2)],
    ids=lambda each: getattr(each, "name", each),
)
def test_a_signal_on_any_rank_ends_all_in_good_order(
    consistency, every, serve, before_push, world, monkeypatch, mpi_tmp_path
):
    """Steps that some have begun with are ended; all is saved; no rank takes another's signal for its own."""
    original, target = SliceServer.handle, 0

    def note(now):
        if now and world.rank == target and not signals.received:
            signals.received.append("SIGTERM")

    def handle(server, *arguments):
        note(server.clocks.pushes >= 3)
        yield from original(server, *arguments)

    before_push(lambda store: note(store.clock >= 1))
    monkeypatch.setattr(SliceServer, "handle", handle)
    for own in halves(world.size):
        for target in {1 % world.size} if every else sorted({0, world.size - 1}):
            monkeypatch.setattr(signals, "received", [])
            out = mpi_tmp_path / f"{own}{target}"
            settings = {"steps": 3000, "schedule": "constant", "out": str(out), "lr": 0.001}
            run = serve(world, own | {"consistency": consistency, "broadcast_every": every}, **settings)
            assert run.stopped == "signal" and len(signals.received) == (world.rank == target)
            if world.rank == 0:
                assert 1 <= run.step < 3000
                assert Checkpoint.read(out).attributes["step"] == run.step == recorded(out)[-1] == len(run.path)
                each = run.workers if consistency.clocked else 1
                assert sum(run.reported["staleness_histogram"]) == run.step * each
            world.Barrier()
