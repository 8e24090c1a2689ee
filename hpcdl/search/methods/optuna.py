"""Optuna's samplers, by ask-and-tell.

Akiba et al., "Optuna: a next-generation hyperparameter optimization framework", KDD 2019; `tpe`, the tree-structured
Parzen estimator: Bergstra et al., "Algorithms for hyper-parameter optimization", NeurIPS 2011. TPE counts the many
running trials as bad (the constant liar), so that it proposes other points. The study is in memory, and its sampler is
seeded: the same asks and tells give the same proposals."""

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

from hpcdl.errors import UsageError, blamed_on, unknown
from hpcdl.plugins import call_plugin, load_plugin
from hpcdl.random import Random
from hpcdl.search.space import Parameter, Space
from hpcdl.search.tasks import SearchTask, Values

REHEARSED = 12  # trial asks at start: more than samplers draw at random, so missing libraries show at once


class Optuna:
    """`trials` trials that a sampler proposes, such as TPESampler or, with settings, TPESampler,multivariate=True.
    Raises UsageError without Optuna, for an unknown sampler or setting, or if the sampler does not work here."""

    planned = False

    def __init__(self, sampler: str, space: Space, trials: int, seed: int):
        self.space, self.trials, self.told = space, trials, f"--method optuna:{sampler}"
        self.trials_of: dict[int, Any] = {}  # optuna.trial.Trial, by number
        self.exhausted = False
        seed = int(Random(seed)("optuna").integers(2**32))
        with blamed_on(f"{self.told} does not work here"):
            for number in range(REHEARSED):
                if number == 0:
                    self.study = self._made(sampler, seed)
                trial = self.study.ask()
                self._values(trial)
                self.study.tell(trial, float(number))
            self.study, self.exhausted = self._made(sampler, seed), False

    def ask(self) -> SearchTask | None:
        if self.over:
            return None
        with blamed_on(self.told):
            trial = self.study.ask()
            values = self._values(trial)
        self.trials_of[trial.number] = trial
        return SearchTask(trial.number, values)

    def tell(self, task: SearchTask, loss: float | None) -> None:
        from optuna.trial import TrialState

        with blamed_on(self.told):
            if loss is None:
                self.study.tell(self.trials_of[task.trial], state=TrialState.FAIL)
            else:
                self.study.tell(self.trials_of[task.trial], loss)

    @property
    def over(self) -> bool:
        return len(self.trials_of) == self.trials or self.exhausted

    def _values(self, trial: Any) -> Values:
        values: Values = {}
        for each in self.space.order:
            if self.space.active(each, values):
                values[each.name] = _suggested(trial, each)
        return self.space.in_order(values)

    def _made(self, sampler: str, seed: int) -> Any:
        with _quiet() as optuna:
            known = _samplers(optuna)
            name, comma, settings = sampler.partition(",")
            full = {each.lower(): each for each in [*(each.removesuffix("Sampler") for each in known), *known]}
            name = full.get(name.lower(), name)
            name = name if name in known else f"{name}Sampler"
            if name not in known:
                raise unknown("sampler of Optuna", sampler.partition(",")[0], known)
            kind, given = load_plugin(f"optuna.samplers:{name}{comma}{settings}", self.told)
            made = call_plugin(kind, given, {"seed": seed, "constant_liar": True}, self.told)
            study = optuna.create_study(sampler=made)
        study.stop = lambda: setattr(self, "exhausted", True)  # called by a sampler that is exhausted
        return study


def _suggested(trial: Any, each: Parameter) -> str | int | float:
    if each.kind == "choice":
        return trial.suggest_categorical(each.name, each.choices)
    if each.kind == "int":
        return int(trial.suggest_int(each.name, int(each.low), int(each.high), log=each.log))
    return float(trial.suggest_float(each.name, each.low, each.high, log=each.log))


def _samplers(optuna: Any) -> list[str]:
    """Return the names of the samplers that need no arguments; GridSampler needs one."""

    def optional(takes: inspect.Parameter) -> bool:
        return takes.default is not takes.empty or takes.kind in (takes.VAR_POSITIONAL, takes.VAR_KEYWORD)

    return [
        name
        for name, sampler in inspect.getmembers(optuna.samplers, inspect.isclass)
        if name.endswith("Sampler")
        and not name.startswith("Base")
        and all(map(optional, inspect.signature(sampler).parameters.values()))
    ]


@contextlib.contextmanager
def _quiet() -> Iterator[Any]:
    """Context that yields the module `optuna`, with warnings off. Raises UsageError if Optuna is not installed."""
    try:
        import optuna
    except ImportError:
        raise UsageError('this method needs Optuna, which is not installed: pip install "hpcdl[search]"') from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on experimental samplers and settings
        yield optuna
