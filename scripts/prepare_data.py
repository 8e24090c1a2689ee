"""Make a data file from IDX, NPZ, CSV, libsvm or text: hpcdl prepare-data idx fashion-mnist/ fashion.h5

    prepare-data idx FOLDER OUT.h5      MNIST's format, gzipped or not
    prepare-data npz FILE OUT.h5        arrays x and y, and perhaps x_test and y_test
    prepare-data csv FILE OUT.h5        one row per example: --label COLUMN, --missing mean, --like TRAIN.h5, ...
    prepare-data table FILE OUT.h5      the same: csv, tsv (.gz, .zst, 'part*.csv'), JSON, Parquet, Arrow (Feather)
    prepare-data text SOURCE... OUT.h5  text as rows of tokens: --tokenizer bpe:8192, --length, --rows documents, ...
    prepare-data libsvm FILE OUT.h5     sparse rows as text, gzipped or not: --test FILE, --zero-based, --features
    prepare-data synthetic SPEC OUT.h5  random sparse rows: rcv1, small, or rcv1:rows=1000,seed=1

`hpcdl prepare-data KIND --help` lists the options. The result is what `--data OUT.h5` of every program that trains
reads; the format is in docs/data.md. OUT/, with a / at its end, becomes a folder of such files (shards). One process is
enough, without MPI; under mpiexec all ranks share the work of text."""

import argparse
import os
import sys
from fractions import Fraction
from functools import partial

from hpcdl.data.formats.prepare import Output
from hpcdl.data.formats.prepare_documents import ROWS, prepare_documents
from hpcdl.data.formats.prepare_idx import prepare_idx
from hpcdl.data.formats.prepare_libsvm import BASES, prepare_libsvm
from hpcdl.data.formats.prepare_npz import prepare_npz
from hpcdl.data.formats.prepare_table import prepare_table
from hpcdl.data.formats.prepare_text import LEVELS
from hpcdl.data.formats.recipe import MISSING
from hpcdl.data.formats.vocabulary import BYTES
from hpcdl.data.placement import run_together
from hpcdl.data.synthetic import prepare_synthetic
from hpcdl.errors import UsageError, parse_bytes, printable
from hpcdl.formatting import counted
from hpcdl.launch.help import OptionParser
from hpcdl.launch.program import ended, quiet
from hpcdl.launch.start import start_mpi
from hpcdl.machine.world import launch

TABLES = ("csv", "table")
PARALLEL = ("text",)  # kinds whose work all ranks share
KINDS = {  # by kind: the function that makes the file, and its source
    "idx": (prepare_idx, "a folder in MNIST's format (train-images-idx3-ubyte, ...), gzipped or not"),
    "npz": (prepare_npz, "numpy's npz with x, y (or x_train, y_train), and perhaps x_test, y_test"),
    "csv": (prepare_table, "a table of numbers and texts, one row per example"),
    "table": (prepare_table, "the same as csv, tsv, JSON, Parquet or Arrow (Feather)"),
    "text": (prepare_documents, "texts, as rows of tokens, each with the token that follows"),
    "libsvm": (prepare_libsvm, "libsvm's text (svmlight's), gzipped or not: sparse rows"),
    "synthetic": (prepare_synthetic, "a spec, as rcv1:rows=1000,seed=1: random sparse rows"),
}


def number(text):
    """Parse a number, or a fraction as 1/16. Raises ValueError."""
    try:
        return float(Fraction(text))
    except ZeroDivisionError:
        raise ValueError from None


def parser():
    """Return the parser of the command line; each KIND has its own options."""
    parser = OptionParser(prog="hpcdl prepare-data", description="Make an HDF5 data file for hpcdl.")
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for kind, (_, text) in KINDS.items():
        command = kinds.add_parser(kind, help=text, description=f"From {text}.")
        add = command.add_argument
        if kind == "text":
            what = "files, folders or patterns: plain text, JSON lines, Parquet; the first two also .gz and .zst"
            add("source", metavar="SOURCE", nargs="+", help=what)
        else:
            add("source", metavar="SPEC" if kind == "synthetic" else "SOURCE")
        add("out", metavar="OUT.h5")
        add("--force", action="store_true", help="replace OUT.h5 if it exists")
        size = "bytes of a shard before compression, where OUT ends in / and is a folder (default: 256MiB)"
        add("--shard-size", type=partial(parse_bytes, option="--shard-size"), metavar="SIZE", help=size)
        add("--compress", action="store_true", help="smaller, but slower to read (gzip)")
        add("--name", help="name of the data set in reports (default: that of OUT.h5)")
        add("--origin", help="text on where the data come from, which the file keeps")
        if kind not in ("text", "synthetic"):
            add("--scale", type=number, help="the model sees x * SCALE, as 1/16 (default: 1/255 for bytes)")
        if kind in ("npz", "libsvm", *TABLES):
            add("--regression", action="store_true", help="labels are values to predict, even if whole")
            part = "test part of the rows, stratified by class; 0 or 1: one group only (default: 0.2)"
            add("--test-fraction", type=float, help=part)
            add("--seed", type=int, help="seed of the split (default: 0)")
        if kind in TABLES:
            table_options(add)
        if kind == "libsvm":
            add("--test", metavar="FILE", help="the test part, in a file of its own")
            add("--zero-based", choices=[*BASES], help="yes if indices count from 0 (default: auto)")
            add("--features", type=int, metavar="N", help="number of features (default: by the largest index)")
        if kind == "text":
            add("--length", type=int, help="tokens of a row (default: 64)")
            what = "bpe:N or wordpiece:N, trained for N tokens; FILE.json; DATA.h5; chars or bytes (default: chars)"
            add("--tokenizer", metavar="HOW", help=what)
            add("--level", choices=LEVELS, help="character and byte: the same as --tokenizer chars and bytes")
            sample = "of texts from which a tokenizer learns, as 64MB (default: 64MB)"
            add(
                "--tokenizer-sample",
                type=partial(parse_bytes, option="--tokenizer-sample"),
                metavar="BYTES",
                help=sample,
            )
            rows = "packed: a row may hold several documents; documents: each begins a row (default: packed)"
            add("--rows", choices=ROWS, help=rows)
            add("--document-separator", metavar="LINE", help="a line between documents (default: a file is a document)")
            add("--field", help="field of JSON lines, column of Parquet, with the text (default: text)")
            part = "part for tests: the last documents, or tokens of a single document (default: 0.1)"
            add("--test-fraction", type=float, help=part)
            add("--encoding", help="encoding of plain text (default: utf-8)")
    return parser


