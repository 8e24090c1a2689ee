"""prepare_data text: rows and what follows them, and each refusal as one line."""

import h5py
import numpy as np
import pytest
from in_process import ends

from hpcdl.data import hdf5, open_data
from hpcdl.data.format import vocabulary_of
from hpcdl.scripts import prepare_data

TEXT = "".join(f"Zeile {number}: süß, 5 €\r\n" for number in range(60))


@pytest.fixture
def prepare(tmp_path, capsys):
    """A function: prepare_data text as a user would run it; the path of the file, or the line it refuses with."""

    def run(content, *options):
        (tmp_path / "in.txt").write_bytes(content.encode() if isinstance(content, str) else content)
        out = tmp_path / "out.h5"
        before = out.read_bytes() if out.exists() else None
        try:
            prepare_data.main(["text", str(tmp_path / "in.txt"), str(out), "--force", *map(str, options)])
        except SystemExit as end:
            printed = capsys.readouterr()
            assert end.code == 2 and not printed.out and printed.err.count("\n") == 1
            assert (out.read_bytes() if out.exists() else None) == before
            assert {path.name for path in tmp_path.iterdir()} <= {"in.txt", "out.h5"}  # nothing half-written
            return printed.err
        run.said = capsys.readouterr().out
        assert run.said.count("\n") == 1
        return out

    return run


def tokens_of(path):
    """What the rows of train and test and the tokens after them spell, each as one vector of tokens."""
    with h5py.File(path) as file:
        for group in ("train", "test"):
            x, y = file[group]["x"][...], file[group]["y"][...]
            np.testing.assert_array_equal(y[:-1], x[1:, 0])
            yield np.append(x.ravel(), y[-1])


@pytest.mark.parametrize("compress", [[], ["--compress"]])
@pytest.mark.parametrize("level", ["character", "byte"])
@pytest.mark.parametrize(("length", "fraction"), [(64, None), (1, 0.5), (7, 0.3), (30, 0.05)])
def test_rows_spell_the_text(prepare, monkeypatch, level, length, fraction, compress):
    monkeypatch.setattr(hdf5, "SLAB_BYTES", 200)
    given = [] if fraction is None else ["--test-fraction", fraction]
    path = prepare(TEXT, "--level", level, "--length", length, *given, *compress)
    units = list(TEXT) if level == "character" else list(TEXT.encode())
    known = sorted(set(units)) if level == "character" else range(256)
    cut = len(units) - int(len(units) * (fraction or 0.1) + 1e-9)
    for tokens, part in zip(tokens_of(path), (units[:cut], units[cut:]), strict=True):
        assert len(tokens) == (len(part) - 1) // length * length + 1 > len(part) - length
        assert [known[token] for token in tokens] == part[: len(tokens)]
    with h5py.File(path) as file:
        assert file["train/x"].dtype == file["test/x"].dtype == file["train/y"].dtype == np.uint8
        assert (file.attrs["classes"], file.attrs["scale"], file.attrs["name"]) == (len(known), 1, "out")
        named = file.attrs["vocabulary"]
        assert named == "bytes" if level == "byte" else list(named) == known
    assert ("256 bytes" if level == "byte" else f"{len(known)} characters") in prepare.said
    data = open_data(path)
    assert data.features == (length,) and vocabulary_of(path).decode(data.train.rows(0, 1)[0]) == (
        TEXT[:length] if level == "character" else TEXT.encode()[:length].decode(errors="replace")
    )
    data.close()


def test_every_token_but_the_first_of_a_part_is_a_target_once(prepare):
    with h5py.File(prepare("abcdefghij" * 5, "--length", 6, "--test-fraction", 0.3)) as file:
        for group, first, rows in (("train", 0, 5), ("test", 35, 2)):
            x, y = file[group]["x"][...], file[group]["y"][...]
            targets = np.column_stack([x[:, 1:], y])
            np.testing.assert_array_equal(targets.ravel(), (first + 1 + np.arange(6 * rows)) % 10)
            np.testing.assert_array_equal(x.ravel(), (first + np.arange(6 * rows)) % 10)


