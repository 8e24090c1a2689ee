"""What a strategy says that a step sends is what a run counts: bytes and messages of all ranks together."""

from collections import Counter

import numpy as np
import pytest

from hpcdl.data.formats.prepare import Output
from hpcdl.data.formats.prepare_libsvm import prepare_libsvm
from hpcdl.parameter_server.store_messages import REQUEST
from hpcdl.planning.cut_time import messages
from hpcdl.planning.dry_run import cut_of


@pytest.mark.parametrize("ranks", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3)), 4])
@pytest.mark.parametrize(
    "program, options",
    [
        ("train-svrg", ["--steps", "7", "--batch-size", "512", "--inner-epochs", "1"]),
        ("train-svrg", ["--steps", "7", "--batch-size", "512", "--model", "softmax", "--method", "saga"]),
        ("train-sgld", ["--steps", "5"]),
        ("train-federated", ["--rounds", "3", "--clients", "20", "--late", "0.2"]),
        pytest.param("train-hogwild", ["--steps", "4", "--join-every", "2"], marks=pytest.mark.long),
        ("train-hogwild", ["--steps", "4", "--join", "gossip"]),
        ("train-coordinate-descent", ["--rounds", "3", "--weight-decay", "0.01"]),
        ("train-local-sgd", ["--steps", "90", "--sync-every", "5", "--local-from", "1"]),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else str(value),
)
def test_calls(compared, rows_file, ranks, program, options):
    data = ["--data", rows_file(), "--model", "svm"] if program == "train-coordinate-descent" else []
    case, _, summary = compared(ranks, program, *options, *data, "--allreduce", "ring")
    bytes = messages = 0
    if program not in ("train-hogwild", "train-coordinate-descent"):  # initial values, which rank 0 broadcasts
        bytes, messages = (ranks - 1) * case.bytes, ranks - 1
    for call in case.strategy.step(case).calls if ranks > 1 else ():
        times = call.times * summary["steps"]
        each = ranks * call.partners if call.operation == "exchange" else 2 * (ranks - 1)
        bytes += times * each * call.bytes
        messages += times * (each if call.operation == "exchange" else ranks * each)
    assert sum(summary["bytes_sent_per_rank"]) == pytest.approx(bytes, rel=1e-12)
    assert sum(summary["messages_per_rank"]) == pytest.approx(messages, rel=1e-12)


def test_sparse_pushes(compared, tmp_path):
    """Of a batch of all rows each column that is not zero anywhere travels, and of smaller ones the expected number."""
    random = np.random.default_rng(0)
    x = (random.random((29, 40)) < 0.1) * random.standard_normal((29, 40))
    lines = [" ".join([str(i % 2), *(f"{j + 1}:{row[j]:.4f}" for j in np.flatnonzero(row))]) for i, row in enumerate(x)]
    (tmp_path / "rows.svm").write_text("\n".join(lines))
    prepare_libsvm(str(tmp_path / "rows.svm"), Output(str(tmp_path / "rows.h5")))
    data = "--data", str(tmp_path / "rows.h5"), "--model", "softmax", "--optimizer", "sgd", "--sparse-push"
    case, _, summary = compared(2, "train-parameter-server", "--steps", "5", "--batch-size", "full", *data)
    service = case.strategy.step(case).service
    sent = summary["bytes_sent_per_rank"][1] - (2 * 5 + 1) * REQUEST.bytes
    assert sent == pytest.approx(5 * service.pushed) and service.pulled < service.pushed < case.bytes + 8 * 40
    n, nonzero = case.data.examples, case.data.nonzero
    drawn = [np.count_nonzero((random.permutation(n)[:4, None] < nonzero).any(axis=0)) for _ in range(4000)]
    assert case.touched(4) == pytest.approx(np.mean(drawn), rel=0.02)


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_messages_of_ranks_that_share_sequences(compared, attention):
    """Keys and values, or rows for all-to-alls, and the choices of experts, of which each takes what its rank has."""
    model = "gpt:layers=2,width=16,heads=4,experts=4,capacity=1"
    options = f"--data text --steps 3 --batch-size 8 --attention {attention} --model {model} --allreduce ring"
    case, _, summary = compared(2, "train-context-parallel", *options.split())
    bytes, calls = Counter(), Counter()
    for operation, size in messages(case, 0, cut_of(case))["context"]:
        calls[operation] += 3
        bytes[operation] += 3 * size
    for counted, operation, share in (("push", "message", 1), ("all_to_all",) * 2 + (2,), ("all_gather",) * 2 + (2,)):
        found = [rank.get(counted, {"calls": 0, "bytes": 0}) for rank in summary["traffic_per_rank"]]
        assert [each["calls"] for each in found] == [calls[operation]] * 2
        assert [each["bytes"] for each in found] == [bytes[operation] / share] * 2  # the other rank's part of an array
