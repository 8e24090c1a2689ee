"""Population based training: a badly performing member becomes a modified copy of a well performing one.

    member 0   o---o---o---o---o      loss 0.3  0.2  0.2  0.1
    member 1   o---o---o---o---o
    member 2   o---o   |
                    \\  copies the weights and the values of member 0, and changes the values: lr 0.1 -> 0.12
                     o-+-o---o

Jaderberg et al., "Population based training of neural networks", 2017. After each piece, of `interval` epochs:

    exploit    a member in the worst fifth by last loss continues from a random one of the best fifth (truncation
               selection); at least one is worst and one best once all have reported
    explore    each number of the copy is multiplied by 0.8 or 1.2, one time in four drawn anew, and clipped

Members are asynchronous: a ready member compares with the last losses of the others; of several ready ones the least
trained comes first. A copy continues at its parent's progress, so every piece has `interval` epochs; a parent is never
behind, nor at its end. Choices and all settings of the model, which the copied weights must fit, are copied unchanged.
A failed member is replaced as soon as another one has a loss."""

import math
from dataclasses import dataclass

import numpy as np

from hpcdl.errors import UsageError
from hpcdl.formatting import dashed
from hpcdl.random import Random
from hpcdl.search.methods.random import point
from hpcdl.search.space import Space
from hpcdl.search.tasks import SearchTask, Values

POPULATION = 10
PART = 5  # 1/PART of the members are the worst, 1/PART the best
FACTORS = (0.8, 1.2)
ANEW = 0.25  # probability that a number is drawn anew
SHAPE = "model"  # the option that determines the weights


@dataclass
class PopulationMember:
    """A member. values, progress (in intervals from the beginning), loss: after its last piece; loss None: it has no
    piece yet, or failed. pieces: number begun. state: ready, training (until progress `goal`), failed or over."""

    values: Values
    progress: int = 0
    loss: float | None = None
    pieces: int = 0
    goal: int = 0
    state: str = "ready"


class PopulationBasedTraining:
    """`population` members (0: 10), each trained for `most` epochs in pieces of `interval`. UsageError: bad values."""

    planned = False

    def __init__(self, space: Space, population: int, seed: int, interval: float, most: float):
        population = population or POPULATION
        if population < 2:
            raise UsageError(f"--method pbt: a population of {population} has no other member to copy; give 2 or more")
        if not 0 < interval <= most:
            raise UsageError(f"--method pbt: the interval, {interval:g} epochs, should be over 0 and at most {most:g}")
        self.space, self.seed, self.interval, self.most = space, seed, interval, most
        self.last = max(1, math.ceil(most / interval - 1e-9))  # progress at the end
        self.members = [PopulationMember(point(space, seed, number)) for number in range(population)]

    def ask(self) -> SearchTask | None:
        """Return the next piece: of a failed member that can be replaced, else of the least trained ready member."""
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
        member = self.members[task.trial]
        member.loss = loss
        if loss is None:
            member.state = "failed" if member.pieces < self.last else "over"
        else:
            member.values, member.progress = task.values, member.goal
            member.state = "ready" if member.progress < self.last else "over"

    @property
    def over(self) -> bool:
        """True if each member is at its end, trains its last piece, or has failed and cannot be replaced."""
        states = [member.state for member in self.members]
        if "ready" in states or ("failed" in states and "training" in states):
            return False
        return not any(
            (member.state == "training" and member.pieces < self.last)
            or (member.state == "failed" and self._parents(number))
            for number, member in enumerate(self.members)
        )

    def _begin(self, number: int, parents: list[int]) -> SearchTask:
        member = self.members[number]
        values, progress, parent = member.values, member.progress, None
        if parents:
            random = Random(self.seed)("pbt", number, member.pieces)
            parent = parents[int(random.integers(len(parents)))]
            values, progress = self._explored(self.members[parent].values, random), self.members[parent].progress
        member.goal, member.pieces, member.state = progress + 1, member.pieces + 1, "training"
        return SearchTask(number, values, member.pieces - 1, min(member.goal * self.interval, self.most), parent)

    def _ranked(self) -> list[int]:
        """Return the numbers of the members that have a loss, the smallest loss first; ties by number."""
        losses = [(member.loss, number) for number, member in enumerate(self.members) if member.loss is not None]
        return [number for _, number in sorted(losses)]

    def _part(self) -> int:
        """Return how many members with a loss count as the best; equally many count as the worst."""
        count = len(self._ranked())
        waiting = any(member.loss is None and member.state in ("ready", "training") for member in self.members)
        return max(count // PART, int(count > 1 and not waiting))

    def _parents(self, number: int) -> list[int]:
        member = self.members[number]
        failed = member.state == "failed"
        best = self._ranked()[: max(self._part(), int(failed))]
        least = 0 if failed else member.progress
        return [each for each in best if each != number and least <= self.members[each].progress < self.last]

    def _explored(self, values: Values, random: np.random.Generator) -> Values:
        """Return perturbed values: numbers multiplied or drawn anew; choices and model settings stay."""
        explored = dict(values)
        for parameter in self.space.parameters:
            resample, u, factor = random.random() < ANEW, random.random(), FACTORS[int(random.integers(len(FACTORS)))]
            option = dashed(self.space.owners.get(parameter.name, parameter.name))
            if parameter.name not in values or parameter.kind == "choice" or option == SHAPE:
                continue
            old = values[parameter.name]
            new = parameter.value(u) if resample else parameter.bounded(old * factor)
            if new == old and parameter.kind == "int":  # too small for a factor to change it
                new = parameter.bounded(old + (1 if factor > 1 else -1))
            explored[parameter.name] = new
        return explored
