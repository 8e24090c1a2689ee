"""hpcdl/reports/run_reader.py: what a run's folder says, however little that is; what is missing is said."""

import json
import os
import tracemalloc

import pytest
from made_runs import write_run

from hpcdl.reports.run_reader import record


def test_a_whole_run(tmp_path):
    run = record(write_run(tmp_path, steps=100, evaluations=5))
    assert run.missing == [] and run.said("strategy") == "all_reduce" and run.score == "accuracy"
    assert run.header["launch"].startswith("4 ranks") and run.options["lr"] == "0.05"
    assert run.steps.rows == 100 and run.evaluations.rows == 5
    assert run.evaluations.mean["bytes"].tolist() == [19280.0 * step for step in (20, 40, 60, 80, 100)]


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("summary.json", None, "no summary: the run is running or was killed"),
        ("summary.json", b'{"schema_version": 3}', "summary.json has version 3, but hpcdl reads version 2"),
        ("summary.json", b'{"schema_version": 2, "stra', "summary.json cannot be read: it is cut off"),
        ("summary.json", b"[1]", "summary.json cannot be read: it holds no object"),
        ("summary.json", b"[" * 100_000, "summary.json cannot be read: it is cut off"),
        ("summary.json", os.mkfifo, "summary.json cannot be read: it is no file"),  # which is not waited for
        ("config.yaml", None, "no options: config.yaml: No such file"),
        ("config.yaml", os.mkfifo, "no options: config.yaml: it is no file"),
        ("config.yaml", b"a: [", "no options: config.yaml is not valid YAML"),
        ("metrics.jsonl", None, "no curves: metrics.jsonl: No such file"),
        ("metrics.jsonl", b"", "no curves: metrics.jsonl has no lines yet"),
        ("metrics.jsonl", b'{"step": 1, "train_loss": 2}\n{"step', "the last line is cut off"),
        ("metrics.jsonl", b'{"step": 1, "train_loss": 2}\nx\n', "1 broken line left out"),
        ("started.json", b"{", "started.json cannot be read: it is cut off"),
    ],
)
def test_what_is_missing_is_said_and_the_rest_is_there(tmp_path, name, content, said):
    path = write_run(tmp_path, steps=20) / name
    path.unlink(missing_ok=True)
    if content is not None:
        content(path) if callable(content) else path.write_bytes(content)
    run = record(tmp_path)
    (line,) = [each for each in run.missing if said in each]
    assert run.missing == [line]
    assert bool(run.summary) == (name != "summary.json") and (run.steps.rows > 0 or name == "metrics.jsonl")


def test_of_a_run_that_goes_on_its_beginning_is_known(tmp_path):
    write_run(tmp_path)
    os.remove(tmp_path / "summary.json")
    (tmp_path / "started.json").write_text(json.dumps({"strategy": "gossip", "ranks": 4, "hosts": ["n1"]}))
    assert record(tmp_path).said("strategy") == "gossip"


def test_memory_goes_with_what_is_drawn(tmp_path):
    peaks = []
    for steps in (2_000, 20_000):
        folder = write_run(tmp_path / str(steps), steps=steps, evaluations=steps // 4, traced=False)
        record(folder)  # what is kept from the first time on
        tracemalloc.start()
        run = record(folder)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert run.steps.rows == steps and 200 < len(run.steps) <= 400 and 200 < len(run.evaluations) <= 400
    assert peaks[1] < 1.3 * peaks[0]  # of ten times as many lines
