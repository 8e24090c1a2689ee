"""One way to cut."""

from hypothesis import given
from hypothesis import strategies as st

from hpcdl.chunks import chunk, chunks


@given(st.integers(0, 10_000), st.integers(1, 50))
def test_chunks_cover_all_once_and_the_first_are_one_longer(n, parts):
    cut = chunks(n, parts)
    assert [i for part in cut for i in range(part.start, part.stop)] == list(range(n))
    assert [part.stop - part.start for part in cut] == [n // parts + (i < n % parts) for i in range(parts)]
    assert cut == [chunk(n, parts, i) for i in range(parts)]
