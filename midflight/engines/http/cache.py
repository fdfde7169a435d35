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
from contextlib import suppress
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

    `say` is told once where answers cannot be kept; no more are then, and those that are there are read if that can be.

    Raises:
        EngineGaveUp: the file cannot be read, or is no such file; of `get`.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = lambda _: None) -> None:
        self._say, self._keeps, self._opened, self._problem = say, True, False, ""
        self._path = path
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="midflight-cache")
        self._connection: sqlite3.Connection | None = None

    async def get(self, key: str, seconds: float) -> Any | None:
        """The answer, or None; raises EngineGaveUp where that takes more than so many seconds, too."""
        try:
            async with asyncio.timeout(seconds):
                answer = await self._done(self._get, key)
        except TimeoutError:
            raise EngineGaveUp(
                f"the cache of answers, {self._path}: not read within total_seconds = {seconds:g}; set the engine's "
                "cache: false"
            ) from None
        if self._problem:
            self._say(f"warning: the cache of answers, {self._path}: {self._problem}; no answers are kept")
            self._problem = ""
        return answer

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

    def _open(self) -> sqlite3.Connection | None:
        """None where the file can be neither written nor read."""
        if not self._opened:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._connection = self._connect(
                    str(self._path),
                    "PRAGMA journal_mode = WAL",
                    "PRAGMA synchronous = NORMAL",
                    "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)",
                )
            except (OSError, sqlite3.OperationalError) as error:  # a damaged file is another sqlite3.DatabaseError
                if "locked" in str(error):
                    raise
                self._keeps, self._problem = False, str(error)
                with suppress(sqlite3.OperationalError):  # there is nothing to read
                    self._connection = self._connect(
                        f"{self._path.absolute().as_uri()}?mode=ro&immutable=1", "SELECT key FROM answers LIMIT 1"
                    )
            self._opened = True
        return self._connection

    def _connect(self, where: str, *commands: str) -> sqlite3.Connection:
        uri = where.startswith("file:")
        connection = sqlite3.connect(where, timeout=BUSY_SECONDS, isolation_level=None, uri=uri)
        try:
            for command in commands:
                connection.execute(command)
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _get(self, key: str) -> Any | None:
        connection = self._open()
        if connection is None:
            return None
        row = connection.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def _put(self, key: str, answer: str) -> None:
        connection = self._open()
        if not self._keeps or connection is None:
            return
        try:
            connection.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, answer))
        except sqlite3.Error:
            self._keeps = False  # here, for those that wait behind it
            raise

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection, self._opened = None, False
