"""Seconds of coordinate descent to a duality gap, beside scikit-learn's: hpcdl bench-coordinate-descent

Solves one problem, a linear model with an L2 penalty on sparse rows like those of texts, by dual coordinate ascent in
one thread and in several, and by LIBLINEAR's dual solver (LinearSVC and LogisticRegression of scikit-learn) if that is
installed; in turn, `--repeats` times each. Each is timed until its primal value is below (1 + `--gap`) times the best.
hpcdl ends when its duality gap certifies this; the seconds of the certificates have a column, too. LIBLINEAR gets the
first of the tolerances 0.1, 0.05, 0.025, ... that is fine enough, which a user would not know."""

import importlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hpcdl.data.synthetic import draw_or_open_data
from hpcdl.errors import UsageError
from hpcdl.launch.benchmark_table import benchmark, in_turns, quartiles, several, spread
from hpcdl.models import for_data
from hpcdl.models.linear_form import linear_form
from hpcdl.runs.options import option, positive

FINEST = 2**-20  # the smallest tolerance of LIBLINEAR that is tried, divided by 0.1


@dataclass
class DescentOptions:
    """Options of bench-coordinate-descent: the problem, and how often it is solved."""

    model: Literal["svm", "logistic"] = option("svm", "svm or logistic")
    data: str = option(
        "rcv1:rows=20242,test=0", "rows of 2 classes: drawn ones, as by prepare-data synthetic, or an HDF5 file"
    )
    weight_decay: float = option(1e-4, "L2 penalty, lambda")
    gap: float = option(1e-4, "relative distance from the best value at which a solver ends")
    threads: str = option("1,2", "threads, with commas between")
    most: int = option(1000, "passes after which hpcdl gives up, as threads without locks may lose additions")
    repeats: int = option(5, "how often each solver runs")
    json: str = option("", "file for the results")

    def __post_init__(self):
        several(self, "threads")
        positive(self, "most", "repeats", "weight_decay", "gap")


def run(world, options: DescentOptions, _) -> tuple:
    data = draw_or_open_data(options.data, dtype="float64")
    if not data.sparse or data.classes != 2:
        raise UsageError(f"--data {options.data} does not have what is compared here, sparse rows of 2 classes")
    form = linear_form(for_data(options.model, data, "float64"), "the benchmark")
    best = ours(options, data, form, 1, "atomic", min(1e-7, options.gap / 100))["dual"]
    ways: dict[str, Any] = {}
    for threads in options.threads:
        for locking in ("atomic", "none") if threads > 1 else ("atomic",):
            name = f"{threads} threads, {locking}" if threads > 1 else "1 thread"
            how = threads, locking, options.gap
            ways[name] = lambda turn, how=how: ours(options, data, form, *how)
    try:
        name, theirs = liblinear(options, data, form, best)
        ways[name] = theirs
    except ImportError:
        print("scikit-learn is not installed, and is left out")
    found = in_turns(options.repeats, ways)
    rows, records, base = [], [], [turn["seconds"] for turn in found.get("1 thread", [])]
    for name, turns in found.items():
        last, seconds = turns[-1], [turn["seconds"] for turn in turns]
        ratios = [one / other for one, other in zip(seconds, base, strict=True)] if base else [math.nan]
        rows.append(
            {
                "solver": name,
                "s": spread(seconds, ".3f"),
                "of them certificates": spread([turn["certificates"] for turn in turns], ".3f"),
                "passes": spread([turn["passes"] for turn in turns], ".0f"),
                "from the best": spread([turn["primal"] / best - 1 for turn in turns], ".1e"),
                "times 1 thread": spread(ratios, ".2f"),
            }
        )
        records.append({"solver": name, "best": best} | quartiles("seconds", seconds))
        records[-1] |= {each: last[each] for each in ("certificates", "passes", "primal")}
    x = data.train.source.x
    problem = f"{options.model}, {len(x)} rows, {form.features} features, {np.count_nonzero(x.data)} elements"
    title = f"{problem}, lambda {options.weight_decay:g}, to {options.gap:g} of the best"
    return title, rows, records


def ours(options: DescentOptions, data: Any, form: Any, threads: int, locking: str, gap: float) -> dict:
    """Solve to this relative duality gap; return seconds, seconds of certificates, passes, primal and dual value."""
    from hpcdl.parallel.dual_ascent import Ascent

    ascent = Ascent(data, form, (0, 1), options.weight_decay, threads=threads, locking=locking)
    ascent.compile()
    start, certificates = time.perf_counter(), 0.0
    for turn in range(options.most):
        ascent.visit(turn * data.examples, data.examples, 1)
        asked = time.perf_counter()
        found = ascent.certificate(ascent.v, ascent.sums(ascent.v))
        certificates += time.perf_counter() - asked
        if found["duality_gap"] <= gap * found["dual"]:
            break
    seconds = time.perf_counter() - start
    ascent.close()
    return found | {"seconds": seconds, "certificates": certificates, "passes": turn + 1}


def liblinear(options: DescentOptions, data: Any, form: Any, best: float) -> tuple[str, Callable[[int], dict]]:
    """Return a name, and a function that solves by LIBLINEAR at the first tolerance that is fine enough for --gap."""
    from hpcdl.parallel.dual_ascent import Ascent

    sparse, models = (importlib.import_module(name) for name in ("scipy.sparse", "sklearn"))
    svm, linear = (importlib.import_module(f"sklearn.{name}") for name in ("svm", "linear_model"))
    x, y = data.train.source.x, data.train.source.y
    matrix = sparse.csr_matrix((x.data, x.indices, x.indptr), shape=x.shape)
    how = {"C": 1 / (options.weight_decay * data.examples), "dual": True, "intercept_scaling": 1.0, "max_iter": 10**6}
    judge = Ascent(data, form, (0, 1), options.weight_decay)

    def fitted(tolerance: float) -> dict:
        if options.model == "svm":
            made = svm.LinearSVC(loss="hinge", tol=tolerance, random_state=0, **how)
        else:
            made = linear.LogisticRegression(solver="liblinear", tol=tolerance, random_state=0, **how)
        start = time.perf_counter()
        made.fit(matrix, y)
        seconds = time.perf_counter() - start
        w = np.append(made.coef_[0], made.intercept_[0]).reshape(1, -1)
        primal = judge.certificate(w, judge.sums(w))["primal"]
        passes = int(np.max(made.n_iter_))
        return {"seconds": seconds, "certificates": 0.0, "passes": passes, "primal": primal}

    tolerance = 0.1
    while fitted(tolerance)["primal"] > best * (1 + options.gap) and tolerance > 0.1 * FINEST:
        tolerance /= 2
    return f"scikit-learn {models.__version__}, tol {tolerance:.2g}", lambda turn: fitted(tolerance)


main = benchmark("bench-coordinate-descent", DescentOptions, __doc__, run, one_rank=True)


if __name__ == "__main__":
    main()
