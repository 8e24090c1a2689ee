"""Documents of text in files, folders and patterns, read as streams: plain text, JSON lines, Parquet; .gz and .zst.

    source                        documents                                    is cut into pieces at
    plain text                    the whole file                               nothing
      --document-separator LINE   what lies between lines that are LINE        separators
    .jsonl, .ndjson, .json        a line each, its field --field               line ends
    .parquet                      a row each, its column --field               row groups
    any but Parquet, .gz or .zst  the same                                     nothing

A piece is PIECE bytes or more of sources that follow one another: a range of documents, which depends on the sources
alone. A rank reads a piece as a stream, of parts of about PART bytes; texts are cut between words (`safe`)."""

import codecs
import contextlib
import dataclasses
import glob
import gzip
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from hpcdl.data.hdf5 import FilePath, shown
from hpcdl.errors import UsageError, blamed_on
from hpcdl.files import files_below

PIECE = 16 << 20  # bytes of a piece, at least
PART = 1 << 20  # bytes of text that are read at a time
LONGEST = 256 << 20  # bytes of a line of JSON, at most
BATCH = 256  # rows of Parquet that are read at a time
PACKED = (".gz", ".zst")
JSON_LINES = (".jsonl", ".ndjson", ".json")
SPACE = r" \t\n\v\f\r\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # White_Space in Unicode
# Between a character and a single space or a line end, with a word on both sides: no tokenizer's word crosses it.
SAFE = re.compile(rf"(?<=[^{SPACE}])(?= [^{SPACE}])|(?<=[^{SPACE}]\n)(?=[^{SPACE}])")


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """How sources become documents. separator: a line between documents of plain text; None: a file is one. field: of
    JSON lines and Parquet. encoding, errors: of plain text, as of bytes.decode."""

    separator: str | None = None
    field: str = "text"
    encoding: str = "utf-8"
    errors: str = "strict"


class DocumentSpan(NamedTuple):
    """Documents of one source that follow one another. start, stop: bytes of the unpacked file, of Parquet row groups;
    stop None: to the end. line: number of lines before them. bytes: of the file, unpacked."""

    path: str
    start: int
    stop: int | None
    first: int
    line: int
    documents: int
    bytes: int


class Part(NamedTuple):
    """The next characters of a document. document: its number. ends: True for its last part."""

    document: int
    text: str
    ends: bool


