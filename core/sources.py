"""Files of rows: JSON lines (plain or gzip) and Parquet, one file or a folder of them, read one row at a time.

A row is a JSON object. A Parquet row is given as the object it was made from: in a columnar file every struct has
every member that any row has, so a member that is null there is taken for absent (an argument `path` that only
another tool has, a `tool_calls` that only assistants have). A null the source wrote itself is lost in such a file and
cannot be told apart; JSON text, in a file or in a column, is taken as it stands, nulls included.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any, Iterator

from oprd.core.messages import FieldError

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")  # what is read of a folder
_BATCH = 32  # Parquet rows held at once
_BUFFER = 1 << 20  # bytes of a Parquet column read ahead


def files(path: str | Path) -> list[Path]:
    """The file itself, or what a folder holds with one of SUFFIXES, `step_9` before `step_10`; subfolders are not read.

    Raises FileNotFoundError.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such file; expected {', '.join(SUFFIXES)} or a folder of them")
    found = [p for p in path.iterdir() if p.is_file() and p.name.endswith(SUFFIXES) and not p.name.startswith(".")]
    if not found:
        raise FileNotFoundError(f"{path}: no {', '.join(SUFFIXES)} file in this folder (subfolders are not searched)")
    return sorted(found, key=_by_number)


def rows(path: str | Path) -> Iterator[tuple[str, dict | FieldError]]:
    """(place, row) in order, the place as `file:line`, in Parquet `file:row, row group g`, counted from 1.

    A line that is no JSON object comes as the FieldError that says so, for the reader to raise or to count. A file that
    cannot be read on at all (damaged Parquet or gzip, pyarrow missing) is a ValueError.
    """
    for file in files(path):
        yield from _parquet(file) if file.suffix == ".parquet" else _json_lines(file)


def count(path: str | Path) -> int:
    """Rows, good or bad, without parsing them."""
    return sum(_open_parquet(file).metadata.num_rows if file.suffix == ".parquet" else sum(1 for _ in lines(file))
               for file in files(path))


def _by_number(file: Path) -> tuple:
    """Sorts digits in a name by value; names that differ in leading zeros only, by the name itself."""
    parts = re.split(r"(\d+)", file.name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], file.name


# --- JSON lines ---------------------------------------------------------------------------------------------------

def lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of the lines that are not blank."""
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as opened:
            yield from ((number, line) for number, line in enumerate(opened, 1) if line.strip())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{file}: cannot be unpacked ({error}); is the file cut off?") from None


def parse(number: int, line: bytes) -> dict:
    """The JSON object in line `number` of a file (a byte-order mark before the first is passed over). ValueError says
    what it is instead."""
    line = line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"")
    array = "each line must be an object of its own (JSON lines)" if line.lstrip()[:1] == b"[" else ""
    try:
        row: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 ({error.reason} at byte {error.start + 1} of the line); save the file as UTF-8")
    except (ValueError, RecursionError) as error:
        hint = f"is the file one JSON array? {array}" if number == 1 and array else "is the line cut off?"
        raise ValueError(f"is not valid JSON ({error}); {hint}") from None
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object, got {type(row).__name__}" + (f"; {array}" if array else ""))
    return row


def _json_lines(file: Path) -> Iterator[tuple[str, dict | FieldError]]:
    for number, line in lines(file):
        try:
            row: dict | FieldError = parse(number, line)
        except ValueError as problem:
            row = FieldError("row", str(problem), "json")
        yield f"{file}:{number}", row


# --- Parquet ------------------------------------------------------------------------------------------------------

def _parquet(file: Path) -> Iterator[tuple[str, dict]]:
    opened, number = _open_parquet(file), 0
    from pyarrow import ArrowException, types

    # Rows need no dates, and a datetime cannot hold the nanoseconds that some files have.
    columns = [f.name for f in opened.schema_arrow if not types.is_temporal(f.type)]
    try:
        for group in range(opened.num_row_groups):
            for batch in opened.iter_batches(_BATCH, row_groups=[group], columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}:{number}, row group {group + 1}", _plain_members(row, batch.schema)
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read after row {number} ({_one_line(error)}); is the file damaged?"
        raise ValueError(f"{file}: {problem}") from None
    finally:
        opened.close()


def _open_parquet(file: Path):
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError(f"{file}: reading Parquet needs pyarrow; pip install pyarrow") from None
    try:
        return ParquetFile(file, buffer_size=_BUFFER)
    except (ArrowException, OSError) as error:
        problem = f"is no Parquet file ({_one_line(error)}); is it cut off, or a pointer of git LFS?"
        raise ValueError(f"{file}: {problem}") from None


def _plain(value: Any, kind: Any) -> Any:
    """A value of Arrow type `kind` without the null members of its structs. Null elements of lists and null values of
    maps stay: only structs have members that no row asked for."""
    from pyarrow import types

    if value is None:
        return None
    if types.is_struct(kind):
        return _plain_members(value, kind)
    if types.is_map(kind):
        return {key: _plain(item, kind.item_type) for key, item in value}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_plain(item, kind.value_type) for item in value]
    return value


def _plain_members(value: dict, fields: Any) -> dict:
    return {f.name: _plain(value[f.name], f.type) for f in fields if value[f.name] is not None}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
