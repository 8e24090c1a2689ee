"""The loops that read libsvm's text: every number as Python reads it, to the bit; lines and rows counted."""

import random

import numpy as np
import pytest

from hpcdl.kernels import libsvm


def parsed(text, limit=2**31 - 2, base=0):
    """Return (result of `parse`, labels, rows as lists of (index, value), hard numbers, state)."""
    content, size = np.frombuffer(text, np.uint8), len(text)
    labels, starts = np.empty(size // 2 + 1), np.zeros(size // 2 + 2, np.int64)
    columns, values = np.empty(size // 3 + 1, np.int32), np.empty(size // 3 + 1)
    hard, state = np.empty((size // 4 + 1, 3), np.int64), np.zeros(libsvm.WORDS, np.int64)
    state[[libsvm.LOW, libsvm.HIGH]] = 1 << 40, -1
    said = libsvm.parse(content, size, limit, base, labels, starts, columns, values, hard, state)
    pairs = list(zip(columns.tolist(), values.tolist(), strict=True))
    rows = [pairs[starts[k] : starts[k + 1]] for k in range(state[libsvm.ROWS])]
    return said, labels[: state[libsvm.ROWS]].tolist(), rows, hard[: state[libsvm.HARD]], state


def test_lines_as_they_are_written():
    text = b"+1 3:0.5 17:1e-3 # 4:4\n\n  # a comment\n-1 \t qid:3 4:2 \r\n2.5\n0 0:-7 5:0 6:0.0e5 8:+.5#x\n3e2 1:5."
    said, labels, rows, hard, state = parsed(text)
    assert said == libsvm.FINE and not len(hard)
    assert labels == [1, -1, 2.5, 0, 300]
    assert rows == [[(3, 0.5), (17, 0.001)], [(4, 2)], [], [(0, -7), (8, 0.5)], [(1, 5)]]
    assert state[[libsvm.LINE, libsvm.LOW, libsvm.HIGH, libsvm.WHERE, libsvm.QID]].tolist() == [7, 0, 17, 1, 1]
    assert libsvm.count(np.frombuffer(text, np.uint8), len(text)) == (7, 5)
    assert libsvm.count(np.frombuffer(b"\n", np.uint8), 1) == (1, 0)


def numbers():
    draw = random.Random(5)
    kinds = [
        lambda: f"{draw.random():.17g}",
        lambda: f"{draw.random():.16f}",
        lambda: f"{draw.random():.19f}",
        lambda: repr(draw.uniform(-1e6, 1e6)),
        lambda: f"{draw.uniform(-1, 1) * 10.0 ** draw.randint(-320, 300):.{draw.randint(0, 20)}e}",
        lambda: str(draw.randint(0, 10 ** draw.randint(1, 25))),
        lambda: f"{draw.uniform(0, 100):.{draw.randint(0, 8)}f}",
        # Halfway between two float64 numbers, where wrong rounding shows.
        lambda: str((1 << 53) + 2 * draw.randint(0, 1 << 40) + 1),
        lambda: f"{(1 << 52) + draw.randint(0, 1 << 40)}.5",
    ]
    return [draw.choice(kinds)() for _ in range(20000)] + [
        *("0", "-0", "0.0", "00.500", "1e22", "1e23", "1e-22", "1e-23", "9007199254740993", "18446744073709551615"),
        *("18446744073709551616", "0." + "0" * 30 + "1", "1" + "0" * 30, "4.9e-324", "2.2250738585072011e-308"),
        *("1.7976931348623157e308", "123456789012345678.00000", "0.3" + "0" * 40, "0.3" + "0" * 40 + "1", "1E+2"),
    ]


def test_every_number_is_rounded_correctly():
    texts = numbers()
    whole = "".join(f"1 7:{text} 8:1\n" for text in texts)
    said, _, rows, hard, _ = parsed(whole.encode())
    assert said == libsvm.FINE
    noted = {whole[at:end] for at, end, _ in hard}
    right = 0
    for text, row in zip(texts, rows, strict=True):
        if text in noted:
            continue
        value = row[0][1] if len(row) == 2 else 0.0
        assert value == float(text), text
        right += 1
    assert right > 0.6 * len(texts) and "1e23" in noted and "0.3" + "0" * 40 not in noted
    assert "9007199254740993" in noted  # in the middle of two float64
    plain = [text for text in texts if len(text) <= 18 and "e" not in text]
    fifteen = [text for text in plain if len(text.strip("-0.").replace(".", "")) <= 15]
    assert len(fifteen) > 2000 and not noted & set(fifteen)


WRONG = {  # (error, its position): texts
    (libsvm.NO_LABEL, 0): ["1:1"],
    (libsvm.NO_LABEL, 2): ["  3:4 5:6"],
    (libsvm.BAD_LABEL, 0): ["a 1:1", "nan 1:1", "1x 1:1", "+ 1:1", "1e 1:1"],
    (libsvm.SEVERAL, 0): ["1,2 1:1"],
    (libsvm.BAD_PAIR, 2): ["1 a", "1 7", "1 7 :1", "1 :1"],
    (libsvm.BAD_INDEX, 2): ["1 7x:1", "1 1.5:1"],
    (libsvm.NEGATIVE, 2): ["1 -7:1"],
    (libsvm.BEYOND, 6): ["1 3:1 9999999999999999999999:1"],
    (libsvm.BEYOND, 2): ["1 2147483647:1"],
    (libsvm.REPEATED, 6): ["1 3:1 3:2", "1 3:0 3:2"],
    (libsvm.UNSORTED, 6): ["1 3:1 2:2"],
    (libsvm.BAD_VALUE, 2): [
        f"1 3:{value}" for value in ("", " 4", "x", "nan", "1:2", "1_0", "0x1p3", "--1", ".", "1e")
    ],
}


@pytest.mark.parametrize("text, said, at", [(text, *error) for error, texts in WRONG.items() for text in texts])
def test_what_is_wrong_and_where(text, said, at):
    for end in ("", "\n", " # c\n2 4:5\n"):
        first = "1 5:5\n#\n"
        found, labels, rows, _, state = parsed(f"{first}{text}{end}".encode())
        assert (found, state[libsvm.AT] - len(first), state[libsvm.LINE]) == (said, at, 3)
        assert labels == [1] and rows == [[(5, 5.0)]]


def test_an_index_zero_where_they_count_from_one():
    assert parsed(b"1 0:1", base=1)[0] == libsvm.ZERO and parsed(b"1 1:1", base=1)[0] == libsvm.FINE
    assert parsed(b"1 5:1", limit=4)[0] == libsvm.BEYOND and parsed(b"1 4:1", limit=4)[0] == libsvm.FINE
