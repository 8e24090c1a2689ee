"""The table at a run's end: what each strategy is about, and no row that says nothing."""

import pytest
from rich.console import Console

from hpcdl.runs.closing_table import as_table, span

COSTS = ("bytes_sent", "messages", "compute_seconds", "communication_seconds", "idle_seconds", "peak_memory_bytes")
HELD = {"parameters": 2**20, "gradients": 2**20, "optimizer": 0, "activations": 0}


def summary(ranks=2, **more):
    """What every run has."""
    made = {"strategy": "any", "ranks": ranks, "workers": ranks, "data": "[red]", "model": "mlp", "parameters": 1234}
    made |= {"dtype": "float32", "steps": 60, "batch_size": 32, "epochs": 1.5, "stopped": "finished", "seconds": 2.0}
    made |= {"examples_per_second": 1000.0, "train_loss": None, "test_loss": 0.5, "test_accuracy": 0.25}
    made |= {"allreduce": None, "allreduce_by_length": None, "replicas_agree": True, "legs": [{"steps": 60}]}
    made |= {f"{name}_per_rank": [1000000] * ranks for name in COSTS}
    return made | {"memory_bytes_per_rank": {kind: [held] * ranks for kind, held in HELD.items()}} | more


def rows(summary):
    """Each row's title and what it says."""
    console = Console(width=200, force_terminal=False, markup=False)
    with console.capture() as printed:
        console.print(as_table(summary))
    lines = [line.split("│") for line in printed.get().splitlines() if line.startswith("│")]
    return {title.strip(): says.strip() for _, title, says, _ in lines}


ALWAYS = [
    *("model", "data", "steps", "test loss", "test accuracy", "seconds", "sent per rank", "messages per rank"),
    *("compute per rank", "communication per rank", "idle per rank", "peak memory per rank", "parameters per rank"),
    *("gradients per rank", "replicas agree"),
]


def test_what_every_run_says():
    found = rows(summary())
    assert list(found) == ALWAYS
    assert found["model"] == "mlp, 1,234 parameters, float32" and found["data"] == "[red]"
    assert found["sent per rank"] == "1.00 MB" and found["steps"] == "60 of 32 examples, 1.5 epochs"
    assert found["parameters per rank"] == "1.00 MiB" and found["test accuracy"] == "25.00%"
    table = as_table(summary())
    assert table.title == "any on 2 ranks"


def test_one_rank_sends_nothing_and_agrees_with_nobody():
    left = {"sent per rank", "messages per rank", "communication per rank", "idle per rank", "replicas agree"}
    assert list(rows(summary(1))) == [title for title in ALWAYS if title not in left]


SERVERS = {"servers": 2, "ranks": 4, "workers": 2, "staleness": 0, "fixed_delay": 0}
PIPELINE = {"layers_of_stages": [["a"], ["b"]], "microbatches": 4, "chunks": 1, "recompute": False, "idle_share": 0.25}
ALONE = {"layers_of_stages": [["a", "b"]]}
TABLE = [{"up_to_bytes": 2048, "algorithm": "tree"}, {"up_to_bytes": 9, "algorithm": "tree"}, {"algorithm": "ring"}]
CLIENTS = {"rounds": 7, "clients": 1000, "clients_per_round": 10}


