"""sql over real files of each kind: right answers, and no way to anything but those files."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from midflight.errors import UserError
from midflight.recipe import load_recipe
from midflight.tools import ErrorKind, LimitedTool, Tool, ToolResult, make_toolset, recipe_tool_info
from tests.recipe.test_config import MINIMAL

duckdb = pytest.importorskip("duckdb")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "capitals-of.csv").write_text("country,capital\nPeru,Lima\nChad,N'Djamena\nBolivia,\n")
    duckdb.connect().execute(
        f"COPY (SELECT * FROM (VALUES ('Peru', 33), ('Chad', 17)) t(country, millions)) TO '{tmp_path}/people.parquet'"
    )
    with sqlite3.connect(tmp_path / "more.sqlite") as connection:
        connection.execute("CREATE TABLE area (country TEXT, km2 INTEGER, note, share REAL, raw BLOB)")
        connection.execute("INSERT INTO area VALUES ('Peru', 1285216, 1, 0.5, x'00ff'), ('Chad', NULL, 'x', 2, NULL)")
        connection.execute("CREATE TABLE empty (a, b)")
    (tmp_path / "secret.csv").write_text("a\nsecret\n")
    return [str(tmp_path / name) for name in ("capitals-of.csv", "people.parquet", "more.sqlite")]


def made(files: list[str], **options: Any) -> Tool:
    found = make_toolset(["sql"], {"sql": {"files": files, **options}}).get("sql")
    assert found is not None
    return found


def ask(files: list[str], query: str, **options: Any) -> ToolResult:
    return asyncio.run(made(files, **options).call({"query": query}, 30.0))


def test_files_of_all_kinds_are_joined(files: list[str]) -> None:
    query = """SELECT capital, millions, km2 FROM capitals_of JOIN people USING (country) JOIN area USING (country)
    ORDER BY capital"""
    assert ask(files, query).text == "capital | millions | km2\nLima | 33 | 1285216\nN'Djamena | 17 | NULL"


def test_one_value_is_the_value_itself(files: list[str]) -> None:
    assert ask(files, "SELECT sum(millions) FROM people").text == "50"
    assert ask(files, "SELECT capital FROM capitals_of WHERE country = 'Bolivia'").text == "NULL"


def test_the_planner_is_told_tables_and_columns(files: list[str]) -> None:
    assert made(files).description == (
        "answer a SQL query over the tables: area(country VARCHAR, km2 BIGINT, note VARCHAR, share DOUBLE, raw BLOB); "
        "capitals_of(country VARCHAR, capital VARCHAR); empty(a VARCHAR, b VARCHAR); "
        "people(country VARCHAR, millions INTEGER)"
    )


def test_the_kinds_of_sqlite_values_stay(files: list[str]) -> None:
    query = "SELECT note, share, raw FROM area ORDER BY country DESC"
    assert ask(files, query).text == "note | share | raw\n1 | 0.5 | b'\\x00\\xff'\nx | 2.0 | NULL"
    assert ask(files, "SELECT * FROM empty").text == "a | b\n(no rows)"


def test_a_long_result_says_how_long(files: list[str]) -> None:
    text = ask(files, "SELECT range AS n FROM range(25000)", rows=3).text
    assert text == "n\n0\n1\n2\n(25000 rows; the first 3 are shown)"


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM read_blob('/proc/self/environ')",
        "SELECT * FROM '{folder}/secret.csv'",
        "SELECT * FROM read_csv('{folder}/secret.csv')",
        "SELECT * FROM read_csv('{folder}/../{name}/secret.csv')",
        "SELECT * FROM glob('{folder}/*')",
        "SELECT * FROM read_csv('http://127.0.0.1:9/x.csv')",
        "SELECT * FROM read_csv('s3://bucket/x.csv')",
        "SELECT * FROM sqlite_scan('{folder}/more.sqlite', 'area')",
        "SELECT getenv('HOME')",
        "COPY (SELECT 1) TO '{folder}/capitals-of.csv'",
        "COPY people TO '{folder}/new.csv'",
        "EXPORT DATABASE '{folder}/new'",
        "ATTACH '{folder}/new.db'",
        "CREATE TABLE x AS SELECT 1",
        "INSERT INTO area VALUES ('X', 1, 1, 1, NULL)",
        "UPDATE area SET km2 = 1",
        "DROP VIEW people",
        "SET enable_external_access = true",
        "PRAGMA enable_profiling",
        "INSTALL httpfs",
        "LOAD httpfs",
        "CALL pragma_version()",
        "WITH x AS (COPY people TO '{folder}/capitals-of.csv' (USE_TMP_FILE false)) SELECT 1",
        "SELECT 1 FROM (WITH x AS (COPY people TO '{folder}/capitals-of.csv' (USE_TMP_FILE false)) SELECT 1)",
        "WITH x AS (INSERT INTO area VALUES ('X', 1, 1, 1, NULL) RETURNING *) FROM x",
        "SELECT * FROM query('SELECT 1')",
        "SELECT * FROM system.main.QUERY('SELECT 1')",
        "SELECT * FROM enable_logging(storage = 'file', storage_path = '{folder}/new')",
        "SELECT 1; DROP TABLE area",
        "SELECT 1; SELECT 2",
        "",
        "SELEC 1",
        "SELECT nothing FROM people",
    ],
)
def test_nothing_else_is_read_and_nothing_is_changed(files: list[str], query: str, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    text = query.format(folder=tmp_path, name=tmp_path.name)
    result = asyncio.run(made(files).call({"query": text or " "}, 30.0))
    assert result.error is ErrorKind.TOOL_ERROR, result
    assert "\n" not in result.text and "secret\n" not in result.text
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_sql_that_is_data_is_not_run(files: list[str]) -> None:
    hidden = f"WITH x AS (COPY (SELECT 1) TO '{files[0]}' (USE_TMP_FILE false)) SELECT 1"
    told = duckdb.connect().execute("SELECT json_serialize_sql(?)", [hidden]).fetchone()[0].replace("'", "''")
    before = Path(files[0]).read_bytes()
    result = ask(files, f"SELECT * FROM json_execute_serialized_sql('{told}')")
    assert result == ToolResult(
        "json_execute_serialized_sql cannot be used here; functions in FROM: duckdb_columns, duckdb_tables, "
        "duckdb_views, generate_series, json_each, json_tree, pragma_table_info, range, repeat, repeat_row, unnest",
        ErrorKind.TOOL_ERROR,
    )
    assert Path(files[0]).read_bytes() == before


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("WITH RECURSIVE r AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM r WHERE i < 3) SELECT sum(i) FROM r", "6"),
        ("WITH a AS MATERIALIZED (SELECT country FROM AREA) SELECT count(*) FROM a JOIN people USING (country)", "2"),
        ("SELECT country FROM main.area QUALIFY row_number() OVER (ORDER BY country DESC) = 1", "Peru"),
        ("SELECT count(*) FROM range(2) r, LATERAL (SELECT r.range), unnest([1, 2]) u(v)", "4"),
        ("PIVOT (SELECT 1 AS a, 'x' AS b) ON b IN ('x') USING sum(a)", "1"),
        ("FROM people SELECT sum(millions)", "50"),
        ("SELECT column_type FROM (DESCRIBE area) WHERE column_name = 'km2'", "BIGINT"),
        ("SHOW TABLES", "name\narea\ncapitals_of\nempty\npeople"),
    ],
)
def test_what_only_reads_is_answered(files: list[str], query: str, text: str) -> None:
    assert ask(files, query) == ToolResult(text)


def test_errors_help_the_planner(files: list[str]) -> None:
    assert 'Candidate bindings: "millions"' in ask(files, "SELECT million FROM people").text
    assert ask(files, "DELETE FROM area").text == "write one SELECT; the files are not changed"


def test_a_query_without_end_is_interrupted(files: list[str]) -> None:
    endless = "SELECT count(*) FROM range(1000000000) a, range(1000000) b WHERE a.range * 7 % 11 = b.range"
    result = ask(files, endless, seconds=1)
    assert result == ToolResult("sql took longer than 1 seconds", ErrorKind.TOOL_TIMEOUT)


def test_a_query_that_needs_too_much_memory_is_an_error(files: list[str]) -> None:
    result = ask(files, "SELECT list(repeat('x', 1000) || range) FROM range(10000000)")
    assert result.error is ErrorKind.TOOL_ERROR and "memory" in result.text.lower()


def test_files_that_are_wrong_are_told_before_anything_starts(tmp_path: Path, files: list[str]) -> None:
    (tmp_path / "x.xlsx").write_text("")
    (tmp_path / "bad.parquet").write_text("no")
    (tmp_path / "capitals_of.tsv").write_text("a\tb\n1\t2\n")
    for wrong, line in (
        ([str(tmp_path / "x.xlsx")], "not a kind of file that sql reads"),
        ([str(tmp_path / "no.csv")], "no such file"),
        ([str(tmp_path / "bad.parquet")], "cannot be read as tables"),
        ([files[0], str(tmp_path / "capitals_of.tsv")], "already exists"),
        ([], "at least 1 item"),
    ):
        with pytest.raises(UserError, match=line):
            made(wrong)


def test_it_is_listed_also_where_it_cannot_be_used_yet(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(file: str) -> str:
        (row, _) = recipe_tool_info(["sql"], {"sql": {"files": [file]}}, {})
        assert row.description == "answer a SQL query over the tables"
        return row.missing

    assert missing("/no/such.csv") == "/no/such.csv: no such file; give others in agent.tool_options.sql.files"
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert missing(files[0]) == "pip install 'midflight[tools]' (duckdb)"


def test_files_are_relative_to_the_recipe_and_the_result_is_not_cached(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(MINIMAL.replace("[calculator]", "[sql]\n  tool_options: {sql: {files: [people.parquet]}}"))
    monkeypatch.chdir("/")
    loaded = load_recipe(str(recipe))
    assert loaded.agent.tool_options["sql"]["files"] == [files[1]]
    with pytest.raises(UserError, match="sql.cache_hours = 1: an equal call may have another result here"):
        load_recipe(str(recipe), ["agent.tool_options.sql.cache_hours=1"])
    assert isinstance(made(files), LimitedTool)
