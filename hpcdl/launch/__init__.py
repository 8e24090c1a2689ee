"""From a command line to a run: checks of the launch, programs, nested command lines, many runs in one job.

`hpcdl.launch(PROGRAM, ranks=4)`, from a plain Python process, starts such a job: the room is called like a function."""

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *words: Any, **options: Any) -> Any:
        from hpcdl.launch.launched_run import launch  # here: programs need it not, and it imports numpy

        return launch(*words, **options)


sys.modules[__name__].__class__ = _Room
