"""How long trials take, as far as that follows from their values: learned from those that have ended.

    log seconds = a + sum over the parameters of b u + c u^2 + d u^3, u the value's place in the unit cube,
                      of a choice a number of its own for each

by least squares with a small ridge, over all that have ended. Where all points are known before (grid, random search),
the longest that are left are handed out first (LPT: at most 4/3 of the shortest schedule, if lengths are known; Graham,
"Bounds on multiprocessing timing anomalies", SIAM Journal on Applied Mathematics 1969). So at the end no group trains
for long alone. Which trials there are, and what comes out of them, does not depend on it.
"""

import numpy as np

from hpcdl.search.space import Space
from hpcdl.search.tasks import Values

RIDGE = 1e-3
LEAST = 4  # trials that have ended, for each number that is learned of a parameter with a range, from which it is known


class Lengths:
    """Of the trials of a space."""

    def __init__(self, space: Space):
        self.space = space
        self.rows: list[np.ndarray] = []
        self.logs: list[float] = []
        self.known: np.ndarray | None = None  # the coefficients; None: to be found anew

    def add(self, values: Values, seconds: float) -> None:
        """A trial with these values has taken so long."""
        if seconds > 0:
            self.rows.append(self.row(values))
            self.logs.append(float(np.log(seconds)))
            self.known = None

    def expected(self, values: list[Values]) -> np.ndarray:
        """The logarithms of the seconds that these are expected to take; all alike before enough have ended."""
        if len(self.rows) < LEAST:
            return np.zeros(len(values))
        if self.known is None:
            rows, logs = np.array(self.rows), np.array(self.logs)
            square = rows.T @ rows + RIDGE * len(rows) * np.eye(rows.shape[1])
            self.known = np.linalg.solve(square, rows.T @ (logs - logs.mean()))
        return np.array([self.row(each) for each in values]) @ self.known

    def row(self, values: Values) -> np.ndarray:
        """What the logarithm is linear in; 0 for a parameter that is not there."""
        found, place = [1.0], dict(zip(self.space.names, self.space.unit(values), strict=True))
        for parameter in self.space.parameters:
            there = parameter.name in values
            if parameter.kind == "choice":
                found += [float(there and values[parameter.name] == choice) for choice in parameter.choices]
            else:
                u = float(place[parameter.name]) if there else 0.0
                found += [u, u**2, u**3]
        return np.array(found)
