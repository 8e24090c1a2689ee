"""Quality measures of predictions, from sums that add up over blocks of rows and over ranks.

classes                 n[true, predicted]: the confusion matrix
precision of a class    n[c, c] / sum over true of n[true, c]
recall of a class       n[c, c] / sum over predicted of n[c, predicted]
expected calibration    sum over bins of (rows in it / rows) |accuracy in it - mean probability in it|,
error                   15 equal bins of the probability of the predicted class
                        (Guo et al., "On calibration of modern neural networks", 2017)
values, each output     RMSE    sqrt(mean of (z - y)^2), z the prediction          MAE    mean of |z - y|
                        R2      1 - sum (z - y)^2 / sum (y - mean y)^2"""

import math

import numpy as np

BINS = 15
MOST = 1000  # most classes with a confusion matrix


def probabilities(outputs: np.ndarray) -> np.ndarray:
    """Return outputs as probabilities (rows, classes); outputs (rows,) of a binary classifier are those of class 1."""
    return np.column_stack([1 - outputs, outputs]) if outputs.ndim == 1 else outputs


class ClassMeasures:
    """Measures of predicted classes, as sums over rows: the confusion matrix and the calibration bins."""

    def __init__(self, classes: int):
        self.classes, self.whole = classes, classes <= MOST
        # For many classes only the diagonal, and the sums of rows and columns.
        self.confusion = np.zeros((classes, classes) if self.whole else (3, classes))
        self.bins = np.zeros((3, BINS))  # rows, sum of probabilities, right answers
        self.sums = [self.confusion, self.bins]  # to be added up over ranks

    def add(self, y: np.ndarray, outputs: np.ndarray) -> None:
        """Add rows. y: true classes; outputs: predictions (rows, classes) or (rows,)."""
        p = probabilities(outputs)
        predicted = p.argmax(axis=1)  # the first of equally probable classes
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
        n = self.confusion
        right, true, predicted = (np.diag(n), n.sum(axis=1), n.sum(axis=0)) if self.whole else n
        rows, surest, hits = self.bins
        error = np.abs(hits - surest).sum() / max(1, rows.sum())
        keys = ("from", "to", "rows", "probability", "accuracy")
        bins = [(k / BINS, (k + 1) / BINS, int(m), ratio(s, m), ratio(h, m)) for k, (m, s, h) in enumerate(self.bins.T)]
        return {
            "accuracy": ratio(right.sum(), true.sum()),
            "expected_calibration_error": float(error),
            "rows_per_class": true.astype(int).tolist(),
            "precision": [ratio(a, b) for a, b in zip(right, predicted, strict=True)],
            "recall": [ratio(a, b) for a, b in zip(right, true, strict=True)],
            "confusion": n.astype(int).tolist() if self.whole else None,
            "calibration": [dict(zip(keys, each, strict=True)) for each in bins],
        }


class ValueMeasures:
    """Measures of predicted values, as sums over rows of `outputs` values each.
    around: for each output a value near the true ones, which is subtracted from these, to lose fewer digits."""

    def __init__(self, outputs: int, around: np.ndarray):
        self.around = np.asarray(around, np.float64).reshape(outputs)
        self.rows, self.totals = np.zeros(1), np.zeros((4, outputs))
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
        return {"rmse": [math.sqrt(each / n) for each in errors], "mae": (sizes / n).tolist(), "r2": r2}


def ratio(part: float, whole: float) -> float | None:
    """Return part / whole; None if whole is 0."""
    return float(part / whole) if whole else None
