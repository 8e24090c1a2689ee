"""Counts of what the ranks of a distributed run have done, and bytes sent by kind; both travel with other messages.

    actor   tally.note(actor)                     its environment steps, episodes, restarts, returns
            tally.packed()      -> message ->     tally.take(rank, message)   memory or server: sums over all
                                                  tally.packed()  -> ...      which may be passed on

    with by_kind("transitions"): comm.push(...)   bytes as the communicator counts them

Numbers are totals since the run started or was resumed: a late or missing message loses nothing. Returns of single
episodes travel once, some in each message; if there are too many, the oldest are dropped."""

import contextlib
from collections import deque
from collections.abc import Iterator

import numpy as np

from hpcdl.comm.trace import Traffic
from hpcdl.rl.agent import LAST, Actor, return_scores
from hpcdl.runs import signals

KINDS = ("parameters", "gradients", "transitions", "samples", "priorities", "control")
COUNTS = ("steps", "episodes", "restarts", "discarded", "signal")
NUMBERS = len(COUNTS) + len(KINDS)
SLOTS = 8  # returns in a message
EARLIER = -1  # key of the counts of earlier legs in RankCounts.by_rank


class BytesByKind:
    """Bytes sent by this rank, by kind. transitions: by actors; samples: by memories; control: requests, credits."""

    def __init__(self, traffic: Traffic):
        self.traffic, self.sent = traffic, dict.fromkeys(KINDS, 0)

    @contextlib.contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        """Context whose messages are of this kind, except those of nested contexts."""
        before = self._unnamed
        try:
            yield
        finally:
            self.sent[kind] += self._unnamed - before

    def rest(self, kind: str) -> None:
        """Count as `kind` all bytes that were sent outside the contexts."""
        self.sent[kind] += self._unnamed

    @property
    def _unnamed(self) -> int:
        return self.traffic.bytes - sum(self.sent.values())


class RankCounts:
    """Counts of this rank and of ranks that have reported. by_kind: bytes of this rank; None: not counted."""

    length = NUMBERS + SLOTS

    def __init__(self, by_kind: BytesByKind | None = None):
        self.by_kind = by_kind or BytesByKind(Traffic())
        self.local, self.by_rank = np.zeros(NUMBERS), dict[int, np.ndarray]()
        self.unsent_returns: deque[float] = deque(maxlen=10 * LAST)
        self.returns: deque[float] = deque(maxlen=LAST)
        self.counted_episodes = 0

    def note(self, actor: Actor) -> None:
        """Count what this rank's own actor has done so far."""
        new = min(actor.episodes - self.counted_episodes, len(actor.returns))
        self.counted_episodes = actor.episodes
        self._add(actor.returns[len(actor.returns) - new :])
        environments = actor.environments
        self.local[:3] = actor.steps * environments.count, actor.episodes, environments.restarts

    def discard(self) -> None:
        self.local[COUNTS.index("discarded")] += 1

    def take(self, rank: int, message: np.ndarray) -> None:
        """Store another rank's report."""
        self.by_rank[rank] = message[:NUMBERS].copy()
        returns = message[NUMBERS:]
        self._add(returns[~np.isnan(returns)].tolist())

    def note_sent(self, rank: int, kind: str, bytes: float) -> None:
        """Store the bytes of a kind that a rank without reports has sent."""
        self.by_rank.setdefault(rank, np.zeros(NUMBERS))[len(COUNTS) + KINDS.index(kind)] = bytes

    def _add(self, returns: list[float]) -> None:
        self.unsent_returns.extend(returns)
        self.returns.extend(returns)

    def total(self) -> np.ndarray:
        self.local[COUNTS.index("signal")] = bool(signals.received)
        self.local[len(COUNTS) :] = list(self.by_kind.sent.values())
        return sum(self.by_rank.values(), start=self.local)

    def packed(self) -> np.ndarray:
        """Return the message for other ranks: float64 (length,)."""
        slots = [self.unsent_returns.popleft() for _ in range(min(SLOTS, len(self.unsent_returns)))]
        return np.concatenate([self.total(), slots, np.full(SLOTS - len(slots), np.nan)])

    def __getitem__(self, name: str) -> float:
        """Return a sum over all ranks: steps, episodes, restarts, discarded, signal, or bytes of a kind."""
        return float(self.total()[(*COUNTS, *KINDS).index(name)])

    def scores(self) -> dict[str, float]:
        return return_scores(int(self["episodes"]), self.returns)

    def bytes_by_kind(self) -> dict[str, int]:
        return {f"{kind}_bytes": int(self[kind]) for kind in KINDS}

    def state(self) -> dict[str, np.ndarray]:
        return {"totals": self.total(), "returns": np.array(self.returns, np.float64)}

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Continue the counts of a state; an empty state begins a new run."""
        if not state:
            return
        self.by_rank[EARLIER] = np.asarray(state["totals"], np.float64).copy()
        self.by_rank[EARLIER][COUNTS.index("signal")] = 0
        self.returns.extend(np.asarray(state["returns"]).tolist())
