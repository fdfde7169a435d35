"""`corpus_search`: the user's documents, indexed by SQLite FTS5 in the cache folder and kept up to date.

Invariant: a search sees each file as it is when the search begins: files that are new, changed (by size and time) or
gone are indexed, indexed anew or dropped first. What one file holds enters the index in one transaction, so a search
that is stopped halfway through a large folder leaves the next one only the rest.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from midflight.tools.base import InfrastructureError, Tool, ToolError
from midflight.tools.documents import document_text
from midflight.tools.function import tool
from midflight.tools.options import ToolContext, ToolOptions, installed, to_install
from midflight.tools.passages import TOKENIZER, match_expression, paragraphs
from midflight.tools.worker import run_in_worker

INDEX_VERSION = 1
"""Raise when the tables, the passages or the tokenizer change."""
KINDS = {".txt": "text/plain", ".md": "text/plain", ".rst": "text/plain", ".html": "text/html", ".htm": "text/html"}
"""Types of the files that are read; a PDF is told by its content."""
PDF = ".pdf"
LARGEST = 50_000_000
"""Bytes of a file; a larger one is not indexed."""
_TABLES = f"""
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, size INTEGER, changed INTEGER, problem TEXT);
CREATE VIRTUAL TABLE IF NOT EXISTS passages USING fts5(path UNINDEXED, title, text, tokenize='{TOKENIZER}');
"""


class CorpusOptions(ToolOptions):
    cacheable: ClassVar[bool] = False
    paths: ClassVar[tuple[str, ...]] = ("folder",)

    folder: str
    """With the documents, in folders below it as well: `.txt`, `.md`, `.rst`, `.html`, `.htm`, `.pdf`."""
    passages: int = Field(default=5, ge=1, le=50)
    """Passages of about 600 characters that a search gives."""
    seconds: float | None = Field(default=600.0, gt=0)
    """Time limit of a call; the first one indexes all, later ones what has changed."""
    result_characters: int | None = Field(default=8000, ge=200)

    def missing(self) -> str:
        if not Path(self.folder).is_dir():
            return f"{self.folder}: no such folder; give another in agent.tool_options.corpus_search.folder"
        absent = [package for package in ("trafilatura", "lxml_html_clean", "pypdf") if not installed(package)]
        kinds = {path.suffix.lower() for path in _documents(Path(self.folder))} - {".txt", ".md", ".rst"}
        return to_install(absent, "tools") if absent and kinds else ""


def corpus_search(options: CorpusOptions, context: ToolContext) -> Tool:
    """The tool within its options."""

    async def corpus_search(
        query: Annotated[str, Field(min_length=1, max_length=500, description="words to look for")],
        document: Annotated[str, Field(max_length=500, description="name of the only one to look in; empty: all")] = "",
    ) -> str:
        """passages of the user's documents that match the words, each with the document's name"""
        folder = os.path.abspath(options.folder)  # a worker may be in another
        index = str(context.cache_folder.absolute() / "corpora" / index_name(folder))
        return await run_in_worker(search, folder, index, query, document, options.passages)

    return tool(corpus_search)


def index_name(folder: str) -> str:
    """Of the index file of a folder."""
    digest = hashlib.sha256(str(Path(folder).resolve()).encode("utf-8", "surrogatepass")).hexdigest()
    return f"{digest[:32]}-{INDEX_VERSION}.sqlite"


def search(folder: str, index: str, query: str, document: str, count: int) -> str:
    """The best passages as text, below a line with their document; first the index is brought up to date.

    Raises:
        ToolError: nothing matches, or there is no such document.
        InfrastructureError: the folder cannot be read, or the index not written.
    """
    expression = match_expression(query)
    try:
        Path(index).parent.mkdir(parents=True, exist_ok=True)
        with _locked(index), closing(sqlite3.connect(index, isolation_level=None)) as connection:
            problems = update(connection, Path(folder))
            where = ""
            if document:
                (known,) = connection.execute("SELECT count(*) FROM files WHERE path = ?", (document,)).fetchone()
                if not known:
                    raise ToolError(f"there is no document {document!r}; leave it empty to search all")
                where = "AND path = ?"
            rows = (
                connection.execute(
                    f"SELECT path, title, text FROM passages WHERE passages MATCH ? {where} "
                    "ORDER BY bm25(passages, 0.0, 2.0, 1.0), rowid LIMIT ?",
                    (f"{{title text}} : ({expression})", *([document] if document else []), count),
                ).fetchall()
                if expression
                else []
            )
    except (OSError, sqlite3.Error) as error:
        raise InfrastructureError(f"corpus_search: {folder} or its index {index}: {error}") from error
    told = [f"(cannot be read: {path}: {problem})" for path, problem in problems[:5]]
    if not rows:
        raise ToolError("\n".join([f"nothing in the documents matches {query.strip()!r}; try other words", *told]))
    found = (f"[{path}]{f' {title}' if title else ''}\n{text}" for path, title, text in rows)
    return "\n\n".join([*found, *told])


def update(connection: sqlite3.Connection, folder: Path) -> list[tuple[str, str]]:
    """Bring the index up to date; the files that are new or changed and cannot be read, each with the reason.

    Raises:
        OSError: the folder cannot be read.
    """
    connection.executescript(_TABLES)
    indexed = connection.execute("SELECT path, size, changed FROM files")
    known = {path: (size, changed) for path, size, changed in indexed}
    problems: list[tuple[str, str]] = []
    present: set[str] = set()
    for file in _documents(folder):
        path, state = file.relative_to(folder).as_posix(), file.stat()
        present.add(path)
        stamp = (state.st_size, state.st_mtime_ns)
        if known.get(path) == stamp:
            continue
        found, problem = {"title": "", "text": ""}, ""
        try:
            if state.st_size > LARGEST:
                raise ToolError(f"larger than {LARGEST // 1_000_000} MB")
            found = document_text(file.read_bytes(), KINDS.get(file.suffix.lower(), ""))
        except Exception as error:  # the boundary to readers of files that may hold anything
            problem = str(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {error}"
            problems.append((path, problem))
        with _transaction(connection):
            if path in known:  # it would look through all passages
                connection.execute("DELETE FROM passages WHERE path = ?", (path,))
            rows = ((path, found["title"], text) for text in paragraphs(found["text"]))
            connection.executemany("INSERT INTO passages VALUES (?, ?, ?)", rows)
            connection.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)", (path, *stamp, problem))
    with _transaction(connection):
        for path in known.keys() - present:
            connection.execute("DELETE FROM passages WHERE path = ?", (path,))
            connection.execute("DELETE FROM files WHERE path = ?", (path,))
    return problems


def _documents(folder: Path) -> Iterator[Path]:
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
    """One process at a time brings an index up to date; the lock ends with the process."""
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
        connection.execute("ROLLBACK")
        raise
