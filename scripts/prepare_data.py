"""Make a data file from IDX, NPZ, CSV, libsvm or text: python scripts/prepare_data.py idx fashion-mnist/ fashion.h5

    prepare_data.py idx FOLDER OUT.h5      MNIST's format, gzipped or not
    prepare_data.py npz FILE OUT.h5        arrays x, y and, or not, x_test, y_test
    prepare_data.py csv FILE OUT.h5        one row per example: --label COLUMN, --missing mean, --like TRAIN.h5, ...
    prepare_data.py table FILE OUT.h5      the same: csv, tsv, Parquet or Arrow (Feather), told apart by what they hold
    prepare_data.py text FILE OUT.h5       plain text as rows of tokens: --length, --level character or byte, ...
    prepare_data.py libsvm FILE OUT.h5     sparse rows as text, gzipped or not: --test FILE, --zero-based, --features
    prepare_data.py synthetic SPEC OUT.h5  sparse rows that are drawn: rcv1, small, or rcv1:rows=1000,seed=1

`prepare_data.py KIND --help` lists the options. The result is what `--data OUT.h5` of every training script reads; the
format is in docs/data.md. One process is enough; MPI is not needed.
"""

import argparse
import os
import sys
from fractions import Fraction

from hpcdl.data.formats.prepare import Output
from hpcdl.data.formats.prepare_idx import prepare_idx
from hpcdl.data.formats.prepare_libsvm import BASES, prepare_libsvm
from hpcdl.data.formats.prepare_npz import prepare_npz
from hpcdl.data.formats.prepare_table import prepare_table
from hpcdl.data.formats.prepare_text import LEVELS, prepare_text
from hpcdl.data.formats.recipe import MISSING
from hpcdl.data.formats.vocabulary import BYTES
from hpcdl.data.synthetic import prepare_synthetic
from hpcdl.errors import UsageError, printable
from hpcdl.formatting import counted
from hpcdl.launch.help import OptionParser

TABLES = ("csv", "table")
KINDS = {
    "idx": prepare_idx,
    "npz": prepare_npz,
    "csv": prepare_table,
    "table": prepare_table,
    "text": prepare_text,
    "libsvm": prepare_libsvm,
    "synthetic": prepare_synthetic,
}


def number(text):
    """A number, also as a fraction: 1/16."""
    try:
        return float(Fraction(text))
    except ZeroDivisionError:
        raise ValueError from None


def parser():
    """The command line; each KIND has its own options."""
    parser = OptionParser(prog="prepare_data", description="Make an HDF5 data file for hpcdl.")
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    helps = {
        "idx": "a folder in MNIST's format (train-images-idx3-ubyte, ...), gzipped or not",
        "npz": "numpy's npz with x, y (or x_train, y_train) and, or not, x_test, y_test",
        "csv": "a table of numbers and texts, one row per example",
        "table": "the same as csv, tsv, Parquet or Arrow (Feather)",
        "text": "plain text, as rows of tokens, each with the token that follows",
        "libsvm": "libsvm's text (svmlight's), gzipped or not: sparse rows",
        "synthetic": "a spec, as rcv1:rows=1000,seed=1: sparse rows that are drawn",
    }
    for kind, text in helps.items():
        command = kinds.add_parser(kind, help=text, description=f"From {text}.")
        command.add_argument("source", metavar="SPEC" if kind == "synthetic" else "SOURCE")
        command.add_argument("out", metavar="OUT.h5")
        command.add_argument("--force", action="store_true", help="replace OUT.h5 if it exists")
        command.add_argument("--compress", action="store_true", help="smaller, but slower to read (gzip)")
        command.add_argument("--name", help="name of the data set in reports (default: that of OUT.h5)")
        command.add_argument("--origin", help="a text on where the data come from, kept in the file")
        if kind not in ("text", "synthetic"):
            command.add_argument(
                "--scale", type=number, help="the model sees x * SCALE, as 1/16 (default: 1/255 for bytes)"
            )
        if kind in ("npz", "libsvm", *TABLES):
            command.add_argument(
                "--regression", action="store_true", help="labels are values to predict, even if whole"
            )
            command.add_argument(
                "--test-fraction",
                type=float,
                help="of the rows, stratified by class; 0 or 1: one group only (default: 0.2)",
            )
            command.add_argument("--seed", type=int, help="of the split (default: 0)")
        if kind in TABLES:
            table_options(command)
        if kind == "libsvm":
            command.add_argument("--test", metavar="FILE", help="the test part, in a file of its own")
            command.add_argument("--zero-based", choices=[*BASES], help="whether indices count from 0 (default: auto)")
            command.add_argument(
                "--features", type=int, metavar="N", help="how many there are (default: as they occur)"
            )
        if kind == "text":
            command.add_argument("--length", type=int, help="tokens of a row (default: 64)")
            command.add_argument("--level", choices=LEVELS, help="what a token is (default: character)")
            command.add_argument("--test-fraction", type=float, help="of the tokens, the last ones (default: 0.1)")
            command.add_argument("--encoding", help="of the characters (default: utf-8)")
    return parser


