"""The vocabulary of a text: the mapping between tokens and characters, bytes or parts of words.

    level        token k stands for                                           tokens
    characters   the character number k of the list                           len(list)
    bytes        the byte k; a character is one to four of them in UTF-8      256
    tokenizer    the token with the id k of a tokenizer                       largest id + 1

A data file stores it in the attribute `vocabulary`: the list of characters, or the text "bytes"; or in the data set
`tokenizer`: the JSON of the library `tokenizers`, as bytes, for attributes end at 64 KiB. The library is imported when
text is encoded or decoded; training needs the number of tokens alone."""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import parse_json

BYTES = "bytes"
END = ("<|end|>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # names of a token that ends documents
MOST_TOKENS = 1 << 24  # as there can be classes


class Vocabulary:
    """What tokens 0 and up stand for. characters: a list without repetitions, or BYTES; UsageError for other values."""

    def __init__(self, characters: Iterable[str] | str):
        self.characters = characters if isinstance(characters, str) else list(characters)
        self.numbers: dict[str, int] = {}
        if not isinstance(characters, str):
            self.numbers = {character: number for number, character in enumerate(self.characters)}
            if not self.characters or any(not isinstance(each, str) or len(each) != 1 for each in self.characters):
                raise UsageError(f"a vocabulary is a list of single characters, or the text {BYTES!r}")
            if len(self.numbers) < len(self.characters):
                raise UsageError("a vocabulary must not hold a character twice")
        elif characters != BYTES:
            given = characters[:60]
            raise UsageError(f"a vocabulary is a list of single characters, or the text {BYTES!r}, not {given!r}")

    @property
    def description(self) -> Any:
        """The vocabulary as JSON data, which `vocabulary_from` reads."""
        return self.characters

    @property
    def kind(self) -> str:
        """What a token is, as a noun."""
        return "byte" if self.characters == BYTES else "character"

    def __len__(self) -> int:
        return 256 if self.characters == BYTES else len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, int64 (tokens,); UsageError for an unknown character."""
        if self.characters == BYTES:
            return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.int64)
        try:
            return np.array([self.numbers[character] for character in text], np.int64)
        except KeyError as error:
            character = error.args[0]
            where = f"(place {text.index(character)} of the text) is not in the vocabulary of {len(self)} characters"
            todo = "leave it out, or train on a text that has it"
            raise UsageError(f"the character {character!r} {where}; {todo}") from None

    def decode(self, tokens: ArrayLike) -> str:
        """Return the text of tokens: integers 0 ... len - 1 of any type and shape (read row by row). Invalid UTF-8 (of
        a cut character) becomes the replacement character. UsageError for a number that is no token."""
        numbers = self.numbers_of(tokens)
        if self.characters == BYTES:
            return numbers.astype(np.uint8).tobytes().decode("utf-8", "replace")
        return "".join(self.characters[number] for number in numbers.tolist())

    def numbers_of(self, tokens: ArrayLike) -> np.ndarray:
        """Return tokens as int64 (tokens,); UsageError for a number that is no token."""
        given = np.asarray(tokens).ravel()
        if given.size and not ((given == np.floor(given)) & (given >= 0) & (given < len(self))).all():
            raise UsageError(f"tokens are whole numbers from 0 to {len(self) - 1}, unscaled and not standardized")
        return given.astype(np.int64)


class TokenizerVocabulary(Vocabulary):
    """The vocabulary of a tokenizer. text: its JSON. UsageError if it is none."""

    kind = "token"

    def __init__(self, text: str):
        self.text = text
        with blamed_on("a tokenizer is the JSON of the library tokenizers, which this is not"):
            about = parse_json(text)
            entries, added = about["model"]["vocab"], about.get("added_tokens") or []
            numbers = entries.values() if isinstance(entries, dict) else range(len(entries))
            self.count = max([*numbers, *(each["id"] for each in added)]) + 1
            if type(self.count) is not int or not 1 < self.count <= MOST_TOKENS:
                raise ValueError(f"its tokens are numbered up to {self.count - 1}")

    @property
    def description(self) -> Any:
        return {"tokenizer": self.text}

    def __len__(self) -> int:
        return self.count

    @property
    def end(self) -> str:
        """The name of the token that ends a document; "" if there is none."""
        special = {each["content"] for each in parse_json(self.text).get("added_tokens") or [] if each.get("special")}
        return next((name for name in END if name in special), "")

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, an object of the library; UsageError if the library is missing."""
        return load_tokenizer(self.text)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, int64 (tokens,); special tokens, as <|end|>, may stand in it by their names."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, tokens: ArrayLike) -> str:
        """Return the text of tokens, with the names of special ones; other facts: as of `Vocabulary.decode`."""
        return self.tokenizer.decode(self.numbers_of(tokens).tolist(), skip_special_tokens=False)  # type: ignore


def load_tokenizer(text: str) -> Any:
    """Return the tokenizer of the library `tokenizers` that this JSON describes; UsageError."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError("text in tokens needs the package tokenizers: pip install 'hpcdl[text]'") from None
    with blamed_on("the tokenizer cannot be read"):
        return Tokenizer.from_str(text)


def vocabulary_from(description: Any) -> Vocabulary:
    """Return the vocabulary that `description` gave; UsageError for other values."""
    if isinstance(description, dict):
        return TokenizerVocabulary(str(description.get("tokenizer")))
    return Vocabulary(description)
