"""What the members of an ensemble predict together. Pure functions of arrays.

With p_m(k) the probability of class k that member m of M gives to a row:

    mean        p(k) = 1/M sum of p_m(k)
    vote        p(k) = sum of a_m [k is the likeliest of p_m] / sum of a_m              a_m = 1, or boosting's
    stacking    p(k) = exp(z_k) / sum of exp(z_j),   z_k = b_k + sum of w_m log p_m(k)

A sum over members is all that each of them needs, so members may lie on different ranks. Stacking's w (M,) and b
(classes,) are those of least log loss over rows that no member was trained on, found by Newton's method (a convex
problem; a ridge of 1e-3 per row holds w near 1/M and b near 0 where the rows say little). (Wolpert, "Stacked
generalization", Neural Networks 1992.) Of values the mean and the deviation over the members are what is predicted.

    disagreement    mean over rows and over pairs of members of [their likeliest classes differ]

SAMME, of K classes: a member with the weighted error e gets a = log((1 - e) / e) + log(K - 1), and the weights of the
rows that it takes for another class are multiplied by exp(a). With K = 2 it is AdaBoost. (Zhu, Zou, Rosset and Hastie,
"Multi-class AdaBoost", Statistics and Its Interface 2009; Freund and Schapire, 1997.)
"""

import math

import numpy as np

LEAST = 1e-9  # a probability counts as so much at least where its logarithm is taken
RIDGE = 1e-3
MOST_STEPS = 100


def votes(p: np.ndarray) -> np.ndarray:
    """(..., classes) of probabilities -> the same shape: 1 at the likeliest class of each row, of two the first."""
    found = np.zeros(p.shape)
    np.put_along_axis(found, p.argmax(axis=-1)[..., None], 1.0, axis=-1)
    return found


def logs(p: np.ndarray) -> np.ndarray:
    """Logarithms of probabilities, in float64."""
    return np.log(np.maximum(p, LEAST, dtype=np.float64))


def softmax(z: np.ndarray) -> np.ndarray:
    """exp(z_k) / sum of exp(z_j) over the last axis."""
    found = np.exp(z - z.max(axis=-1, keepdims=True))
    return found / found.sum(axis=-1, keepdims=True)


def deviation(total: np.ndarray, squares: np.ndarray, members: int) -> np.ndarray:
    """The deviation over members, of their sum and the sum of their squares."""
    mean = total / members
    return np.sqrt(np.maximum(squares / members - np.square(mean), 0.0))


def disagreement(counts: np.ndarray) -> float:
    """counts (rows, classes): how many members take each row for each class -> the sum over rows of the share of pairs
    of members that differ; 0 of one member.
    """
    members = counts[0].sum() if len(counts) else 0
    if members < 2:
        return 0.0
    alike = (counts * (counts - 1)).sum(axis=1) / (members * (members - 1))
    return float((1 - alike).sum())


def stack(log_p: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log_p (members, rows, classes), y (rows,) -> w (members,) and b (classes,), whose sum is 0."""
    members, rows, classes = log_p.shape
    start = np.full(members + classes, 0.0)
    start[:members] = 1 / members
    a, right = start.copy(), np.eye(classes)[y]
    ridge = RIDGE * rows

    def objective(a: np.ndarray) -> tuple[float, np.ndarray]:
        z = np.tensordot(a[:members], log_p, 1) + a[members:]
        top = z.max(axis=1)
        total = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
        loss = (total - z[np.arange(rows), y]).sum() + ridge / 2 * np.square(a - start).sum()
        return float(loss), np.exp(z - total[:, None])

    loss, p = objective(a)
    for _ in range(MOST_STEPS):
        error = p - right
        gradient = np.concatenate([(log_p * error).sum(axis=(1, 2)), error.sum(axis=0)]) + ridge * (a - start)
        middle = (log_p * p).sum(axis=2)  # (members, rows): the mean of log p_m under p
        apart = log_p - middle[:, :, None]
        hessian = np.empty((len(a), len(a)))
        hessian[:members, :members] = np.einsum("mik,nik,ik->mn", apart, apart, p)
        hessian[:members, members:] = (apart * p).sum(axis=1)
        hessian[members:, :members] = hessian[:members, members:].T
        hessian[members:, members:] = np.diag(p.sum(axis=0)) - p.T @ p
        step = np.linalg.solve(hessian + ridge * np.eye(len(a)), gradient)
        slope, length = float(gradient @ step), 1.0
        if slope <= 1e-12 * max(1.0, abs(loss)):
            break
        while (found := objective(a - length * step))[0] > loss - 1e-4 * length * slope and length > 1e-9:
            length /= 2
        a, (loss, p) = a - length * step, found
    return a[:members], a[members:] - a[members:].mean()


def samme(weights: np.ndarray, wrong: np.ndarray, classes: int) -> tuple[float, float, np.ndarray]:
    """weights (rows,), whose sum is 1, and which rows a member takes for another class -> its error, the a of its vote,
    and the weights for the next member.

    An error of 0 counts as half a row. A member no better than chance has an a of 0 or less, and is no use.
    """
    error = float(weights[wrong].sum())
    counted = min(max(error, 0.5 / len(weights)), 1 - 0.5 / len(weights))
    alpha = math.log((1 - counted) / counted) + math.log(classes - 1)
    heavier = weights * np.where(wrong, math.exp(alpha), 1.0)
    return error, alpha, heavier / heavier.sum()
