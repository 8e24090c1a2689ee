"""The section of a search in a report: its settings, a table of its best trials, the importance of each option."""

from collections import Counter
from collections.abc import Sequence

from hpcdl.errors import printable
from hpcdl.formatting import counted, spent
from hpcdl.reports import page
from hpcdl.reports.page import Cell
from hpcdl.reports.search_pictures import ordered
from hpcdl.search.importance import importance
from hpcdl.search.search_log_reader import TrialRow, Trials, best, number_text, score_text
from hpcdl.search.space import Parameter

BEST = 20  # trials in the table
COLUMNS = 6  # options with a column of their own
REASONS = 5  # most listed reasons of failed trials
OPTIMISTIC = (
    "The best of many scores that vary by chance is too good to be repeated: train this trial with other seeds before "
    "you report its score, or search with --seeds."
)


def searched(trials: Trials, pictures: str) -> list[str]:
    """Return the parts of the section. pictures: those of the search, as a part of the page."""
    rows, axes = trials.rows(), trials.axes()
    shares = importance(rows, axes)
    top = best(rows, BEST)
    parts = [page.facts(about(trials, rows)), page.missing([*trials.missing, *failures(rows)])]
    if top:
        parts.append(table(trials, top, ordered(axes, shares), len(best(rows))))
        if trials.seeds == 1 and len(rows) > 1:
            parts.append(page.paragraph(OPTIMISTIC))
    return [*parts, pictures, page.folded("What each option explains", explained(shares))]


def about(trials: Trials, rows: Sequence[TrialRow]) -> list[tuple[str, str]]:
    told = trials.settings
    better = "larger is better" if trials.maximize else "smaller is better"
    counts = Counter(row.status for row in rows)
    of = f" of {trials.asked}" if trials.asked is not None else ""
    said = [f"{counts['ended']}{of} ended", *(f"{counts[each]} {each}" for each in ("failed", "begun") if counts[each])]
    if trials.asked is not None and trials.asked > len(rows):
        said.append(f"{trials.asked - len(rows)} not begun")
    found = [(name, str(told[name])) for name in ("program", "method") if told.get(name)]
    found += [("score", f"{trials.objective} ({better})" + f", mean of {trials.seeds} seeds" * (trials.seeds > 1))]
    found += [("trials", ", ".join(said))]
    space = told.get("space")
    found += [("space", "; ".join(map(str, space)))] if isinstance(space, list) and space else []
    ranks = told.get("ranks_per_trial")
    found += [("groups", f"{trials.groups}" + (f" of {counted(ranks, 'rank')}" if isinstance(ranks, int) else ""))]
    return found + ([("time", spent(trials.seconds))] if trials.seconds is not None else [])


def failures(rows: Sequence[TrialRow]) -> list[str]:
    whys = Counter(row.failed for row in rows if row.failed is not None).most_common()
    said = [f"{counted(count, 'trial')} failed: {why}" for why, count in whys[:REASONS]]
    left = sum(count for _, count in whys[REASONS:])
    return said + ([f"{counted(left, 'trial')} failed for other reasons (trials.csv)"] if left else [])


def table(trials: Trials, top: Sequence[TrialRow], axes: Sequence[Parameter], scored: int) -> str:
    columns, others = axes[:COLUMNS], axes[COLUMNS:]
    rungs = any(row.amount > 0 for row in top)
    names = ["trial", trials.objective.replace("_", " "), *(["epochs"] if rungs else []), "time"]
    rows = []
    for row in top:
        rest = [f"{each.name} {number_text(row.values[each.name])}" for each in others if each.name in row.values]
        cells = [Cell(f"trial {row.trial}", ", ".join([*rest, *(["goes on"] if row.status == "begun" else [])]))]
        cells.append(Cell(score_text(trials, row.score, row.spread)))
        cells += [Cell(f"{row.amount:g}" if row.amount else "all")] if rungs else []
        cells.append(Cell(spent(row.seconds)))
        rows.append([*cells, *(Cell(number_text(row.values.get(axis.name, "-"))) for axis in columns)])
    more = f"The best {len(top)} of {scored} trials with a score. " if scored > len(top) else ""
    note = f"{more}Each trial is a run, in a folder such as {top[0].folder}, whose report shows the whole run."
    return page.table([*names, *(axis.name for axis in columns)], rows) + page.paragraph(note)


def explained(shares: Sequence[tuple[str, float | None]]) -> str:
    if all(share is None for _, share in shares):
        return ""
    rows = [
        (printable(name, allowed=""), "too few trials" if share is None else f"{share:.0%}") for name, share in shares
    ]
    return page.facts(rows) + page.paragraph(
        "The share of the differences between the trials' first scores that an option explains by itself, corrected "
        "for chance. Options that matter only together have small shares."
    )
