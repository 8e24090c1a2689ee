"""How good predictions are, beside loss and accuracy; all from sums, which add up over blocks of rows and over ranks.

Of classes, from the confusion matrix n[true, predicted]:

    precision of a class    n[c, c] / sum over true of n[true, c]
    recall of a class       n[c, c] / sum over predicted of n[c, predicted]
    expected calibration    sum over bins of (rows in it / rows) |accuracy in it - mean probability in it|,
    error                   15 equal bins of the probability of the predicted class
                            (Guo et al., "On calibration of modern neural networks", 2017)

Of values, for each output:

    RMSE    sqrt(mean of (z - y)^2)      MAE    mean of |z - y|      R2    1 - sum (z - y)^2 / sum (y - mean y)^2
"""

import math

import numpy as np

BINS = 15
MOST = 1000  # classes of which a confusion matrix is kept


def probabilities(outputs: np.ndarray) -> np.ndarray:
    """What a classifier predicts as (rows, classes): the probability of class 1 alone (rows,) as both."""
    return np.column_stack([1 - outputs, outputs]) if outputs.ndim == 1 else outputs


def answers(p: np.ndarray) -> np.ndarray:
    """The likeliest class of each row; of two that are as likely, the first."""
    return p.argmax(axis=1)


class ClassMeasures:
    """Sums over rows: how often which class is taken for which, and what the probabilities are worth."""

    def __init__(self, classes: int):
        self.classes, self.whole = classes, classes <= MOST
        # Of many classes only the diagonal, and the sums of rows and of columns.
        self.confusion = np.zeros((classes, classes) if self.whole else (3, classes))
        self.bins = np.zeros((3, BINS))  # rows, sum of probabilities, right answers
        self.sums = [self.confusion, self.bins]  # to be added up over ranks

    def add(self, y: np.ndarray, outputs: np.ndarray) -> None:
        """Rows with their true classes y, and what the model predicts: (rows, classes) or (rows,)."""
        p = probabilities(outputs)
        predicted = answers(p)
        if self.whole:
            np.add.at(self.confusion, (y, predicted), 1)
        else:
            for at, classes in enumerate((y[y == predicted], y, predicted)):
                self.confusion[at] += np.bincount(classes, minlength=self.classes)
        surest = p[np.arange(len(p)), predicted].astype(np.float64)
        place = np.clip((surest * BINS).astype(np.int64), 0, BINS - 1)
        for at, weights in enumerate((None, surest, y == predicted)):
            self.bins[at] += np.bincount(place, weights, BINS)

    def found(self) -> dict:
        """In JSON's terms; what cannot be known, as the precision of a class that is never predicted, is None."""
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
    """Sums over rows of what is predicted and what is true; `outputs` values of each row.

    around: a value near the true ones, for each output: their squares are summed about it, so that few digits are lost.
    """

    def __init__(self, outputs: int, around: np.ndarray):
        self.around = np.asarray(around, np.float64).reshape(outputs)
        self.rows, self.totals = np.zeros(1), np.zeros((4, outputs))
        self.sums = [self.rows, self.totals]

    def add(self, y: np.ndarray, outputs: np.ndarray) -> None:
        """Rows with their true values y, and what the model predicts; both (rows,) or (rows, outputs)."""
        shape = (len(y), len(self.around))
        true, error = y.reshape(shape) - self.around, outputs.reshape(shape).astype(np.float64) - y.reshape(shape)
        self.rows += len(y)
        self.totals += [
            true.sum(axis=0),
            np.square(true).sum(axis=0),
            np.square(error).sum(axis=0),
            abs(error).sum(axis=0),
        ]

    def found(self) -> dict:
        """In JSON's terms, a number for each output; R2 is None where the true values are all the same."""
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
    """part / whole; None of nothing."""
    return float(part / whole) if whole else None
