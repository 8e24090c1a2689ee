"""Scores beside scikit-learn's models, on the same rows: hpcdl bench-sklearn --data a.h5,b.h5 --json scores.json

For each data file a linear model and a perceptron with one hidden layer are trained by hpcdl, and by scikit-learn with
its defaults ("its"): LogisticRegression or Ridge, MLPClassifier or MLPRegressor. All get the same rows, standardized
alike, and are scored on the same test rows: by accuracy, or for values by the root of the mean squared error. Mean and
standard deviation over the seeds are printed; a seed gives initial values, and batches."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdl.data import Data, open_data
from hpcdl.errors import UsageError
from hpcdl.launch.benchmark_table import benchmark, trained, training_options
from hpcdl.runs.options import option, positive
from hpcdl.strategies import all_reduce


@dataclass
class SklearnBenchOptions:
    """Options of bench-sklearn: the data, and the models."""

    data: str = option("digits", "data files made by prepare-data, or digits; several with commas between")
    width: int = option(64, "neurons of the hidden layer")
    epochs: int = option(100, "passes of hpcdl over the training rows")
    batch_size: int = option(32, "examples per update")
    optimizer: str = option("adam", "rule of hpcdl's updates")
    schedule: str = option("cosine", "schedule of the learning rate")
    lr: float = option(0.01, "learning rate of hpcdl")
    weight_decay: float = option(1e-3, "L2 penalty per parameter of hpcdl")
    seeds: int = option(5, "number of seeds")
    json: str = option("", "file for the results")

    def __post_init__(self):
        positive(self, "width", "epochs", "batch_size", "lr", "seeds")


def files_to_score(options: SklearnBenchOptions, ranks: int) -> list[Data]:
    try:
        import sklearn  # noqa: F401 - that it is installed
    except ImportError:
        raise UsageError("bench-sklearn needs scikit-learn: pip install 'hpcdl[sklearn]'") from None
    found = [open_data(each, standardize=True) for each in options.data.split(",")]
    for data in found:
        if data.test is None or data.outputs:
            raise UsageError(f"{data.name} has no test rows, or several values to predict")
    return found


def run(world, options: SklearnBenchOptions, files: list[Data]) -> tuple | None:
    rows, records = [], []
    for data in files:
        score = "accuracy" if data.classes else "rmse"
        row = {"data": data.name, "rows": f"{data.examples:,} + {data.test.examples:,}", "score": score}
        for name, way in ways(world, options, data).items():
            scores = [way(seed) for seed in range(options.seeds)]
            mean, spread = np.mean(scores), np.std(scores)
            row[name] = f"{mean:.4g}" + (f" +- {spread:.1g}" if spread > 1e-9 * mean else "")
            about = {"data": data.name, "score": score, "way": name}
            records += [about | {"seed": seed, "value": value} for seed, value in enumerate(scores)]
        rows.append(row)
        data.close()
    title = f"perceptrons of {options.width} neurons, {options.seeds} seeds, {world.size} ranks of hpcdl"
    return (title, rows, records) if world.rank == 0 else None


def ways(world, options: SklearnBenchOptions, data: Data) -> dict[str, Callable[[int], float]]:
    """Return, by name, functions that train with a seed and return the score."""
    from sklearn import linear_model, neural_network

    linear = "linear" if not data.classes else "softmax" if data.classes > 2 else "logistic"
    made = linear_model.LogisticRegression(max_iter=1000) if data.classes else linear_model.Ridge()
    perceptron = neural_network.MLPClassifier if data.classes else neural_network.MLPRegressor
    more = {"hidden_layer_sizes": (options.width,), "max_iter": 1000}
    return {
        "linear": lambda seed: by_hpcdl(world, options, data, linear, seed),
        "its linear": lambda seed: by_sklearn(made, data) if world.rank == 0 else 0.0,
        "mlp": lambda seed: by_hpcdl(world, options, data, f"mlp:{options.width}", seed),
        "its mlp": lambda seed: by_sklearn(perceptron(random_state=seed, **more), data) if world.rank == 0 else 0.0,
    }


def by_hpcdl(world, options: SklearnBenchOptions, data: Data, model: str, seed: int) -> float:
    from hpcdl.comm import Communicator

    settings = training_options(options, model=model, seed=seed, evaluate_every=options.epochs)
    found = trained(Communicator(world), all_reduce.train, settings, data).progress.scores
    return found["test_accuracy" if data.classes else "test_rmse"]


def by_sklearn(model: Any, data: Data) -> float:
    """Train on the rows of `data`; return the accuracy, or the root of the mean squared error in the label's units."""
    (x, y), (test_x, test_y) = (part.rows(0, part.examples) for part in (data.train, data.test))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a perceptron that has not converged says so for each seed
        found = model.fit(x, y).predict(test_x)
    if data.classes:
        return float(np.mean(found == test_y))
    return data.unit * float(np.sqrt(np.mean(np.square(found - test_y))))


main = benchmark("bench-sklearn", SklearnBenchOptions, __doc__, run, files_to_score)


if __name__ == "__main__":
    main()
