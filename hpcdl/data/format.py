"""The data file: HDF5, which any tool can write, and any part of which can be read alone.

    train/x  (n, features...)   integers or floats       attributes of the file
    train/y  (n,)               class numbers, or        scale    the model sees x * scale (default 1)
         or  (n, outputs)       floats to predict        classes  0 for regression (default: from y)
    test/x, test/y              the same                 labels   names of the classes (default: their numbers)
    rows/x                      rows without labels      table    how a table became numbers (formats/recipe.py)
    .../x/data, indices, indptr  sparse rows              base     number of the first feature in libsvm's text
                                                         name     for reports (default: the file's name)

A file has at least one of the groups; a file to train on has `train`. A text has rows of tokens, integers from 0 to
classes - 1 (hpcdl/data/formats/prepare_text.py):

    train/x  (n, length)        unsigned integers        vocabulary  characters of the tokens (formats/vocabulary.py)
    train/y  (n,)               the token that follows   scale       1
    train/document  (n,)        number of the document   bytes_per_token  JSON: by group, of the source
    tokenizer  (bytes,)         JSON, instead of the attribute vocabulary"""

import contextlib
import dataclasses
import math
import os
import stat
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcdl.data.formats.sparse_file import open_rows
from hpcdl.data.formats.vocabulary import TokenizerVocabulary, Vocabulary
from hpcdl.data.hdf5 import DataFile, FilePath, check_memory, dataset, follow_links, open_file, shown, slabs_of
from hpcdl.data.schema import Schema
from hpcdl.data.shards import GROUPS, INDEX, ShardFolder, is_folder
from hpcdl.errors import UsageError, blamed_on, unknown
from hpcdl.files import finite, parse_json

KNOWN = {name: Path(__file__).with_name(f"{name}.h5") for name in ("digits", "text")}
MOST_CLASSES = 1 << 24  # more are a mistake: models and label counts have an entry per class
TABLE = "table"  # the attribute with a table's recipe
TOKENIZER, TOKEN_BYTES = "tokenizer", "bytes_per_token"  # a data set, and an attribute, of texts
NOTES = frozenset(("row", "id", "filled"))  # source rows and fill marks: neither in the digest nor for a partition


@dataclasses.dataclass(frozen=True)
class Info:
    """The structure of a data file."""

    path: str
    name: str
    features: tuple[int, ...]
    classes: int
    scale: float
    rows: dict[str, int]  # by group ("train", "test", "rows"), 0 for a missing group
    kinds: dict[str, np.dtype]  # element types of x of the existing groups
    outputs: tuple[int, ...] = ()  # shape of a row's targets, () or (k,)
    schema: Schema = dataclasses.field(default_factory=Schema)
    elements: dict[str, int] = dataclasses.field(default_factory=dict)  # by group, sparse rows only
    fills: tuple[float, ...] = ()  # that replace the file's own fills of number columns (fills.py); (): none

    @property
    def sparse(self) -> bool:
        """True if the rows are sparse (hpcdl/data/formats/sparse_file.py)."""
        return bool(self.elements)

    @property
    def vocabulary(self) -> Vocabulary | None:
        return self.schema.vocabulary


def find_data_file(name_or_path: str) -> Path:
    """Return the file of a known data set or a path; UsageError if it is neither."""
    text = str(name_or_path)
    if text in KNOWN:
        return KNOWN[text]
    path = Path(text)
    with blamed_on(f"data file {shown(text, 200)} cannot be read"):  # a name may be too long, or hold a NUL
        mode = path.stat().st_mode if path.exists() else 0
    if stat.S_ISREG(mode):
        return path
    if stat.S_ISDIR(mode) and not is_folder(path):
        raise UsageError(f"data {text!r} is a folder without {INDEX}; give an HDF5 file or a folder of shards")
    if stat.S_ISDIR(mode):
        return path
    if mode:
        raise UsageError(f"data {text!r} is no file that can be read twice; give an HDF5 file (prepare-data makes one)")
    if os.sep in text or path.suffix:
        raise UsageError(f"data file {shown(text, 200)} does not exist")
    raise UsageError(f"{unknown('data set', text, KNOWN)}, or the path of an HDF5 file")


