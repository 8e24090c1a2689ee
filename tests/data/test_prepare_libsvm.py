"""libsvm's text becomes a data file: values, labels, base, width, split; block by block; bad lines by number."""

import contextlib
import gzip
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from fuzz import cases
from hypothesis import given
from hypothesis import strategies as st
from printed import commands
from sparse_files import make_sparse

from hpcdl.data import open_data
from hpcdl.data.format import read_info
from hpcdl.data.formats import prepare_libsvm as module
from hpcdl.data.formats.prepare import Output
from hpcdl.data.formats.prepare_libsvm import prepare_libsvm
from hpcdl.data.formats.recipe import recipe_of
from hpcdl.data.formats.table_rows import TableRows
from hpcdl.data.synthetic import SPECS
from hpcdl.errors import UsageError
from hpcdl.scripts import prepare_data

SMALL = "+1 1:0.5 3:2\n-1 2:1.5\n# nothing\n+1 3:0.25\n-1 1:4\n+1 2:8 3:1\n"


def text_of(x, y, base=1):
    """Rows as libsvm writes them."""
    rows = (" ".join(f"{column + base}:{float(row[column])!r}" for column in np.flatnonzero(row)) for row in x)
    return "".join(f"{label} {row}\n" for label, row in zip(y, rows, strict=True))


def dense(path, group):
    with h5py.File(path, "r", locking=False) as file:
        part = file[f"{group}/x"]
        x = np.zeros((len(part["indptr"]) - 1, part.attrs["features"]))
        rows = np.repeat(np.arange(len(x)), np.diff(part["indptr"][...]))
        x[rows, part["indices"][...]] = part["data"][...]
        return x, file[f"{group}/y"][...]


@pytest.fixture
def written(tmp_path):
    """A function: write a text, gzipped or not."""

    def write(text, name="a.svm"):
        content = text.encode() if isinstance(text, str) else text
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return tmp_path / name

    return write


@pytest.fixture(params=[1 << 20, 100])
def block(request, monkeypatch):
    """A block takes all, or a line or two."""
    monkeypatch.setattr(module, "BLOCK", request.param)


@pytest.mark.parametrize("name", ["a.svm", "a.txt.gz", "plain"])
@pytest.mark.parametrize("base", [0, 1])
def test_train_and_test_from_files_of_their_own(prepare, written, tmp_path, block, name, base):
    x, y, x_test, y_test = make_sparse()
    x[:, 20:] = 0
    source, test = written(text_of(x, y, base), name), written(text_of(x_test, y_test, base), f"test-{name}")
    prepare("libsvm", source, "--test", test).close()
    for group, rows, labels in (("train", x, y), ("test", x_test, y_test)):
        found = dense(tmp_path / "out.h5", group)
        np.testing.assert_array_equal(found[0], rows)  # as they come, and as wide as the test part needs
        np.testing.assert_array_equal(found[1], labels)
    info = read_info(tmp_path / "out.h5")
    assert info.schema.base == base and info.scale == 1 and info.schema.labels is None and info.classes == 3
    assert f"indices from {base}" in prepare.summary and "60 training and 16 test rows of 23 float64" in prepare.summary


def test_a_split_by_class(prepare, written, tmp_path, block):
    x, _, _, _ = make_sparse()
    y = np.where(np.arange(60) % 3 == 0, "+1", "-1")
    source = written(text_of(x, y))
    prepare("libsvm", source, "--test-fraction", 0.25, "--seed", 4).close()
    (a, b), (c, d) = (dense(tmp_path / "out.h5", group) for group in ("train", "test"))
    assert (len(a), len(c), np.sum(b), np.sum(d)) == (45, 15, 15, 5)
    assert read_info(tmp_path / "out.h5").schema.labels == ("-1", "1") and "classes -1, 1" in prepare.summary
    both = np.concatenate([a, c])
    np.testing.assert_array_equal(both[np.lexsort(both.T)], x[np.lexsort(x.T)])
    assert not np.array_equal(a[:, 0], np.sort(a[:, 0]))  # shuffled
    for row, label in zip(both, np.concatenate([b, d]), strict=True):
        if row[0] and row[1] != 7.25:
            assert (y[int(row[0]) - 1] == "+1") == label
    prepare("libsvm", source, "--test-fraction", 0.25, "--seed", 4, out="again.h5").close()
    assert read_info(tmp_path / "again.h5") != read_info(tmp_path / "out.h5")
    np.testing.assert_array_equal(dense(tmp_path / "again.h5", "train")[0], a)
    prepare("libsvm", source, "--test-fraction", 0, out="all.h5").close()
    assert read_info(tmp_path / "all.h5").rows == {"train": 60, "test": 0, "rows": 0}


