"""SQLite files, read as they are and without a trace: nothing is changed in them or made beside them.

Invariant: what is read is one state of a file, also while another process writes it. A table that is needed is copied
to a Parquet file that has no name, once for a state of its file, and goes with this process.

It is for worker processes: to close a file here would drop the locks that its process has on it.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from midflight.tools.base import ToolError

T = TypeVar("T")
State = tuple[tuple[int, int] | None, ...]

SAMPLED = 1000
"""Rows that say what the columns of a table hold that no query has named."""
DESCRIBE_SECONDS = 1.0
"""Longest look at one table; a view may never end."""
BATCH = 20_000
_KEPT: dict[tuple[str, str], tuple[State, Any]] = {}
"""By file and table: what was read of it, in which state of the file."""


class SqliteFile:
    """One state of a file; see `opened`."""

    def __init__(self, file: str, source: sqlite3.Connection, state: State) -> None:
        self._file, self._source, self._state = file, source, state

    def tables(self) -> Mapping[str, Mapping[str, str] | str]:
        """By name, tables and views: DuckDB's types of the columns, as the first rows have them, or what is wrong."""
        return self._kept("", self._tables)

    def parquet(self, table: str) -> IO[bytes]:
        """A table, copied; a column that mixes kinds is text."""
        return self._kept(table, lambda: _copied(self._source, table, _columns(self._source, table)))

    def _kept(self, table: str, make: Callable[[], T]) -> T:
        key = (self._file, table)
        if key not in _KEPT or _KEPT[key][0] != self._state:
            _KEPT[key] = self._state, make()
        return cast(T, _KEPT[key][1])

    def _tables(self) -> dict[str, dict[str, str] | str]:
        found = self._source.execute(
            "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' "
            "ORDER BY name"
        ).fetchall()
        return {name: self._described(name) for (name,) in found}

    def _described(self, table: str) -> dict[str, str] | str:
        """Its columns; what is wrong with a view that does not work: its table is gone, or it does not end."""
        end = time.monotonic() + DESCRIBE_SECONDS
        self._source.set_progress_handler(lambda: time.monotonic() > end, 10_000)
        try:
            return _columns(self._source, table, SAMPLED)
        except sqlite3.OperationalError as error:
            return f"{table} cannot be read: {error}"
        finally:
            self._source.set_progress_handler(None, 0)


@contextmanager
def opened(file: str) -> Iterator[SqliteFile]:
    """A file at one moment.

    Raises:
        ToolError: it has to be finished by a program that may write, or changes too often.
        sqlite3.Error: it cannot be read.
    """
    how = _how(file)
    with closing(sqlite3.connect(f"{Path(file).absolute().as_uri()}?{how}", uri=True, isolation_level=None)) as source:
        for _ in range(9):
            state = _state(file)
            source.execute("BEGIN")
            try:
                source.execute("SELECT 1 FROM sqlite_master").fetchone()  # from here on nothing of it changes
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode == sqlite3.SQLITE_READONLY_ROLLBACK:
                    raise ToolError(_unfinished(file)) from error
                raise
            if _state(file) == state:
                break
            source.execute("ROLLBACK")
        else:
            raise ToolError(f"{Path(file).name} changes all the time; ask again")
        yield SqliteFile(file, source, state)
    if how == _UNLOCKED and _state(file) != state:
        raise ToolError(f"{Path(file).name} was changed while it was read; ask again")


_UNLOCKED = "immutable=1"


def _how(file: str) -> str:
    """The parameters of SQLite's URI with which it makes no file (sqlite.org/wal.html, "Read-Only Databases")."""
    log, index = _stamp(f"{file}-wal"), _stamp(f"{file}-shm")
    with open(file, "rb") as head:
        logged = head.read(20)[18:] == b"\2\2"
    if not logged:
        return "mode=ro"
    if log and index:
        return "mode=ro&readonly_shm=1"
    if log and log[1]:
        raise ToolError(_unfinished(file))
    return _UNLOCKED


def _unfinished(file: str) -> str:
    return f"{Path(file).name}: the program that wrote it ended early; open it once with sqlite3 to finish that"


def _state(file: str) -> State:
    """What is another after each change."""
    return tuple(map(_stamp, (file, f"{file}-wal")))


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size


def _columns(source: sqlite3.Connection, table: str, most: int | None = None) -> dict[str, str]:
    """DuckDB's type of each column, as its first `most` rows have it."""
    rows = f"SELECT * FROM {quoted(table)}" + ("" if most is None else f" LIMIT {most}")
    names = [column[0] for column in source.execute(f"SELECT * FROM {quoted(table)} LIMIT 0").description]
    kinds = ", ".join(f"group_concat(DISTINCT typeof({quoted(name)}))" for name in names)
    found = source.execute(f"SELECT {kinds} FROM ({rows})").fetchone()
    return {name: _type(set((said or "").split(",")) - {"", "null"}) for name, said in zip(names, found, strict=True)}


def _type(kinds: set[str]) -> str:
    if kinds == {"blob"}:
        return "BLOB"
    if kinds == {"integer"}:
        return "BIGINT"
    return "DOUBLE" if kinds and kinds <= {"integer", "real"} else "VARCHAR"


def _copied(source: sqlite3.Connection, table: str, columns: Mapping[str, str]) -> IO[bytes]:
    import duckdb

    made = tempfile.TemporaryFile()
    with closing(duckdb.connect(config=SETTINGS)) as database:
        declared = ", ".join(f"{quoted(name)} {kind}" for name, kind in columns.items())
        database.execute(f"CREATE TABLE copied ({declared})")
        cursor = source.execute(f"SELECT * FROM {quoted(table)}")
        while rows := cursor.fetchmany(BATCH):
            filled = zip(zip(*rows, strict=True), columns.values(), strict=True)
            database.register("batch", {str(place): _array(*column) for place, column in enumerate(filled)})
            database.execute("INSERT INTO copied SELECT * FROM batch")
            database.unregister("batch")
        database.execute(f"COPY copied TO '{path_of(made)}' (FORMAT parquet, USE_TMP_FILE false)")
    return made


def _array(column: Sequence[object], kind: str) -> Any:
    import numpy as np

    array = np.empty(len(column), dtype=object)
    array[:] = [str(value) if kind == "VARCHAR" and value is not None else value for value in column]
    return array


def path_of(copy: IO[bytes]) -> str:
    """Where a file without a name can be read, in this process."""
    return f"/dev/fd/{copy.fileno()}"


def quoted(name: str) -> str:
    """A name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'


SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "memory_limit": "1GB",
    "threads": 2,
    "temp_directory": "",
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}
"""Of any DuckDB here."""
