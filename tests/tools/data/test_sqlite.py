"""SQLite files are read without a trace, as of one moment, and each table that is needed is copied once."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from midflight.tools import ToolError
from midflight.tools.data import sqlite
from midflight.tools.data.sql import run_query, tables
from midflight.tools.data.sqlite import SETTINGS, opened

duckdb = pytest.importorskip("duckdb")


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """The writer of `live/w.db`, which has a write-ahead log with the second of its two rows."""
    (tmp_path / "live").mkdir()
    writer = sqlite3.connect(tmp_path / "live" / "w.db", isolation_level=None)
    writer.execute("PRAGMA journal_mode = wal")
    writer.execute("CREATE TABLE t (a, b)")
    writer.execute("INSERT INTO t VALUES (1, 'x')")
    writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    writer.execute("INSERT INTO t VALUES (2, 'y')")
    yield writer
    writer.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("state", ["in use", "left by a program that ended early", "finished"])
def test_a_write_ahead_log_is_read_and_none_is_left(state: str, logged: sqlite3.Connection, tmp_path: Path) -> None:
    folder = tmp_path / "live"
    if state == "left by a program that ended early":
        folder = shutil.copytree(folder, tmp_path / "left")
    elif state == "finished":
        logged.close()
    before = contents(folder)
    assert list(before) == ["w.db"] or set(before) == {"w.db", "w.db-shm", "w.db-wal"}
    file = str(folder / "w.db")
    code = f"from midflight.tools.data.sql import *\nprint(tables([{file!r}]), run_query([{file!r}], 'FROM t', 5))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['t(a BIGINT, b VARCHAR)'] a | b\n1 | x\n2 | y\n"
    if state == "in use":
        before.pop("w.db-shm")  # where its users write who reads what
        assert contents(folder).pop("w.db-shm")
    assert before.items() <= contents(folder).items() and len(contents(folder)) - len(before) == (state == "in use")


@pytest.mark.parametrize("kind", ["wal", "journal"])
def test_what_only_a_writer_can_finish_is_told(kind: str, logged: sqlite3.Connection, tmp_path: Path) -> None:
    if kind == "journal":
        logged.execute("PRAGMA journal_mode = delete")
        logged.execute("PRAGMA cache_size = 1")
        logged.execute("BEGIN")
        logged.executemany("INSERT INTO t VALUES (1, ?)", [("x" * 1000,)] * 2000)
    (tmp_path / "left").mkdir()
    for name in ("w.db", f"w.db-{kind}"):
        shutil.copy(tmp_path / "live" / name, tmp_path / "left")
    before = contents(tmp_path / "left")
    with pytest.raises(ToolError) as caught:
        tables([str(tmp_path / "left" / "w.db")])
    assert str(caught.value) == (
        "w.db: the program that wrote it ended early; open it once with sqlite3 to finish that"
    )
    assert contents(tmp_path / "left") == before


def test_a_table_is_copied_when_it_is_named_and_again_when_its_file_has_changed(
    logged: sqlite3.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged.execute("CREATE TABLE other (a)")
    logged.execute("CREATE VIEW doubled AS SELECT a * 2 AS twice FROM t")
    copied: list[str] = []
    copy = sqlite._copied

    def counted(source: Any, table: str, columns: Any) -> Any:
        copied.append(table)
        return copy(source, table, columns)

    monkeypatch.setattr(sqlite, "_copied", counted)
    files = [str(tmp_path / "live" / "w.db")]

    def ask(query: str) -> str:
        return run_query(files, query, 5)

    assert [ask("SELECT 1"), ask("SELECT count(*) FROM information_schema.tables"), copied] == ["1", "3", []]
    assert [ask("SELECT sum(a) FROM t"), ask('SELECT max(b) FROM "T"'), copied] == ["3", "y", ["t"]]
    assert [ask("SELECT sum(twice) FROM doubled"), copied] == ["6", ["t", "doubled"]]
    logged.execute("UPDATE t SET a = 5 WHERE a = 1")
    assert [ask("SELECT sum(a) FROM t"), ask("SELECT sum(twice) FROM doubled")] == ["7", "14"]
    assert copied == ["t", "doubled"] * 2
    logged.execute("ALTER TABLE other ADD COLUMN b")
    assert ask("SELECT b FROM other") == "b\n(no rows)"


def test_a_table_that_was_not_copied_is_never_taken_for_an_empty_one(
    logged: sqlite3.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midflight.tools.data.sql._tables_named", lambda connection, query: frozenset())
    for query in ("FROM t", "SELECT count(*) FROM t", "SELECT 1 WHERE NOT EXISTS (FROM t)"):
        with pytest.raises(ToolError, match='write FROM "t" for that table'):
            run_query([str(tmp_path / "live" / "w.db")], query, 5)


def test_what_is_written_meanwhile_is_not_seen(logged: sqlite3.Connection, tmp_path: Path) -> None:
    with opened(str(tmp_path / "live" / "w.db")) as source:
        logged.execute("INSERT INTO t VALUES (3, 'z')")
        path = sqlite.path_of(source.parquet("t"))
    with duckdb.connect(config=SETTINGS) as connection:
        assert connection.read_parquet(path).fetchall() == [(1, "x"), (2, "y")]


def test_a_file_that_changes_under_a_reader_without_locks_is_told(
    logged: sqlite3.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged.close()
    file = tmp_path / "live" / "w.db"
    with pytest.raises(ToolError, match="^w.db was changed while it was read; ask again$"), opened(str(file)):
        with sqlite3.connect(file) as writer:
            writer.execute("INSERT INTO t VALUES (3, 'z')")
    numbers = iter(range(1000))
    monkeypatch.setattr(sqlite, "_state", lambda file: next(numbers))
    with pytest.raises(ToolError, match="^w.db changes all the time; ask again$"), opened(str(file)):
        pass


def test_a_kind_that_shows_late_counts(tmp_path: Path) -> None:
    file = tmp_path / "m.db"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE t (a, b, c)")
        connection.executemany("INSERT INTO t VALUES (?, ?, ?)", [(None, 1, 1)] * 25_000 + [(5, 0.5, "x")])
    query = "SELECT count(*), sum(a), sum(b), max(c) FROM t"
    assert run_query([str(file)], query, 1).splitlines()[1] == "25001 | 5 | 25000.5 | x"
    assert tables([str(file)]) == ["t(a VARCHAR, b BIGINT, c BIGINT)"]  # as its first rows are


def test_the_agents_process_opens_no_file_of_the_user(tmp_path: Path) -> None:
    """It would end the locks that a tool of the user's may have on it, and needs no DuckDB."""
    sqlite3.connect(tmp_path / "m.db").execute("CREATE TABLE t (a)")
    code = (
        "import sys\nfrom midflight.tools import make_toolset\nopened = []\n"
        "sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event in ('open', 'sqlite3.connect') "
        "else None)\n"
        f"toolset = make_toolset(['sql'], {{'sql': {{'files': [{str(tmp_path / 'm.db')!r}]}}}})\n"
        "print(toolset.get('sql').description, 'duckdb' in sys.modules, [one for one in opened if 'm.db' in one])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "answer a SQL query over the tables: t(a VARCHAR) False []\n"


def test_a_view_that_does_not_work_leaves_the_other_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "views.db"
    with closing(sqlite3.connect(file)) as made:
        made.executescript(
            "create table a (n integer); insert into a values (7); create table sqlite3_versions (v text);"
            "create table b (n integer); create view broken as select * from b; drop table b;"
            "create view endless as with recursive c(x) as (select 1 union all select x + 1 from c)"
            "select count(*) from c;"
        )
    monkeypatch.setattr(sqlite, "DESCRIBE_SECONDS", 0.1)
    with sqlite.opened(str(file)) as found:
        assert found.tables() == {
            "a": {"n": "BIGINT"},
            "broken": "broken cannot be read: no such table: main.b",
            "endless": "endless cannot be read: interrupted",
            "sqlite3_versions": {"v": "VARCHAR"},
        }
    assert "broken(cannot be read " in " ".join(tables([str(file)]))
    assert run_query([str(file)], "select n from a", 9) == "7"
    with pytest.raises(ToolError, match="broken cannot be read: no such table: main.b"):
        run_query([str(file)], "select * from broken", 9)
