"""What ranks call together, and who they are, in words; without MPI, for whoever reads what a job has left."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

# Types of elements, by a small number: those that MPI knows, of which two that are one (long, long long) are one here;
# and, by name, those that PyTorch alone has, which travel as integers (hpcdl/torch/arrays.py).
BYTES = "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"
ORDER: list[np.dtype | str] = [*map(np.dtype, "?bBhHiIlLqQefdgFDG"), "bfloat16", "complex32", *BYTES]
TYPES = {kind: i for i, kind in enumerate(ORDER)}
KINDS = {i: kind for kind, i in TYPES.items()}
Call: TypeAlias = tuple[str, np.dtype | str | None, int, str, int]  # operation, type, length, reduction, root
ROOTED = ("broadcast", "reduce", "gather", "scatter")
ALL, SOME = -1, -2  # in the place of the rank that is waited for


def told(call: Call) -> str:
    """The call in words: all_reduce of 1000 float32 (sum)."""
    name, kind, size, op, root = call
    what = "" if kind is None else f" of {size} {kind}"
    return name + what + (f" ({op})" if op else "") + (f", root {root}" if name in ROOTED else "")


def ranks_told(ranks: Sequence[int]) -> str:
    """rank 3, or ranks 0, 1 and 5, or of many the first few and their number."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:8]))} and {len(ranks) - 8} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def by_words(words: dict[int, str]) -> str:
    """What each rank calls, or from where, ranks of the same words together: ranks 0 and 2: a; rank 1: b."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(words):
        groups.setdefault(words[rank], []).append(rank)
    return "; ".join(f"{ranks_told(ranks)}: {each}" for each, ranks in groups.items())


def differ(calls: dict[int, str], lines: dict[int, str] | None = None) -> str:
    """The message for ranks that call different things, given by their numbers in words.

    lines: of the programs that call, as far as they are known.
    """
    at = f" (from {by_words(lines)})" if lines else ""
    return (
        f"the ranks differ in what they call together ({by_words(calls)}); call the same on all, with vectors of one "
        f"length{at}"
    )
