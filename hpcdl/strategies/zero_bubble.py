"""Zero-bubble schedules: the backward is two actions, and the second one fills the idle time of the pipeline.

    B    the gradient by the input, for which the stage before waits
    W    the gradients by the weights, for which only the update waits

Here F, B and W take equally long, and the whole backward in dualpipe-v takes as long as B and W:

    zb-h1
    0 |F0---F1---F2---..........B0===W0~~~F3---B1===W1~~~F4---B2===W2~~~B3===W3~~~B4===W4~~~
    1 |.....F0---F1---.....B0===F2---B1===W0~~~F3---B2===W1~~~F4---B3===W2~~~B4===W3~~~W4~~~
    2 |..........F0---B0===F1---B1===F2---B2===W0~~~F3---B3===W1~~~F4---B4===W2~~~W3~~~W4~~~

    zb-h2
    0 |F0---F1---F2---F3---F4---B0===W0~~~B1===W1~~~B2===W2~~~B3===W3~~~B4===W4~~~..........
    1 |.....F0---F1---F2---B0===F3---B1===F4---B2===W0~~~B3===W1~~~B4===W2~~~W3~~~W4~~~.....
    2 |..........F0---B0===F1---B1===F2---B2===F3---B3===F4---B4===W0~~~W1~~~W2~~~W3~~~W4~~~

    zb-v: A and a are F0 and B0 of chunk 0, A1 and a1 those of chunk 1, ~ is a W
    0 |A--B--C--D--E--A1-a1=~~~B1-b1=~~~C1-c1=~~~a==~~~D1-d1=~~~b==~~~E1-e1=~~~c==~~~d==~~~e==~~~......
    1 |...A--B--C--A1-D--B1-a1=~~~C1-b1=~~~E--a==~~~D1-c1=~~~b==~~~E1-d1=~~~c==e1=d==~~~e==~~~~~~~~~...
    2 |......A--A1-B--B1-C--C1-a1=~~~D--a==~~~D1-b1=~~~E--b==~~~E1-c1=~~~c==d1=d==e1=e==~~~~~~~~~~~~~~~

    dualpipe-v
    0 |A-B-C-D-E-A1a1~~B1b1~~C1F-c1==D1a===d1==E1..b===e1==F1..c===f1==d=~~e=~~f=~~
    1 |..A-B-C-A1D-B1a1~~C1E-b1==D1a===F-c1==E1b===d1==F1..c===e1==d===f1e=~~f=~~~~
    2 |....A-A1B-B1C-C1D-a1==D1a===E-b1==E1b===F-c1==F1c===d1==d===e1==e=f1f=~~~~~~

TF, TB, TW: times of F, B, W of a micro-batch on a stage, TW at most TF and TB; of dualpipe-v also TF = TB. idle: the
time of a step, from a stage's first start to its last end, beyond m (TF+TB+TW). v: chunks of a stage. held: micro-
batches from F to W on a stage, each chunk as 1/v of one. zb-h1, zb-h2 and zb-v also take fewer micro-batches, with more
idle time.

    schedule        on stage s of p                                   v      m               idle               held
    1f1b            p-1-s F ahead, then F, B, W in turn               1      p or more       (p-1) (TF+TB+TW)   p-s
    zb-h1           the same; the W of a B comes after s more B       1      p or more       (p-1) (TF+TB-TW)   p
    zb-h2           2(p-1-s) F ahead; the W comes after 2s more B     1      2p-1 or more    (p-1) (TF+TB-2TW)  2p-1
    zb-interleaved  as zb-h1, with (v-1)p more F ahead                any    multiple of p   (p-1) (TF+TB-TW)/v p
    zb-v            chunks s and 2p-1-s, a V; F B W of both in turn   2      2p-1 or more    0 if TF = TB = TW  p
    dualpipe-v      the same V; F of one chunk and the whole backward 2      2p or more      (p-1) (TF+TB-TW)/2 p + 1/2
                    of the other in turn; W apart only at both ends

A stage ends its step before the stages after it, and begins the next one meanwhile, unless the update waits for all
stages (--clip-norm, weights that the first and the last stage share). DualPipe computes F and the backward that stands
beside it as one, to hide the messages of expert parallelism; here they are two actions.

(Qi et al., "Zero bubble pipeline parallelism", ICLR 2024: zb-h1, zb-h2. Qi et al., "Pipeline parallelism with
controllable memory", NeurIPS 2024: zb-v. DeepSeek-AI, "DeepSeek-V3 technical report", 2024: DualPipe, here the half
of it that holds each layer once, DualPipeV)"""

from collections import deque
from collections.abc import Iterator

from hpcdl.parallel.timetable import Action


