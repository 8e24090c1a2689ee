"""Scores of predictions, from sums that add up over blocks of rows and over ranks; areas under curves need all rows.

classes                 n[true, predicted]: the confusion matrix
precision of a class    n[c, c] / sum over true of n[true, c]
recall of a class       n[c, c] / sum over predicted of n[c, predicted]
F1 of a class           2 n[c, c] / (rows of it + rows predicted as it), the harmonic mean of both
macro ...               mean over the classes that rows have or are predicted as; an undefined precision or recall is 0
balanced accuracy       mean of recall over the classes that rows have
log loss                mean of -log p[true class], p at least the rounding error of its type
Brier score             mean of sum over classes of (p - [true class])^2; two classes: of class 1 alone
ROC AUC                 probability that a row of the class has a larger p than another row; ties count half
average precision       sum over thresholds of (recall - recall before) precision, the area under the precision-recall
                        curve; with ROC AUC: of class 1 of two classes, else the mean of each class against the others
expected calibration    sum over bins of (rows in it / rows) |accuracy in it - mean probability in it|,
error                   15 equal bins of the probability of the likeliest class
                        (Guo et al., "On calibration of modern neural networks", 2017)
values, each output     RMSE    sqrt(mean of (z - y)^2), z the prediction          MAE    mean of |z - y|
                        R2      1 - sum (z - y)^2 / sum (y - mean y)^2"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcdl.metric_lines import AREAS, CLASS_SCORES, PAIR

BINS = 15
MOST = 1000  # most classes with a confusion matrix
MOST_KEPT = 2**25  # most probabilities that are kept for curves, on all ranks together
MOST_CURVES = 20  # most classes with a curve each
POINTS = 200  # of a curve, about
MOST_NAMED = 32  # most outputs with scores of their own


def probabilities(outputs: np.ndarray) -> np.ndarray:
    """Return outputs as probabilities (rows, classes); outputs (rows,) of a binary classifier are those of class 1."""
    return np.column_stack([1 - outputs, outputs]) if outputs.ndim == 1 else outputs


def predicted_classes(p: np.ndarray, threshold: float | None = None) -> np.ndarray:
    """Return the likeliest class of each row of p (rows, classes), the first of equally probable ones. threshold, for
    two classes: class 1 if its probability is at least this."""
    return p.argmax(axis=1) if threshold is None else (p[:, 1] >= threshold).astype(np.int64)


class ClassMeasures:
    """Measures of predicted classes. threshold: see `predicted_classes`. curves: True to keep the probabilities of all
    rows for the areas under curves. certain: True if outputs are classes, as of a support vector machine, without
    probabilities to score."""

    def __init__(self, classes: int, threshold: float | None = None, curves: bool = False, certain: bool = False):
        self.classes, self.threshold, self.whole, self.certain = classes, threshold, classes <= MOST, certain
        # For many classes only the diagonal, and the sums of rows and columns.
        self.confusion = np.zeros((classes, classes) if self.whole else (3, classes))
        self.bins = np.zeros((3, BINS))  # rows, sum of probabilities, right answers
        self.penalties = np.zeros(2)  # sums of log losses, and of squared errors
        self.sums = [self.confusion, self.bins, self.penalties]  # to be added up over ranks
        self.kept: list[np.ndarray] | None = [] if curves and self.whole and not certain else None

    def add(self, y: np.ndarray, outputs: np.ndarray) -> None:
        """Add rows. y: true classes; outputs: predictions (rows, classes) or (rows,)."""
        p = probabilities(outputs)
        predicted, likeliest = predicted_classes(p, self.threshold), p.argmax(axis=1)
        if self.whole:
            np.add.at(self.confusion, (y, predicted), 1)
        else:
            for at, classes in enumerate((y[y == predicted], y, predicted)):
                self.confusion[at] += np.bincount(classes, minlength=self.classes)
        each = np.arange(len(p))
        surest, least = p[each, likeliest].astype(np.float64), np.finfo(p.dtype).eps
        place = np.clip((surest * BINS).astype(np.int64), 0, BINS - 1)
        for at, weights in enumerate((None, surest, y == likeliest)):
            self.bins[at] += np.bincount(place, weights, BINS)
        chosen = p[each, y].astype(np.float64)
        squares = np.square(p, dtype=np.float64).sum(axis=1) - 2 * chosen + 1
        self.penalties += -np.log(np.maximum(chosen, least)).sum(), squares.sum() / (2 if self.classes == 2 else 1)
        if self.kept is not None:
            self.kept.append(np.column_stack([y, p[:, 1] if self.classes == 2 else p]).astype(np.float64))
            if self.width * sum(map(len, self.kept)) > MOST_KEPT:
                self.kept = None

    @property
    def width(self) -> int:
        """The number of values that are kept of a row: its class and its probabilities."""
        return 2 if self.classes == 2 else 1 + self.classes

    def scores(self) -> dict[str, float]:
        """Return the scores that are defined, by the names in CLASS_SCORES."""
        right, true, predicted = self._counts()
        per_class = self._per_class()
        occurs = (true > 0) | (predicted > 0)
        found = {
            "accuracy": ratio(right.sum(), true.sum()),
            "balanced_accuracy": ratio(sum(each or 0.0 for each in per_class["recall"]), (true > 0).sum()),
        }
        if self.classes == 2:
            found |= {name: per_class[name][1] or (0.0 if occurs[1] else None) for name in PAIR}
        for name, values in per_class.items():
            found[f"macro_{name}"] = ratio(sum(value or 0.0 for value in values), occurs.sum())
        if not self.certain:
            for name, *values in zip(AREAS, *(each[1:] for each in self._areas()), strict=True):
                known = [value for value in values if value is not None]
                found[name] = ratio(sum(known), len(known))
            for name, total in zip(("log_loss", "brier_score"), self.penalties, strict=True):
                found[name] = ratio(total, true.sum())
            rows, surest, hits = self.bins
            found["calibration_error"] = float(np.abs(hits - surest).sum() / max(1, rows.sum()))
        return {name: float(found[name]) for name in CLASS_SCORES if found.get(name) is not None}  # type: ignore[arg-type]

    def results(self) -> dict[str, Any]:
        """Return the measures as a JSON object; an undefined one (the precision of an unpredicted class) is None."""
        _, true, _ = self._counts()
        keys = ("from", "to", "rows", "probability", "accuracy")
        bins = [(k / BINS, (k + 1) / BINS, int(m), ratio(s, m), ratio(h, m)) for k, (m, s, h) in enumerate(self.bins.T)]
        return {
            "scores": self.scores(),
            "rows_per_class": true.astype(int).tolist(),
            **self._per_class(),
            "confusion": self.confusion.astype(int).tolist() if self.whole else None,
            "calibration": [dict(zip(keys, each, strict=True)) for each in bins],
            "curves": [self._curve(*each) for each in self._areas()] if self.classes <= MOST_CURVES else [],
        }

    def _counts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return for each class the rows that are right, that have it, and that are predicted as it."""
        n = self.confusion
        return (np.diag(n), n.sum(axis=1), n.sum(axis=0)) if self.whole else tuple(n)  # type: ignore[return-value]

    def _per_class(self) -> dict[str, list[float | None]]:
        right, true, predicted = self._counts()
        parts = {"precision": (right, predicted), "recall": (right, true), "f1": (2 * right, true + predicted)}
        return {name: [ratio(*each) for each in zip(*both, strict=True)] for name, both in parts.items()}

    def _areas(self) -> list[tuple[int, float | None, float | None]]:
        """Return (class, ROC AUC, average precision) for class 1 of two, or for each class; [] without kept rows."""
        if not self.kept:
            return []
        chosen = [1] if self.classes == 2 else range(self.classes)
        return [(number, *areas(*self._thresholds(number)[1:])) for number in chosen]

    def _thresholds(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert self.kept is not None
        rows = self.kept = [np.concatenate(self.kept)]
        return threshold_counts(rows[0][:, 0] == number, rows[0][:, 1 if self.classes == 2 else 1 + number])

    def _curve(self, number: int, area: float | None, average: float | None) -> dict[str, Any]:
        """Return a class's curves, thinned to about POINTS thresholds; a rate without rows is None."""
        thresholds, hits, alarms = self._thresholds(number)
        length = hits / max(1, hits[-1]) + alarms / max(1, alarms[-1])
        at = np.unique(np.searchsorted(length, np.linspace(0, length[-1] * (1 - 1e-12), POINTS)))
        curve: dict[str, Any] = {"class": number, "roc_auc": area, "average_precision": average}
        curve["threshold"] = thresholds[at].tolist()
        curve["precision"] = (hits / (hits + alarms))[at].tolist()
        for name, counts in (("recall", hits), ("false_positive_rate", alarms)):
            curve[name] = [ratio(count, counts[-1]) for count in counts[at]]
        return curve


def threshold_counts(positive: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct values of p, the largest first, and how many rows with at least this p are `positive`, and
    how many are not."""
    order = np.argsort(-p, kind="stable")
    values, hits = p[order], np.cumsum(positive[order])
    last = np.flatnonzero(np.append(np.diff(values) != 0, True))
    return values[last], hits[last], 1 + last - hits[last]


def areas(hits: np.ndarray, alarms: np.ndarray) -> tuple[float | None, float | None]:
    """Return (ROC AUC, average precision) from the counts of `threshold_counts`; None: no row is of a needed kind."""
    new, before = np.diff(hits, prepend=0), np.concatenate([[0], hits[:-1]])
    under = (np.diff(alarms, prepend=0) * (hits + before)).sum()  # whole numbers: exact
    return ratio(under, 2 * int(hits[-1]) * int(alarms[-1])), ratio((new * (hits / (hits + alarms))).sum(), hits[-1])


class ValueMeasures:
    """Measures of predicted values, as sums over rows with a value for each of `names`, the outputs.
    around: for each output a value near the true ones, which is subtracted from these, to lose fewer digits. unit: of
    each output, in which RMSE and MAE are given, per unit of y and predictions."""

    def __init__(self, names: Sequence[str], around: np.ndarray | float = 0.0, unit: np.ndarray | float = 1.0):
        self.names, shape = list(names), (len(names),)
        self.around, self.unit = (np.broadcast_to(np.ravel(each).astype(float), shape) for each in (around, unit))
        self.rows, self.totals = np.zeros(1), np.zeros((4, len(names)))
        self.sums = [self.rows, self.totals]

    def add(self, y: np.ndarray, outputs: np.ndarray) -> None:
        """Add rows with true values y and predictions, both (rows,) or (rows, outputs)."""
        shape = (len(y), len(self.around))
        true, error = y.reshape(shape) - self.around, outputs.reshape(shape).astype(np.float64) - y.reshape(shape)
        self.rows += len(y)
        self.totals += [part.sum(axis=0) for part in (true, np.square(true), np.square(error), abs(error))]

    def results(self) -> dict:
        """Return the measures as a JSON object, a number per output; R2 is None if all true values are equal."""
        n = max(1.0, float(self.rows[0]))
        total, squares, errors, sizes = self.totals
        sums = zip(errors, squares - np.square(total) / n, squares, strict=True)
        r2 = [None if spread <= 1e-12 * max(1.0, square) else 1 - error / spread for error, spread, square in sums]
        rmse, mae = self.unit * np.sqrt(errors / n), self.unit * sizes / n
        return {"rmse": rmse.tolist(), "mae": mae.tolist(), "r2": r2}

    def scores(self) -> dict[str, float]:
        """Return the scores that are defined: rmse, or rmse_NAME for each of several outputs; {} beyond MOST_NAMED."""
        names = [""] if len(self.names) == 1 else [f"_{name}" for name in self.names]
        if len(names) > MOST_NAMED:
            return {}
        return {
            f"{score}{name}": value
            for score, values in self.results().items()
            for name, value in zip(names, values, strict=True)
            if value is not None
        }


def ratio(part: float, whole: float) -> float | None:
    """Return part / whole; None if whole is 0."""
    return float(part / whole) if whole else None
