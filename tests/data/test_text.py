"""Text as a data set: its vocabulary there and back, the embedded one under every placement, each refusal."""

import h5py
import numpy as np
import pytest
from batches import PLACEMENTS

from hpcdl.data import open_data
from hpcdl.data.format import KNOWN, read_info, vocabulary_of
from hpcdl.data.formats.vocabulary import BYTES, Vocabulary
from hpcdl.errors import UsageError
from hpcdl.models.bigram import Bigram

WORDS = ["\n", " ", "a", "ß", "€", "🎈"]


# --- the vocabulary


def test_characters_there_and_back():
    vocabulary = Vocabulary(WORDS)
    tokens = vocabulary.encode("a ß🎈\na")
    assert tokens.dtype == np.int64 and tokens.tolist() == [2, 1, 3, 5, 0, 2]
    for given in (tokens, tokens.astype(np.float32), tokens.reshape(2, 3).astype("u1"), tokens.tolist()):
        assert vocabulary.decode(given) == "a ß🎈\na"
    assert (len(vocabulary), vocabulary.characters) == (6, WORDS)
    assert vocabulary.encode("").shape == (0,) and vocabulary.decode([]) == ""
    with pytest.raises(UsageError, match=r"the character 'b' \(place 2 of the text\) is not in the vocabulary of 6"):
        vocabulary.encode("a b")


def test_bytes_there_and_back():
    vocabulary = Vocabulary(BYTES)
    text = "".join(WORDS) + "\0"
    assert vocabulary.encode(text).tolist() == list(text.encode()) and len(vocabulary) == 256
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert vocabulary.decode(vocabulary.encode("€a")[1:]) == "\ufffd\ufffda"  # a character that is cut


@pytest.mark.parametrize("characters", [WORDS, BYTES])
def test_what_is_no_token(characters):
    vocabulary = Vocabulary(characters)
    for tokens in ([-1], [len(vocabulary)], [0.5], [np.nan], [[0, 1], [2, 1e9]]):
        with pytest.raises(UsageError, match=f"whole numbers from 0 to {len(vocabulary) - 1}"):
            vocabulary.decode(tokens)


@pytest.mark.parametrize("characters", [[], ["a", "bc"], ["a", ""], ["a", 1], "abc", ""])
def test_what_is_no_vocabulary(characters):
    with pytest.raises(UsageError, match="a list of single characters, or the text 'bytes'"):
        Vocabulary(characters)
    with pytest.raises(UsageError, match="a character twice"):
        Vocabulary(["a", "b", "a"])


# --- the file


@pytest.fixture
def text(tmp_path, write):
    """A function: a text of 40 and 10 rows of 5 tokens of 6, written by hand, with changes."""

    def make(x=None, **attributes):
        random = np.random.default_rng(2)
        arrays = [random.integers(0, 6, shape).astype("u1") for shape in ((40, 5), 40, (10, 5), 10)]
        arrays[0] = arrays[0] if x is None else x(arrays[0])
        path = tmp_path / "text.h5"
        path.unlink(missing_ok=True)
        return write(path, *arrays, **{"scale": 1, "classes": 6, "vocabulary": WORDS} | attributes)

    return make


def test_vocabulary_of(text, file):
    assert vocabulary_of(text()).characters == WORDS
    assert vocabulary_of(text(vocabulary=[character.encode() for character in WORDS])).characters == WORDS
    assert vocabulary_of(text(vocabulary="bytes", classes=256)).characters == BYTES
    assert vocabulary_of(file) is None and vocabulary_of("digits") is None
    assert open_data(file).vocabulary is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": 7}, "classes is 7 and scale 1, but the vocabulary has 6 tokens"),
        ({"scale": 0.5}, "classes is 6 and scale 0.5, but"),
        ({"vocabulary": "bytes"}, "classes is 6 and scale 1, but the vocabulary has 256 tokens"),
        ({"vocabulary": ["ab"] * 6}, "the attribute vocabulary: a vocabulary is a list"),
        ({"vocabulary": ["a"] * 6}, "the attribute vocabulary: .* a character twice"),
        ({"vocabulary": "abcdef"}, "the attribute vocabulary: a vocabulary is a list"),
        ({"x": lambda x: x.astype("i1")}, "train/x is int8 of shape"),
        ({"x": lambda x: x.astype("f4")}, "train/x is float32 of shape"),
    ],
)
def test_bad_files_are_refused(text, changes, message):
    with pytest.raises(UsageError, match=message):
        read_info(text(**changes))


@pytest.mark.parametrize("place", PLACEMENTS)
def test_a_token_outside_the_vocabulary_is_refused(text, place):
    def spoil(x):
        x[17, 3] = 6
        return x

    with pytest.raises(UsageError, match="train/x has the token 6 in row 17; the 6 tokens of the vocabulary are"):
        data = open_data(text(spoil), placement=place)
        list(data.batches(0, 10))


def test_what_makes_no_sense_for_text(text):
    for options, message in (({"standardize": True}, "cannot be standardized"), ({"augment": "flip"}, "needs images")):
        with pytest.raises(UsageError, match=message):
            open_data(text(), **options)


# --- the embedded one


def test_the_embedded_text():
    data = open_data("text")
    assert (data.name, data.features, data.classes) == ("text", (64,), 105)
    assert (data.train.examples, data.test.examples, data.train.source.x.dtype) == (21745, 2416, np.uint8)
    x, y = data.train.rows(0, 21745)
    np.testing.assert_array_equal(y[:-1], x[1:, 0])  # rows one after the other: what follows a row begins the next
    read = data.vocabulary.decode(x)
    assert read.startswith("# Changelog\n\n## 0.1.0 (unreleased)\n") and len(read) == 21745 * 64
    assert data.vocabulary.decode(data.vocabulary.encode(read[:5000])) == read[:5000]
    characters = data.vocabulary.characters
    test = data.vocabulary.decode(data.test.rows(0, 2416)[0])
    assert characters == sorted(characters) and set(read + test) == set(characters)
    assert KNOWN["text"].stat().st_size < 600_000
    with h5py.File(KNOWN["text"]) as file:
        assert "BSD-3-Clause" in file.attrs["source"] and file["train/x"].compression == "gzip"
    model = Bigram.fit(data.train, data.classes)  # far better than a guess of one in 105
    assert 2 < model.loss(data.train) < model.loss(data.test) < 3 < np.log(data.classes)
    data.close()
