"""What rank 0 knows of the bytes that all ranks have sent, under parameter servers, and who sends to whom."""

import itertools

import numpy as np
import pytest
from written_runs import lines

from hpcdl.parameter_server.consistency import Consistency
from hpcdl.parameter_server.store_messages import ANSWER, REQUEST

pytestmark = pytest.mark.four

ASYNC = Consistency("async")


def last_evaluation(folder):
    found = [line for line in lines(folder) if "test_loss" in line]
    for name in ("bytes", "messages"):
        told = [line[name] for line in found]
        assert told == sorted(told) and told[0] > 0
    return found[-1]["bytes"], found[-1]["messages"]


@pytest.mark.mpi(min_size=2)
def test_an_evaluation_knows_what_all_have_sent_but_what_follows_it(serve, world, mpi_tmp_path):
    """One server, under bsp: what follows is known of each worker, but for how far it was with asking for a next step.
    Of the one that has pushed last: its question, the answer that there is no step, its last question and the last
    answer. Of another one the question may have come before, and then was answered; and so may its last question."""
    run = serve(world, {"servers": 1}, out=str(mpi_tmp_path / "a"), model="mlp:30")
    world.Barrier()
    if world.rank == 0:
        told, workers = last_evaluation(mpi_tmp_path / "a"), world.size - 1
        question = np.array([REQUEST.bytes, 1])
        answer = np.array([ANSWER.bytes + run.parameters.nbytes, 2])
        names = "bytes_sent_per_rank", "messages_per_rank"
        left = [sum(run.summary[name]) - known for name, known in zip(names, told, strict=True)]
        ends = [2 * (question + answer), question + answer, answer]
        possible = [sum(ways) + ends[0] for ways in itertools.product(ends, repeat=workers - 1)]
        assert left in [each.tolist() for each in possible]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "own",
    [
        {"on_workers": True},
        {"on_workers": True, "consistency": ASYNC},
        {"consistency": ASYNC},
        {"consistency": Consistency("ssp", 2)},
        {"consistency": Consistency("ssp", 2), "broadcast_every": 2},
        {"consistency": ASYNC, "broadcast_every": 3},
    ],
    ids=str,
)
def test_what_an_evaluation_does_not_know_is_what_ends_the_run(own, serve, world, mpi_tmp_path):
    """Of all pushes it knows: what is left are a few headers, and the last answers of the servers."""
    own = own if own.get("on_workers") else own | {"servers": max(1, world.size - 2)}
    run = serve(world, own, out=str(mpi_tmp_path / "a"), model="mlp:30", optimizer="sgd", epochs=8)
    world.Barrier()
    if world.rank == 0:
        told = last_evaluation(mpi_tmp_path / "a")
        servers, workers, size = run.reported["servers"], run.workers, run.parameters.nbytes
        total = sum(run.summary["bytes_sent_per_rank"]), sum(run.summary["messages_per_rank"])
        answers = 5 if "broadcast_every" in own else 2
        messages = workers * servers * (3 + 2 * answers) + 7 * servers
        headers = messages * REQUEST.bytes
        assert 0 < total[1] - told[1] <= messages
        assert 0 < total[0] - told[0] <= headers + (workers * answers + 2) * size < total[0] / 3


@pytest.mark.mpi(min_size=3)
def test_workers_send_to_servers_only_and_servers_to_workers(serve, world):
    """Also the servers' agreement on a norm, and rank 0, which gathers."""
    run = serve(world, {"servers": 2}, model="mlp:30", clip_norm=1.0)
    if world.rank == 0:
        found = run.summary
        for rank, sent in enumerate(found["sent_to_per_rank"]):
            assert sum(size for _, size, _ in sent) == found["bytes_sent_per_rank"][rank]
            assert sum(count for _, _, count in sent) == found["messages_per_rank"][rank]
            assert sum(found["message_sizes_per_rank"][rank].values()) == found["messages_per_rank"][rank]
            others = {to for to, _, _ in sent}
            assert rank not in others and (others == {0, 1} if rank > 1 else others >= set(range(2, world.size)))
