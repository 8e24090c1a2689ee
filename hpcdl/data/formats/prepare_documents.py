"""Preparation of documents of text: rows of tokens, each with the token that follows.

    documents   a a a a a a a / b b b / c c c c c c c c c      of all sources in order; the last ones are for the test
    packed      a a a a|a a a .|b b b .|c c c c|c c c c        rows of 4; `.` is the token between documents
    documents   a a a a|c c c c|c c c c                        each document begins a row; rests are left out

    row         tokens t[k L] ... t[(k + 1) L - 1] of a stream, and the token t[(k + 1) L] that follows
    a stream    packed: the documents of a piece (documents.py) on one side; documents: one document, with its end

A stream of n tokens has (n - 1) // L rows; of the rest each token is left out. A single document is divided between
training and test by its tokens (prepare_text.py). Each rank reads, encodes and writes whole shards: pieces that follow
one another. Memory holds a part of a text, and of each shard the targets; tokens wait in a temporary file."""

import dataclasses
import glob
import hashlib
import itertools
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from hpcdl.data.format import Info
from hpcdl.data.formats import documents
from hpcdl.data.formats.documents import DocumentSpan, Part, TextOptions, find_sources, kind_of, survey
from hpcdl.data.formats.prepare import MOST_NAMES, Groups, Output
from hpcdl.data.formats.prepare_text import LEVELS, check_rows, prepare_text, rows_of, token_groups
from hpcdl.data.formats.shard_writer import ShardWriter, source_states
from hpcdl.data.formats.tokenizer import (
    BEYOND,
    TRAINED,
    Characters,
    Encoder,
    Tokenizer,
    code_points,
    one_thread,
    parse_spec,
    trained,
    vocabulary_text,
)
from hpcdl.data.hdf5 import FilePath
from hpcdl.data.placement import Comm, on_first_rank, run_together
from hpcdl.errors import UsageError, unknown
from hpcdl.formatting import counted

