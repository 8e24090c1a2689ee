"""hpcdl/reports/timeline.py: the last steps that all ranks have, whatever else the trace holds, and micro-batches."""

import json

import pytest
from made_runs import write_trace

from hpcdl.reports import timeline
from hpcdl.reports.timeline import TruncatedTrace, events, read_timeline


def test_the_last_steps_of_all_ranks(tmp_path):
    write_trace(path := tmp_path / "trace.json", ranks=3, steps=40)
    found = read_timeline(path)
    assert found.ranks == [0, 1, 2] and found.of == 3 and not found.cut and not found.boxes
    assert found.seconds == pytest.approx(298e-6)  # steps 37, 38 and 39
    assert len(found.spans["steps"]) == len(found.spans["communication"]) == 9
    reduced = [start for rank, start, _ in found.spans["communication"] if rank == 2]
    assert reduced == pytest.approx([62e-6, 162e-6, 262e-6])


def test_steps_with_an_evaluation_are_not_the_usual_ones(tmp_path):
    write_trace(path := tmp_path / "trace.json", ranks=2, steps=10)
    trace = json.loads(path.read_text())
    step = {"name": "step", "ph": "X", "pid": 0, "ts": 1000.0, "dur": 90000.0}
    trace["traceEvents"] += [step | {"tid": 0}, step | {"tid": 1}]
    trace["traceEvents"] += [step | {"tid": 0, "name": "evaluate", "dur": 80000.0}]
    path.write_text(json.dumps(trace))
    assert read_timeline(path).seconds == pytest.approx(298e-6)


def test_the_micro_batches_of_the_last_step(tmp_path):
    write_trace(path := tmp_path / "trace.json", ranks=4, steps=6, microbatches=4)
    found = read_timeline(path)
    assert len(found.boxes) == 4 * 8 and found.stages == [0, 1, 2, 3]
    assert sorted({(box.kind, box.number) for box in found.boxes}) == [(kind, n) for kind in "BF" for n in range(4)]
    assert found.box_seconds == pytest.approx(98e-6)


def test_of_many_ranks_some_and_of_near_spans_one(tmp_path):
    write_trace(path := tmp_path / "trace.json", ranks=100, steps=4)
    found = read_timeline(path)
    assert len(found.ranks) == timeline.RANKS and found.of == 100 and found.ranks[0] == 0 and found.ranks[-1] == 99
    label = {"name": "thread_name", "ph": "M", "tid": 0, "args": {"name": "rank 0 on n1 (7 earlier spans not kept)"}}
    spans = [{"name": "step", "ph": "X", "tid": 0, "ts": start, "dur": 1e6} for start in (0.0, 1e6)]
    spans += [{"name": "push", "ph": "X", "tid": 0, "ts": 20.0 * n, "dur": 19.0} for n in range(100_000)]
    path.write_text(json.dumps({"traceEvents": [label, *spans]}))
    assert len(read_timeline(path).spans["communication"]) < timeline.COLUMNS


@pytest.mark.parametrize("chunk", [100, 1 << 20])
def test_a_cut_trace_is_shown_up_to_the_cut(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(timeline, "CHUNK", chunk)
    write_trace(path := tmp_path / "trace.json", ranks=2, steps=5)
    text = path.read_text()
    whole = json.loads(text)["traceEvents"]
    assert list(events(path)) == whole
    for length in (0, 5, 40, len(text) // 3, len(text) - 40):
        path.write_text(text[:length])
        found, read = read_timeline(path), []
        with pytest.raises(TruncatedTrace):
            read.extend(events(path))
        assert found.cut and bool(found.ranks) == (length > 100)
    path.write_text("[1]")
    assert read_timeline(path).cut


def test_what_is_no_span_of_ours_is_left_out(tmp_path):
    path = tmp_path / "trace.json"
    odd = [1, {}, {"ph": "X"}, {"name": "thread_name", "ph": "M", "args": 3}]
    odd += [{"ph": "X", "name": [], "ts": 1, "dur": 1, "tid": 0}]
    odd += [{"ph": "X", "name": "step", "ts": "NaN", "dur": 1, "tid": 0}]
    odd += [{"ph": "X", "name": "x", "ts": 1, "dur": 1, "tid": 10**30}]
    path.write_text(json.dumps({"traceEvents": odd}))
    found = read_timeline(path)
    assert not found.ranks and not found.cut
