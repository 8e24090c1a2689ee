"""The program as its user starts it: what it reaches, along which ways messages go, and what it refuses."""

import json
from pathlib import Path

import pytest
from written_runs import summary

from hpcdl.comm.gossip.topology import topology

SCRIPTS = Path(__file__).parents[2] / "scripts"
SCRIPT = SCRIPTS / "train_gossip.py"


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--method", "detag", "--partition", "by-label"],
        pytest.param(["--method", "dpsgd", "--partition", "dirichlet:0.5"], marks=pytest.mark.long),
        ["--method", "adpsgd"],
    ],
    ids=" ".join,
)
def test_digits_are_learned(run_on, tmp_path, more):
    options = ["--topology", "ring", "--data", "digits", "--epochs", "8", "--seed", "1", "--out", "g"]
    done = run_on(4, SCRIPT, *options, *more, check=0)
    found = summary(tmp_path / "g")
    assert found["strategy"] == "gossip" and found["topology"] == "ring"
    assert found["test_accuracy"] >= 0.94
    assert len(found["replica_test_accuracy"]) == 4
    assert found["replicas_agree"] is None and "at its largest" in done.stdout
    assert found["consensus_distance_max"] >= found["consensus_distance"] > 0
    assert ("spectral gap" in done.stdout) == ("spectral_gap" in found) == ("adpsgd" not in more)
    held, whole = found["memory_bytes_per_rank"], 4 * found["parameters"]
    assert min(held["parameters"]) >= 4 * whole and held["gradients"] == [whole] * 4  # replica, average, messages
    assert max(held["activations"]) <= 2 * min(held["activations"])  # what scores need is not counted on any rank
    assert found["allreduce"] is None and "all-reduce" not in done.stdout


@pytest.mark.parametrize("spec", ["ring", "one-peer"])
@pytest.mark.parametrize("method", ["dpsgd", "defacto"])
def test_the_trace_shows_messages_along_edges_only_and_along_all_of_them(run_on, tmp_path, spec, method):
    small = ["--model", "softmax", "--steps", "12", "--trace", "10000", "--out", "a"]
    run_on(4, SCRIPT, "--topology", spec, "--method", method, *small, check=0)
    events = json.loads((tmp_path / "a" / "trace.json").read_text())["traceEvents"]
    pushed = {(event["tid"] % 4, event["args"]["to"]) for event in events if event["name"] == "push"}
    edges = topology(spec, 4).edges
    if method == "dpsgd":
        assert pushed == edges
    else:
        assert pushed and pushed <= edges  # the tree that DeFacto goes by


@pytest.mark.long
def test_the_graph_is_drawn(run_on, tmp_path):
    pytest.importorskip("matplotlib")
    run_on(4, SCRIPT, "--steps", "1", "--draw", "graph.png", check=0)
    assert (tmp_path / "graph.png").read_bytes().startswith(b"\x89PNG")
