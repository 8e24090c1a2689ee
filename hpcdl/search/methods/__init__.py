"""Methods of search, by name.

grid              every combination                                                       grid.py
random            independent points; random:sobol: low-discrepancy points                random.py, sobol.py
asha              many short trials, the best of which go on; asynchronous                asha.py
hyperband         successive halving at several trade-offs of number and length           hyperband.py
pbt               a population; bad members become modified copies of good ones           pbt.py
optuna:SAMPLER    proposals of a sampler of Optuna; tpe: optuna:TPESampler                optuna.py"""

from hpcdl.errors import UsageError, parse_spec, unknown
from hpcdl.search.methods.asha import Asha
from hpcdl.search.methods.grid import GridSearch
from hpcdl.search.methods.hyperband import Hyperband
from hpcdl.search.methods.optuna import Optuna
from hpcdl.search.methods.pbt import PopulationBasedTraining
from hpcdl.search.methods.random import RandomSearch
from hpcdl.search.space import Space
from hpcdl.search.tasks import Method

METHODS = ("grid", "random", "random:sobol", "asha", "hyperband", "pbt", "tpe", "optuna:SAMPLER")
SETTINGS = {"pbt": {"interval": 0.0, "population": 0}}  # of a method, with their defaults
RUNGS = ("asha", "hyperband", "pbt")  # methods that train trials in pieces, counted in epochs


def make_method(
    text: str, space: Space, trials: int, seed: int, *, least: float, most: float, eta: int, points: int
) -> Method:
    """Return the method that `text` names. Raises UsageError. trials: largest number of points, or pbt's population; 0:
    whole grid, each bracket of hyperband once, pbt's default; else refused. least, most: epochs of a trial's first
    piece and of a whole trial. eta: 1/eta of a rung continues. points: values per range of a grid."""
    name, _, rest = text.partition(":")
    known = {each.partition(":")[0] for each in METHODS}
    if name not in known:
        raise unknown("method", name, known)
    if trials < 0:
        raise UsageError(f"--trials should be 0 or more, not {trials}")
    if name in RUNGS:
        if not 0 < most < float("inf"):
            raise UsageError(f"--method {name} needs the epochs of a whole trial, a number above 0, not {most:g}")
        if not 0 < least <= most:
            raise UsageError(f"the shortest piece of a trial, {least:g} epochs, should be over 0 and at most {most:g}")
    elif rest and text != "random:sobol" and name != "optuna":
        raise UsageError(f"there is no method {text!r}; known: {', '.join(METHODS)}")
    if trials == 0 and name in ("random", "asha", "tpe", "optuna"):
        raise UsageError(f"--method {name} needs --trials, the number of points to try")
    if name == "grid":
        return GridSearch(space, trials, points)
    if name == "random":
        return RandomSearch(space, trials, seed, sobol=rest == "sobol")
    if name in ("tpe", "optuna"):
        return Optuna(rest if name == "optuna" else "TPESampler", space, trials, seed)
    if name == "pbt":
        _, settings = parse_spec("method", text, SETTINGS)
        population, interval = settings["population"] or trials, settings["interval"] or least
        return PopulationBasedTraining(space, population, seed, interval, most)
    if rest:
        raise UsageError(f"--method {name} has no settings such as {rest!r}; give --eta, --least and --most")
    if eta < 2:
        raise UsageError(f"--eta should be 2 or more, not {eta}: 1 of --eta trials goes on to the next rung")
    return (Asha if name == "asha" else Hyperband)(space, trials, seed, least, most, eta)
