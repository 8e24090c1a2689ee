"""hpcdl/reports/report.py: one page of whatever lies below some folders, safe, and as small as what is drawn."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from made_runs import write_comparison, write_run, write_trace

from hpcdl.errors import UsageError
from hpcdl.reports import report
from hpcdl.reports.charts import Curve
from hpcdl.reports.comparison_pictures import band, read_comparison, results_of, told_apart
from hpcdl.reports.figures import Key
from hpcdl.reports.report import UNFOLDED, make
from hpcdl.reports.run_pictures import pictures_of
from hpcdl.reports.run_reader import record

ALL = [f"{measure}-{cost}" for measure in ("loss", "accuracy") for cost in ("steps", "time", "bytes-sent")]
ALL += ["learning-rate", "time-of-ranks", "timeline", "pipeline", "who-to-whom", "message-sizes", "memory"]
ALL += ["staleness", "consensus", "hidden"]


class Page(HTMLParser):
    """What a page holds: its tags, ids, the text outside of its style, and how many pictures are unfolded."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.said, self.values, self.folds, self.unfolded = [], [], [], [], 0, 0
        self.feed(text)
        self.text = " ".join(" ".join(self.said).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.folds += tag == "details"
        self.unfolded += tag == "figure" and not self.folds
        self.values += [value or "" for _, value in attributes]
        self.ids += [value for name, value in attributes if name == "id"]

    def handle_endtag(self, tag):
        self.folds -= tag == "details"

    def handle_data(self, data):
        self.said.append(data)


def page_of(folder, *folders, **how):
    made = make([str(each) for each in folders or [folder]], folder / "report.html", **how)
    return Page((folder / "report.html").read_text()), made


def test_a_run_with_all_that_there_is(tmp_path):
    run = write_run(tmp_path / "run", strategy="pipeline")
    write_trace(run / "trace.json", microbatches=4)
    assert [each.name for each in pictures_of(record(run))] == ALL
    page, made = page_of(tmp_path)
    assert made.runs == 1 and made.pictures == len(ALL) and made.missing == []
    assert page.tags.count("figure") == len(ALL) and len(page.ids) == len(set(page.ids))
    assert page.unfolded == UNFOLDED == 12 and f"{len(ALL) - 12} more pictures" in page.text
    said = ["Loss (mean per example) against steps", "Who sent how much to whom", "4 ranks: python hpcdl", "n1, n2"]
    assert all(text in page.text for text in said)
    assert all(each.title and each.sentence for each in pictures_of(record(run)))


def test_it_needs_nothing_from_elsewhere_and_no_script(tmp_path):
    write_comparison(tmp_path / "compare", ["train-allreduce", "train-gossip"])
    write_run(tmp_path / "run")
    page, _ = page_of(tmp_path)
    assert not {"script", "link", "iframe", "object", "img"} & set(page.tags)
    links = [value for value in page.values if value.startswith(("http", "//", "javascript"))]
    assert all("w3.org" in value for value in links)
    text = (tmp_path / "report.html").read_text()
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    for colour in ("#1a1b1c", "#d9dadb", "#5a5b5c"):  # in which pictures are drawn; only the style may have one
        assert colour not in text.split("</style>")[1]


def test_what_users_wrote_is_no_markup(tmp_path):
    evil = "<script>alert(1)</script><b a=\"'&"
    run = write_run(tmp_path / "run", strategy=evil, model=evil, data=f"\x1b[2J{evil}", options={evil: evil})
    (run / "config.yaml").write_text(f"# launch: {evil}\ndata: '{evil.replace(chr(39), '')}'\n")
    failing = write_comparison(tmp_path / "compare", [evil, "x"], seeds=1)
    found = json.loads((failing / "results.json").read_text())
    found |= {"command": evil, "target": {evil: evil}, "budget": evil, "environment": {evil: evil}}
    found["lines"][1]["runs"][0]["failed"] = evil
    found["measures"][0] |= {"title": evil, "unit": evil, "format": evil}
    (failing / "results.json").write_text(json.dumps(found))
    page, _ = page_of(tmp_path)
    assert "script" not in page.tags and "b" not in page.tags
    assert page.text.count("<script>alert(1)</script>") >= 8 and "\x1b" not in page.text


def test_a_comparison_has_its_lines_in_their_colours_and_says_what_failed(tmp_path):
    names = ["train-allreduce", "train-gossip --topology ring", "train-local-sgd", "train-federated"]
    write_comparison(tmp_path, names, failing=(2,))
    page, made = page_of(tmp_path)
    assert made.comparisons == 1 and made.runs == 9
    assert "failed: rank 1: no memory is left" in page.text and "within noise" in page.text
    for title in ("Accuracy of each line against bytes sent", "Time to the target (accuracy 0.9)"):
        assert title in page.text
    assert "mean over 3 seeds, its band from the lowest to the highest" in page.text
    assert "+0.89%" not in page.text and "-2.00% (-2.00% to +1.00%), within noise" in page.text
    text = (tmp_path / "report.html").read_text()
    keys = set(re.findall(r'stroke="(#\w+)" stroke-width="2.4"/></svg> (?:<span>)?(\d [\w-]+)', text))
    assert len(keys) == 4 and len({colour for colour, _ in keys}) == 4  # of each line one, throughout
    assert page.tags.count("section") == 1 and page.values.count("wide") == 1
    assert page.unfolded == 10 and page.text.count("One run of this line, with its first seed") == 3
    said = "by test accuracy, line 4 is worse; by time, line 4 is better; by bytes sent by the busiest rank, no"
    assert page.text.index(f"Over 3 seeds, compared with line 1 (train-allreduce): {said}") < page.text.index("89.00%")
    assert "line 3 is without a verdict, for want of values." in page.text


def test_of_several_folders_a_dozen_pictures_are_unfolded(tmp_path):
    for name in "ab":
        write_run(tmp_path / name, traced=False)
    write_comparison(tmp_path / "compare", ["train-allreduce"], seeds=1)
    page, made = page_of(tmp_path)
    assert page.unfolded == 12 and page.tags.count("figure") == made.pictures > 50
    assert page.values.count("wide") == 2 and "Each row is a single run, which cannot tell a difference" in page.text


def curve(y, x=(1, 2, 3), **more):
    return Curve(np.array(x, float), np.array(y, float), "#0072b2", **more)


@pytest.mark.parametrize(
    "second, sign",
    [
        (curve([3, 2, 1]), "="),
        (curve([3, 2, 1 + 1e-4]), "≈"),
        (curve([3, 2, 1.01]), ""),
        (curve([3, 2, 1], x=(1, 2, 3.1)), ""),
        (curve([3, 2], x=(1, 2)), ""),
        (curve([3, 2, 1], low=np.array([2, 1, 0]), high=np.array([4, 3, 3])), ""),
    ],
)
def test_equal_curves_take_turns_and_are_named(second, sign):
    """Of four curves the second may equal the first; the last one does."""
    band = {"low": np.array([2, 1, 0]), "high": np.array([4, 3, 2])}
    lines = [curve([3, 2, 1], **band), second, curve([4, 4, 4]), curve([3, 2, 1], **band)]
    drawn, keys = told_apart(lines, [Key(f"{i} line", "#0072b2") for i in range(1, 5)], "line")
    assert [key.label for key in keys] == [
        "1 line",
        "2 line" + f" {sign} line 1" * bool(sign),
        "3 line",
        "4 line = line 1",
    ]
    assert (
        [each.shared for each in drawn] == [(0, 3), (1, 3), (0, 1), (2, 3)]
        if sign
        else [(0, 2), (0, 1), (0, 1), (1, 2)]
    )


def test_differences_that_a_logarithmic_axis_shows_are_told():
    lines = [curve([100, 1, 1e-3]), curve([100, 1, 2e-3])]
    assert told_apart(lines, [Key("1", ""), Key("2", "")], "run")[1][1].label == "2"


def test_points_say_which_lines_they_show_in_part(tmp_path):
    folder = write_comparison(tmp_path, ["a", "b", "c"], seeds=2)
    found = json.loads((folder / "results.json").read_text())
    for line, seeds in ((1, [0]), (2, [0, 1])):  # that missed the target
        for seed in seeds:
            found["lines"][line]["runs"][seed]["values"]["seconds_to_target"] = None
    (folder / "results.json").write_text(json.dumps(found))
    said = next(results_of(read_comparison(folder))).sentence
    assert "No value, or not reached: line 3. Only the seeds that have a value, or reached it: line 2." in said


def test_bands_are_over_the_seeds(tmp_path):
    records = [record(write_run(tmp_path / str(seed), steps=50, seed=seed)) for seed in range(3)]
    records.append(record(write_run(tmp_path / "short", steps=40, seed=7, evaluations=2)))  # of another rhythm
    x, mean, low, high = band(records[:3], "seconds", "test_accuracy")
    table = np.array([each.evaluations.mean["test_accuracy"] for each in records[:3]])
    for found, expected in ((mean, table.mean(0)), (low, table.min(0)), (high, table.max(0))):
        np.testing.assert_allclose(found, expected)
    np.testing.assert_allclose(x, records[0].evaluations.mean["seconds"])
    assert len(band(records, "bytes", "test_loss")[0]) == 2
    assert band(records, "bytes", "test_rmse") is None and band([], "step", "test_loss") is None


def test_many_runs_are_shown_together_and_some_with_pictures_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MOST", 1)
    for number in range(9):
        write_run(tmp_path / f"run-{number}", seed=number, traced=False)
    page, made = page_of(tmp_path)
    assert made.runs == 9 and "Accuracy of each run against time" in page.text
    assert made.missing == [f"{tmp_path}/run-0: no timeline: there is no trace.json: --trace 0"]
    key = r'<path d="M0 5h27" stroke="(#\w+)" stroke-width="2.4"( stroke-dasharray="[^"]*")?/>'
    colours = re.findall(key, (tmp_path / "report.html").read_text())
    assert len(set(colours)) == 9 and made.pictures == 6 + 14  # of more than seven some are dashed
    assert "Of 9 runs the pictures of the first 1 are shown" in page.text and page.tags.count("section") == 2


@pytest.mark.long
def test_a_thousand_ranks_are_grouped(tmp_path):
    run = write_run(tmp_path / "run", ranks=1000)
    found = {each.name: each for each in pictures_of(record(run))}
    page, _ = page_of(tmp_path)
    assert "ranks, means of 42 neighbours" in page.text and "16 of 1,000 ranks are shown" in page.text
    assert len((tmp_path / "report.html").read_text()) < 150_000 and "who-to-whom" in found


def test_what_is_missing_is_said_and_the_rest_is_shown(tmp_path):
    old = write_run(tmp_path / "old", traced=False)
    summary = json.loads((old / "summary.json").read_text())
    for name in ("bookkeeping_seconds_per_rank", "sent_to_per_rank", "message_sizes_per_rank"):
        del summary[name]
    summary["compute_seconds_per_rank"][1] = None
    (old / "summary.json").write_text(json.dumps(summary))
    cut = write_run(tmp_path / "cut")
    (cut / "trace.json").write_text((cut / "trace.json").read_text()[:2000])
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.yaml").write_text("data: digits\n")
    page, made = page_of(tmp_path)
    assert made.runs == 3
    for text in (
        "no matrix of who sent to whom: the summary does not have it (an older version)",
        "trace.json is cut off or no trace; the ranks before the cut are shown",
        "no curves: metrics.jsonl: No such file or directory",
        "The time of evaluations and checkpoints is not recorded.",
    ):
        assert text in page.text, text


@pytest.mark.long
def test_summaries_that_are_odd_do_no_harm(tmp_path):
    odd = [None, -1.5, "x", [None], {}, [[]], {"a": 1}, [1, "x"], 10**400, [float("nan")], [10**400], [{"1": 2}]]
    names = [*json.loads((write_run(tmp_path / "like", steps=1) / "summary.json").read_text())]
    for place, value in enumerate(odd):
        folder = write_run(tmp_path / str(place), steps=1, evaluations=0, traced=False)
        chosen = dict.fromkeys(names, value) | {"schema_version": 2}
        (folder / "summary.json").write_text(json.dumps(chosen))
        assert {"loss-steps", "learning-rate"} <= {each.name for each in pictures_of(record(folder))}
    assert page_of(tmp_path)[1].runs == len(odd) + 1


@pytest.mark.parametrize(
    "odd", [None, 3, "x", [], [1], {}, {"line": 3, "runs": [{}], "statistics": {"a": 1}}, [{"line": "a", "runs": 3}]]
)
def test_results_that_are_odd_do_no_harm(tmp_path, odd):
    folder = write_comparison(tmp_path, ["train-allreduce"], seeds=1)
    found = json.loads((folder / "results.json").read_text())
    measure = {"name": "seconds", "format": odd, "scale": odd}
    for change in [*({name: odd} for name in found), {"lines": [odd], "measures": [measure]}]:
        (folder / "results.json").write_text(json.dumps(found | change))
        comparison = read_comparison(folder)
        assert report.compared(comparison, "") and all(each.title for each in results_of(comparison))


def test_of_a_comparison_that_cannot_be_read_the_runs_are_shown(tmp_path):
    write_comparison(tmp_path, ["train-allreduce", "train-gossip"], seeds=1, schema_version=2)
    page, made = page_of(tmp_path)
    assert "results.json has version 2, but hpcdl reads version 1" in page.text
    assert made.runs == 2 and "Accuracy of each run against steps" in page.text


@pytest.mark.long
def test_files_of_others_stay(tmp_path):
    run = write_run(tmp_path / "run", steps=5, evaluations=0, traced=False)
    foreign = tmp_path / "report.html"
    foreign.write_text("mine")
    with pytest.raises(UsageError, match="no report has written it; give another name, or --force"):
        page_of(tmp_path)
    assert foreign.read_text() == "mine"
    page_of(tmp_path, force=True)
    page_of(tmp_path)  # now it is ours
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "other.png").write_text("mine")
    _, made = page_of(tmp_path, pictures=pictures, kind="svg")
    files = {path.name for path in pictures.glob("*.svg")}
    assert len(files) == made.pictures and "run-1-run-loss-steps.svg" in files
    (pictures / "run-1-run-loss-steps.svg").write_text("mine")
    with pytest.raises(UsageError, match=r"run-1-run-loss-steps\.svg exists, and no report has written it"):
        page_of(tmp_path, run, pictures=pictures, kind="svg")
    page_of(tmp_path, run, pictures=pictures, kind="png")
    page_of(tmp_path, run, pictures=pictures, kind="png")
    assert (pictures / "other.png").read_text() == "mine"
