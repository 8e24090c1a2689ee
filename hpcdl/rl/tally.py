"""What the ranks of a distributed run have done, and what they have sent by what it was: told on with what travels.

    actor   tally.note(actor, environments)       its environment steps, episodes, restarts, returns
            tally.packed()      -> message ->     tally.take(rank, message)   memory or server: the sums over all
                                                  tally.packed()  -> ...      which may tell them on

    with by_kind("transitions"): comm.push(...)   bytes as the communicator counts them

Numbers are totals since the run, or its resumption, began: a message that is late or left out loses nothing. The
returns of single episodes travel once, some in each message; of too many the oldest are left out.
"""

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from hpcdl.comm.trace import Traffic
from hpcdl.rl.agent import LAST
from hpcdl.runs import signals

KINDS = ("parameters", "gradients", "transitions", "samples", "priorities", "control")
COUNTS = ("steps", "episodes", "restarts", "discarded", "signal")
NUMBERS = len(COUNTS) + len(KINDS)
SLOTS = 8  # returns in a message
EARLIER = -1  # in the place of a rank: the legs before


class ByKind:
    """The bytes that this rank has sent, by what they were: parameters, gradients, ...

    transitions: from actors to memories; samples: from memories to learners. control: what is asked, and leave to send.
    """

    def __init__(self, traffic: Traffic):
        self.traffic, self.sent = traffic, dict.fromkeys(KINDS, 0)

    @contextlib.contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        """What is sent inside is of this kind, but for what a block within has named."""
        before = self._unnamed
        try:
            yield
        finally:
            self.sent[kind] += self._unnamed - before

    def rest(self, kind: str) -> None:
        """What was sent, and not in any such block, is of this kind."""
        self.sent[kind] += self._unnamed

    @property
    def _unnamed(self) -> int:
        return self.traffic.bytes - sum(self.sent.values())


class RankCounts:
    """Of this rank and of those that have told it. by_kind: what this rank has sent; None: it does not say."""

    length = NUMBERS + SLOTS

    def __init__(self, by_kind: ByKind | None = None):
        self.by_kind = by_kind
        self.own, self.of = np.zeros(NUMBERS), dict[int, np.ndarray]()
        self.news: deque[float] = deque(maxlen=10 * LAST)
        self.returns: deque[float] = deque(maxlen=LAST)
        self.noted = 0

    def note(self, actor: Any, environments: Any) -> None:
        """What this rank's own actor has done so far."""
        new = min(actor.episodes - self.noted, len(actor.returns))
        self.noted = actor.episodes
        self._add(actor.returns[len(actor.returns) - new :])
        self.own[:3] = actor.steps * environments.count, actor.episodes, environments.restarts

    def discard(self) -> None:
        """A gradient of this rank was discarded."""
        self.own[COUNTS.index("discarded")] += 1

    def take(self, rank: int, message: np.ndarray) -> None:
        """What another rank tells."""
        self.of[rank] = message[:NUMBERS].copy()
        told = message[NUMBERS:]
        self._add(told[~np.isnan(told)].tolist())

    def note_sent(self, rank: int, kind: str, bytes: float) -> None:
        """A rank that tells nothing else has sent so much of this kind."""
        self.of.setdefault(rank, np.zeros(NUMBERS))[len(COUNTS) + KINDS.index(kind)] = bytes

    def _add(self, returns: list[float]) -> None:
        self.news.extend(returns)
        self.returns.extend(returns)

    def total(self) -> np.ndarray:
        """The sums over all of them."""
        self.own[COUNTS.index("signal")] = bool(signals.received)
        if self.by_kind is not None:
            self.own[len(COUNTS) :] = list(self.by_kind.sent.values())
        return sum(self.of.values(), start=self.own)

    def packed(self) -> np.ndarray:
        """What travels: float64 (length,)."""
        slots = [self.news.popleft() for _ in range(min(SLOTS, len(self.news)))]
        return np.concatenate([self.total(), slots, np.full(SLOTS - len(slots), np.nan)])

    def __getitem__(self, name: str) -> float:
        """Of all of them: steps, episodes, restarts, discarded, signal, or bytes of a kind."""
        return float(self.total()[(*COUNTS, *KINDS).index(name)])

    def scores(self) -> dict[str, float]:
        """As those of an actor: how many episodes, and the mean, the least and the largest return of the last ones."""
        found: dict[str, float] = {"episodes": int(self["episodes"])}
        if not self.returns:
            return found
        of = np.array(self.returns)
        return found | {"return_mean": float(of.mean()), "return_min": float(of.min()), "return_max": float(of.max())}

    def bytes_by_kind(self) -> dict[str, int]:
        """Of all of them, by what they were."""
        return {f"{kind}_bytes": int(self[kind]) for kind in KINDS}

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint holds of it."""
        return {"totals": self.total(), "returns": np.array(self.returns, np.float64)}

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Go on from there."""
        self.of[EARLIER] = np.asarray(state["totals"], np.float64).copy()
        self.of[EARLIER][COUNTS.index("signal")] = 0
        self.returns.extend(np.asarray(state["returns"]).tolist())