def zb_h1(stages: int, stage: int, microbatches: int) -> Iterator[Action]:
    """Yield 1F1B with W apart: each stage holds p micro-batches, as the first one of 1F1B does."""
    yield from zb_interleaved(stages, stage, microbatches, 1)


def zb_h2(stages: int, stage: int, microbatches: int) -> Iterator[Action]:
    """Yield twice as many forwards ahead as 1F1B, so that no stage waits before its first B."""
    yield from _delayed(stages, microbatches, 1, 2 * (stages - 1 - stage), 2 * stage)


def zb_interleaved(stages: int, stage: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Yield ZB-H1 over `chunks` chunks per stage: p micro-batches through chunk 0, the same p through chunk 1, ..."""
    yield from _delayed(stages, microbatches, chunks, (chunks - 1) * stages + stages - 1 - stage, stage)


def zb_v(stages: int, stage: int, microbatches: int) -> Iterator[Action]:
    """Yield ZB-V: each stage has a first and a last part of the model, whose first B comes p F after its first F.
    Fewer than 2p-1 micro-batches do the same without those that are missing."""
    p, s, m = stages, stage, max(microbatches, 2 * stages - 1)
    phases = [
        ("F0", 2 * (p - s) - 1),
        ("F1 F0", s),
        ("F1 B1 W1", p - s),
        ("F0 B0 W0 F1 B1 W1", m - 2 * p + s + 1),
        ("B0 W0 F1 B1 W1", p - 1 - s),
        ("B0 B1", s),
        ("B0 W0", p - s),
        ("W1", s),
        ("W0", s),
    ]
    yield from (action for action in _numbered(phases) if action.microbatch < microbatches)


def dualpipe_v(stages: int, stage: int, microbatches: int) -> Iterator[Action]:
    """Yield DualPipeV: F of one chunk beside the whole backward (b) of the other."""
    p, s, half = stages, stage, (stage + 1) // 2
    phases = [
        ("F0", 2 * (p - 1 - s)),
        ("F0 F1", s + 1),
        ("B1 W F1", p - 1 - s),
        ("F0 b1 F1 b0", microbatches - 2 * p + s + 1),
        ("b1 F1 b0", p - 1 - s),
        ("b1 b0", half),
        ("b1 B0", (s + 1) % 2),
        ("B1 B0", half),
        ("W B0", p - 1 - s),
        ("W", s + 1),
    ]
    yield from _numbered(phases)


def rounds(kind: str, stages: int, microbatches: int, chunks: int = 1) -> Iterator[Action]:
    """Yield all F or B of a stage in the order of interleaved schedules: `stages` micro-batches through one chunk, the
    same through the next one (F: from the first chunk on, B: from the last); with 1 chunk, in the order of numbers."""
    order = range(chunks) if kind == "F" else range(chunks - 1, -1, -1)
    for first in range(0, microbatches, stages):
        for chunk in order:
            for k in range(first, min(first + stages, microbatches)):
                yield Action(kind, k, chunk)


def _delayed(stages: int, microbatches: int, chunks: int, ahead: int, lag: int) -> Iterator[Action]:
    """Yield `ahead` forwards, then F, B, W in turn, then the B and W left; the first `lag` B are followed by no W."""
    backwards, waiting = rounds("B", stages, microbatches, chunks), deque[Action]()
    for number, forward in enumerate(rounds("F", stages, microbatches, chunks)):
        yield forward
        if number >= ahead:
            yield from _back(next(backwards), waiting, lag)
    for backward in backwards:
        yield from _back(backward, waiting, lag)
    yield from waiting


def _back(backward: Action, waiting: deque[Action], lag: int) -> Iterator[Action]:
    yield backward
    waiting.append(backward._replace(kind="W"))
    if len(waiting) > lag:
        yield waiting.popleft()


def _numbered(phases: list[tuple[str, int]]) -> Iterator[Action]:
    """Yield the actions of phases, each a pattern and how often it comes, with micro-batches in order.
    F0: forward through chunk 0; B0: its backward, with a W later; b0: the whole backward; W0: the oldest W of chunk 0;
    W: the oldest W of any chunk."""
    counts: dict[str, int] = {}
    waiting: list[Action] = []
    for pattern, times in phases:
        for sign in times * pattern.split():
            kind, chunk = sign[0], sign[1:]
            if kind == "W":
                action = next(each for each in waiting if chunk in ("", str(each.chunk)))
                waiting.remove(action)
                yield action
                continue
            counter = sign.upper()
            number = counts.get(counter, 0)
            counts[counter] = number + 1
            yield Action(kind.upper(), number, int(chunk))
            if kind == "B":
                waiting.append(Action("W", number, int(chunk)))
