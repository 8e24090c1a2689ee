"""Duration model: predicts how long a trial takes from its values, learned from the trials that have ended.

    log seconds = a + sum over the parameters of b u + c u^2 + d u^3       u: coordinate of the value in the unit cube;
                                                                           a choice has one coefficient per value

Fitted by least squares with a small ridge. In a planned search (grid, random), the trials that are expected to take
longest start first (LPT: at most 4/3 of the shortest schedule if durations are known; Graham, "Bounds on
multiprocessing timing anomalies", SIAM Journal on Applied Mathematics 1969), which changes no result."""

import numpy as np

from hpcdl.search.space import Space
from hpcdl.search.tasks import Values

RIDGE = 1e-3
LEAST = 4  # ended trials before the model predicts


class DurationModel:
    """Ridge regression of log seconds on the values of a trial."""

    def __init__(self, space: Space):
        self.space = space
        self.rows: list[np.ndarray] = []
        self.logs: list[float] = []
        self.coefficients: np.ndarray | None = None  # None: to be fitted again

    def add(self, values: Values, seconds: float) -> None:
        """Add a trial that has ended after `seconds`."""
        if seconds > 0:
            self.rows.append(self.row(values))
            self.logs.append(float(np.log(seconds)))
            self.coefficients = None

    def expected(self, values: list[Values]) -> np.ndarray:
        """Return each trial's predicted log seconds minus the mean of ended trials; 0 until LEAST trials have ended."""
        if len(self.rows) < LEAST:
            return np.zeros(len(values))
        if self.coefficients is None:
            rows, logs = np.array(self.rows), np.array(self.logs)
            square = rows.T @ rows + RIDGE * len(rows) * np.eye(rows.shape[1])
            self.coefficients = np.linalg.solve(square, rows.T @ (logs - logs.mean()))
        return np.array([self.row(each) for each in values]) @ self.coefficients

    def row(self, values: Values) -> np.ndarray:
        """Return a trial's features for the regression; features of an inactive parameter are 0."""
        features, coordinate = [1.0], dict(zip(self.space.names, self.space.unit(values), strict=True))
        for parameter in self.space.parameters:
            active = parameter.name in values
            if parameter.kind == "choice":
                features += [float(active and values[parameter.name] == choice) for choice in parameter.choices]
            else:
                u = float(coordinate[parameter.name]) if active else 0.0
                features += [u, u**2, u**3]
        return np.array(features)