def find_sources(sources: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the files of paths, folders (with all below them, sorted) and patterns. Empty files and hidden ones in
    folders are left out. Raises UsageError."""
    found: list[str] = []
    for source in map(str, sources):
        with blamed_on(f"{shown(source, 200)} cannot be read"):
            if os.path.isdir(source):
                inside = [os.path.join(source, path) for path in files_below(source)]
                if not inside:
                    raise UsageError(f"the folder {source} holds no files; name texts, or a folder of texts")
                found += inside
            elif os.path.exists(source) or not glob.has_magic(source):
                if not os.stat(source).st_size:
                    raise UsageError(f"{source} is empty; leave it out")
                found.append(source)
            else:
                names = sorted(each for each in glob.glob(source, recursive=True) if os.path.isfile(each))
                if not names:
                    raise UsageError(f"no file has a name like {source}; a pattern in quotes, as 'texts/*.txt'")
                found += names
    files = [path for path in dict.fromkeys(found) if os.stat(path).st_size]
    if not files:
        raise UsageError(f"all files of {', '.join(map(str, sources))} are empty; there is no text")
    return files


def kind_of(path: str) -> str:
    """Return plain, json or parquet."""
    name = path.lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    return "json" if name.endswith(JSON_LINES) else "parquet" if name.endswith(".parquet") else "plain"


def survey(path: str, options: TextOptions) -> list[DocumentSpan]:
    """Return the spans of a source, with `first` counted from 0 in this source. Raises UsageError."""
    kind = kind_of(path)
    with blamed_on(f"{path} cannot be read"):
        if kind == "parquet":
            return _survey_parquet(path, options.field)
        if kind == "plain" and options.separator is None:
            return [DocumentSpan(path, 0, None, 0, 0, 1, _size(path))]
        is_document = _separates(path, options) if kind == "plain" else None
        return list(_survey_lines(path, is_document))


def _size(path: str) -> int:
    """Return the bytes of a file, unpacked."""
    if not path.lower().endswith(PACKED):
        return os.stat(path).st_size
    with open_bytes(path) as file:
        return sum(map(len, iter(lambda: file.read(PART), b"")))


def _survey_lines(path: str, separates: Callable[[bytes], bool] | None) -> Iterator[DocumentSpan]:
    """Yield the spans of a file of lines. separates: True for a line between documents; None: a line is a document."""
    cuttable = not path.lower().endswith(PACKED)
    start, first, first_line, at, documents, lines = 0, 0, 0, 0, 0, 0
    whole, inside = True, False  # at the beginning of a line; within a document
    with open_bytes(path) as file:
        while line := file.readline(PART):
            if whole:
                between = not line.strip() if separates is None else separates(line)
                if cuttable and at - start >= PIECE and (between or separates is None) and documents > first:
                    yield DocumentSpan(path, start, at, first, first_line, documents - first, at - start)
                    start, first, first_line = at, documents, lines
                documents += not between and not inside
                inside = separates is not None and not between
            whole = line.endswith(b"\n")
            at, lines = at + len(line), lines + whole
    if documents > first:
        yield DocumentSpan(path, start, None if first == 0 else at, first, first_line, documents - first, at - start)


def _separates(path: str, options: TextOptions) -> Callable[[bytes], bool]:
    """Return a function that says whether a line of a file lies between documents."""
    with blamed_on(f"unknown text encoding {options.encoding!r}"):
        line = (options.separator or "").encode(options.encoding)
        if "\n".encode(options.encoding) != b"\n":
            raise UsageError(f"--document-separator cannot be found in {options.encoding}; convert {path} to utf-8")
    return lambda text: text.rstrip(b"\r\n") == line


def open_bytes(path: str, start: int = 0) -> BinaryIO:
    """Open a file, unpacked, at byte `start` of its content."""
    name = path.lower()
    if name.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if name.endswith(".zst"):
        return io.BufferedReader(_Zstandard(path), PART)
    file = open(path, "rb", buffering=PART)  # noqa: SIM115
    file.seek(start)
    return file


class _Zstandard(io.RawIOBase):
    """The content of a .zst file, which may hold several frames. Raises EOFError if the last one is cut."""

    def __init__(self, path: str):
        try:
            import zstandard
        except ImportError:
            raise UsageError(f"{path} needs the package zstandard: pip install 'hpcdl[text]'") from None
        self.file, self.new = open(path, "rb"), zstandard.ZstdDecompressor().decompressobj  # noqa: SIM115
        self.frame, self.rest, self.unpacked = self.new(), b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        begun = bool(self.rest) or self.file.tell() > 0
        while not self.unpacked:
            packed = self.rest or self.file.read(16 << 10)
            if not packed:
                if begun and not self.frame.eof:
                    raise EOFError("the compressed file ends in the middle")
                return 0
            begun, self.rest = True, b""
            if self.frame.eof:
                self.frame = self.new()
            self.unpacked = memoryview(self.frame.decompress(packed))
            if self.frame.eof:
                self.rest = self.frame.unused_data
        count = min(len(buffer), len(self.unpacked))
        buffer[:count], self.unpacked = self.unpacked[:count], self.unpacked[count:]
        return count

    def close(self) -> None:
        self.file.close()
        super().close()


def read(span: DocumentSpan, options: TextOptions) -> Iterator[Part]:
    """Yield the documents of a span in parts. Raises UsageError, which names the file and the line."""
    kind = kind_of(span.path)
    with blamed_on(f"{span.path} cannot be read"):
        if kind == "plain":
            yield from _read_plain(span, options)
        else:
            texts = _read_json(span, options.field) if kind == "json" else _read_parquet(span, options.field)
            for number, text in enumerate(texts, span.first):
                yield Part(number, text, True)


def text_decoder(path: FilePath, encoding: str, errors: str, todo: str) -> Callable[..., str]:
    """Return a function (data, at, final=False) that decodes a file's bytes, part by part. at: bytes before `data`.
    final: a text ends, and the next call begins another. todo: the end of the UsageError for undecodable bytes."""
    try:
        with contextlib.suppress(UnicodeError):
            b"a".decode(encoding)  # LookupError if it is not of texts
        decoder = codecs.getincrementaldecoder(encoding)(errors)
    except LookupError:
        raise UsageError(f"unknown text encoding {encoding!r}; utf-8 and latin-1 are two that are known") from None

    def decoded(data: bytes, at: int, final: bool = False) -> str:
        waiting = len(decoder.getstate()[0])
        try:
            text = decoder.decode(data, final)
        except UnicodeDecodeError as error:
            where = f"byte {at - waiting + error.start} cannot be decoded"
        except UnicodeError as error:  # of encodings without a position
            where = str(error)
        else:
            if final:
                decoder.reset()
            return text
        raise UsageError(f"{path} is not {encoding}: {where}; {todo}")

    return decoded


def _read_plain(span: DocumentSpan, options: TextOptions) -> Iterator[Part]:
    separates = None if options.separator is None else _separates(span.path, options)
    todo = "name its --encoding, or use --tokenizer bytes"
    decoded = text_decoder(span.path, options.encoding, options.errors, todo)
    document, at, held, whole, inside = span.first, span.start, "", True, False

    with open_bytes(span.path, span.start) as file:
        next_part = file.read if separates is None else file.readline
        while data := next_part(PART):
            if separates is not None and whole and separates(data):
                if inside:
                    yield Part(document, held + decoded(b"", at, True), True)
                    document, held, inside = document + 1, "", False
                if span.stop is not None and at >= span.stop:
                    return
            elif span.stop is not None and at >= span.stop and whole:  # never, if the file is as it was
                break
            else:
                text = decoded(data, at)
                held = held + text if inside else text.removeprefix("\ufeff") if at == 0 else text
                inside = True
                if len(held) >= PART:
                    cut = safe(held)
                    yield Part(document, held[:cut], False)
                    held = held[cut:]
            at, whole = at + len(data), data.endswith(b"\n")
    if inside:
        yield Part(document, held + decoded(b"", at, True), True)


def safe(text: str) -> int:
    """Return the last place at which the text can be cut so that its tokens stay those of the whole text: between two
    words. Without such a place: its length."""
    for start in (max(0, len(text) - 4096), 0):
        last = len(text)
        for found in SAFE.finditer(text, start, len(text)):
            last = found.start()
        if last < len(text):
            return last
    return len(text)


def _read_json(span: DocumentSpan, field: str) -> Iterator[str]:
    at, number, left = span.start, span.line, span.documents
    with open_bytes(span.path, span.start) as file:
        while left and (line := file.readline(LONGEST)):
            number, at = number + 1, at + len(line)
            if not line.strip():
                continue
            left -= 1
            where = f"{span.path}, line {number}"
            if len(line) == LONGEST:
                raise UsageError(f"{where} is longer than {LONGEST >> 20} MB; cut the document")
            try:
                value = json.loads(line.decode())
            except UnicodeDecodeError as error:
                raise UsageError(f"{where} is not UTF-8: byte {error.start} of the line cannot be decoded") from None
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{where} is no JSON: {error}") from None
            text = value.get(field) if isinstance(value, dict) else None
            if not isinstance(text, str):
                names = ", ".join(map(shown, list(value)[:8])) if isinstance(value, dict) else "it is no object"
                raise UsageError(
                    f"{where} has no text {field!r} (it has: {names}); name the --field that holds the text"
                )
            yield text if text.isascii() else text.encode("utf-8", "replace").decode()  # half a surrogate pair: "?"


def _parquet(path: str, field: str) -> Any:
    """Return pyarrow's ParquetFile of a file whose column `field` holds texts."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UsageError(f"{path} needs the package pyarrow: pip install 'hpcdl[arrow]'") from None
    file = parquet.ParquetFile(path)
    names = file.schema_arrow.names
    kind = file.schema_arrow.field(field).type if field in names else None
    while kind is not None and pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    if kind is None or not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        said = ", ".join(map(shown, names[:8]))
        raise UsageError(f"{path} has no column of texts {field!r} (it has: {said}); name the --field that holds them")
    return file


def _survey_parquet(path: str, field: str) -> list[DocumentSpan]:
    spans: list[DocumentSpan] = []
    file = _parquet(path, field)
    with contextlib.closing(file):
        about, start, first, documents, size = file.metadata, 0, 0, 0, 0
        for group in range(about.num_row_groups):
            row_group = about.row_group(group)
            columns = map(row_group.column, range(row_group.num_columns))
            size += sum(each.total_uncompressed_size for each in columns if each.path_in_schema == field)
            documents += row_group.num_rows
            if size >= PIECE or group == about.num_row_groups - 1:
                spans += [DocumentSpan(path, start, group + 1, first, first, documents, size)] if documents else []
                start, first, documents, size = group + 1, first + documents, 0, 0
    return spans


def _read_parquet(span: DocumentSpan, field: str) -> Iterator[str]:
    file, row = _parquet(span.path, field), span.first
    assert span.stop is not None
    with contextlib.closing(file):
        try:
            for batch in file.iter_batches(BATCH, [*range(span.start, span.stop)], [field], use_threads=False):
                for value in batch.column(0):
                    yield value.as_py() or ""
                    row += 1
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"{span.path}, row {row} and after: {str(error).splitlines()[0]}") from error
