"""hpcdl/runs/metric_logs.py: tables and TensorBoard's events hold what metrics.jsonl holds."""

import csv
import itertools
import json
import math
import sys

import pytest
from events import read_events, scalars
from in_process import room
from written_runs import evaluations, lines

from hpcdl.errors import LoneError, UsageError
from hpcdl.runs import Options
from hpcdl.runs.folder import Folder, remove_run
from hpcdl.runs.metric_logs import Csv, forms, write_events

STEPS = [{"step": n, "epoch": n / 2, "train_loss": 1 / n, "seconds": n / 4} for n in range(1, 7)]
SCORES = {"step": 4, "epoch": 2.0, "test_loss": 0.125, "train_loss": 0.25, "seconds": 1.0, "bytes": 9, "messages": None}
LINES = [*STEPS[:4], SCORES, *STEPS[4:]]


def table(path):
    """A csv's rows, as metrics.jsonl has them: without what a line lacks."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file, strict=True))
    return [{name: json.loads(text) for name, text in row.items() if text} for row in rows]


def known(lines):
    """What a table has of lines: all but null."""
    return [{name: value for name, value in line.items() if value is not None} for line in lines]


def test_the_words_of_log():
    assert forms("none") == () and forms("csv") == ("csv",)
    assert forms("tensorboard,csv") == forms("csv, tensorboard") == forms("csv,csv,tensorboard")
    for text, said in (
        ("cvs", r"some of csv,tensorboard,wandb,mlflow with commas between, not 'cvs' \(did you mean 'csv'\?\)"),
        ("", "not ''"),
        ("csv,", "not ''"),
        ("none,csv", "not 'none'"),
        ("csv,tensorbord", r"not 'tensorbord' \(did you mean 'tensorboard'\?\)"),
    ):
        with pytest.raises(UsageError, match=said):
            Options(log=text)


def test_what_a_form_needs_is_missed_before_anything_starts(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--log tensorboard needs tensorboardX: pip install 'hpcdl\[tensorboard\]'$"):
        Options(log="csv,tensorboard")
    assert Options(log="csv").log == "csv"


def test_a_table_has_one_header_and_columns_that_come_late(tmp_path):
    log = Csv(tmp_path / "a.csv")
    log.write(LINES[:3])
    log.flush()
    assert (tmp_path / "a.csv").read_text().startswith("step,epoch,train_loss,seconds\n1,0.5,1.0,0.25\n2,")
    log.write(LINES[3:])
    log.flush()
    text = (tmp_path / "a.csv").read_text()
    assert text.startswith("step,epoch,train_loss,seconds,test_loss,bytes,messages\n1,0.5,1.0,0.25,,,\n")
    assert text.count("step") == 1 and len({line.count(",") for line in text.splitlines()}) == 1
    assert table(tmp_path / "a.csv") == known(LINES)
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]
    log.close()


def test_no_value_breaks_a_row(tmp_path):
    odd = [{"step": 1, "a,b": 'x"y\n,z', "c\nd": [1, "\n"]}, {"step": 2, "e": True, "f": 1e-320, "g": 2**70}]
    Csv.begin(tmp_path / "a.csv", odd).close()
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.reader(file, strict=True))
    assert rows[0] == ["step", "a,b", "c d", "e", "f", "g"] and len(rows) == 3
    assert rows[1] == ["1", '"x\\"y\\n,z"', '[1, "\\n"]', "", "", ""]
    assert rows[2] == ["2", "", "", "true", repr(1e-320), str(2**70)]


def test_events_hold_each_scalar_once_at_its_step_and_the_runs_own_time(tmp_path):
    pytest.importorskip("tensorboardX")
    write_events(tmp_path, LINES, 1000.0, {"lr": 0.5, "model": "a|b", "force": True}).close()
    found = scalars(tmp_path)
    assert set(found) == {"train_loss", "test_loss", "bytes"}
    assert [step for step, *_ in found["train_loss"]] == [1, 2, 3, 4, 5, 6]
    assert all(math.isclose(value, 1 / step, rel_tol=1e-6) for step, value, _ in found["train_loss"])
    assert [time for *_, time in found["train_loss"]] == [1000 + n / 4 for n in range(1, 7)]
    assert found["test_loss"] == [(4, 0.125, 1001.0)]
    (path,) = tmp_path.iterdir()
    first, *_ = events = read_events(path)
    assert first.file_version == "brain.Event:2"
    tags = {value.tag: value for event in events for value in event.summary.value}
    assert "| model | a\\|b |" in tags["options/text_summary"].tensor.string_val[0].decode()
    assert "_hparams_/session_start_info" in tags


def test_other_tools_read_them(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_events(tmp_path, LINES, 1000.0, {"lr": 0.5}).close()
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in found.Scalars("train_loss")] == [1, 2, 3, 4, 5, 6]


def begin(path, step, log="csv,tensorboard"):
    folder = Folder(path, 0)
    folder.create(Options(out=str(path), log=log), True)
    folder.open(step)
    return folder


def test_a_run_that_goes_on_has_what_metrics_jsonl_has(tmp_path):
    """Later lines go; a leg that wrote no events, or was killed in the middle of a record, leaves no gap."""
    pytest.importorskip("tensorboardX")

    def check(steps):
        assert table(tmp_path / "metrics.csv") == known(lines(tmp_path))
        found = scalars(tmp_path / "tensorboard")
        assert [step for step, *_ in found["train_loss"]] == steps
        times = [time for *_, time in found["train_loss"]]
        assert all(math.isclose(b - a, 0.25, abs_tol=1e-5) for a, b in itertools.pairwise(times))
        assert len(list((tmp_path / "tensorboard").glob("events*"))) == 1

    folder = begin(tmp_path, 0)
    folder.record(LINES[:2])
    folder.record(LINES[2:])
    check([1, 2, 3, 4, 5, 6])  # before it is closed: with each batch
    folder.close()
    (events,) = (tmp_path / "tensorboard").glob("events*")
    events.write_bytes(events.read_bytes()[:-7])
    (tmp_path / "metrics.csv").write_text((tmp_path / "metrics.csv").read_text()[:-3])
    folder = begin(tmp_path, 4, log="none")
    folder.record(STEPS[4:5])
    folder.close()
    folder = begin(tmp_path, 5)
    check([1, 2, 3, 4, 5])
    assert [line["step"] for line in table(tmp_path / "metrics.csv")] == [1, 2, 3, 4, 4, 5]
    folder.record(STEPS[5:])
    check([1, 2, 3, 4, 5, 6])
    folder.close()


def test_a_tensorboard_that_is_open_drops_what_it_has_read(tmp_path):
    pytest.importorskip("tensorboardX")
    write_events(tmp_path, LINES, 1000.0).close()
    (path,) = tmp_path.iterdir()
    first = path.rename(tmp_path / "events.out.tfevents.0000000001.host")  # as if it were in its memory
    write_events(tmp_path, LINES[:2], 1000.0).close()
    assert first.exists() and [step for step, *_ in scalars(tmp_path)["train_loss"]] == [1, 2]


def test_the_file_of_events_before_is_removed_when_there_is_another(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX")
    for now, count in ((1_700_000_000.9, 4), (1_700_000_000.95, 2), (1_700_000_009.0, 5)):
        monkeypatch.setattr("hpcdl.runs.metric_logs.time.time", lambda now=now: now)
        write_events(tmp_path, STEPS[:count], 1000.0).close()
        (path,) = tmp_path.iterdir()
        assert path.name.startswith(f"events.out.tfevents.{int(now)}.")
        assert len(scalars(tmp_path)["train_loss"]) == count


def test_events_have_the_time_of_day(tmp_path, monkeypatch):
    """The last line that a run goes on from is of now; the run began as many seconds before as its steps have taken."""
    pytest.importorskip("tensorboardX")
    folder = begin(tmp_path, 0)
    folder.record(LINES)
    folder.close()
    monkeypatch.setattr("hpcdl.runs.folder.time.time", lambda: 1_800_000_000.0)
    begin(tmp_path, 4).close()
    assert [time for *_, time in scalars(tmp_path / "tensorboard")["train_loss"]][-1] == 1_800_000_000.0


def test_nothing_is_written_unasked_and_not_by_other_ranks(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)  # as if not installed
    folder = begin(tmp_path, 0, log="none")
    other = Folder(tmp_path, 1)
    other.options = Options(log="csv")
    other.open(0)
    for each in (folder, other):
        each.record(LINES)
        each.close()
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "config.yaml", "logs", "metrics.jsonl"}


def test_force_and_a_new_start_remove_ours_and_nothing_else(tmp_path):
    pytest.importorskip("tensorboardX")
    folder = begin(tmp_path, 0)
    folder.record(LINES)
    folder.close()
    inside = tmp_path / "tensorboard"
    (ours,) = inside.iterdir()
    others = [inside / name for name in ("events.out.tfevents.1234567890.host", "mine.txt", f"{ours.name}.txt")]
    leftovers = [inside / f".{ours.name}.77.part", tmp_path / ".metrics.csv.77.part"]
    leftovers.append(tmp_path / "..metrics.csv.77.part.77.part")
    others.append(tmp_path / "metrics.csv.txt")
    for path in (*others, *leftovers):
        path.write_text("")
    folder = begin(tmp_path, 6, log="none")
    folder.close()
    assert not any(path.exists() for path in leftovers) and ours.exists()
    remove_run(tmp_path)
    left = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {path.relative_to(tmp_path) for path in (*others, tmp_path / ".lock")}


def test_a_link_to_a_folder_that_others_use_is_not_cleared(tmp_path):
    pytest.importorskip("tensorboardX")
    (tmp_path / "all").mkdir()
    foreign = tmp_path / "all" / "events.out.tfevents.1234567890.host.hpcdl"
    foreign.write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").symlink_to(tmp_path / "all")
    folder = begin(tmp_path / "run", 0, log="tensorboard")
    folder.close()
    remove_run(tmp_path / "run")
    assert foreign.exists() and len(list((tmp_path / "all").iterdir())) == 2


@pytest.mark.parametrize("log, name", [("csv", "metrics.csv"), ("tensorboard", "tensorboard/events.out")])
def test_a_full_disk_is_one_line(tmp_path, log, name):
    if log == "tensorboard":
        pytest.importorskip("tensorboardX")
    folder = begin(tmp_path, 0, log=log)
    folder.metrics.close()
    folder.metrics = open("/dev/null", "wb", buffering=0)  # noqa: SIM115 - the folder closes it
    with room(20_000), pytest.raises(LoneError, match=rf"{name}.* cannot be written: File too large$"):
        for _ in range(300):
            folder.record(LINES)
    folder.close()


def test_what_cannot_be_written_refuses_the_run(tmp_path):
    (tmp_path / "metrics.csv").mkdir()
    with pytest.raises(UsageError, match=r"metrics\.csv cannot be written: Is a directory"):
        begin(tmp_path, 0, log="csv")


def test_a_run_and_one_that_goes_on_with_it(run, world, mpi_tmp_path):
    """Through all that a run does: evaluations, the summary, a resumption from an older checkpoint."""
    pytest.importorskip("tensorboardX")
    out = mpi_tmp_path / "a"
    done = run(out=str(out), log="tensorboard,csv", epochs=3, checkpoint_every=4, keep=9)
    older = sorted(out.glob("checkpoint-*.h5"))[0]
    for _ in range(2):
        assert table(out / "metrics.csv") == known(lines(out))
        found = scalars(out / "tensorboard")
        assert [step for step, *_ in found["train_loss"]] == list(range(1, done.step + 1))
        assert [step for step, *_ in found["test_loss"]] == [line["step"] for line in evaluations(out)]
        run(resume=str(older), out=str(out), log="tensorboard,csv", epochs=3, checkpoint_every=4, keep=9)
    assert (out / "later" / "metrics.jsonl").exists()