def read_info(path: FilePath) -> Info:
    """Return the structure of a data file; UsageError if it is no data file. The values of rows are not checked."""
    with open_file(path) as file:
        if isinstance(file, ShardFolder):
            file.check()
        names = set(map(str, file))  # links are followed by `dataset`
        present = [group for group in GROUPS if group in names]
        if not present:
            raise UsageError(f"{path} has no data set train/x, test/x or rows/x; a data file has at least one of these")
        groups = {group: _check_group(path, file, group) for group in present}
        features = groups[present[0]][0].shape[1:]
        for group, (x, _) in groups.items():
            if x.shape[1:] != features:
                shapes = f"{features} in {present[0]}/x, but {x.shape[1:]} in {group}/x"
                raise UsageError(f"{path}: rows have shape {shapes}")
        elements = {group: x.nnz for group, (x, _) in groups.items() if hasattr(x, "nnz")}
        if elements and len(elements) < len(groups):
            dense = next(group for group in groups if group not in elements)
            raise UsageError(f"{path}: the rows of {next(iter(elements))} are sparse, but the rows of {dense} are not")
        labels = [y for _, y in groups.values() if y is not None]
        classes, scale = _classes(path, file, labels), _scale(path, file)
        outputs = {y.shape[1:] for y in labels} or {()}
        if len(outputs) > 1 or (classes and outputs != {()}):
            shapes = " and ".join(map(str, sorted(outputs)))
            why = "a class is one number, and all rows have one shape"
            raise UsageError(f"{path}: y has rows of shape {shapes}; {why}")
        vocabulary = _vocabulary(path, file, groups, classes, scale)
        name = _text(path, "name", file.attrs["name"]) if "name" in file.attrs else Path(path).stem
        rows = {group: len(groups[group][0]) if group in groups else 0 for group in GROUPS}
        kinds = {group: x.dtype for group, (x, _) in groups.items()}
        schema = _schema(path, file, classes, scale, vocabulary)
        return Info(str(path), name, features, classes, scale, rows, kinds, outputs.pop(), schema, elements)


def vocabulary_of(name_or_path: str) -> Vocabulary | None:
    """Return the vocabulary of a text; None for other data. UsageError if it is no data file."""
    return read_info(find_data_file(name_or_path)).vocabulary


def _check_group(path: FilePath, file: DataFile, group: str) -> tuple[Any, h5py.Dataset | None]:
    """Return x (maybe a SparseSet) and y (None for `rows`) of a group; UsageError for wrong types or shapes."""
    x = open_rows(file, f"{group}/x")
    y = None if group == "rows" else dataset(file, f"{group}/y")
    both = [(x, "x")] * (not hasattr(x, "nnz")) + ([] if y is None else [(y, "y")])
    for each, name in both:
        if each.dtype.kind not in "iuf":
            where = f"{path}: {group}/{name}"
            raise UsageError(f"{where} holds elements of type {shown(each.dtype)}; it must hold integers or floats")
    if len(x.shape or ()) < 2 or 0 in x.shape[1:]:
        raise UsageError(f"{path}: {group}/x has shape {x.shape}; it must have shape (rows, features...)")
    if y is not None:
        several = y.dtype.kind == "f" and len(y.shape or ()) == 2 and y.shape[1] > 0  # values to predict
        if (y.shape or ())[:1] != x.shape[:1] or not (len(y.shape) == 1 or several):
            raise UsageError(f"{path}: {group}/x has {len(x)} rows, but {group}/y has shape {y.shape}")
    if len(x) == 0:
        raise UsageError(f"{path}: {group} has no rows")
    for each, name in both:
        if isinstance(each, h5py.Dataset) and not each.id.get_storage_size():  # a damaged file may claim any shape
            raise UsageError(f"{path}: {group}/{name} has shape {each.shape}, but nothing was ever written into it")
    if y is not None:
        check_memory(8 * math.prod(y.shape), f"{path}: {group} has {len(y)} rows, whose labels")
    return x, y


def owner_columns(file: DataFile) -> list[str]:
    """Return the names of the columns that a partition may use: those of integers in `train`, beside x and y."""
    shape, names = dataset(file, "train/y").shape[:1], []
    for name in sorted(set(map(str, file["train"])) - {"x", "y"} - NOTES):
        with contextlib.suppress(Exception):  # an unreadable data set is no column
            each = dataset(file, f"train/{name}")
            names += [name] if each and each.dtype.kind in "iu" and each.shape == shape else []
    return names


def row_notes(file: DataFile, group: str, rows: int) -> dict[str, h5py.Dataset]:
    """Return the valid columns of notes on rows by name: `row`, numbers in the source; `id`, texts or integers."""
    columns = {}
    for name, kinds in (("row", "iu"), ("id", "iuSO")):
        with contextlib.suppress(UsageError):
            each = dataset(file, f"{group}/{name}")
            if each.shape == (rows,) and each.dtype.kind in kinds:
                columns[name] = each
    return columns


def _scale(path: FilePath, file: DataFile) -> float:
    value = file.attrs.get("scale", 1.0)
    scale = float(value) if isinstance(value, (int, float, np.integer, np.floating)) else math.nan
    if not math.isfinite(scale) or scale == 0:
        raise UsageError(f"{path}: the attribute scale is {shown(value)}; it must be a number other than 0")
    return scale


