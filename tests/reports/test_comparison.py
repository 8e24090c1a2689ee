"""hpcdl/reports/comparison.py: from the folders of runs to results, tables and what is to be said of them."""

import csv
import io
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdl.errors import UsageError
from hpcdl.reports import comparison, report
from hpcdl.reports.comparison import Line, run_folder
from hpcdl.reports.comparison_pictures import measure_of, statistics_of
from hpcdl.reports.measures import BY_NAME
from hpcdl.reports.statistics import Statistics, of_lines

LINES = [Line("train-a", 2, "1-train-a"), Line("train-b --c 'x|y'", 1, "2-train-b"), Line("train-d", 2, "3-train-d")]
SEEDS = [0, 1, 2]
ABOUT = {"command": "2 ranks: hpcdl compare", "environment": {}, "options": {}, "budget": ""}


@pytest.fixture
def found(tmp_path):
    """Of three lines: the second is better by half a point with each seed; the last one failed twice."""
    for i, line in enumerate(LINES):
        for seed in SEEDS:
            path = tmp_path / run_folder(line.folder, seed)
            path.mkdir(parents=True)
            summary = {"test_accuracy": 0.8 + 0.05 * seed + 0.005 * i, "test_loss": 0.5, "workers": 2}
            summary |= {"stopped": "budget", "bytes_sent_per_rank": [1_000_000, 2_000_000 - 500_000 * i]}
            (path / "summary.json").write_text(json.dumps(summary))
    failed = {(2, 0): "the loss is not finite", (2, 1): "the loss is not finite"}
    return comparison.results(tmp_path, LINES, SEEDS, {"accuracy": 0.9}, failed, ABOUT, {})


def test_results_have_each_run_and_its_statistics(found):
    first, second, last = found["lines"]
    assert [run["values"]["test_accuracy"] for run in first["runs"]] == pytest.approx([0.8, 0.85, 0.9])
    assert first["statistics"]["test_accuracy"]["difference"] is None
    of_second = second["statistics"]["test_accuracy"]
    assert of_second["mean"] == pytest.approx(0.855) and of_second["deviation"] == pytest.approx(0.05)
    assert of_second["interval"] == pytest.approx((0.005, 0.005)) and of_second["within_noise"] is False
    assert [run["failed"] for run in last["runs"]] == ["the loss is not finite"] * 2 + [None]
    assert last["statistics"]["test_accuracy"]["runs"] == 1
    names = [each["name"] for each in found["measures"]]
    assert names == ["test_accuracy", "test_loss", "bytes_per_rank", "bytes_per_worker"]


def test_a_summary_that_cannot_be_read_is_a_failure(found, tmp_path):
    path = tmp_path / run_folder(LINES[0].folder, 1) / "summary.json"
    path.write_text('{"test_acc')
    again = comparison.results(tmp_path, LINES, SEEDS, {}, {}, ABOUT, {})
    assert "summary.json" in again["lines"][0]["runs"][1]["failed"]
    assert again["lines"][0]["statistics"]["test_accuracy"]["runs"] == 2


def test_the_table_of_markdown(found):
    text = comparison.markdown(found, comparison.chosen(""))
    assert "| `train-a` | 85.00% ± 5.00% | 0.5000 | 2.00 |" in text
    assert "| `train-b --c 'x\\|y'` | 85.50% ± 5.00% + | 0.5000 = | 1.50 + |" in text
    assert "`train-b --c 'x\\|y'` | +0.50% (+0.50% to +0.50%), p < 0.001 | +0.0000 (+0.0000 to +0.0000), p 1, w" in text
    assert "- line 3 failed with seeds 0, 1: the loss is not finite" in text
    assert "- line 1: 3 of 3 runs did not reach accuracy 0.9" in text


@pytest.mark.parametrize(
    "p, within_noise, signed, words",
    [(0.03, False, " -", ", p 0.03"), (0.3, True, " =", ", p 0.3, within noise"), (None, None, "", "")],
)
@pytest.mark.parametrize("interval", [(0.5, 1.5), None], ids=["paired", "censored"])
def test_table_and_page_say_the_same_of_a_difference(interval, p, within_noise, signed, words):
    measure = BY_NAME["seconds_to_target"]
    found = Statistics(7, 3.0, None, 1.0, interval, within_noise, p, 0 if interval else 2)
    told = [json.loads(json.dumps(each._asdict())) for each in (found, measure)]  # as results.json has them
    said = report.statistic(statistics_of(told[0]), measure_of(told[1])).more
    assert comparison.sign(measure, found) == signed
    assert said == "+1.00" + " (+0.50 to +1.50)" * bool(interval) + words


def statistics(*signs):
    """Statistics of lines: the first one, then ones with these signs for a measure that is better if less."""
    return [Statistics(5, 4.0, 1.0, None, None, None)] + [
        Statistics(5, 4.0, 1.0, {"+": -1.0, "-": 1.0, "=": 1.0, " ": 1.0}[each], None, *verdicts)
        for each in signs
        for verdicts in [{"=": (True, 0.3), " ": (None, None)}.get(each, (False, 0.01))]
    ]