def table_options(command):
    """Columns are named, or numbered from 0, -1 the last; A,B are several."""
    add = command.add_argument
    add("--label", metavar="COLUMN", help="of the labels (default: -1, the last); several: values to predict")
    add("--id", metavar="COLUMN", help="says which row a row is, no feature; kept as train/id and test/id")
    add("--group", metavar="COLUMN", help="says whose each row is, no feature; kept for --partition column:group")
    add("--columns", metavar="A,B", help="only these are features")
    add("--drop", metavar="A,B", help="these are no features")
    add("--text", metavar="A,B", help="these hold texts, even if they look like numbers")
    add("--one-hot", type=int, metavar="N", help="different texts that a column may have, a feature each (default: 64)")
    add("--missing", choices=MISSING, help="what is done with missing values (default: refuse)")
    add("--like", metavar="TRAIN.h5", help="do again what was done with the table of this file; its classes and scale")
    add("--no-label", action="store_true", help="rows to predict; needs --like")
    add("--delimiter", help="between columns of a csv (default: a comma; of .tsv a tab)")
    add(
        "--header",
        action=argparse.BooleanOptionalAction,
        help="the first line of a csv holds names (default: if not numbers)",
    )


def main(arguments=None):
    """Make the file and say in one line what is in it; bad input is one line on stderr and exit status 2."""
    try:
        given = {key: value for key, value in vars(parser().parse_args(arguments)).items() if value is not None}
        kind, source, out = (given.pop(key) for key in ("kind", "source", "out"))
        if os.path.exists(source) and os.path.exists(out) and os.path.samefile(source, out):
            raise UsageError(f"{out} is the source itself; name another file to be made")
        about = {key: given.pop(key) for key in ("force", "compress", "name", "scale", "origin") if key in given}
        output = Output(out, **about)
        info = KINDS[kind](source, output, **given)
    except UsageError as error:
        print(f"prepare_data: error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        sys.exit(2)
    shape = "x".join(map(str, info.features))
    task = counted(info.classes, "class") if info.classes else "values to predict"
    if info.vocabulary is not None:
        task = "256 bytes" if info.vocabulary.characters == BYTES else counted(info.classes, "character")
    words = {"train": "training", "test": "test", "rows": "unlabelled"}
    *others, last = [(info.rows[group], words[group]) for group in info.kinds]
    rows = "".join(f"{count} {word} and " for count, word in others) + counted(last[0], f"{last[1]} row")
    kinds = next(iter(info.kinds.values()))
    said = "".join(f"; {printable(' '.join(each.split()), allowed='')}" for each in output.summary)
    print(f"{info.path}: {rows} of {shape} {kinds}, scale {info.scale:.6g}, {task}{said}")


if __name__ == "__main__":
    main()