ROWS = ("packed", "documents")
MOST_LISTED = 100  # sources that a recipe names one by one
BY_LEVEL = dict(zip(LEVELS, ("chars", "bytes"), strict=True))


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The documents of sources. pieces: spans that are read together. first_test: number of the first test document."""

    options: TextOptions
    files: list[str]
    pieces: list[list[DocumentSpan]]
    documents: int
    first_test: int
    bytes: int

    @property
    def single(self) -> bool:
        return self.documents == 1

    def parts(self, piece: list[DocumentSpan]) -> Iterator[Part]:
        """Yield the parts of the documents of a piece."""
        for span in piece:
            yield from documents.read(span, self.options)


def prepare_documents(
    sources: FilePath | Sequence[FilePath],
    output: Output,
    *,
    length: int = 64,
    level: str | None = None,
    tokenizer: str | None = None,
    tokenizer_sample: int = 64_000_000,
    rows: str = "packed",
    document_separator: str | None = None,
    field: str = "text",
    test_fraction: float = 0.1,
    encoding: str = "utf-8",
    comm: Comm = None,
) -> Info:
    """Make a data set of texts: rows of `length` tokens. Collective over `comm`; UsageError on all ranks.

    tokenizer         chars (default), bytes, bpe:N, wordpiece:N, FILE.json or DATA.h5 (tokenizer.py); level: character
                      or byte, instead
    tokenizer_sample  bytes of training documents from which bpe and wordpiece learn: the first of each piece
    rows              packed or documents (above)
    test_fraction     of the documents, the last ones, or of a single document's tokens
    document_separator, field, encoding   as of documents.TextOptions"""
    named = [sources] if isinstance(sources, str | os.PathLike) else [*sources]
    spec = tokenizer or BY_LEVEL.get(level or LEVELS[0], "")
    kind, count = run_together(comm, lambda: _checked(spec, level, tokenizer, rows, length, test_fraction))
    one_thread()
    if kind in BY_LEVEL.values() and rows == "packed" and document_separator is None and _is_plain(named):

        def whole_file() -> Info:
            level = LEVELS[[*BY_LEVEL.values()].index(kind)]
            return prepare_text(
                named[0], output, length=length, level=level, test_fraction=test_fraction, encoding=encoding
            )

        return on_first_rank(comm, whole_file)  # type: ignore[no-any-return]
    errors = "surrogateescape" if kind == "bytes" else "strict"
    options = TextOptions(document_separator, field, encoding, errors)
    corpus = _plan(named, options, test_fraction, comm)
    encoder = _encoder(corpus, spec, kind, count, tokenizer_sample, test_fraction, comm)
    shards = (
        [*grouped(corpus.pieces, _bytes, output.shard_size)] if output.folder else [[each] for each in corpus.pieces]
    )
    recipe = _recipe(corpus, encoder) | {"length": length, "rows": rows, "test_fraction": test_fraction}
    writer = ShardWriter(output, recipe, len(shards), comm)

    def write() -> None:
        for number in writer.missing():
            shard = TokenShard(corpus, encoder, length, rows)
            with (
                tempfile.TemporaryFile(dir=output.path.parent) as train,
                tempfile.TemporaryFile(dir=output.path.parent) as test,
            ):
                groups = (
                    shard.single_groups(train, Fraction(str(test_fraction)))
                    if corpus.single
                    else shard.groups(shards[number], {"train": train, "test": test})
                )
                about = {"vocabulary": encoder.vocabulary, "token_bytes": shard.token_bytes(groups)}
                classes = len(encoder.vocabulary)
                writer.write(number, groups, encoder.kind, 1.0, None, classes, counts=shard.counts, **about)

    try:
        run_together(comm, write)
    except UsageError:
        writer.give_up()
        raise
    info = writer.finish()
    output.summary += _summary(corpus, info, writer.counts, spec)
    return info


def _checked(
    spec: str, level: str | None, tokenizer: str | None, rows: str, length: int, fraction: float
) -> tuple[str, int]:
    check_rows(length, fraction)
    if level and level not in LEVELS:
        raise unknown("level", level, LEVELS)
    if level and tokenizer:
        raise UsageError(f"--tokenizer {tokenizer} and --level {level} say the same: give one of them")
    if rows not in ROWS:
        raise unknown("kind of rows", rows, ROWS)
    return parse_spec(spec)


def _is_plain(sources: Sequence[FilePath]) -> bool:
    """True for a single file of plain text, which may not exist."""
    name = str(sources[0])
    packed = name.lower().endswith(documents.PACKED)
    pattern = glob.has_magic(name) and not os.path.exists(name)
    return len(sources) == 1 and not (os.path.isdir(name) or pattern or packed) and kind_of(name) == "plain"


def grouped(items: Iterable[Any], size_of: Any, size: int) -> Iterator[list[Any]]:
    """Yield lists of items that follow one another, of `size` or more together; the last one may be smaller."""
    group, total = [], 0
    for item in items:
        group.append(item)
        total += size_of(item)
        if total >= size:
            yield group
            group, total = [], 0
    if group:
        yield group


def _bytes(piece: list[DocumentSpan]) -> int:
    return sum(span.bytes for span in piece)


def _plan(sources: Sequence[FilePath], options: TextOptions, test_fraction: float, comm: Comm) -> Corpus:
    """Return the documents; each rank looks at some files. Collective."""
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    files = run_together(comm, lambda: find_sources(sources))
    mine = run_together(comm, lambda: {at: survey(files[at], options) for at in range(rank, len(files), size)})
    found = mine if comm is None else {at: spans for each in comm.allgather(mine) for at, spans in each.items()}
    spans, total = list[DocumentSpan](), 0
    for at in range(len(files)):
        spans += [span._replace(first=span.first + total) for span in found[at]]
        total += sum(span.documents for span in found[at])
    if not total:
        raise UsageError(f"{', '.join(map(str, sources))}: there is no document in it")
    first_test = total - max(1, int(total * Fraction(str(test_fraction))))
    pieces = [*grouped(spans, lambda span: span.bytes, documents.PIECE)]
    return Corpus(options, files, pieces, total, first_test, sum(span.bytes for span in spans))


def _encoder(
    corpus: Corpus, spec: str, kind: str, count: int, sample: int, test_fraction: float, comm: Comm
) -> Encoder:
    """Return the encoder of all documents. Collective: rank 0 reads or trains a tokenizer for all."""
    if kind == "bytes":
        return Characters(None)
    if kind == "chars":
        return Characters(_known_characters(corpus, comm))

    def make() -> str:
        if kind not in TRAINED:
            return vocabulary_text(spec)
        try:
            import tokenizers  # noqa: F401
        except ImportError:
            raise UsageError(f"--tokenizer {spec} needs the package tokenizers: pip install 'hpcdl[text]'") from None
        return trained(kind, count, sample_of(corpus, sample, test_fraction))

    text = on_first_rank(comm, make)
    return run_together(comm, lambda: Tokenizer(text))  # type: ignore[no-any-return]


def sample_of(corpus: Corpus, sample: int, test_fraction: float) -> Iterator[str]:
    """Yield the first training documents of each piece, `sample` characters in all, or all of them."""
    share = min(sample / corpus.bytes, 1 - test_fraction if corpus.single else 1.0)
    for piece in corpus.pieces:
        left = math.ceil(share * _bytes(piece))
        for part in corpus.parts(piece):
            if left <= 0 or (part.document >= corpus.first_test and not corpus.single):
                break
            yield part.text[:left] if corpus.single else part.text
            left -= len(part.text)


def _known_characters(corpus: Corpus, comm: Comm) -> np.ndarray:
    """Return the code points of all documents, sorted; each rank reads some pieces. Collective."""
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    seen = np.zeros(BEYOND, bool)
    seen[ord("\n")] = True

    def look() -> None:
        for piece in corpus.pieces[rank::size]:
            for part in corpus.parts(piece):
                seen[code_points(part.text)] = True
            odd = np.flatnonzero(seen[:1].tolist() + seen[0xD800:0xE000].tolist())
            if len(odd):
                character = "\0" if odd[0] == 0 else chr(0xD7FF + int(odd[0]))
                files = ", ".join(dict.fromkeys(span.path for span in piece))
                todo = "leave it out, or use --tokenizer bytes"
                raise UsageError(f"{documents.shown(files, 200)} holds {character!r}, which is not plain text; {todo}")

    run_together(comm, look)
    if comm is not None:
        for other in comm.allgather(np.flatnonzero(seen)):
            seen[other] = True
    known = np.flatnonzero(seen)
    if len(known) > MOST_NAMES:
        most = f"a data file can name {MOST_NAMES}, so use --tokenizer bytes or bpe:8192"
        raise UsageError(f"the texts have {len(known)} different characters; {most}")
    return known


def _recipe(corpus: Corpus, encoder: Encoder) -> dict[str, Any]:
    """Return what decides the content of the shards: sources, with sizes and times, and the vocabulary."""
    sources: Any = source_states(corpus.files)
    if len(sources) > MOST_LISTED:
        sources = {"files": len(sources), "digest": hashlib.sha256(repr(sources).encode()).hexdigest()}
    vocabulary = hashlib.sha256(repr(encoder.vocabulary.description).encode()).hexdigest()
    return {"kind": "text", "sources": sources, "vocabulary": vocabulary} | dataclasses.asdict(corpus.options)


class Stream:
    """Rows of a group of a shard, written to a file. ends: called after each stream."""

    def __init__(self, file: Any, length: int, kind: np.dtype):
        self.file, self.length, self.kind = file, length, kind
        self.rest, self.begun = np.empty(0, kind), False
        self.y, self.documents, self.rows = list[np.ndarray](), list[np.ndarray](), 0
        self.tokens, self.dropped, self.bytes = 0, 0, 0

    def add(self, tokens: np.ndarray, document: int) -> None:
        """Add the next tokens of the stream, of this document."""
        self.tokens += len(tokens)
        pending = np.concatenate([self.rest, tokens])
        rows = max(0, len(pending) - 1) // self.length
        if rows:
            self.file.write(pending[: rows * self.length].tobytes())
            self.y.append(pending[self.length : rows * self.length + 1 : self.length].copy())
            self.documents.append(np.full(rows, document))
            self.rows, self.begun = self.rows + rows, True
        self.rest = pending[rows * self.length :].copy()

    def end(self) -> bool:
        """End the stream: its rest is left out. Returns True if it had a row."""
        self.dropped += len(self.rest) - self.begun
        begun, self.begun, self.rest = self.begun, False, self.rest[:0]
        return begun

    def group(self, by_document: bool) -> Any:
        """Return the group of the rows, for `Output.write_file`."""
        self.file.flush()
        x = np.memmap(self.file, self.kind, "r", shape=(self.rows * self.length,))
        columns = {"document": np.concatenate(self.documents)} if by_document else {}
        return (
            (self.rows, self.length),
            rows_of(lambda which: x[which], 0, self.rows, self.length),
            np.concatenate(self.y),
            columns,
        )


class TokenShard:
    """The rows of a shard. counts: bytes and tokens by group, tokens left out, and documents shorter than a row."""

    def __init__(self, corpus: Corpus, encoder: Encoder, length: int, rows: str):
        self.corpus, self.encoder, self.length, self.by_document = corpus, encoder, length, rows == "documents"
        self.counts: Counter[str] = Counter()

    def groups(self, pieces: list[list[DocumentSpan]], files: dict[str, Any]) -> Groups:
        """Return the groups of pieces of several documents. files: temporary ones, for the rows of train and test."""
        streams = {name: Stream(file, self.length, self.encoder.kind) for name, file in files.items()}
        end, by_document = self.encoder.end, self.by_document
        for piece in pieces:
            behind: Stream | None = None  # the stream that has a document before this one
            for number, parts in itertools.groupby(self.corpus.parts(piece), lambda part: part.document):
                stream = streams["test" if number >= self.corpus.first_test else "train"]
                if not by_document and behind is stream:
                    stream.add(end, number)
                for part in parts:
                    stream.bytes += byte_count(part.text)
                    stream.add(self.encoder.encode(part.text), number)
                if by_document:
                    stream.add(end, number)
                    self.counts["short"] += not stream.end()
                behind = stream
            for stream in streams.values():
                stream.end()
        for name, stream in streams.items():
            self.counts[f"{name}_tokens"], self.counts[f"{name}_bytes"] = stream.tokens, stream.bytes
            self.counts["left_out"] += stream.dropped
        found: Groups = {}
        for name, stream in streams.items():
            if stream.rows:
                found[name] = stream.group(by_document and name == "train")
        return found

    def single_groups(self, file: Any, fraction: Fraction) -> Groups:
        """Return the groups of a single document, divided by its tokens. file: a temporary one for the tokens."""
        ((span,),) = self.corpus.pieces
        count = total = 0
        for part in self.corpus.parts([span]):
            tokens = self.encoder.encode(part.text)
            file.write(tokens.tobytes())
            count, total = count + len(tokens), total + byte_count(part.text)
        file.flush()
        what = self.encoder.vocabulary.kind
        tokens = np.memmap(file, self.encoder.kind, "r", shape=(count,)) if count else np.empty(0, self.encoder.kind)
        groups = token_groups(span.path, count, lambda which: np.array(tokens[which]), what, self.length, fraction)
        if self.by_document:
            shape, x, y, _ = groups["train"]
            groups["train"] = shape, x, y, {"document": np.zeros(shape[0], np.int64)}
        used = sum(shape[0] * self.length + 1 for shape, *_ in groups.values())
        self.counts["left_out"] += count - used
        for name in groups:  # the ratio is that of the whole text
            self.counts[f"{name}_tokens"], self.counts[f"{name}_bytes"] = count, total
        return groups

    def token_bytes(self, groups: Groups) -> dict[str, float]:
        """Return the bytes of text per token, by group."""
        return {name: self.counts[f"{name}_bytes"] / self.counts[f"{name}_tokens"] for name in groups}


def byte_count(text: str) -> int:
    """Return the number of bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogateescape"))


def _summary(corpus: Corpus, info: Info, counts: Counter[str], spec: str) -> list[str]:
    """Return phrases about the texts, for prepare-data's line."""
    said = [f"{counted(corpus.documents, 'document', ',')} by {spec}"]
    if ratio := (info.schema.token_bytes or {}).get("train"):
        said.append(f"{ratio:.4g} bytes a token")
    if left_out := counts["left_out"]:
        all_tokens = sum(counts[f"{name}_tokens"] for name in ("train", "test")) // (2 if corpus.single else 1)
        said.append(f"{left_out:,} of {all_tokens:,} tokens, of rests shorter than a row, left out")
    if counts["short"]:
        said.append(f"{counted(counts['short'], 'document', ',')} shorter than a row left out")
    empty = [name for name in ("train", "test") if not info.rows[name]]
    if empty:
        said.append(f"no {empty[0]} rows, as no document of that part has a whole row")
    return said