def judged(**signs):
    by_name = {name: statistics(*each) for name, each in signs.items()}
    lines = [dict(zip(by_name, each, strict=True)) for each in zip(*by_name.values(), strict=True)]
    return comparison.verdict("train-a", 5, [BY_NAME[name] for name in signs], lines)


NO_VERDICT = "No verdict: it takes 3 seeds with values of two lines to tell a difference from noise."


@pytest.mark.parametrize(
    "signs, said",
    [
        ({"test_loss": "==", "seconds": "=="}, "by test loss and time, no line can be told apart"),
        ({"test_loss": "==", "seconds": "+="}, "by time, line 2 is better; by test loss, no line can be told apart"),
        ({"test_loss": "-+--", "seconds": "++++"}, "by test loss, line 3 is better and lines 2, 4 and 5 are worse; "
         "by time, lines 2, 3, 4 and 5 are better"),
        ({"test_loss": "= ", "seconds": "- "}, "by time, line 2 is worse; by test loss, no line can be told apart; "
         "line 3 is without a verdict, for want of values"),
        ({"seconds": "+", "seconds_to_target": "-"}, "by time to the target, line 2 is worse"),
    ],
)  # fmt: skip
def test_the_verdict_is_a_sentence_of_the_signs(signs, said):
    assert judged(**signs) == f"Over 5 seeds, compared with line 1 (train-a): {said}."


def test_there_is_no_verdict_of_one_line_or_of_too_few_seeds(found):
    assert judged(test_loss="  ", seconds="  ") == judged(epochs="++") == NO_VERDICT
    assert judged(test_loss="") == ""


def test_costs_to_a_target_that_a_run_missed_are_no_verdict():
    lines = [{name: each for name in ("seconds", "seconds_to_target")} for each in statistics("+")]
    lines[0]["seconds_to_target"] = lines[0]["seconds_to_target"]._replace(censored=1)
    said = comparison.verdict("a", 5, [BY_NAME[name] for name in lines[0]], lines)
    assert said == "Over 5 seeds, compared with line 1 (a): by time, line 2 is better."


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0, 5, -3]), st.lists(st.floats(1, 9), min_size=3, max_size=3)), min_size=2))
def test_the_verdict_names_the_lines_that_paired_t_tests_with_holms_correction_tell_apart(lines):
    """A line is (d, values): the first line's values plus d and some noise if d is not 0, else the values."""
    first = lines[0][1]
    values = [first, *([a + d + b / 99 if d else b for a, b in zip(first, line, strict=True)] for d, line in lines[1:])]
    found = of_lines(values)
    better = {
        i for i, each in enumerate(found, 1) if each.p is not None and each.p < 0.05 and each.difference <= -0.005
    }
    worse = {i for i, each in enumerate(found, 1) if each.p is not None and each.p < 0.05 and each.difference >= 0.005}
    said = comparison.verdict("a", 3, [BY_NAME["seconds"]], [{"seconds": each} for each in found])
    for word, expected in (("better", better), ("worse", worse)):
        named = re.findall(rf"lines? ((?:\d+(?:, | and )?)+) (?:is|are) {word}", said)
        assert {int(number) for each in named for number in re.findall(r"\d+", each)} == expected, said
    assert ("no line can be told apart" in said) == (not better | worse)


def test_chosen_columns(found):
    assert "test loss" not in comparison.markdown(found, comparison.chosen("test_accuracy,seconds"))
    with pytest.raises(UsageError, match="did you mean 'test_loss'"):
        comparison.chosen("test_los")


def test_the_table_of_csv_has_all_numbers(found):
    rows = list(csv.DictReader(io.StringIO(comparison.table(found))))
    assert [row["line"] for row in rows] == [line.text for line in LINES]
    assert [row["failed"] for row in rows] == ["0", "0", "2"]
    assert float(rows[1]["test_accuracy_difference_low"]) == pytest.approx(0.005)
    assert rows[0]["test_accuracy_difference"] == "" and rows[1]["bytes_per_rank_within_noise"] == "False"


def test_tables_fit_a_terminal():
    columns = [["a long title", "12345678", "1"], ["b", "123456", "12"], ["c", "1234567890", ""]]
    groups = comparison.in_width(columns, 32)
    assert [[column[0] for column in group] for group in groups] == [["a long title", "b"], ["c"]]
    assert comparison.in_width(columns, 200) == [columns]
    assert len(comparison.in_width(columns, 10)) == 3  # what is wider stands by itself


def test_neither_cells_nor_words_are_broken_where_titles_have_room_to_give():
    columns = [["messages of the busiest rank", "202 -"], ["examples/s", "30,415 ± 7,334"], ["sent, MB", "0.05"]]
    assert comparison.widths(columns, 45) == [12, 14, 5]
    assert comparison.widths(columns, 200) == [28, 14, 8]


def test_epochs_that_end_before_the_budget_are_told_of(found):
    found["budget"] = "seconds=9"
    assert not any("budget" in said for said in comparison.remarks(found))
    found["lines"][1]["runs"][2]["stopped"] = "finished"
    assert any(said.startswith("line 2: the epochs or steps ended before") for said in comparison.remarks(found))
