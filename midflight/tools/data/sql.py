"""`sql`: queries over CSV, Parquet and SQLite files, by DuckDB in a worker process.

Invariant: a query reads the named files and nothing else of the machine or the network, and changes nothing: one SELECT
a call, whose syntax tree holds nothing that writes, on a new database in memory whose configuration is locked.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from midflight.errors import UserError
from midflight.section import MOST_SECONDS
from midflight.tools.base import Tool, ToolError, one_line
from midflight.tools.data.sqlite import SETTINGS, opened, path_of, quoted
from midflight.tools.function import tool
from midflight.tools.options import ToolContext, ToolOptions, installed
from midflight.tools.worker import run_in_worker, run_in_worker_now

if TYPE_CHECKING:
    import duckdb

READERS = {".csv": "read_csv", ".tsv": "read_csv", ".parquet": "read_parquet"}
SQLITE = (".sqlite", ".sqlite3", ".db")
DESCRIBED = 1500
"""Characters of tables and columns in the tool's description."""
ONLY_SELECT = "write one SELECT; the files are not changed"
READING = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
"""The nodes of DuckDB's syntax tree that only read; INSERT, COPY TO and others can stand in a WITH."""
FUNCTIONS = frozenset(
    {"range", "generate_series", "unnest", "repeat", "repeat_row", "json_each", "json_tree"}
    | {"duckdb_columns", "duckdb_tables", "duckdb_views", "pragma_table_info"}
)
"""The functions in FROM that a query may use: others run SQL that is text, or reach beyond the database."""


class SqlOptions(ToolOptions):
    cacheable: ClassVar[bool] = False
    paths: ClassVar[tuple[str, ...]] = ("files",)

    files: tuple[str, ...] = Field(min_length=1)
    """CSV (`.csv`, `.tsv`), Parquet and SQLite (`.sqlite`, `.sqlite3`, `.db`) files. The first two are tables of the
    file's name; each table of the third has its own. Nothing in them is changed, nothing is made beside them."""
    rows: int = Field(default=50, ge=1, le=1_000_000)
    """Most rows of a result; how many there are is said."""
    seconds: float | None = Field(default=30.0, gt=0, le=MOST_SECONDS)
    result_characters: int | None = Field(default=8000, ge=200, le=1_000_000_000)

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
    if files and not options.missing() and installed("duckdb"):
        try:
            described = "; ".join(run_in_worker_now(tables, [os.path.abspath(file) for file in files]))
        except ToolError as error:
            raise UserError(f"agent.tool_options.sql.files: {error}") from error
        made.description = one_line(f"{made.description}: {described}", DESCRIBED)
    return made


def tables(files: Sequence[str]) -> list[str]:
    """Each table with its columns, as in `countries(name VARCHAR, people BIGINT)`; for a worker, as `run_query`.

    Raises:
        ToolError: a file cannot be read, or two tables have one name.
    """
    import duckdb

    with closing(duckdb.connect(config=SETTINGS)) as connection:
        _open(connection, files, frozenset())
        rows = connection.execute(
            "SELECT table_name, string_agg(column_name || ' ' || data_type, ', ' ORDER BY column_index) "
            "FROM duckdb_columns() WHERE NOT internal GROUP BY table_name ORDER BY table_name"
        ).fetchall()
    return [f"{name}({columns})" for name, columns in rows]


def run_query(files: Sequence[str], query: str, most: int) -> str:
    """The result as text: one value as it is, a table with a line of names above its rows.

    Raises:
        ToolError: the query is not one that only reads, or DuckDB refuses it.
    """
    import duckdb

    try:
        with closing(duckdb.connect(config=SETTINGS)) as connection:
            _open(connection, files, _tables_named(connection, query))
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


def _tables_named(connection: duckdb.DuckDBPyConnection, query: str) -> frozenset[str]:
    """The names in a query that may be tables, in small letters.

    Raises:
        ToolError: it is not one SELECT, does more than read, such as a COPY in its WITH, or uses a function that could.
    """
    import duckdb

    statements = [statement.type for statement in duckdb.extract_statements(query)]
    told = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchone()
    tree = json.loads(told[0]) if told else {}
    if statements != [duckdb.StatementType.SELECT] or tree.get("error", True):
        raise ToolError(ONLY_SELECT)
    names: set[str] = set()
    parts: list[Any] = [tree]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            parts += part.values()
            kind = str(part.get("type"))
            if kind.endswith("_NODE") and kind not in READING:
                raise ToolError(ONLY_SELECT)
            if kind == "TABLE_FUNCTION" and part["function"]["function_name"].lower() not in FUNCTIONS:
                used = part["function"]["function_name"]
                raise ToolError(f"{used} cannot be used here; functions in FROM: {', '.join(sorted(FUNCTIONS))}")
            if kind == "BASE_TABLE":
                names.add(part["table_name"].casefold())
    return frozenset(names)


def _open(connection: duckdb.DuckDBPyConnection, files: Sequence[str], named: frozenset[str]) -> None:
    """The files' tables as views in a database, which is then locked; those of SQLite can be read if `named`."""
    import duckdb

    read = []
    try:
        for file in files:
            suffix = Path(file).suffix.lower()
            if suffix in SQLITE:
                read += _open_sqlite(connection, file, named)
                continue
            read.append(file)
            _view(connection, re.sub(r"\W", "_", Path(file).stem), READERS[suffix], file)
        connection.execute("SET allowed_directories = []")
        connection.execute(f"SET allowed_paths = [{', '.join(map(_literal, read))}]")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
    except (duckdb.Error, sqlite3.Error) as error:
        raise ToolError(one_line(f"{file}: cannot be read as tables ({error})", 600)) from error


def _open_sqlite(connection: duckdb.DuckDBPyConnection, file: str, named: frozenset[str]) -> list[str]:
    """The paths of the tables that are named; each of the others is a view that has its columns and fails when read."""
    read = []
    with opened(file) as source:
        for table, columns in source.tables().items():
            if isinstance(columns, str):
                fails = f"SELECT NULL AS {quoted('cannot be read')} WHERE error({_literal(columns)})"
                connection.execute(f"CREATE VIEW {quoted(table)} AS {fails}")
                continue
            if table.casefold() in named:
                read.append(path_of(source.parquet(table)))
                _view(connection, table, "read_parquet", read[-1])
                continue
            empty = ", ".join(f"NULL::{kind} AS {quoted(name)}" for name, kind in columns.items())
            problem = _literal(f"write FROM {quoted(table)} for that table")
            connection.execute(f"CREATE VIEW {quoted(table)} AS SELECT {empty} WHERE error({problem})")
    return read


def _view(connection: duckdb.DuckDBPyConnection, name: str, reader: str, file: str) -> None:
    connection.execute(f"CREATE VIEW {quoted(name)} AS SELECT * FROM {reader}({_literal(file)})")


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
