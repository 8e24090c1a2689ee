"""Combination of the predictions of an ensemble's members; pure functions of arrays.

With p_m(k) the probability of class k that member m of M gives to a row:

    mean            p(k) = 1/M sum of p_m(k)
    vote            p(k) = sum of a_m [k is the likeliest of p_m] / sum of a_m          a_m: 1; in boosting: see below
    stacking        p(k) = exp(z_k) / sum of exp(z_j),   z_k = b_k + sum of w_m log p_m(k)
    disagreement    mean over rows and over pairs of members of [their likeliest classes differ]

All need only sums over members. Stacking's w (M,) and b (classes,) minimize the log loss on rows that no member was
trained on, by Newton's method (convex; a ridge of 1e-3 per row keeps w near 1/M and b near 0 if the rows tell little).
(Wolpert, "Stacked generalization", Neural Networks 1992.) Values are combined to their mean and standard deviation.

SAMME, with K classes: a member with weighted error e has the vote a = log((1 - e) / e) + log(K - 1), and the weights of
the rows it misclassifies are multiplied by exp(a). With K = 2 it is AdaBoost. (Zhu, Zou, Rosset and Hastie,
"Multi-class AdaBoost", Statistics and Its Interface 2009; Freund and Schapire, 1997.)"""

import math

import numpy as np

LEAST = 1e-9  # lower bound of a probability under the logarithm
RIDGE = 1e-3
MOST_STEPS = 100


def votes(p: np.ndarray) -> np.ndarray:
    """Return one-hot votes of the shape of `p` (..., classes): 1 at the likeliest class, the first one of a tie."""
    one_hot = np.zeros(p.shape)
    np.put_along_axis(one_hot, p.argmax(axis=-1)[..., None], 1.0, axis=-1)
    return one_hot


def logs(p: np.ndarray) -> np.ndarray:
    """Return the logarithms of probabilities (at least LEAST), in float64."""
    return np.log(np.maximum(p, LEAST, dtype=np.float64))


def softmax(z: np.ndarray) -> np.ndarray:
    """Return exp(z_k) / sum of exp(z_j) over the last axis."""
    exponentials = np.exp(z - z.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def deviation(total: np.ndarray, squares: np.ndarray, members: int) -> np.ndarray:
    """Return the standard deviation over members, from the sum over members and the sum of squares."""
    mean = total / members
    return np.sqrt(np.maximum(squares / members - np.square(mean), 0.0))


def disagreement(counts: np.ndarray) -> float:
    """Return the sum over rows of the share of member pairs that disagree; 0 for one member.
    counts (rows, classes): number of members whose likeliest class for the row is this class."""
    members = counts[0].sum() if len(counts) else 0
    if members < 2:
        return 0.0
    agreeing = (counts * (counts - 1)).sum(axis=1) / (members * (members - 1))
    return float((1 - agreeing).sum())


def stack(log_p: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fit stacking to log_p (members, rows, classes) and labels y (rows,); return w (members,), b (classes,), sum 0."""
    members, rows, classes = log_p.shape
    start = np.full(members + classes, 0.0)
    start[:members] = 1 / members
    a, targets = start.copy(), np.eye(classes)[y]
    ridge = RIDGE * rows

    def objective(a: np.ndarray) -> tuple[float, np.ndarray]:
        z = np.tensordot(a[:members], log_p, 1) + a[members:]
        top = z.max(axis=1)
        total = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
        loss = (total - z[np.arange(rows), y]).sum() + ridge / 2 * np.square(a - start).sum()
        return float(loss), np.exp(z - total[:, None])

    loss, p = objective(a)
    for _ in range(MOST_STEPS):
        error = p - targets
        gradient = np.concatenate([(log_p * error).sum(axis=(1, 2)), error.sum(axis=0)]) + ridge * (a - start)
        middle = (log_p * p).sum(axis=2)  # (members, rows): the mean of log p_m under p
        centred = log_p - middle[:, :, None]
        hessian = np.empty((len(a), len(a)))
        hessian[:members, :members] = np.einsum("mik,nik,ik->mn", centred, centred, p)
        hessian[:members, members:] = (centred * p).sum(axis=1)
        hessian[members:, :members] = hessian[:members, members:].T
        hessian[members:, members:] = np.diag(p.sum(axis=0)) - p.T @ p
        step = np.linalg.solve(hessian + ridge * np.eye(len(a)), gradient)
        slope, length = float(gradient @ step), 1.0
        if slope <= 1e-12 * max(1.0, abs(loss)):
            break
        while (trial := objective(a - length * step))[0] > loss - 1e-4 * length * slope and length > 1e-9:
            length /= 2
        a, (loss, p) = a - length * step, trial
    return a[:members], a[members:] - a[members:].mean()


def samme(weights: np.ndarray, wrong: np.ndarray, classes: int) -> tuple[float, float, np.ndarray]:
    """Return (weighted error, weight of the vote, the next member's row weights) of a SAMME member.
    weights (rows,): this member's, of sum 1. wrong (rows,): True for misclassified rows. An error of 0 counts as half a
    row. A member no better than chance gets a weight <= 0 and cannot be used."""
    error = float(weights[wrong].sum())
    counted = min(max(error, 0.5 / len(weights)), 1 - 0.5 / len(weights))
    alpha = math.log((1 - counted) / counted) + math.log(classes - 1)
    heavier = weights * np.where(wrong, math.exp(alpha), 1.0)
    return error, alpha, heavier / heavier.sum()
