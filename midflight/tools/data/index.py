"""The index of `corpus_search`: SQLite FTS5 in the cache folder, kept up to date.

Invariant: a search sees each file as it is when the search begins: files that are new, changed (by size and time) or
gone are indexed, indexed anew or dropped first. What one file holds enters the index in one transaction, so a search
that is stopped halfway through a large folder leaves the next one only the rest. A file that cannot be read is told in
each search, and keeps no other from being read; it is read again where it has changed or the problem may have passed.

All of it runs in a worker.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from midflight.tools.base import InfrastructureError, ToolError, TransientError
from midflight.tools.data.reader import KINDS, PDF, read_each
from midflight.tools.reading.passages import TOKENIZER, match_expression

INDEX_VERSION = 3
"""Raise when the tables, the passages or the tokenizer change."""
DOCUMENT_SECONDS = 60.0
"""Of processor time that one document may take; in a call that may not take twice as long half of its time."""
TOLD = 5
"""Files that cannot be read that a result names."""
_TABLES = f"""
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, size INTEGER, changed INTEGER, problem TEXT, enough REAL);
CREATE VIRTUAL TABLE IF NOT EXISTS passages USING fts5(path UNINDEXED, title, text, tokenize='{TOKENIZER}');
CREATE TABLE IF NOT EXISTS vectors (model TEXT, passage INTEGER, vector BLOB, PRIMARY KEY (model, passage));
"""


def index_name(folder: str) -> str:
    """Of the index file of a folder."""
    digest = hashlib.sha256(str(Path(folder).resolve()).encode("utf-8", "surrogatepass")).hexdigest()
    return f"{digest[:32]}-{INDEX_VERSION}.sqlite"


def search(folder: str, index: str, query: str, document: str, count: int, seconds: float) -> str:
    """The best passages as text, below a line with their document; first the index is brought up to date.

    Args:
        seconds: of the call.

    Raises:
        ToolError: nothing matches, or there is no such document.
        InfrastructureError: the folder cannot be read, or the index not written.
    """
    expression = match_expression(query)
    with opened(folder, index) as connection:
        problems = update(connection, Path(folder), seconds)
        where = "AND path = ?" if known(connection, document) else ""
        rows = (
            connection.execute(
                f"SELECT path, title, text FROM passages WHERE passages MATCH ? {where} "
                "ORDER BY bm25(passages, 0.0, 2.0, 1.0), rowid LIMIT ?",
                (f"{{title text}} : ({expression})", *([document] if document else []), count),
            ).fetchall()
            if expression
            else []
        )
    return shown(rows, problems, query)


@contextmanager
def opened(folder: str, index: str) -> Iterator[sqlite3.Connection]:
    """The index of a folder, for this process alone meanwhile; the lock ends with the process.

    Raises:
        TransientError: the index is damaged; it is removed, and the next search makes it anew.
        InfrastructureError: what is done inside cannot read the folder, or not write the index.
    """
    try:
        Path(index).parent.mkdir(parents=True, exist_ok=True)
        with _locked(index):
            try:
                with closing(sqlite3.connect(index, isolation_level=None)) as connection:
                    yield connection
            except sqlite3.DatabaseError as error:
                if type(error) is not sqlite3.DatabaseError:  # those below it: a full disk, no rights
                    raise
                for file in (index, f"{index}-wal", f"{index}-shm", f"{index}-journal"):
                    Path(file).unlink(missing_ok=True)
                raise TransientError(
                    f"corpus_search: the index {index} was damaged ({error}); it is removed, the next search makes "
                    "another"
                ) from error
    except (OSError, sqlite3.Error) as error:
        raise InfrastructureError(f"corpus_search: {folder} or its index {index}: {error}") from error


def known(connection: sqlite3.Connection, document: str) -> bool:
    """Whether a document is named.

    Raises:
        ToolError: there is none of that name.
    """
    if not document:
        return False
    (found,) = connection.execute("SELECT count(*) FROM files WHERE path = ?", (document,)).fetchone()
    if not found:
        raise ToolError(f"there is no document {document!r}; leave it empty to search all")
    return True


def shown(rows: Sequence[tuple[str, str, str]], problems: Sequence[Sequence[str]], query: str) -> str:
    """The found path, title and text as a result, and what could not be read.

    Raises:
        ToolError: nothing was found.
    """
    told = [f"(cannot be read: {path}: {problem})" for path, problem in problems[:TOLD]]
    if len(problems) > TOLD:
        told.append(f"(cannot be read either: {len(problems) - TOLD} more)")
    if not rows:
        raise ToolError("\n".join([f"nothing in the documents matches {query.strip()!r}; try other words", *told]))
    found = (f"[{path}]{f' {title}' if title else ''}\n{text}" for path, title, text in rows)
    return "\n\n".join([*found, *told])


def update(connection: sqlite3.Connection, folder: Path, seconds: float) -> list[tuple[str, str]]:
    """Bring the index up to date within a call of `seconds`; the files that cannot be read, each with the reason.

    Raises:
        OSError: the folder cannot be read.
    """
    connection.executescript(_TABLES)
    given = min(DOCUMENT_SECONDS, seconds / 2)  # the next search has time for the others
    indexed = connection.execute("SELECT path, size, changed, enough FROM files")
    stamps = {path: (size, changed, enough is not None and enough < given) for path, size, changed, enough in indexed}
    problems: list[tuple[str, str]] = []
    present: set[str] = set()
    anew: list[tuple[Path, str, tuple[int, int]]] = []
    for file in documents(folder):
        path, state = file.relative_to(folder).as_posix(), file.stat()
        legible = os.fsencode(path).decode("utf-8", "backslashreplace")
        if legible != path:
            problems.append((legible, "its name is not UTF-8; rename it"))
            continue
        present.add(path)
        if stamps.get(path) != (state.st_size, state.st_mtime_ns, False):
            anew.append((file, path, (state.st_size, state.st_mtime_ns)))
    with closing(read_each([file for file, _, _ in anew], seconds / 2, given)) as readings:
        for (_, path, stamp), reading in zip(anew, readings, strict=True):
            with _transaction(connection):
                if path in stamps:  # it would look through all passages
                    _drop(connection, path)
                rows = ((path, reading.title, text) for text in reading.passages)
                connection.executemany("INSERT INTO passages VALUES (?, ?, ?)", rows)
                row = (path, *stamp, reading.problem, reading.enough)
                connection.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", row)
    with _transaction(connection):
        for path in stamps.keys() - present:
            _drop(connection, path)
            connection.execute("DELETE FROM files WHERE path = ?", (path,))
    return problems + connection.execute("SELECT path, problem FROM files WHERE problem != '' ORDER BY path").fetchall()


def _drop(connection: sqlite3.Connection, path: str) -> None:
    """Forget the passages of a file, and their vectors first: a new passage may get the number of an old one."""
    connection.execute("DELETE FROM vectors WHERE passage IN (SELECT rowid FROM passages WHERE path = ?)", (path,))
    connection.execute("DELETE FROM passages WHERE path = ?", (path,))


def documents(folder: Path) -> Iterator[Path]:
    """Files of the kinds that are read, in order; hidden ones and links that lead out of the folder are not.

    Raises:
        OSError: a folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    root = folder.resolve()
    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(place) / name
            readable = file.suffix.lower() in KINDS or file.suffix.lower() == PDF
            if readable and not name.startswith(".") and file.is_file() and file.resolve().is_relative_to(root):
                yield file


@contextmanager
def _locked(index: str) -> Iterator[None]:
    import fcntl

    with open(f"{index}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk has ended it
            connection.execute("ROLLBACK")
        raise
