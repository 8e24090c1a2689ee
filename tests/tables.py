"""Small tables, written as csv, Parquet and Arrow alike."""

import csv

import numpy as np
import pytest

from hpcdl.data.formats import table_source


def write_csv(path, rows, **how):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, **how).writerows(rows)
    return path


def write_arrow(path, rows, kinds=None):
    """The same as Parquet or Arrow: numbers where all there is are numbers."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    columns = {}
    for name, *texts in zip(*rows, strict=True):
        values = [None if text.strip() in table_source.ABSENT else text.strip() for text in texts]
        try:
            columns[name] = [None if value is None else float(value) for value in values]
        except ValueError:
            columns[name] = values
    table = pa.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=3)
    elif path.suffix == ".feather":
        feather.write_feather(table, str(path), chunksize=3)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=3)
    return path


WRITE = {"csv": write_csv, "parquet": write_arrow, "feather": write_arrow, "arrows": write_arrow}


def all_of(rows):
    """All blocks put together."""
    blocks = [call() for call in rows.blocks()]
    ids = [each for block in blocks for each in block.ids] if rows.ids else None
    x, numbers = (np.concatenate([block[at] for block in blocks]) for at in (0, 1))
    return x, numbers.tolist(), ids, *np.sum([block.counts[1:] for block in blocks], axis=0).tolist()


def reasons_of(rows):
    """Why rows have no answer, by number."""
    blocks = [call() for call in rows.blocks()]
    return {row: why for each in blocks for row, why in zip(each.numbers.tolist(), each.reasons, strict=True) if why}
