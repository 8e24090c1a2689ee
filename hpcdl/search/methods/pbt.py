"""Population based training: of those that train, who does badly becomes a changed copy of one who does well.

    member 0   o---o---o---o---o      loss 0.3  0.2  0.2  0.1
    member 1   o---o---o---o---o
    member 2   o---o   |
                    \\  copies the weights and the values of member 0, and changes the values: lr 0.1 -> 0.12
                     o-+-o---o

Jaderberg et al., "Population based training of neural networks", 2017. After each piece, of `interval` epochs:

    exploit    who is among the worst fifth of what each member has told last goes on from one of the best fifth, chosen
               at random (truncation selection); one at least is worst and best once all have told
    explore    each number of the copy is multiplied by 0.8 or 1.2, one time in four drawn anew, and stays in its range

So the result is a schedule of values as well as a model. Nobody waits: a member that is ready compares with what the
others have told so far; of several that are ready the one that has trained least comes first. A copy goes on from where
its parent is, so that every piece is one of `interval` epochs; a parent is never behind, nor at its end.

Choices are taken over as they are, and so is all that belongs to the model: what a copy's weights have to fit.
A member that fails is replaced at once, as soon as any has told.
"""

import math
from dataclasses import dataclass

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.random import Random
from hpcdl.runs.help import dashed
from hpcdl.search.methods.random import point
from hpcdl.search.space import Parameter, Space
from hpcdl.search.tasks import SearchTask, Values

POPULATION = 10
PART = 5  # one of so many is among the worst, one among the best
FACTORS = (0.8, 1.2)
ANEW = 0.25  # how often a number is drawn anew
SHAPE = "model"  # the option that says which weights there are


@dataclass
class PopulationMember:
    """values, progress (in intervals from the beginning), loss: of the last piece that was told.

    pieces: how many have begun. state: ready, training (until `goal` intervals), failed or over.
    """

    values: Values
    progress: int = 0
    loss: float | None = None
    pieces: int = 0
    goal: int = 0
    state: str = "ready"


class PopulationBasedTraining:
    """A population of so many (0: 10), each trained for `most` epochs. Raises UsageError for one that cannot be."""

    planned = False

    def __init__(self, space: Space, population: int, seed: int, interval: float, most: float):
        population = population or POPULATION
        if population < 2:
            raise UsageError(f"method pbt: of a population of {population} nobody learns from another; take 2 at least")
        if not 0 < interval <= most:
            raise UsageError(f"method pbt: the interval, {interval:g} epochs, should lie above 0 and within {most:g}")
        self.space, self.seed, self.interval, self.most = space, seed, interval, most
        self.last = max(1, math.ceil(most / interval - 1e-9))  # progress at the end
        self.members = [PopulationMember(point(space, seed, number)) for number in range(population)]

    def ask(self) -> SearchTask | None:
        """The next piece of a member that has failed and can be replaced, else of that which has trained least."""
        for number, member in enumerate(self.members):
            if member.state == "failed" and (parents := self._parents(number)):
                return self._begin(number, parents)
        ready = [(member.progress, number) for number, member in enumerate(self.members) if member.state == "ready"]
        if not ready:
            return None
        number, ranked = min(ready)[1], self._ranked()
        among_worst = number in ranked[len(ranked) - self._part() :]
        return self._begin(number, self._parents(number) if among_worst else [])

    def tell(self, task: SearchTask, loss: float | None) -> None:
        """What a member's piece has brought."""
        member = self.members[task.trial]
        member.loss = loss
        if loss is None:
            member.state = "failed" if member.pieces < self.last else "over"
        else:
            member.values, member.progress = task.values, member.goal
            member.state = "ready" if member.progress < self.last else "over"

    @property
    def over(self) -> bool:
        """Whether each member is at its end, trains until there, or has failed where nobody can replace it."""
        states = [member.state for member in self.members]
        if "ready" in states or ("failed" in states and "training" in states):
            return False
        return not any(
            (member.state == "training" and member.pieces < self.last)
            or (member.state == "failed" and self._parents(number))
            for number, member in enumerate(self.members)
        )

    def _begin(self, number: int, parents: list[int]) -> SearchTask:
        """Member `number`'s next piece, after its last one or after that of one of the parents."""
        member = self.members[number]
        values, progress, parent = member.values, member.progress, None
        if parents:
            random = Random(self.seed)("pbt", number, member.pieces)
            parent = parents[int(random.integers(len(parents)))]
            values, progress = self._explored(self.members[parent].values, random), self.members[parent].progress
        member.goal, member.pieces, member.state = progress + 1, member.pieces + 1, "training"
        return SearchTask(number, values, member.pieces - 1, min(member.goal * self.interval, self.most), parent)

    def _ranked(self) -> list[int]:
        """Those whose last piece has not failed, the best first; of equals the first."""
        told = [(member.loss, number) for number, member in enumerate(self.members) if member.loss is not None]
        return [number for _, number in sorted(told)]

    def _part(self) -> int:
        """How many are the best, and the worst, of those that have told."""
        told = len(self._ranked())
        waiting = any(member.loss is None and member.state in ("ready", "training") for member in self.members)
        return max(told // PART, int(told > 1 and not waiting))

    def _parents(self, number: int) -> list[int]:
        """Of the best those that a member may go on from."""
        member = self.members[number]
        failed = member.state == "failed"
        best = self._ranked()[: max(self._part(), int(failed))]
        least = 0 if failed else member.progress
        return [each for each in best if each != number and least <= self.members[each].progress < self.last]

    def _explored(self, values: Values, random: np.random.Generator) -> Values:
        """The values, each number of them multiplied or drawn anew; choices and what the model's shape is stay."""
        found = dict(values)
        for each in self.space.parameters:
            anew, u, factor = random.random() < ANEW, random.random(), FACTORS[int(random.integers(len(FACTORS)))]
            if each.name not in values or each.kind == "choice" or self._is_shape(each):
                continue
            old = values[each.name]
            new = each.value(u) if anew else each.bounded(old * factor)
            if new == old and each.kind == "int":  # too small for a factor to change it
                new = each.bounded(old + (1 if factor > 1 else -1))
            found[each.name] = new
        return found

    def _is_shape(self, parameter: Parameter) -> bool:
        return dashed(self.space.owners.get(parameter.name, parameter.name)) == SHAPE
