"""Lines that name programs, where one job runs several: "train-gossip --topology ring", "-n 2: train-pipeline".

    -n 2:          how many of the ranks; without it all, or as many as the strategy works on
    program        one that trains
    options        its own, as on a command line

Options that are common to all lines stand before a line's own, so that those win.
"""

import re
import shlex
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcdl.errors import UsageError, unknown
from hpcdl.formatting import counted, dashed
from hpcdl.launch.config_migration import taken
from hpcdl.launch.option_parser import parse
from hpcdl.launch.start import TrainingProgram
from hpcdl.programs import TRAINS, files, script
from hpcdl.runs.options import COMMON, INSTEAD, Options, kinds_of

if TYPE_CHECKING:
    from hpcdl.launch.training import Training

PLACED = re.compile(r"\s*-n\s*(\d+)\s*:(.*)", re.DOTALL)
DECIDED = ("seed", "out", "resume", "force")  # of each run, by who runs them


class Command(NamedTuple):
    """A line that can be run: as it was written, on how many ranks, by which program, with which options.

    folder: a name for what its runs write.
    """

    text: str
    ranks: int
    folder: str
    training: "Training"
    words: list[str]

    def options(self, parse: Callable[..., Any], *more: str) -> Options:
        """All options of a run, as `parse` reads them, with some more. Raises UsageError."""
        strategy = self.training.strategy
        made: Options = parse(strategy.options_class, strategy.program, "", [*self.words, *more, "--progress=none"])
        self.training.refuse(made, self.ranks)
        return made


def read_commands(lines: list[str], common: dict[str, str], size: int, trust: Iterable[str] = ()) -> list[Command]:
    """The lines on at most `size` ranks, with common options by name. Raises UsageError, which tells of all.

    trust: the values of --trust of who runs them.
    """
    found, wrong = [], []
    for number, text in enumerate(lines, 1):
        try:
            command = read_command(number, text, common, size, trust)
            if text in lines[: number - 1]:
                raise UsageError("it stands there twice")
            command.options(parse, "--seed=0", "--out=auto")
            found.append(command)
        except UsageError as error:
            wrong.append(f"line {number}, {text!r}: {error}")
    if wrong:
        raise UsageError("; ".join(wrong))
    return found


def read_command(number: int, text: str, common: dict[str, str], size: int, trust: Iterable[str] = ()) -> Command:
    """One line. Raises UsageError."""
    placed = PLACED.fullmatch(text)
    try:
        program, *own = shlex.split(placed[2] if placed else text)
    except ValueError as error:
        raise UsageError(f"it has no program, or quotes that do not close ({error})") from None
    known = [name for name in files() if name.startswith(TRAINS)]
    if program not in known:
        raise unknown("program", program, known)
    main = script(program).main
    if not isinstance(main, TrainingProgram):
        raise UsageError(f"{program} trains by no strategy that can be run beside others")
    training, strategy = main.training(), main.strategy
    ranks = int(placed[1]) if placed else strategy.ranks or size
    if strategy.ranks not in (None, ranks):
        raise UsageError(f"{program} works on {counted(strategy.ranks, 'rank')}: leave out -n {ranks}:")
    if not 1 <= ranks <= size:
        raise UsageError(f"it asks for {ranks} ranks, and there are {size}")
    told = {word[2:].partition("=")[0].replace("-", "_") for word in own if word.startswith("--")}
    told |= {"help"} if "-h" in own else set()
    for name in (*DECIDED, "help"):
        if name in told:
            raise UsageError(f"--{name} is not for a line")
    texts, _ = taken(common, kinds_of(strategy.options_class), COMMON)
    replaced = {name for pair in INSTEAD.items() if told & set(pair) for name in pair}
    left_out = replaced | set(strategy.options_class.unused)  # type: ignore[attr-defined]
    words = [f"--{dashed(name)}={value}" for name, value in texts.items() if name not in left_out]
    words += [f"--trust={each}" for each in trust]
    return Command(text.strip(), ranks, f"{number}-{program}", training, [*words, *own])
