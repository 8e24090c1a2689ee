"""What a strategy says of itself; help, files of options, plan, search and compare read it.

    STRATEGY = Strategy("train-allreduce", AllReduceOptions, train, check=fits)

stands beside the loop, in hpcdl/strategies/NAME.py. To import such a file starts no MPI and compiles no kernel, so that
`--help` is quick: what computes is imported by the functions that call it.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from hpcdl.runs.options import Options

SAME = 5  # arguments that each loop takes: comm, model, data, optimizer, run


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to train, with what its program needs to know.

    program: the name of its program. options_class: its options; those that have a field `servers` have that many
    parameter servers. train(comm, model, data, optimizer, run, ...): the loop, or its name, package.module:function; it
    is also given each option that it names. renamed: the option or property of each argument whose name is another.
    ranks: how many it works on, where it is not any number. check(options, ranks, model): raises UsageError where these
    do not go together. cut: no rank holds the whole model: the optimizer that `train` is given is of size 0, for
    `of_size`. survivor: makes what ranks that outlive others go on from, if it is no plain one
    (hpcdl/recovery/survivor.py).
    """

    program: str
    options_class: type
    train: Callable | str
    ranks: int | None = None
    check: Callable[[Any, int, Any], None] | None = None
    cut: bool = False
    survivor: Callable[[], Any] | None = None
    renamed: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def loop(self) -> Callable:
        """`train`, imported where it is given by its name."""
        return named(self.train) if isinstance(self.train, str) else self.train

    def start(self, comm: Any, model: Any, data: Any, optimizer: Any, run: Any) -> None:
        """Train with the run's options, each given to the argument of its name."""
        known = {field.name: field.name for field in dataclasses.fields(run.options)} | self.renamed
        names = [name for name in list(inspect.signature(self.loop).parameters)[SAME:] if name in known]
        self.loop(comm, model, data, optimizer, run, **{name: getattr(run.options, known[name]) for name in names})

    @property
    def own_options(self) -> dict[str, type]:
        """The types of the defaults of the options that it adds to the common ones, or has with other defaults."""
        classes = [each for each in self.options_class.__mro__ if issubclass(each, Options) and each is not Options]
        names = {name for each in classes for name in inspect.get_annotations(each)}
        fields = dataclasses.fields(self.options_class)
        return {field.name: type(field.default) for field in fields if field.name in names}


def named(text: str) -> Any:
    """What package.module:name stands for."""
    module, _, name = text.partition(":")
    return getattr(importlib.import_module(module), name)
