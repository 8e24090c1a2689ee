"""hpcdl/reports/measures.py: what is taken from a run's summary and metrics, and when it is not known."""

import json
from pathlib import Path

import pytest

from hpcdl.errors import UsageError
from hpcdl.reports.measures import BY_NAME, MEASURES, measure_of, measured, read_target, shown

SUMMARY = {"ranks": 3, "workers": 2, "steps": 50, "seconds": 2.0, "test_accuracy": 0.9, "test_loss": 0.25}
SUMMARY |= {"bytes_sent_per_rank": [900, 300, 400], "messages_per_rank": [5, 9, 7]}
SUMMARY |= {"idle_seconds_per_rank": [1.9, 0.5, 0.0], "compute_seconds_per_rank": [0.1, 0.5, 1.5]}
SUMMARY |= {"communication_seconds_per_rank": [1.9, 0.5, 0.5], "staleness_histogram": [1, 0, 3]}
SUMMARY |= {"memory_bytes_per_rank": {"parameters": [10, 5, 5], "activations": [0, 40, 30]}}


def test_measures_of_a_summary(tmp_path):
    found = measured(tmp_path, SUMMARY, {})[0]
    assert set(found) == {measure.name for measure in MEASURES}
    assert (found["test_accuracy"], found["test_loss"], found["steps"]) == (0.9, 0.25, 50)
    assert found["bytes_per_rank"] == 900 and found["bytes_per_worker"] == 400  # the server's is the largest
    assert found["idle"] == pytest.approx((0.5 / 1.0 + 0.0 / 2.0) / 2)  # of the two workers, the last ranks
    assert (found["messages_per_rank"], found["memory"]) == (9, 45)  # of rank 1
    assert (found["staleness"], found["milliseconds_per_step"]) == (pytest.approx(6 / 4), 40.0)
    assert found["test_rmse"] is None and found["steps_to_target"] is None


def test_what_is_not_known_is_none(tmp_path):
    hidden = SUMMARY | {"messages_per_rank": [1, None, 2], "idle_seconds_per_rank": None, "test_loss": 10**400}
    found = measured(tmp_path, hidden, {})[0]
    assert [found[name] for name in ("messages_per_rank", "idle", "test_loss")] == [None] * 3
    assert all(value is None for value in measured(tmp_path, {}, {"accuracy": 0.5})[0].values())


def test_the_target_is_reached_at_the_first_evaluation_that_has_it(tmp_path):
    lines = [{"step": step, "seconds": step / 10, "train_loss": 1.0} for step in range(1, 7)]
    for line, accuracy, loss in ((lines[1], 0.6, 0.9), (lines[3], 0.8, 0.5), (lines[5], 0.7, 0.4)):
        line |= {"test_accuracy": accuracy, "test_loss": loss, "bytes": 100 * line["step"], "messages": None}
        line |= {"test_f1": accuracy - 0.5, "test_rmse_mass": 2 * loss}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def to(text):
        found, beyond = measured(tmp_path, SUMMARY, read_target(text))
        return beyond or [found[f"{name}_to_target"] for name in ("steps", "seconds", "bytes")]

    assert to("accuracy=0.8") == [4, 0.4, 400]
    assert to("accuracy=0.5") == [2, 0.2, 200]
    assert to("loss=0.45") == [6, 0.6, 600]
    assert to("f1=0.25") == [4, 0.4, 400] and to("rmse_mass=2") == [2, 0.2, 200]
    assert to("rmse=1") == to("") == [None] * 3
    last = {"steps_to_target": 6, "seconds_to_target": 0.6, "bytes_to_target": 600}
    assert to("accuracy=0.9") == last


@pytest.mark.parametrize("text", ["acuracy=0.9", "accuracy", "accuracy=high", "0.9", "loss=nan", "accuracy=95"])
def test_bad_targets(text):
    with pytest.raises(UsageError, match="--target"):
        read_target(text)


def test_further_scores_are_measures():
    found = measured(Path(), SUMMARY | {"test_f1": 0.5, "validation_rmse_mass": 3, "test_other": 1}, {})[0]
    assert (found["test_f1"], found["validation_rmse_mass"]) == (0.5, 3) and "test_other" not in found
    assert [measure_of(name).better for name in ("test_f1", "test_rmse_mass")] == ["more", "less"]
    assert measure_of("test_other") is None and measure_of("f1") is None


def test_values_are_shown_in_their_units():
    assert shown(BY_NAME["bytes_per_rank"], 2_500_000) == "2.50 MB"
    assert shown(BY_NAME["test_accuracy"], -0.0123, "+", unit=False) == "-1.23%"
    assert shown(BY_NAME["seconds"], None) == ""
