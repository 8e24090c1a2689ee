"""Call signatures: collective calls and ranks as text; without MPI, so that a post-mortem can use them."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

# Element types by number: MPI's types (equal ones, such as long and long long, have one number), and the names of
# PyTorch's own types, which are sent as integers (hpcdl/torch/arrays.py).
BYTES = "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"
ORDER: list[np.dtype | str] = [*map(np.dtype, "?bBhHiIlLqQefdgFDG"), "bfloat16", "complex32", *BYTES]
TYPES = {kind: i for i, kind in enumerate(ORDER)}
KINDS = {i: kind for kind, i in TYPES.items()}
Call: TypeAlias = tuple[str, np.dtype | str | None, int, str, int]  # operation, type, length, reduction, root
ROOTED = ("broadcast", "reduce", "gather", "scatter")
ALL, SOME = -1, -2  # values of `other` instead of a rank: all ranks, some rank


def describe_call(call: Call) -> str:
    """Return the call as text, such as "all_reduce of 1000 float32 (sum)"."""
    name, kind, size, op, root = call
    what = "" if kind is None else f" of {size} {kind}"
    return name + what + (f" ({op})" if op else "") + (f", root {root}" if name in ROOTED else "")


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as "rank 3" or "ranks 0, 1 and 5"; of more than 8, the first 8 and how many more."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:8]))} and {len(ranks) - 8} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def group_by_text(words: dict[int, str]) -> str:
    """Return the ranks of each text, as one line: "ranks 0 and 2: a; rank 1: b". words: the text of each rank."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(words):
        groups.setdefault(words[rank], []).append(rank)
    return "; ".join(f"{format_ranks(ranks)}: {text}" for text, ranks in groups.items())


def mismatch_message(calls: dict[int, str], lines: dict[int, str] | None = None) -> str:
    """Return the message for ranks whose collective calls differ. calls, lines: texts and known call sites by rank."""
    at = f" (called from {group_by_text(lines)})" if lines else ""
    advice = f"make the same call on all ranks, with vectors of equal length{at}"
    return f"the ranks make different collective calls ({group_by_text(calls)}); {advice}"
