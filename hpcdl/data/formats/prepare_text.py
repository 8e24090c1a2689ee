"""Preparation of plain text: rows of tokens, each with the token that follows, for models of the next token.

    tokens   t0 t1 t2 t3 t4 t5 t6 t7 t8 t9 ...          n tokens; the last n * test_fraction are for the test
    x        t0 t1 t2 t3 | t4 t5 t6 t7 | ...            row i: tokens i * length ... (i + 1) * length - 1
    targets     t1 t2 t3 t4 | t5 t6 t7 t8 | ...         at position k of a row x[k + 1], at the last one y

A group of n tokens has (n - 1) // length rows; a rest is left out. Every kept token but the first is a target once.

    level      a token is         tokens are numbered
    character  a character        by code point, among those of the text
    byte       a byte             0 ... 255

A slab of the text is in memory. Code points wait in a file without a name beside the output, 4 bytes a character."""

import math
import tempfile
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np

from hpcdl.data import hdf5
from hpcdl.data.format import Info
from hpcdl.data.formats.documents import text_decoder
from hpcdl.data.formats.prepare import MOST_NAMES, Groups, Output
from hpcdl.data.formats.tokenizer import BEYOND, code_points
from hpcdl.data.formats.vocabulary import BYTES, Vocabulary
from hpcdl.data.hdf5 import FilePath, slabs
from hpcdl.errors import UsageError, blamed_on, unknown

LEVELS = ("character", "byte")
Read: TypeAlias = Callable[[slice], np.ndarray]


def prepare_text(
    path: FilePath,
    output: Output,
    *,
    length: int = 64,
    level: str = "character",
    test_fraction: float = 0.1,
    encoding: str = "utf-8",
) -> Info:
    """Make a data file of plain text: rows of `length` tokens, the last `test_fraction` of the tokens for the test.
    level: `character` or `byte`. encoding: of characters; a byte order mark is dropped. UsageError: invalid text."""
    check_rows(length, test_fraction)
    if level not in LEVELS:
        raise unknown("level", level, LEVELS)
    with tempfile.TemporaryFile(dir=output.path.parent) as scratch:
        with blamed_on(f"{path} cannot be read"):
            found = _bytes(path) if level == "byte" else _characters(path, encoding, scratch, output.path)
        count, read, vocabulary, size = found
        groups = token_groups(path, count, read, level, length, Fraction(str(test_fraction)))
        kind, ratio = np.min_scalar_type(len(vocabulary) - 1), dict.fromkeys(groups, size / count)
        return output.write(groups, kind, 1.0, None, len(vocabulary), vocabulary, token_bytes=ratio)


def check_rows(length: int, test_fraction: float) -> None:
    """Raise UsageError for a length of rows or a test fraction that cannot be."""
    if length < 1:
        raise UsageError(f"the length of a row must be 1 or more, not {length}")
    if not 0 < test_fraction < 1:
        raise UsageError(f"the test fraction must lie between 0 and 1, as 0.1, not {test_fraction}")


def token_groups(path: FilePath, count: int, read: Read, what: str, length: int, fraction: Fraction) -> Groups:
    """Return the groups of `count` tokens of a text, each a `what`; the last `fraction` of them is for the test."""
    # Each part must have a row and the token that follows it.
    least = max(math.ceil((length + 1) / fraction), math.floor(length / (1 - fraction)) + 1)
    if count < least:
        needed = f"rows of {length} and a test fraction of {float(fraction):g} need {least} or more"
        raise UsageError(f"{path} has {count} {what}s; {needed}: take a longer text, or a smaller --length")
    cut = count - math.floor(count * fraction)
    groups: Groups = {}
    for group, (start, stop) in {"train": (0, cut), "test": (cut, count)}.items():
        rows = (stop - 1 - start) // length
        y = read(slice(start + length, start + rows * length + 1, length))
        groups[group] = (rows, length), rows_of(read, start, rows, length), y, {}
    return groups


def rows_of(read: Read, start: int, rows: int, length: int) -> Iterator[np.ndarray]:
    """Yield slabs of rows of the tokens that `read` gives, from token `start` on."""
    for slab in slabs(rows, length):
        yield read(slice(start + slab.start * length, start + slab.stop * length)).reshape(-1, length)


def _bytes(path: FilePath) -> tuple[int, Read, Vocabulary, int]:
    """Return the number of byte tokens, a function that reads a slice of them, the vocabulary, and the bytes."""
    size = Path(path).stat().st_size
    memory = np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
    return size, lambda which: np.array(memory[which]), Vocabulary(BYTES), size


def _characters(path: FilePath, encoding: str, scratch: IO[bytes], output: Path) -> tuple[int, Read, Vocabulary, int]:
    """Return what `_bytes` does, of characters."""
    code = _code_points(path, encoding, scratch, output)
    present, size = np.zeros(BEYOND, bool), len(code)  # bytes in UTF-8
    for slab in slabs(len(code), code.itemsize):
        present[code[slab]] = True
        size += sum(int(np.count_nonzero(code[slab] >= least)) for least in (0x80, 0x800, 0x10000))
    known = np.flatnonzero(present)
    if len(known) == 1:
        raise UsageError(f"{path} holds no other character than {chr(known[0])!r}; there is nothing to predict")
    if len(known) > MOST_NAMES:
        most = f"a data file can name {MOST_NAMES}, so use --level byte"
        raise UsageError(f"{path} has {len(known)} different characters; {most}")
    number = np.zeros(BEYOND, np.min_scalar_type(max(0, len(known) - 1)))
    number[known] = np.arange(len(known))
    vocabulary = Vocabulary(map(chr, known) if len(known) else BYTES)
    return len(code), lambda which: number[code[which]], vocabulary, size


def _code_points(path: FilePath, encoding: str, scratch: IO[bytes], output: Path) -> np.ndarray:
    """Return the code points of a text, mapped from the file `scratch` beside `output`; a slab is read at a time."""
    decoded = text_decoder(path, encoding, "strict", "name its --encoding, or use --level byte")
    done = count = 0  # bytes and characters
    with open(path, "rb") as file:
        while True:
            data = file.read(hdf5.SLAB_BYTES)
            text = decoded(data, done, final=not data)
            text = text if count else text.removeprefix("\ufeff")
            code = code_points(text)
            # HDF5 ends a text at its first 0, and half a surrogate pair is no character.
            odd = (code == 0) | ((code >= 0xD800) & (code < 0xE000))
            if odd.any():
                what = f"{text[odd.argmax()]!r} (character {count + odd.argmax()})"
                raise UsageError(f"{path} holds {what}, which is not plain text; leave it out, or use --level byte")
            with blamed_on(f"{output} cannot be written"):
                scratch.write(code.tobytes())
            done, count = done + len(data), count + len(code)
            if not data:
                break
    scratch.flush()
    return np.memmap(scratch, "<u4", "r") if count else np.empty(0, "<u4")
