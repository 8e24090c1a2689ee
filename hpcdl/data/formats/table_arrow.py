"""Tables in Parquet and Arrow (Feather), read by pyarrow: columns have types, so texts of digits stay texts."""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from hpcdl.data.formats.table_source import BLOCK_ROWS, Cells, Source
from hpcdl.data.hdf5 import FilePath, shown
from hpcdl.errors import UsageError, blamed_on, printable

try:
    import pyarrow
    from pyarrow import ipc, parquet, types
except ImportError:
    pyarrow = None


class ArrowSource(Source):
    """A Parquet or Arrow file. Its row groups or record batches are read in parts."""

    header = True

    def __init__(self, path: FilePath, start: bytes):
        super().__init__(path)
        if pyarrow is None:
            raise UsageError(f"{path}: Parquet and Arrow need the package pyarrow: pip install 'hpcdl[arrow]'")
        if start.startswith(b"FEA1"):
            raise UsageError(f"{path} is Feather of version 1; write it as version 2")
        with self.blamed():
            if start.startswith(b"PAR"):
                with parquet.ParquetFile(path) as file:
                    schema = file.schema_arrow
            else:
                self._opener = ipc.open_file if start.startswith(b"ARROW1") else ipc.open_stream
                with pyarrow.memory_map(self.path) as memory, self._opener(memory) as reader:
                    schema = reader.schema
        self.is_parquet = start.startswith(b"PAR")
        self.names, self.types = list(schema.names), list(schema.types)

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Turn errors of the body into UsageErrors about the file; Thrift's control characters are made printable."""
        try:
            with blamed_on(f"{self.path} cannot be read"):
                yield
        except UsageError as error:
            raise UsageError(printable(error, allowed="")) from error

    def kind(self, column: int) -> str | None:
        kind = self.types[column]
        if types.is_dictionary(kind):
            kind = kind.value_type
        kinds = {
            "number": (types.is_null, types.is_boolean, types.is_integer, types.is_floating, types.is_decimal),
            "text": (types.is_string, types.is_large_string, types.is_string_view),
            "time": (types.is_temporal,),
        }
        for name, tests in kinds.items():
            if any(test(kind) for test in tests):
                return name
        what = f"{self.column_label(column)} holds {shown(kind)}"
        raise UsageError(f"{self.path}: {what}, neither numbers nor texts; leave it out by --drop")

    def blocks(self, most: int = BLOCK_ROWS) -> Iterator[tuple[int, Callable[[], Cells]]]:
        with self.blamed():
            row = 0
            for count, rows in self._parquet(most) if self.is_parquet else self._batches():
                for start in range(0, count, most):
                    part = min(most, count - start)
                    yield row, partial(ArrowCells, self, row, partial(rows, start, part))
                    row += part

    def _parquet(self, most: int) -> Iterator[tuple[int, Callable]]:
        with parquet.ParquetFile(self.path) as file:
            for group in range(file.num_row_groups):
                yield file.metadata.row_group(group).num_rows, _RowGroup(self.path, group, most).rows

    def _batches(self) -> Iterator[tuple[int, Callable]]:
        with pyarrow.memory_map(self.path) as memory, self._opener(memory) as reader:
            numbered = hasattr(reader, "num_record_batches")
            for batch in map(reader.get_batch, range(reader.num_record_batches)) if numbered else reader:
                yield batch.num_rows, batch.slice


class _RowGroup:
    """A row group of Parquet, read from its start, and kept open for the next part."""

    def __init__(self, path: str, group: int, most: int):
        self.path, self.group, self.most = path, group, most
        self.at, self.have, self.parts = 0, None, iter(())  # have: rows from `at` on that were read already

    def rows(self, start: int, count: int) -> Any:
        """Return `count` rows from row `start` on, joined from pyarrow's batches, which may have fewer rows."""
        if self.have is None or start < self.at:
            self.at, self.parts = 0, self._read()
            self.have = pyarrow.Table.from_batches([next(self.parts)])
        while True:
            skip = min(start - self.at, self.have.num_rows)
            self.at, self.have = self.at + skip, self.have.slice(skip)
            if self.have.num_rows >= count:
                return self.have.slice(0, count)
            self.have = pyarrow.concat_tables([self.have, pyarrow.Table.from_batches([next(self.parts)])])

    def _read(self) -> Iterator[Any]:
        with parquet.ParquetFile(self.path) as file:
            yield from file.iter_batches(self.most, row_groups=[self.group], use_threads=False)


class ArrowCells(Cells):
    """A block of rows of a Parquet or Arrow file."""

    source: ArrowSource

    def __init__(self, source: ArrowSource, first: int, rows: Callable):
        super().__init__(source)
        with source.blamed():
            self.rows = rows()
            self.rows.validate(full=True)  # damaged bytes could make pyarrow read any memory
        self.first, self.count = first, self.rows.num_rows

    def where(self, row: int) -> str:
        return f"row {self.first + row}"

    def _column(self, column: int) -> Any:
        values = self.rows.column(column)
        kind = self.source.types[column]
        return values.cast(kind.value_type) if types.is_dictionary(kind) else values

    def texts(self, column: int) -> list[str]:
        with self.source.blamed():
            return ["" if value is None else str(value).strip() for value in self._column(column).to_pylist()]

    def numbers(self, column: int) -> np.ndarray:
        kind = self.source.kind(column)
        if kind == "time":
            where = f"{self.source.path}: {self.source.column_label(column)}"
            raise UsageError(f"{where} holds dates or times; derive numbers from them")
        if kind == "text":
            return super().numbers(column)
        with self.source.blamed():
            values = self._column(column)
            if types.is_boolean(values.type):
                values = values.cast(pyarrow.uint8())
            if types.is_null(values.type):
                return np.full(self.count, math.nan)
            values = values.cast(pyarrow.float64(), safe=False)
            return np.array(values.to_numpy(zero_copy_only=False), dtype=np.float64)
