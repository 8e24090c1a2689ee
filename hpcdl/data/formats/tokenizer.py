"""Tokenizers: text becomes numbers, by characters, bytes or a tokenizer of the library `tokenizers`.

    chars, bytes        a character, a byte; a line end lies between documents
    bpe:N               byte-level byte-pair encoding of N tokens, which splits words as GPT-2 does; no unknown token
    wordpiece:N         WordPiece of N tokens with BERT's words, in lower case; other characters are unknown
    FILE.json           a tokenizer of the library; DATA.h5, that of a data file
    <|end|>             the token between documents; of FILE.json that of END which it has, else one that is added

No token crosses the words of WORDS, of which text has few different ones: each is encoded once and kept. Tokens are
those of one call of the library, several times as fast. (Sennrich et al., "Neural machine translation of rare words
with subword units", ACL 2016; Radford et al., "Language models are unsupervised multitask learners", 2019; Schuster and
Nakajima, "Japanese and Korean voice search", ICASSP 2012)"""

import itertools
import json
import os
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from hpcdl.data.format import find_data_file, read_info
from hpcdl.data.formats.documents import SPACE
from hpcdl.data.formats.vocabulary import BYTES, END, TokenizerVocabulary, Vocabulary, load_tokenizer
from hpcdl.errors import UsageError, blamed_on

TRAINED = ("bpe", "wordpiece")
LEAST_TOKENS = {"bpe": 257, "wordpiece": 3}  # all bytes and the end; end, unknown and a character
BEYOND = 0x110000  # number of Unicode code points
WORDS = {  # words that no token crosses, by the kind of pre-tokenizer
    # A word with the space before it, or blanks but for the last one: GPT-2's pattern cuts at all these places.
    "ByteLevel": re.compile(rf" ?[^{SPACE}]+|[{SPACE}]+(?![^{SPACE}])|[{SPACE}]"),
    # BERT's normalizer drops other blanks, and joins what is beside them.
    "BertPreTokenizer": re.compile(r"[^ \t\n\r]+|[ \t\n\r]+"),
}
LONG_WORD = 64  # characters of a word that is not kept
MOST_WORDS = 1 << 19  # words that are kept, about 100 MB


def one_thread() -> None:
    """Keep the library to one thread; each rank has a core. Before its first import."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"


class Encoder:
    """Text into tokens. vocabulary: of the tokens. end: the tokens between documents. kind: smallest unsigned type."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary, self.kind = vocabulary, np.min_scalar_type(len(vocabulary) - 1)
        self.end = self.encode("\n")

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, of type `kind`."""
        raise NotImplementedError


class Characters(Encoder):
    """Characters, numbered by code point, or bytes. known: the code points, sorted; None: bytes."""

    def __init__(self, known: np.ndarray | None):
        self.known = known
        super().__init__(Vocabulary(BYTES if known is None else map(chr, known.tolist())))

    def encode(self, text: str) -> np.ndarray:
        if self.known is None:
            return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)
        return np.searchsorted(self.known, code_points(text)).astype(self.kind)


def code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


class Tokenizer(Encoder):
    """A tokenizer of the library. text: its JSON, which `vocabulary_text` has returned."""

    def __init__(self, text: str):
        about = json.loads(text)
        self.tokenizer, self.words = load_tokenizer(text), dict[str, tuple[int, ...]]()
        self.tokenizer.encode_special_tokens = True  # a document that names one does not hold one
        self.pattern = words_of(about)
        self.vocabulary = vocabulary = TokenizerVocabulary(text)
        self.kind = np.min_scalar_type(len(vocabulary) - 1)
        self.end = np.array([self.tokenizer.token_to_id(vocabulary.end)], self.kind)

    def encode(self, text: str) -> np.ndarray:
        if self.pattern is None:
            return np.array(self._encode([text])[0], self.kind)
        words, known = self.pattern.findall(text), self.words
        if new := list(dict.fromkeys(word for word in words if word not in known)):
            if len(known) + len(new) > MOST_WORDS:
                known.clear()
                new = list(dict.fromkeys(words))
            known.update(zip(new, map(tuple, self._encode(new)), strict=True))
        tokens = np.fromiter(itertools.chain.from_iterable(map(known.__getitem__, words)), self.kind)
        for word in new:
            if len(word) > LONG_WORD:
                del known[word]
        return tokens

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [found.ids for found in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def words_of(about: dict) -> re.Pattern | None:
    """Return the pattern of words that no token of a tokenizer crosses; None: unknown. about: its JSON."""
    words, normal = about.get("pre_tokenizer") or {}, about.get("normalizer")
    kind = words.get("type")
    gpt = kind == "ByteLevel" and not words.get("add_prefix_space") and words.get("use_regex", True) and normal is None
    bert = kind == "BertPreTokenizer" and (normal is None or normal.get("type") == "BertNormalizer")
    texts = any(not each.get("special") for each in about.get("added_tokens") or [])
    return WORDS[kind] if (gpt or bert) and not texts else None


def vocabulary_text(spec: str) -> str:
    """Return the JSON of the tokenizer in FILE.json or in a data file, with an end of documents; UsageError."""
    if not spec.endswith(".json"):
        vocabulary = read_info(find_data_file(spec)).vocabulary
        if not isinstance(vocabulary, TokenizerVocabulary):
            raise UsageError(f"--tokenizer {spec}: the data have no tokenizer; name a FILE.json, or bpe:8192")
        return vocabulary.text
    with blamed_on(f"--tokenizer {spec} cannot be read"), open(spec, encoding="utf-8") as file:
        text = file.read()
    try:
        vocabulary = TokenizerVocabulary(text)
        tokenizer = load_tokenizer(text)
    except UsageError as error:
        raise UsageError(f"--tokenizer {spec}: {error}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if not vocabulary.end:
        tokenizer.add_special_tokens([END[0]])
    return str(tokenizer.to_str())


def trained(kind: str, count: int, texts: Iterable[str]) -> str:
    """Return the JSON of a tokenizer of `count` tokens or fewer that learned from texts. kind: bpe or wordpiece."""
    from tokenizers import Tokenizer as New
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    about: dict[str, Any] = {"vocab_size": count, "show_progress": False}
    if kind == "bpe":
        made = New(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(special_tokens=[END[0]], initial_alphabet=alphabet, **about)
    else:
        made = New(models.WordPiece(unk_token="[UNK]"))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(special_tokens=[END[0], "[UNK]"], limit_alphabet=count // 2, **about)
    made.train_from_iterator(texts, trainer)
    return str(made.to_str())


def parse_spec(spec: str) -> tuple[str, int]:
    """Return (chars, 0), (bytes, 0), (bpe or wordpiece, number of tokens) or ("", 0): a file. Raises UsageError."""
    kind, _, count = spec.partition(":")
    if spec in ("chars", "bytes"):
        return spec, 0
    if kind in TRAINED:
        if not count.isdecimal() or not LEAST_TOKENS[kind] <= int(count) <= 1 << 20:
            least = LEAST_TOKENS[kind]
            raise UsageError(
                f"--tokenizer {spec}: write {kind}:N for N tokens, from {least} to {1 << 20}, as {kind}:8192"
            )
        return kind, int(count)
    if spec.endswith((".json", ".h5", "/")):
        return "", 0
    raise UsageError(f"--tokenizer is bpe:N, wordpiece:N, FILE.json, DATA.h5, chars or bytes, not {spec!r}")
