"""The vocabulary of a text: the mapping between tokens and characters or bytes.

    level        token k stands for                                           tokens
    characters   the character number k of the list                           len(list)
    bytes        the byte k; a character is one to four of them in UTF-8      256

A data file stores it in the attribute `vocabulary`: the list of characters, or the text "bytes"."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from hpcdl.errors import UsageError

BYTES = "bytes"


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
        given = np.asarray(tokens).ravel()
        if given.size and not ((given == np.floor(given)) & (given >= 0) & (given < len(self))).all():
            raise UsageError(f"tokens are whole numbers from 0 to {len(self) - 1}, unscaled and not standardized")
        numbers = given.astype(np.int64)
        if self.characters == BYTES:
            return numbers.astype(np.uint8).tobytes().decode("utf-8", "replace")
        return "".join(self.characters[number] for number in numbers.tolist())