def test_many_characters_are_two_bytes_each(prepare):
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 4000)))
    path = prepare(text, "--length", 10)
    with h5py.File(path) as file:
        assert file["train/x"].dtype == file["test/y"].dtype == np.uint16 and file.attrs["classes"] == 4000
        assert "".join(file.attrs["vocabulary"]) == text
    data = open_data(path, placement="streamed")
    np.testing.assert_array_equal(data.test.rows(0, 1)[0][0], np.arange(3600, 3610))
    data.close()
    assert "4001 different characters; a data file can name 4000, so use --level byte" in prepare(text + "a")


@pytest.mark.parametrize("slab", [8 << 20, 7])  # bytes; characters lie across the ends of short ones
def test_encodings(prepare, monkeypatch, slab):
    monkeypatch.setattr(hdf5, "SLAB_BYTES", slab)
    for encoding in ("latin-1", "utf-16", "utf-8-sig"):
        text = TEXT.replace("€", "¢")
        path = prepare(text.encode(encoding), *([] if encoding == "utf-8-sig" else ["--encoding", encoding]))
        assert vocabulary_of(path).characters == sorted(set(text))  # without the byte order mark
        train, _ = tokens_of(path)
        assert vocabulary_of(path).decode(train) == text[: len(train)]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"ab\xff" * 900, [], "utf-8: byte 2 cannot be decoded; name its --encoding, or use --level byte"),
        (b"abc" * 900 + b"\xe2\x82", [], "is not utf-8: byte 2700 cannot be decoded"),
        (b"ab\xff" * 900, ["--encoding", "latin-9000"], "unknown text encoding 'latin-9000'"),
        (b"ab\xff" * 900, ["--encoding", "rot13"], "unknown text encoding 'rot13'"),
        (b"xn--0", ["--encoding", "idna"], "in.txt is not idna: "),
        (b"ab\0" * 900, [], r"holds '\x00' (character 2), which is not plain text"),
        (b"ab+2AA-" * 900, ["--encoding", "utf-7"], r"holds '\ud800' (character 2), which is not plain text"),
        ("", [], "in.txt has 0 characters; rows of 64 and a test fraction of 0.1 need 650 or more"),
        ("", ["--level", "byte"], "in.txt has 0 bytes; rows of 64 and"),
        ("ab" * 324, [], "has 648 characters; rows of 64 and a test fraction of 0.1 need 650 or more"),
        ("aaaa", [], "no other character than 'a'"),
        (TEXT, ["--length", "0"], "the length of a row must be 1 or more, not 0"),
        (TEXT, ["--length", "x"], "argument --length: invalid int value: 'x'"),
        (TEXT, ["--level", "word"], "argument --level: invalid choice: 'word'"),
        (TEXT, ["--test-fraction", "0"], "the test fraction must lie between 0 and 1"),
        (TEXT, ["--test-fraction", "nan"], "the test fraction must lie between 0 and 1"),
        (TEXT, ["--scale", "1"], "unrecognized arguments: --scale"),
        (TEXT, ["--label", "1"], "unrecognized arguments: --label"),
    ],
)
def test_refusals(prepare, monkeypatch, content, options, message):
    assert message in prepare(content, *options)
    monkeypatch.setattr(hdf5, "SLAB_BYTES", 7)
    assert message in prepare(content, *options)


@pytest.mark.parametrize("fraction", ["0.1", "0.5", "0.9", "0.29", "1e-2"])
@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("level", ["character", "byte"])
def test_the_shortest_text_that_is_named_is_enough_and_no_shorter_one(prepare, fraction, length, level):
    options = ["--length", length, "--level", level, "--test-fraction", fraction]
    least = int(prepare("ab", *options).split(" need ")[1].split()[0])
    text = "ab" * least
    with h5py.File(prepare(text[:least], *options)) as file:
        assert min(len(file[group]["x"]) for group in ("train", "test")) == 1
    assert f"need {least} or more" in prepare(text[: least - 1], *options)


@pytest.mark.parametrize("level", ["character", "byte"])
@pytest.mark.parametrize(("name", "message"), [("absent", "cannot be read: "), (".", " holds no files; name texts")])
def test_a_source_that_is_no_file(tmp_path, level, name, message):
    status, said = ends("prepare_data", ["text", str(tmp_path / name), str(tmp_path / "a.h5"), "--level", level])
    assert status == 2 and message in said and not list(tmp_path.iterdir())