def table_options(add):
    """Add the options of tables. A COLUMN is a name, or a number from 0 on (-1: the last); A,B is several columns."""
    add("--label", metavar="COLUMN", help="column of the labels (default: -1, the last); several: values to predict")
    add("--id", metavar="COLUMN", help="column that identifies a row, no feature; kept as train/id and test/id")
    add("--group", metavar="COLUMN", help="column with each row's owner, no feature; kept for --partition column:group")
    add("--columns", metavar="A,B", help="use only these columns as features")
    add("--drop", metavar="A,B", help="do not use these columns as features")
    add("--text", metavar="A,B", help="columns of texts, even if they look like numbers")
    add(
        "--one-hot",
        type=int,
        metavar="N",
        help="most different texts of a column that get a feature each (default: 64)",
    )
    add(
        "--categories",
        metavar="HOW",
        help="of more texts: hash:N, into N features; target, means of the label; one-hot, refused (default: hash:64)",
    )
    dates = "times become year, month, weekday, ...: parts; drop; or their format, as %%d/%%m/%%Y (default: parts)"
    add("--dates", metavar="HOW", help=dates)
    add("--missing", choices=MISSING, help="what is done with missing values (default: median)")
    add("--like", metavar="TRAIN.h5", help="encode as this file's table was encoded, with its classes and scale")
    add("--no-label", action="store_true", help="rows to predict have no label; needs --like")
    add("--delimiter", help="between columns of a csv (default: a comma, of .tsv a tab; if not, what the lines have)")
    add("--decimal", choices=(".", ","), help="before the decimals in a csv (default: a comma if numbers need it)")
    names = "the first line of a csv holds names (default: if not numbers)"
    add("--header", action=argparse.BooleanOptionalAction, help=names)


def main(arguments=None):
    """Make the file and print one line about it; bad input is one line on stderr and exit status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    started = launch(os.environ, library="")
    if started is None or started.ranks == 1 or arguments[:1] not in [[kind] for kind in PARALLEL]:
        try:
            print(made(arguments))
        except UsageError as error:
            print(f"prepare-data: error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
            sys.exit(2)
        return
    with start_mpi(stoppable=False):
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        with ended("prepare-data", world.rank):
            said = made(arguments, world)
        if world.rank == 0:
            print(said)


def made(arguments, comm=None):
    """Make the file; return the line about it. comm: ranks that share the work. Raises UsageError."""
    given, output, source, kind = run_together(comm, lambda: read(arguments, comm is not None and comm.rank > 0))
    if comm is not None:
        given["comm"] = comm
    info = KINDS[kind][0](source, output, **given)
    shape = "x".join(map(str, info.features))
    task = counted(info.classes, "class") if info.classes else "values to predict"
    if info.vocabulary is not None:
        bytes_alone = info.vocabulary.description == BYTES
        task = "256 bytes" if bytes_alone else counted(info.classes, info.vocabulary.kind)
    words = {"train": "training", "test": "test", "rows": "unlabelled"}
    *others, last = [(count, words[group]) for group, count in info.rows.items() if count]
    rows = "".join(f"{count} {word} and " for count, word in others) + counted(last[0], f"{last[1]} row")
    kinds = next(iter(info.kinds.values()))
    said = "".join(f"; {printable(' '.join(each.split()), allowed='')}" for each in output.summary)
    return f"{info.path}: {rows} of {shape} {kinds}, scale {info.scale:.6g}, {task}{said}"


def read(arguments, silent):
    """Return the options of the kind, the output, the source and the kind. silent: help is not printed."""
    with quiet(silent):
        given = {key: value for key, value in vars(parser().parse_args(arguments)).items() if value is not None}
    kind, source, out = (given.pop(key) for key in ("kind", "source", "out"))
    sources = source if isinstance(source, list) else [source]
    if any(os.path.exists(each) and os.path.exists(out) and os.path.samefile(each, out) for each in sources):
        raise UsageError(f"{out} is the source itself; name another file to be made")
    names = ("force", "compress", "name", "scale", "origin", "shard_size")
    output = Output(out, **{key: given.pop(key) for key in names if key in given})
    output.recipe = {"kind": kind, "source": source, **given}
    return given, output, source, kind


if __name__ == "__main__":
    main()
