"""`sql`: queries over CSV, Parquet and SQLite files, by DuckDB in a worker process.

Invariant: a query reads the named files and nothing else of the machine or the network, and changes nothing: one SELECT
a call, on a database in memory whose configuration is locked.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from midflight.errors import UserError
from midflight.tools.base import Tool, ToolError, one_line
from midflight.tools.function import tool
from midflight.tools.options import ToolContext, ToolOptions
from midflight.tools.worker import run_in_worker

if TYPE_CHECKING:
    import duckdb

READERS = {".csv": "read_csv", ".tsv": "read_csv", ".parquet": "read_parquet"}
SQLITE = (".sqlite", ".sqlite3", ".db")
DESCRIBED = 1500
"""Characters of tables and columns in the tool's description."""
_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "memory_limit": "1GB",
    "threads": 2,
    "temp_directory": "",
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}


class SqlOptions(ToolOptions):
    cacheable: ClassVar[bool] = False
    paths: ClassVar[tuple[str, ...]] = ("files",)

    files: tuple[str, ...] = Field(min_length=1)
    """CSV (`.csv`, `.tsv`), Parquet and SQLite (`.sqlite`, `.sqlite3`, `.db`) files. The first two are tables of the
    file's name; each table of the third has its own."""
    rows: int = Field(default=50, ge=1)
    """Most rows of a result; how many there are is said."""
    seconds: float | None = Field(default=30.0, gt=0)
    result_characters: int | None = Field(default=8000, ge=200)

    def missing(self) -> str:
        for file in self.files:
            if Path(file).suffix.lower() not in (*READERS, *SQLITE):
                return f"{file}: not a kind of file that sql reads: {', '.join((*READERS, *SQLITE))}"
            if not Path(file).is_file():
                return f"{file}: no such file; give others in agent.tool_options.sql.files"
        return ""


def sql(options: SqlOptions, context: ToolContext) -> Tool:
    """The tool within its options; its description has the tables and their columns."""

    async def sql(
        query: Annotated[str, Field(min_length=1, max_length=4000, description="one SELECT, as DuckDB has it")],
    ) -> str:
        """answer a SQL query over the tables"""
        files = [os.path.abspath(file) for file in options.files]  # a worker may be in another folder
        return await run_in_worker(run_query, files, query, options.rows)

    made = tool(sql)
    files = getattr(options, "files", ())
    if files:
        try:
            described = "; ".join(tables(files))
        except ToolError as error:
            raise UserError(f"agent.tool_options.sql.files: {error}") from error
        made.description = one_line(f"{made.description}: {described}", DESCRIBED)
    return made


def tables(files: Sequence[str]) -> list[str]:
    """Each table with its columns, as in `countries(name VARCHAR, people BIGINT)`.

    Raises:
        ToolError: a file cannot be read, or two tables have one name.
    """
    with closing(_connect(files)) as connection:
        rows = connection.execute(
            "SELECT table_name, string_agg(column_name || ' ' || data_type, ', ' ORDER BY column_index) "
            "FROM duckdb_columns() WHERE NOT internal GROUP BY table_name ORDER BY table_name"
        ).fetchall()
    return [f"{name}({columns})" for name, columns in rows]


def run_query(files: Sequence[str], query: str, most: int) -> str:
    """The result as text: one value as it is, a table with a line of names above its rows.

    Raises:
        ToolError: the query is not one SELECT, or DuckDB refuses it.
    """
    import duckdb

    try:
        statements = duckdb.extract_statements(query)
        if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
            raise ToolError("write one SELECT; the files are not changed")
        with closing(_connect(files)) as connection:
            cursor = connection.execute(query)
            names = [column[0] for column in cursor.description or ()]
            rows = cursor.fetchmany(most + 1)
            total = len(rows) + sum(map(len, iter(lambda: cursor.fetchmany(10_000), [])))
    except duckdb.Error as error:
        raise ToolError(one_line(str(error), 600)) from error
    if len(rows) == 1 and len(names) == 1:
        return _cell(rows[0][0])
    lines = [" | ".join(names), *(" | ".join(map(_cell, row)) for row in rows[:most])]
    if total > most:
        lines.append(f"({total} rows; the first {most} are shown)")
    elif not rows:
        lines.append("(no rows)")
    return "\n".join(lines)


def _cell(value: object) -> str:
    return "NULL" if value is None else " ".join(str(value).split())


def _connect(files: Sequence[str]) -> duckdb.DuckDBPyConnection:
    """A database in memory with the files' tables, locked."""
    import duckdb

    connection = duckdb.connect(config=_SETTINGS)
    direct = []
    try:
        for file in files:
            suffix = Path(file).suffix.lower()
            if suffix in SQLITE:
                _copy_sqlite(connection, file)
                continue
            direct.append(file)
            name = re.sub(r"\W", "_", Path(file).stem)
            connection.execute(f"CREATE VIEW {_quoted(name)} AS SELECT * FROM {READERS[suffix]}({_literal(file)})")
        allowed = ", ".join(map(_literal, direct))
        connection.execute("SET allowed_directories = []")
        connection.execute(f"SET allowed_paths = [{allowed}]")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
    except (duckdb.Error, sqlite3.Error) as error:
        connection.close()
        raise ToolError(one_line(f"{file}: cannot be read as tables ({error})", 600)) from error
    return connection


def _copy_sqlite(connection: duckdb.DuckDBPyConnection, file: str) -> None:
    """Each table of an SQLite file, copied; a column that mixes kinds becomes text."""
    import numpy as np

    uri = f"{Path(file).absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as source:
        names = source.execute(
            "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%' ORDER BY name"
        ).fetchall()
        for (name,) in names:
            cursor = source.execute(f"SELECT * FROM {_quoted(name)}")
            columns = [column[0] for column in cursor.description]
            values = list(zip(*cursor.fetchall(), strict=True)) or [()] * len(columns)
            kinds = [_kind(column) for column in values]
            declared = ", ".join(f"{_quoted(column)} {kind}" for column, kind in zip(columns, kinds, strict=True))
            connection.execute(f"CREATE TABLE {_quoted(name)} ({declared})")
            if values[0]:
                filled = zip(values, kinds, strict=True)
                arrays = {str(number): _array(np, column, kind) for number, (column, kind) in enumerate(filled)}
                connection.register("midflight_rows", arrays)
                connection.execute(f"INSERT INTO {_quoted(name)} SELECT * FROM midflight_rows")
                connection.unregister("midflight_rows")


def _kind(column: Sequence[object]) -> str:
    kinds = {type(value) for value in column if value is not None}
    if kinds == {bytes}:
        return "BLOB"
    if kinds == {int}:
        return "BIGINT"
    return "DOUBLE" if kinds and kinds <= {int, float} else "VARCHAR"


def _array(np: Any, column: Sequence[object], kind: str) -> Any:
    values = [str(value) if kind == "VARCHAR" and value is not None else value for value in column]
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