@pytest.mark.parametrize(
    "more, wanted",
    [
        (
            SERVERS | {"consistency": "bsp", "staleness_histogram": [9]},
            "servers: 2 | consistency: bulk synchronous (bsp)",
        ),
        (
            SERVERS | {"consistency": "ssp", "staleness": 3, "staleness_histogram": [1, 2, 0, 1], "workers": 4},
            "servers: 2, on the workers | consistency: stale synchronous (ssp), 3 clocks at most | "
            "staleness: 1.25 on average, 3 at most",
        ),
        (
            SERVERS | {"consistency": "async", "staleness_histogram": [4], "fixed_delay": 2},
            "servers: 2 | consistency: asynchronous (async) | fixed delay: 2 versions | "
            "staleness: 0.00 on average, 0 at most",
        ),
        (
            {"method": "dpsgd", "topology": "ring", "spectral_gap": 2 / 3, "phase": 1}
            | {"consensus_distance": 0.001, "consensus_distance_max": 0.25, "replica_test_accuracy": [0.5, 0.75]},
            "method: dpsgd | topology: ring | spectral gap: 0.667 | test accuracy of replicas: 50.00% to 75.00% | "
            "consensus distance: 0.001 at the end, 0.25 at its largest",
        ),
        ({"method": "detag", "phase": 3}, "method: detag | batches of a phase: 3"),
        (
            {"sync_every": 8, "local_from": 0, "synchronizations": 50, "outer": "average", "outer_lr": 1.0},
            "local steps: 8 in each of 50 rounds",
        ),
        (
            {"sync_every": 8, "local_from": 2, "synchronizations": 50, "outer": "nesterov", "outer_lr": 0.7},
            "local steps: 8 in each of 50 rounds, from epoch 2 on | outer optimizer: nesterov, learning rate 0.7",
        ),
        (
            PIPELINE | {"schedule": "1f1b", "stage": 0, "grid": {"data": 1, "pipeline": 2}},
            "grid: data 1, pipeline 2 | stages: 2 | schedule: 1f1b, 4 micro-batches | idle share of stages: 25.0%",
        ),
        (
            PIPELINE | {"schedule": "pipedream", "weights_updates_old": [1, 0]},
            "stages: 2 | schedule: pipedream | weights, updates old: 0 to 1 | idle share of stages: 25.0%",
        ),
        (PIPELINE | {"schedule": "1f1b", "stage": 2} | ALONE, "sharded: optimizer's state, gradients (stage 2)"),
        ({"parts": 4, "sequence_parallel": True}, "parts of each layer: 4 | sequence parallel: yes"),
        ({"parts": 4, "sequence_parallel": False, "compress": "none"}, "parts of each layer: 4"),
        ({"hidden_fraction": 0.5, "compress": "float16"}, "exchange hidden: 50% | messages in: float16"),
        ({"allreduce": "auto", "allreduce_by_length": TABLE}, "all-reduce: auto (tree, ring)"),
        ({"allreduce": "ring"}, "all-reduce: ring"),
        (CLIENTS, "rounds: 7 of 10 of 1,000 clients"),
        (
            {"rounds": 7, "local_steps": 0.5, "duality_gap": 0.00125, "primal": 0.25, "dual": 0.24875, "locking": None},
            "rounds: 7 of 0.5 passes over a rank's examples | duality gap: 0.00125 (primal 0.25, dual 0.24875)",
        ),
        (
            {"rounds": 7, "local_steps": 1.0, "locking": "none", "threads": 2, "drift": 0.0123},
            "rounds: 7 of 1 pass over a rank's examples | locking: none, of 2 threads, drift 0.012",
        ),
        (
            CLIENTS | {"rounds_to_accuracy": None, "epsilon": 1.25, "delta": 1e-4, "rounds_abandoned": 1},
            "rounds: 7 of 10 of 1,000 clients | rounds to accuracy: not reached | "
            "rounds abandoned: 1, with too few answers for secure sums | privacy: epsilon 1.25 at delta 0.0001",
        ),
        ({"legs": [{"steps": 20}, {"steps": 1500}, {"steps": 3}]}, "legs: 3, of 20, 1,500 and 3 steps"),
        ({"stopped": "time limit"}, "ended by: time limit"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_a_strategy_is_about(more, wanted):
    found = rows(summary(**{"ranks": 2} | more))
    wanted = dict(row.split(": ", 1) for row in wanted.split(" | "))
    assert {title: says for title, says in found.items() if title not in ALWAYS} == wanted
    assert set(ALWAYS) - set(found) == ({"steps"} if "rounds" in more else set())


def test_what_is_not_known():
    assert span([1, None, 3], ".0f") == "1 to 3 (1 unknown)" and span([None, None], ".0f") == "unknown"
    found = rows(summary(messages_per_rank=[None, None], bytes_sent_per_rank=[2e6, None], replicas_agree=None))
    assert list(found) == [title for title in ALWAYS if title not in ("messages per rank", "replicas agree")]
    assert found["sent per rank"] == "2.00 MB (1 unknown)"
