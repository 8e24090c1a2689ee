"""A text of any length from a grammar: python tests/soak/corpus.py FOLDER BYTES [SEED]

    document  -> sentence ...                 3 to 60 sentences, about one topic
    sentence  -> FORMS: patterns of words     "the ADJECTIVE NOUN VERBs the NOUN ."
    a word    -> of its class, by the law of Zipf and Mandelbrot: P(rank r) ~ 1 / (r + 2.7)^1.1; a third of the nouns
                 are those of the topic

FOLDER gets files part-000.jsonl, part-001.jsonl, ... of 32 MB, a line {"text": ...} for each document. Equal seeds give
equal files; a longer text begins with the shorter one. A corpus of real text would have to be downloaded."""

import json
import sys
from pathlib import Path

import numpy as np

FILE_BYTES = 32 << 20
BLOCK = 256  # documents that are drawn at once
CLASSES = {"N": 16000, "V": 6000, "A": 6000, "D": 1500, "P": 4000}  # nouns, verbs, adjectives, adverbs, names
FORMS = [
    "the N V+s the N .",
    "the A N V+s the A N .",
    "P V+s the N and the N .",
    "the N of the N V+s D .",
    "P , who V+s the N , V+s the A N .",
    "when the N V+s , the N V+s D .",
    "the N+s V the N , but P V+s the A N of P .",
    "in the N of P , many N+s V D .",
    '" the N V+s , " says P , " and the N+s V . "',
    "it is A that the N+s of the N V .",
]
TOPICS, TOPIC_NOUNS, TOPIC_SHARE = 400, 60, 0.33
CONSONANTS, VOWELS = "b c d f g h k l m n p r s t v st tr pl gr ch", "a e i o u ai ea ou"


def made_words(random: np.random.Generator, count: int) -> list[str]:
    """Return `count` different words of one to four syllables, the frequent ones short."""
    words: dict[str, None] = {}
    consonants, vowels = CONSONANTS.split(), VOWELS.split()
    while len(words) < count:
        syllables = 1 + min(3, int(random.integers(0, 1 + len(words) * 4 // count + 1)))
        parts = (random.choice(consonants) + random.choice(vowels) for _ in range(syllables))
        words["".join(parts) + random.choice(["", "n", "r", "l", "t"])] = None
    return list(words)


class Grammar:
    """Documents in blocks of BLOCK: those of a block depend on the seed and the block's number alone."""

    def __init__(self, seed: int):
        self.seed, random = seed, np.random.default_rng([seed, 0])
        fixed = {word: k for k, word in enumerate(dict.fromkeys(" ".join(FORMS).split())) if word[0] not in CLASSES}
        words, self.first, self.limits = made_words(random, sum(CLASSES.values())), {}, {}
        texts, start = list(fixed), 0
        for kind, count in CLASSES.items():
            own = words[start : start + count]
            own = [each.capitalize() for each in own] if kind == "P" else own
            self.first[kind] = len(texts), len(texts) + count  # of words as they are, and with an s
            texts += own + [f"{each}s" for each in own]
            weights = 1 / (np.arange(1, count + 1) + 2.7) ** 1.1
            self.limits[kind] = np.cumsum(weights) / weights.sum()
            start += count
        self.texts = [f" {each}" if each not in ".," else each for each in texts]
        number = {word: k for k, word in enumerate(fixed)}
        # A part of a form: the number of a word, or -1 - (2 kind + ending).
        kinds = {
            form: -1 - (2 * k + plural)
            for k, kind in enumerate(CLASSES)
            for plural, form in ((0, kind), (1, kind + "+s"))
        }
        coded = [[number[part] if part in number else kinds[part] for part in form.split()] for form in FORMS]
        self.lengths, self.parts = np.array([len(form) for form in coded]), np.concatenate(coded)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.favour = np.cumsum(1 / np.arange(1, len(FORMS) + 1))
        self.topics = random.integers(0, CLASSES["N"], (TOPICS, TOPIC_NOUNS))

    def documents(self, block: int) -> list[str]:
        random = np.random.default_rng([self.seed, 1, block])
        sentences = 3 + np.minimum(57, random.exponential(12, BLOCK).astype(int))
        form = np.searchsorted(self.favour, random.random(sentences.sum()) * self.favour[-1])
        ends = np.cumsum(self.lengths[form])
        places = np.arange(ends[-1]) - np.repeat(ends - self.lengths[form] - self.starts[form], self.lengths[form])
        words = self.parts[places]
        stops = ends[np.cumsum(sentences) - 1]
        document = np.repeat(np.arange(BLOCK), np.diff(stops, prepend=0))
        topic = self.topics[random.integers(TOPICS, size=BLOCK)]
        for k, kind in enumerate(CLASSES):
            for plural in (0, 1):
                at = np.flatnonzero(words == -1 - (2 * k + plural))
                rank = np.searchsorted(self.limits[kind], random.random(len(at)))
                if kind == "N":
                    near = np.minimum(random.exponential(8, len(at)).astype(int), TOPIC_NOUNS - 1)
                    rank = np.where(random.random(len(at)) < TOPIC_SHARE, topic[document[at], near], rank)
                words[at] = self.first[kind][plural] + rank
        texts = [self.texts[word] for word in words.tolist()]
        starts = [0, *stops[:-1].tolist()]
        return ["".join(texts[a:b])[1:] for a, b in zip(starts, stops.tolist(), strict=True)]


def write_corpus(folder: Path, size: int, seed: int = 1) -> int:
    """Write files of `size` bytes in all, to a document; return the number of documents."""
    grammar, number, written = Grammar(seed), 0, 0
    folder.mkdir(parents=True, exist_ok=True)
    made: list[str] = []
    for part in range(-(-size // FILE_BYTES)):
        with open(folder / f"part-{part:03}.jsonl", "w", encoding="ascii") as file:
            end = min(size, (part + 1) * FILE_BYTES)
            while written < end:
                if number % BLOCK == 0:
                    made = grammar.documents(number // BLOCK)
                written += file.write(json.dumps({"text": made[number % BLOCK]}) + "\n")
                number += 1
    return number


if __name__ == "__main__":
    folder, size, *seed = sys.argv[1:]
    print(f"{write_corpus(Path(folder), int(float(size)), *map(int, seed))} documents")