@pytest.mark.parametrize(
    ("labels", "options", "classes", "names"),
    [
        ("+1 -1 1 -1 1", (), 2, ("-1", "1")),
        ("0 1 0 1 1", (), 2, None),
        ("1.0 2.0 3 1 2", (), 3, ("1", "2", "3")),
        ("0 1 0 1 1", ("--regression",), 0, None),
        ("0.5 1 0 1 1e-3", (), 0, None),
    ],
)
def test_labels(prepare, written, tmp_path, labels, options, classes, names):
    source = written("".join(f"{label} {k + 1}:1\n" for k, label in enumerate(labels.split())))
    prepare("libsvm", source, "--test-fraction", 0, *options).close()
    info = read_info(tmp_path / "out.h5")
    assert (info.classes, info.schema.labels) == (classes, names)
    x, y = dense(tmp_path / "out.h5", "train")
    values = [float(label) for label in labels.split()]
    for row, found in zip(x, y, strict=True):
        meant = values[int(np.flatnonzero(row)[0])]
        assert (float(names[found]) if names else found) == meant


@pytest.mark.parametrize(
    ("text", "options", "base", "width"),
    [
        (SMALL, (), 1, 3),
        (SMALL.replace("1:4", "0:4"), (), 0, 4),
        (SMALL, ("--zero-based", "yes"), 0, 4),
        (SMALL, ("--zero-based", "no", "--features", 9), 1, 9),
        (SMALL, ("--features", 3), 1, 3),
        (SMALL, ("--zero-based", "yes", "--features", 4), 0, 4),
        (SMALL.replace("3:1", "2147483646:1"), (), 1, 2147483646),
    ],
)
def test_base_and_width(prepare, written, tmp_path, text, options, base, width):
    prepare("libsvm", written(text), "--test-fraction", 0, *options).close()
    info = read_info(tmp_path / "out.h5")
    assert (info.schema.base, info.features) == (base, (width,))
    with h5py.File(tmp_path / "out.h5", "r", locking=False) as file:
        assert file["train/x/indices"][...].min() == (0 if base or "0:4" in text else 1)
        assert file["train/x/indices"].dtype == np.int32 and file["train/x/indptr"].dtype == np.int64


@pytest.mark.parametrize(("value", "kind"), [("255", "u1"), ("256", "f8"), ("-1", "f8"), ("0.5", "f8")])
def test_counts_are_bytes_with_scale_one(prepare, written, tmp_path, value, kind):
    prepare("libsvm", written(f"1 1:3\n2 1:{value}\n"), "--test-fraction", 0).close()
    with h5py.File(tmp_path / "out.h5", "r", locking=False) as file:
        assert file["train/x/data"].dtype == kind and file.attrs["scale"] == 1


def test_what_cannot_be_read_fast_is_read_right(prepare, written, tmp_path):
    values = ["1e-300", "1e300", "0.1234567890123456789012345", "123456789012345678901234567890", "5e-324"]
    text = "".join(f"{k}e-40 1:{v}\n" for k, v in enumerate(values, 1))
    prepare("libsvm", written(text), "--test-fraction", 0).close()
    x, y = dense(tmp_path / "out.h5", "train")
    assert sorted(x[:, 0]) == sorted(map(float, values)) and sorted(y) == [float(f"{k}e-40") for k in range(1, 6)]


