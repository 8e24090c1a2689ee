"""What summary.json holds: options, the all-reduce that was used, and keys that the documentation lists."""

import ast
import dataclasses
from pathlib import Path

import pytest
import written_runs

from hpcdl.comm.allreduce import auto
from hpcdl.models.model import name_of
from hpcdl.runs import Options, summary
from hpcdl.runs.summary import SCHEMA_VERSION

pytestmark = pytest.mark.four

ROOT = Path(__file__).parents[2]


def test_all_options_are_in_it(run, world, mpi_tmp_path):
    out = str(mpi_tmp_path / "a")
    done = run(out=out, lr=0.125, allreduce="ring", clip_norm=3.0)
    found = written_runs.summary(mpi_tmp_path / "a")
    assert found["schema_version"] == SCHEMA_VERSION == 2
    used = {"data": done.data.name, "model": name_of(done.model)}  # a program's own, not the defaults of the options
    assert found["options"] == dataclasses.asdict(done.options) | used
    assert found["options"].keys() == {field.name for field in dataclasses.fields(Options)}
    assert (found["options"]["lr"], found["options"]["out"]) == (0.125, out)
    assert (found["allreduce"], found["allreduce_by_length"]) == ("ring", None)


def test_what_auto_takes_is_told_by_length(run, world):
    done = run(allreduce="auto")
    if world.rank == 0:
        table = done.summary["allreduce_by_length"]
        assert [each["up_to_bytes"] for each in table] == [*auto.LIMITS, None]
        assert [each["algorithm"] for each in table] == done.comm.by_length and done.summary["allreduce"] == "auto"


def test_who_has_sent_how_much_to_whom(run, world, mpi_tmp_path):
    """The ring sends to the right, 2 (N - 1) messages an all-reduce; all that is counted went somewhere."""
    out, ranks, steps = mpi_tmp_path / "a", world.size, 10
    run(allreduce="ring", steps=steps, out=str(out), checkpoint_every=3, keep=9)
    found = written_runs.summary(out)
    begun = [traffic.get("broadcast", {"bytes": 0, "messages": 0}) for traffic in found["traffic_per_rank"]]
    for rank, sent in enumerate(found["sent_to_per_rank"]):
        assert sum(size for _, size, _ in sent) == found["bytes_sent_per_rank"][rank]
        assert sum(count for _, _, count in sent) == found["messages_per_rank"][rank]
        assert sum(found["message_sizes_per_rank"][rank].values()) == found["messages_per_rank"][rank]
        right = [count for to, _, count in sent if to == (rank + 1) % ranks]
        others = sum(count for to, _, count in sent if to != (rank + 1) % ranks)
        if ranks > 1:
            assert others <= begun[rank]["messages"]  # the initial values, along a tree
            assert right[0] + others == 2 * (ranks - 1) * steps + begun[rank]["messages"]
        else:
            assert sent == []


def test_of_too_many_pairs_nothing_is_told(run, world, monkeypatch):
    monkeypatch.setattr(summary, "MOST_PAIRS", 1)
    done = run(allreduce="ring", steps=3)
    if world.rank == 0 and world.size > 1:
        assert done.summary["sent_to_per_rank"] is None and len(done.summary["message_sizes_per_rank"]) == world.size


def reported(path):
    """The entries that a program reports by name."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    reports = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "report"]
    return {keyword.arg for call in reports for keyword in call.keywords if keyword.arg}


def test_the_documentation_lists_all_entries(run, world):
    done, text = run(), (ROOT / "docs" / "runs.md").read_text()
    entries = set.union(*(reported(path) for path in (ROOT / "hpcdl").rglob("*.py") if path.parent.name != "runs"))
    assert {"spectral_gap", "synchronizations", "staleness_histogram", "idle_share"} <= entries | {"idle_share"}
    if world.rank == 0:
        entries |= set(done.summary) | set(done.summary["legs"][0])
        entries |= {"consensus_distance", "consensus_distance_max", "replica_test_accuracy", "exchange", "rounds"}
        entries |= {"idle_share", "in_flight_per_rank", "hidden_fraction", "overlap", "device_per_rank"}
        assert [name for name in sorted(entries) if f"`{name}`" not in text] == []


@pytest.mark.parametrize("of", ["allreduce", "reduce", "scan", "exscan"])
def test_ranks_that_are_left_wait_in_nothing_that_a_revocation_does_not_reach(of):
    """mpi4py passes objects for these on a communicator of its own: a rank lost at a run's end left others there."""
    tree = ast.parse(Path(summary.__file__).read_text())
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert of not in [each.attr for each in calls if isinstance(each, ast.Attribute)]
