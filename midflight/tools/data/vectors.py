"""The passages of a corpus by an engine's vectors, which are kept in its index.

Invariant: a vector is kept beside the passage it was made of, and goes with it; each passage is embedded once for each
model, however many searches wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

from midflight.engines.base import Embedder
from midflight.tools.base import InfrastructureError
from midflight.tools.data.index import known, opened, shown, update
from midflight.tools.reading.retrieval import embedded
from midflight.tools.worker import run_in_worker, wait_in_worker

AT_ONCE = 512
"""Passages that are embedded before their vectors are kept, so that a search which is stopped leaves the next one only
the rest."""
_FILLING: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
"""By event loop, since a lock belongs to one."""

Row = tuple[int, str, str]
"""Number, title and text of a passage."""


async def search(
    embedder: Embedder, folder: str, index: str, query: str, document: str, count: int, seconds: float
) -> str:
    """As `index.search`, by the engine's vectors; passages without one get theirs first.

    Raises: as `index.search` and `retrieval.embedded`.
    """
    async with _FILLING.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        problems = await wait_in_worker(refresh, folder, index, seconds)  # for another that reads it
        while rows := await run_in_worker(pending, folder, index, embedder.vectors, AT_ONCE):
            found = await embedded(embedder, [f"{title}\n{text}".strip() for _, title, text in rows])
            await run_in_worker(keep, folder, index, embedder.vectors, rows, [vector.tobytes() for vector in found])
    (asked,) = await embedded(embedder, [query])
    best = await run_in_worker(nearest, folder, index, embedder.vectors, asked.tobytes(), document, count)
    return shown(best, problems, query)


def refresh(folder: str, index: str, seconds: float) -> list[tuple[str, str]]:
    """`index.update`; this and what follows run in a worker."""
    with opened(folder, index) as connection:
        return update(connection, Path(folder), seconds)


def pending(folder: str, index: str, model: str, most: int) -> list[Row]:
    """Passages that have no vector of the model."""
    with opened(folder, index) as connection:
        return connection.execute(
            "SELECT rowid, title, text FROM passages "
            "WHERE rowid NOT IN (SELECT passage FROM vectors WHERE model = ?) ORDER BY rowid LIMIT ?",
            (model, most),
        ).fetchall()


def keep(folder: str, index: str, model: str, rows: Sequence[Row], vectors: Sequence[bytes]) -> None:
    """Keep the vectors of passages that are still what they were."""
    with opened(folder, index) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(
            "INSERT OR REPLACE INTO vectors SELECT ?, rowid, ? FROM passages "
            "WHERE rowid = ? AND title = ? AND text = ?",
            [(model, vector, *row) for vector, row in zip(vectors, rows, strict=True)],
        )
        connection.execute("COMMIT")


def nearest(folder: str, index: str, model: str, asked: bytes, document: str, count: int) -> list[tuple[str, str, str]]:
    """Path, title and text of the passages whose vectors are nearest to `asked`, best first.

    Raises:
        ToolError: there is no such document.
        InfrastructureError: the engine gives vectors of another dimension than it did.
    """
    import numpy as np

    with opened(folder, index) as connection:
        of_one = known(connection, document)
        where = "AND passage IN (SELECT rowid FROM passages WHERE path = ?)" if of_one else ""
        rows = connection.execute(
            f"SELECT passage, vector FROM vectors WHERE model = ? {where} ORDER BY passage",
            (model, document) if of_one else (model,),
        ).fetchall()
        if any(len(vector) != len(asked) for _, vector in rows):
            raise InfrastructureError(f"corpus_search: {model} gives other vectors than it did; delete {index}")
        matrix = np.frombuffer(b"".join(vector for _, vector in rows), np.float32).reshape(len(rows), len(asked) // 4)
        order = (-(matrix @ np.frombuffer(asked, np.float32))).argsort(kind="stable")[:count]
        select = "SELECT path, title, text FROM passages WHERE rowid = ?"
        return [connection.execute(select, (rows[place][0],)).fetchone() for place in order]
