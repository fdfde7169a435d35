"""Answers that are known already, kept on disk.

Invariant: the key is a hash of all that changes an answer: where it was asked, how, and every field of the request. A
request that draws without a seed is never kept, since the same request is to give another answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from midflight.engines.base import EngineGaveUp

T = TypeVar("T")

BUSY_SECONDS = 5.0
"""So long another process may hold the file."""


def cache_key(where: str, body: Mapping[str, Any]) -> str | None:
    """The key of a request to `where` (server and path); None: do not keep its answer."""
    if body.get("temperature", 1) != 0 and body.get("seed") is None:
        return None
    text = json.dumps([where, body], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class ResponseCache:
    """JSON answers by key in one SQLite file, read and written by a thread of its own.

    `say` is told once where answers cannot be kept; no more are then.

    Raises:
        EngineGaveUp: the file cannot be read, or is no such file; of `get`.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = lambda _: None) -> None:
        self._say, self._keeps = say, True
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="midflight-cache")
        self._connection: sqlite3.Connection | None = None

    async def get(self, key: str, seconds: float) -> Any | None:
        """The answer, or None; raises EngineGaveUp where that takes more than so many seconds, too."""
        try:
            async with asyncio.timeout(seconds):
                return await self._done(self._get, key)
        except TimeoutError:
            raise EngineGaveUp(
                f"the cache of answers, {self._path}: not read within total_seconds = {seconds:g}; set the engine's "
                "cache: false"
            ) from None

    async def put(self, key: str, answer: Any) -> None:
        """Keep an answer that is there, and given, whether that succeeds or not."""
        try:
            await self._done(self._put, key, json.dumps(answer))
        except EngineGaveUp as problem:
            self._say(f"warning: {problem}; no more answers are kept")

    async def _done(self, work: Callable[..., T], *given: str) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, work, *given)
        except (sqlite3.Error, ValueError) as error:
            advice = "another process uses the file: wait for its end" if "locked" in str(error) else "delete the file"
            raise EngineGaveUp(
                f"the cache of answers, {self._path}: {error}; {advice}, or set the engine's cache: false"
            ) from None

    def close(self) -> None:
        """Wait for what is being written, then close."""
        self._worker.submit(self._close).result()
        self._worker.shutdown()

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None)
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")
            except sqlite3.Error:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _get(self, key: str) -> Any | None:
        row = self._open().execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def _put(self, key: str, answer: str) -> None:
        if not self._keeps:
            return
        try:
            self._open().execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, answer))
        except sqlite3.Error:
            self._keeps = False  # here, for those that wait behind it
            raise

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
