"""Quality measures of predictions, from sums that add up over blocks of rows and over ranks.

Classes, from the confusion matrix n[true, predicted]:

    precision of a class    n[c, c] / sum over true of n[true, c]
    recall of a class       n[c, c] / sum over predicted of n[c, predicted]
    expected calibration    sum over bins of (rows in it / rows) |accuracy in it - mean probability in it|,
    error                   15 equal bins of the probability of the predicted class
                            (Guo et al., "On calibration of modern neural networks", 2017)

Values, for each output:

    RMSE    sqrt(mean of (z - y)^2)      MAE    mean of |z - y|      R2    1 - sum (z - y)^2 / sum (y - mean y)^2
"""

import math

import numpy as np

BINS = 15
MOST = 1000  # most classes with a confusion matrix


def probabilities(outputs: np.ndarray) -> np.ndarray:
    """Return probabilities (rows, classes); a binary classifier's (rows,) are those of class 1."""
    return np.column_stack([1 - outputs, outputs]) if outputs.ndim == 1 else outputs


def predicted_classes(p: np.ndarray) -> np.ndarray:
    """Return the most probable class of each row; the first of equal ones."""
    return p.argmax(axis=1)


class ClassMeasures:
    """Sums over rows for classes: confusion matrix and calibration bins."""

    def __init__(self, classes: int):
        self.classes, self.whole = classes, classes <= MOST
        # For many classes only the diagonal, and the sums of rows and columns.
        self.confusion = np.zeros((classes, classes) if self.whole else (3, classes))
        self.bins = np.zeros((3, BINS))  # rows, sum of probabilities, right answers
        self.sums = [self.confusion, self.bins]  # to be added up over ranks

    def add(self, y: np.ndarray, outputs: np.ndarray) -> None:
        """Add rows. y: true classes; outputs: predictions (rows, classes) or (rows,)."""
        p = probabilities(outputs)
        predicted = predicted_classes(p)
        if self.whole:
            np.add.at(self.confusion, (y, predicted), 1)
        else:
            for at, classes in enumerate((y[y == predicted], y, predicted)):
                self.confusion[at] += np.bincount(classes, minlength=self.classes)
        surest = p[np.arange(len(p)), predicted].astype(np.float64)
        place = np.clip((surest * BINS).astype(np.int64), 0, BINS - 1)
        for at, weights in enumerate((None, surest, y == predicted)):
            self.bins[at] += np.bincount(place, weights, BINS)

    def results(self) -> dict:
        """Return the measures as a JSON object; an undefined one (the precision of an unpredicted class) is None."""
        right, true, predicted = (
            (np.diag(self.confusion), self.confusion.sum(axis=1), self.confusion.sum(axis=0))
            if self.whole
            else self.confusion
        )
        rows, surest, hits = self.bins
        error = np.abs(hits - surest).sum() / max(1, rows.sum())
        bins = [
            {
                "from": k / BINS,
                "to": (k + 1) / BINS,
                "rows": int(n),
                "probability": ratio(s, n),
                "accuracy": ratio(h, n),
            }
            for k, (n, s, h) in enumerate(self.bins.T)
        ]
        return {
            "accuracy": ratio(right.sum(), true.sum()),
            "expected_calibration_error": float(error),
            "rows_per_class": true.astype(int).tolist(),
            "precision": [ratio(a, b) for a, b in zip(right, predicted, strict=True)],
            "recall": [ratio(a, b) for a, b in zip(right, true, strict=True)],
            "confusion": self.confusion.astype(int).tolist() if self.whole else None,
            "calibration": bins,
        }


class ValueMeasures:
    """Sums over rows of predicted and true values, with `outputs` values per row.

    around: a value near the true ones, for each output; squares are summed about it to lose few digits.
    """

    def __init__(self, outputs: int, around: np.ndarray):
        self.around = np.asarray(around, np.float64).reshape(outputs)
        self.rows, self.totals = np.zeros(1), np.zeros((4, outputs))
        self.sums = [self.rows, self.totals]

    def add(self, y: np.ndarray, outputs: np.ndarray) -> None:
        """Add rows with true values y and predictions, both (rows,) or (rows, outputs)."""
        shape = (len(y), len(self.around))
        true, error = y.reshape(shape) - self.around, outputs.reshape(shape).astype(np.float64) - y.reshape(shape)
        self.rows += len(y)
        self.totals += [
            true.sum(axis=0),
            np.square(true).sum(axis=0),
            np.square(error).sum(axis=0),
            abs(error).sum(axis=0),
        ]

    def results(self) -> dict:
        """Return the measures as a JSON object, a number per output; R2 is None if all true values are equal."""
        n = max(1.0, float(self.rows[0]))
        total, squares, errors, sizes = self.totals
        spread = squares - np.square(total) / n
        return {
            "rmse": [math.sqrt(each / n) for each in errors],
            "mae": (sizes / n).tolist(),
            "r2": [
                None if b <= 1e-12 * max(1.0, c) else 1 - a / b for a, b, c in zip(errors, spread, squares, strict=True)
            ],
        }


def ratio(part: float, whole: float) -> float | None:
    """Return part / whole; None if whole is 0."""
    return float(part / whole) if whole else None