def _classes(path: FilePath, file: DataFile, labels: list[h5py.Dataset]) -> int:
    whole = bool(labels) and all(y.dtype.kind in "iu" for y in labels)
    if "classes" in file.attrs:
        classes = file.attrs["classes"]
        claim = f"the number of classes is {shown(classes)}"
    else:
        classes = max(int(y[slab].max()) for y in labels for slab in slabs_of(y)) + 1 if whole else 0
        claim = f"the largest label is {classes - 1}, so that there would be {classes} classes"
    if not isinstance(classes, (int, np.integer)) or classes < 0 or classes == 1:
        raise UsageError(f"{path}: the number of classes is {shown(classes)}; it must be 0 (regression), or 2 or more")
    if classes > MOST_CLASSES:
        raise UsageError(f"{path}: {claim}; there can be {MOST_CLASSES} (number the labels 0, 1, 2, ... without gaps)")
    if classes and labels and not whole:
        claim = f"the attribute classes says {classes}; class numbers are integers"
        raise UsageError(f"{path}: y holds floats, but {claim}")
    return int(classes)


def _vocabulary(path: FilePath, file: DataFile, groups: dict, classes: int, scale: float) -> Vocabulary | None:
    with_tokenizer = follow_links(file, TOKENIZER) is not None
    where = f"the data set {TOKENIZER}" if with_tokenizer else "the attribute vocabulary"
    try:
        if with_tokenizer:
            stored = dataset(file, TOKENIZER)
            if stored.dtype != np.uint8 or len(stored.shape) != 1:
                raise UsageError(f"it is {stored.dtype} of shape {stored.shape}; it must be JSON as bytes")
            check_memory(stored.nbytes, f"{path}: {TOKENIZER}")
            vocabulary: Vocabulary = TokenizerVocabulary(_text(path, TOKENIZER, stored[...].tobytes()))
        elif "vocabulary" in file.attrs:
            value = file.attrs["vocabulary"]
            each = [_text(path, "vocabulary", one) for one in value] if np.ndim(value) else None
            vocabulary = Vocabulary(_text(path, "vocabulary", value) if each is None else each)
        else:
            return None
    except UsageError as error:
        raise UsageError(f"{path}: {where}: {error}") from None
    for group, (x, _) in groups.items():
        if x.dtype.kind != "u" or x.ndim != 2:
            where = f"{path}: {group}/x is {x.dtype} of shape {x.shape}"
            raise UsageError(f"{where}; a text has tokens (rows, length) as unsigned integers")
    if classes != len(vocabulary) or scale != 1:
        known = f"but the vocabulary has {len(vocabulary)} tokens; a text has classes {len(vocabulary)} and scale 1"
        raise UsageError(f"{path}: classes is {classes} and scale {scale:g}, {known}")
    return vocabulary


def _schema(path: FilePath, file: DataFile, classes: int, scale: float, vocabulary: Vocabulary | None) -> Schema:
    names: tuple[str, ...] | None = None
    recipe: Any = None
    if "labels" in file.attrs and classes:
        value = file.attrs["labels"]
        names = tuple(_text(path, "labels", each) for each in value) if np.ndim(value) == 1 else ()
        if len(names) != classes or len(set(names)) < classes:
            raise UsageError(f"{path}: the attribute labels must hold {classes} different names, one for each class")
    if TABLE in file.attrs:
        with contextlib.suppress(ValueError):
            recipe = parse_json(_text(path, TABLE, file.attrs[TABLE]))
        if not isinstance(recipe, dict):
            raise UsageError(f"{path}: the attribute table is no recipe of a table, as prepare-data writes it in JSON")
    base = file.attrs.get("base")
    if base is not None and not (isinstance(base, (int, np.integer)) and base in (0, 1)):
        raise UsageError(f"{path}: the attribute base is {shown(base)}; it must be 0 or 1, the first feature's number")
    token_bytes: Any = None
    if TOKEN_BYTES in file.attrs and vocabulary is not None:
        with contextlib.suppress(ValueError):
            token_bytes = parse_json(_text(path, TOKEN_BYTES, file.attrs[TOKEN_BYTES]))
        if isinstance(file, ShardFolder):  # a shard has its own
            token_bytes = (file.index.about.get("schema") or {}).get("token_bytes", token_bytes)
        if not isinstance(token_bytes, dict) or not all((finite(each) or 0) > 0 for each in token_bytes.values()):
            raise UsageError(f"{path}: the attribute {TOKEN_BYTES} must be JSON, a positive number by group")
    return Schema(scale, names, vocabulary, recipe, None if base is None else int(base), token_bytes)


def _text(path: FilePath, name: str, value: object) -> str:
    """Return an attribute's text; UsageError if not UTF-8 text. h5py returns invalid UTF-8 as lone surrogates."""
    with contextlib.suppress(UnicodeError):
        if isinstance(value, bytes | str):
            return (value if isinstance(value, bytes) else value.encode()).decode()
    raise UsageError(f"{path}: the attribute {name} is {shown(value)}; it must be a text in UTF-8")
