"""Lines that name the programs of a job that runs several: "train-gossip --topology ring", "-n 2: train-pipeline".

-n 2:          number of ranks; without it all ranks, or as many as the strategy needs
program        a program that trains
options        its options, as on a command line; they win over the common options of all lines"""

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
DECIDED = ("seed", "out", "resume", "force")  # options that the job sets for each run


class Command(NamedTuple):
    """A line that can be run. text: as written. folder: name of its runs' folder. words: common options, then own."""

    text: str
    ranks: int
    folder: str
    training: "Training"
    words: list[str]

    def options(self, parse: Callable[..., Any], *more: str) -> Options:
        """Return all options of a run, read by `parse`. more: words after those of the line. Raises UsageError."""
        strategy = self.training.strategy
        made: Options = parse(strategy.options_class, strategy.program, "", [*self.words, *more, "--progress=none"])
        self.training.refuse(made, self.ranks)
        return made


def read_commands(lines: list[str], common: dict[str, str], size: int, trust: Iterable[str] = ()) -> list[Command]:
    """Return the commands of `lines`, on up to `size` ranks. common: options of all. UsageError names all bad lines."""
    found, wrong = [], []
    for number, text in enumerate(lines, 1):
        try:
            command = read_command(number, text, common, size, trust)
            if text in lines[: number - 1]:
                raise UsageError("this line is given twice")
            command.options(parse, "--seed=0", "--out=auto")
            found.append(command)
        except UsageError as error:
            wrong.append(f"line {number}, {text!r}: {error}")
    if wrong:
        raise UsageError("; ".join(wrong))
    return found


def read_command(number: int, text: str, common: dict[str, str], size: int, trust: Iterable[str] = ()) -> Command:
    """Return the command of line `number`, `text`; other arguments as in `read_commands`. Raises UsageError."""
    placed = PLACED.fullmatch(text)
    try:
        program, *own = shlex.split(placed[2] if placed else text)
    except ValueError as error:
        raise UsageError(f"the line names no program, or has a quote that is not closed ({error})") from None
    known = [name for name in files() if name.startswith(TRAINS)]
    if program not in known:
        raise unknown("program", program, known)
    main = script(program).main
    if not isinstance(main, TrainingProgram):
        raise UsageError(f"{program} cannot be run as one of several trainings: it trains by no single strategy")
    training, strategy = main.training(), main.strategy
    ranks = int(placed[1]) if placed else strategy.ranks or size
    if strategy.ranks not in (None, ranks):
        raise UsageError(f"{program} runs on {counted(strategy.ranks, 'rank')}: leave out -n {ranks}:")
    if not 1 <= ranks <= size:
        raise UsageError(f"the line asks for {counted(ranks, 'rank')}{f', and the job has {size}' * (ranks > 0)}")
    told = {word[2:].partition("=")[0].replace("-", "_") for word in own if word.startswith("--")}
    told |= {"help"} if "-h" in own else set()
    for name in (*DECIDED, "help"):
        if name in told:
            raise UsageError(f"--{name} cannot be given in a line")
    texts, _ = taken(common, kinds_of(strategy.options_class), COMMON)
    replaced = {name for pair in INSTEAD.items() if told & set(pair) for name in pair}
    left_out = replaced | set(strategy.options_class.unused)  # type: ignore[attr-defined]
    words = [f"--{dashed(name)}={value}" for name, value in texts.items() if name not in left_out]
    words += [f"--trust={each}" for each in trust]
    return Command(text.strip(), ranks, f"{number}-{program}", training, [*words, *own])