def test_memory_does_not_grow_with_the_file(written, tmp_path, monkeypatch):
    """A text twenty times as long is parsed in blocks as long as before, and written in slabs as large."""
    monkeypatch.setattr(module, "BLOCK", 1000)
    monkeypatch.setattr(module, "slab_elements", lambda kind: 100)
    parse, select, blocks, parts = module.LibsvmParser.rows, module.Spool.select, [], []

    def parsed(self, path, lines, content):
        found = parse(self, path, lines, content)
        blocks.append((len(content), self.size))
        return found

    def selected(self, *given):
        for part in select(self, *given):
            parts.append(part.nnz)
            yield part

    monkeypatch.setattr(module.LibsvmParser, "rows", parsed)
    monkeypatch.setattr(module.Spool, "select", selected)
    for rows in (100, 2000):
        blocks.clear(), parts.clear()
        text = "".join(f"{k % 2} {' '.join(f'{j}:0.{k % 900 + 99}625' for j in range(1, 8))}\n" for k in range(rows))
        prepare_libsvm(written(text), Output(tmp_path / f"{rows}.h5"))
        assert sum(parts) == 7 * rows and len(blocks) > rows / 20
        assert max(map(max, blocks)) <= 1100 and max(parts) == 98


BAD = [
    ("", "has no rows"),
    ("1 3:0\n2\n", "all rows hold zeros only"),
    ("1 3:1\n1:1\n", "line 2: the row begins with '1:1', not with a label"),
    ("1 3:1\nspam 1:1\n", "line 2: the label 'spam' is no number"),
    ("1 3:1\n-inf 1:1\n", "line 2: the label '-inf' is not finite"),
    ("1 3:1\n1,5,7 1:1\n", "line 2: the row has several labels ('1,5,7')"),
    ("1 3:1\n\n#\n1 3:nan\n", "line 4: the value in '3:nan' is not finite"),
    ("1 3:1e999\n", "line 1: '1e999' is too large a number"),
    ("1 3:1\n1e400 3:2\n", "line 2: '1e400' is too large a number"),
    ("1 3:1 2:1\n", "line 1: the index in '2:1' comes after a larger one; sort"),
    ("1 3:1 3:1\n", "line 1: the index in '3:1' is there twice"),
    ("1 -3:1\n", "line 1: the index in '-3:1' is negative"),
    ("1 2147483647:1\n", "line 1: the index in '2147483647:1' is beyond 2147483646, the last one that there can be"),
    ("1 3:1 hello\n", "line 1: 'hello' is no INDEX:VALUE"),
    ("1 3x:1\n", "line 1: the index in '3x:1' is no whole number"),
    ("1 3:\n", "line 1: the value in '3:' is no number"),
    ("1 3:1\n1 3:1\n", "all rows have the label 1"),
    (b"\xff\xfe1\x00 \x00", "line 1: the label"),
    ("1 3:\x1b[31m\n", "line 1: the value in '3:\\x1b[31m' is no number"),
    (b"\x1f\x8bnot gzip", "cannot be read"),
    (gzip.compress(b"1 1:1\n2 2:2\n" * 99, mtime=0)[:-30], "cannot be read"),
]


@pytest.mark.parametrize(("text", "words"), BAD, ids=[words[:45] for _, words in BAD])
def test_bad_lines(prepare, written, tmp_path, block, text, words):
    assert words in (said := prepare("libsvm", written(text))), said
    assert [each.name for each in tmp_path.iterdir()] == ["a.svm"]  # no file left, nor any other


