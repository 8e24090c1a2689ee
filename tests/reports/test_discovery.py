"""hpcdl/reports/discovery.py: runs and comparisons below folders, each once; folders without any are refused."""

from made_runs import write_comparison, write_run

from hpcdl.reports.discovery import find


def test_what_lies_below_a_folder(tmp_path):
    write_run(tmp_path / "a" / "one", traced=False)
    write_run(tmp_path / "b", traced=False)
    write_run(tmp_path / "b" / "inner", traced=False)  # a run's own
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "metrics.jsonl").write_text("")
    write_comparison(tmp_path / "d", ["train-allreduce", "train-gossip"], seeds=1)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "summary.json").write_text("{}")
    write_run(tmp_path / "stopped" / "1-line" / "seed-0", traced=False)
    for name in ("stopped", "begun"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.yaml").write_text("data: digits")
    found = find([str(tmp_path), str(tmp_path / "b"), str(tmp_path / "a" / "one")])
    assert [path.relative_to(tmp_path).as_posix() for path in found.runs] == [
        *("a/one", "b", "begun", "c", "stopped/1-line/seed-0")
    ]
    assert [path.name for path in found.comparisons] == ["d"]
    assert [path.name for path in find([str(tmp_path / "d" / "1-line" / "seed-0")]).runs] == ["seed-0"]
