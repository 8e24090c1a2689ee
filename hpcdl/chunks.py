"""One way to cut n things into parts, for rings, shards, servers, batches and test sets alike."""


def chunks(n: int, parts: int) -> list[slice]:
    """Cut range(n) into `parts` consecutive slices; the first n mod parts slices are one longer.

    >>> chunks(7, 3)
    [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    return [chunk(n, parts, part) for part in range(parts)]


def chunk(n: int, parts: int, part: int) -> slice:
    """The slice number `part` of `chunks(n, parts)`, without making the others."""
    length, longer = divmod(n, parts)
    start = part * length + min(part, longer)
    return slice(start, start + length + (part < longer))