def test_the_number_of_a_line_far_down(prepare, written, block):
    text = "1 1:1\n# no row\n\n2 2:2\n" * 60
    assert "a.svm, line 241: the index in '3:1' is there twice" in prepare("libsvm", written(text + "1 3:1 3:1\n"))
    assert "line 242: '1e999' is too large" in prepare("libsvm", written(text + "1 3:1\n2 3:1e999\n"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--features", 2), "line 1: the index in '3:2' is beyond 2, the last one that --features says"),
        (("--features", 3, "--zero-based", "yes"), "line 1: the index in '3:2' is beyond 2, the last one that"),
        (("--features", 0), "--features is a number from 1 to 2147483646, not 0"),
        (("--zero-based", "no"), None),
        (("--test-fraction", 2), "the test fraction must lie between 0 and 1"),
        (("--test", "nowhere.svm"), "nowhere.svm cannot be read: No such file"),
        (("--test", "a.svm", "--test-fraction", 0.5), "leave --test-fraction out, or --test"),
    ],
)
def test_options(prepare, written, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    source = written(SMALL)
    if words is None:
        source = written(SMALL.replace("1:4", "0:4"))
        words = "line 5: the index in '0:4' is 0, but indices must count from 1"
    assert words in prepare("libsvm", source, *options)


def test_features_that_auto_finds_too_few(prepare, written, tmp_path):
    """Whether 3 is beyond 3 features is known when an index 0 has come."""
    said = prepare("libsvm", written(SMALL.replace("1:4", "0:4")), "--features", 3)
    assert "line 1: the index 3 is beyond 2, the last one that --features says" in said
    text = written("1 1:1 2:1\n", "test.svm")
    said = prepare("libsvm", written("1 0:1\n2 1:3\n"), "--features", 2, "--test", text)
    assert "test.svm, line 1: the index 2 is beyond 1" in said


def test_a_line_without_end(written, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 50)
    monkeypatch.setattr(module, "MOST_LINE", 400)
    long = "1 " + " ".join(f"{k}:1" for k in range(1, 60))
    assert 200 < len(long) < 400
    info = prepare_libsvm(written(f"2 1:1\n{long}\n2 2:1\n"), Output(tmp_path / "a.h5"), test_fraction=0)
    assert info.features == (59,)
    with pytest.raises(UsageError, match="line 2: the line has more than 400 bytes"):
        prepare_libsvm(written(f"2 1:1\n{long * 4}\n"), Output(tmp_path / "b.h5"))


def test_qid_and_a_byte_order_mark(prepare, written):
    text = b"\xef\xbb\xbf" + SMALL.replace(" 2:1.5", " qid:4 2:1.5").encode()
    prepare("libsvm", written(text)).close()
    assert "1 qid left out" in prepare.summary


@pytest.mark.parametrize(("start", "end", "count"), [("Tables", "| option", 4), ("Sparse rows", "## Text", 3)])
def test_the_examples_of_the_page_say_what_they_say(tmp_path, monkeypatch, capsys, start, end, count):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text().split(f"## {start}")[1].split(end)[0]
    shown = commands(page)
    assert len(shown) == count
    monkeypatch.chdir(tmp_path)
    for command, said in shown:
        name, *arguments = command.split()
        if name == "cat":
            Path(arguments[0]).write_text("\n".join(said) + "\n")
        else:
            prepare_data.main(arguments[1:])
            assert capsys.readouterr().out.splitlines() == said
    if start == "Tables":
        rows = TableRows("new.csv", recipe_of("patients.h5"))
        assert [parse().ids for parse in rows.blocks()] == [["1"]]
        return
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    table = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines]
    for row in table[-len(SPECS) :]:
        rows, test = map(int, row[1].split(","))
        assert SPECS[row[0]] == {
            "rows": rows,
            "test": test,
            **{name: float(value) for name, value in zip(("features", "nonzeros", "classes"), row[2:5], strict=True)},
            **{name: float(value) for name, value in zip(("power", "noise", "seed"), row[5:], strict=True)},
        }


PIECES = ["1", "-1", "+1", "0", "2.5", "1:1", "2:0.5", "3:1e5", "0:1", "7:0", "#", "qid:1", ":", *" \n" * 2, "\t"]
PIECES += ["nan", "1e999", "x", "\r\n", "\0", "1:", "-2:1", "99999999999:1", "1,2", "é", "0.12345678901234567890123"]


@cases(300)
@given(data=st.lists(st.sampled_from(PIECES), max_size=40).map("".join).map(str.encode) | st.binary(max_size=60))
def test_any_bytes_are_rows_or_one_line(data):
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder, "a.svm"), Path(folder, "a.h5")
        path.write_bytes(data)
        with contextlib.suppress(UsageError):
            try:
                prepare_libsvm(path, Output(out), test_fraction=0.0)
            except UsageError as error:
                assert str(error) and len(str(error)) < 1000
                assert not out.exists() and list(Path(folder).iterdir()) == [path]
                raise
            opened = open_data(out, dtype="float64") if read_info(out).features[0] < 1000 else None
            if opened is not None:
                x, _ = opened.train.rows(0, opened.examples)
                assert np.isfinite(x.dense()).all() and (np.diff(x.indptr) >= 0).all()
