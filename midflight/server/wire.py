"""A small HTTP/1.1 server on asyncio: whole requests in, whole answers out.

Invariant: a client that goes away cancels what is being done for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import cast

MOST_HEAD = 65_536
MOST_BODY = 64_000_000


@dataclass(frozen=True)
class Request:
    """What a client asks; names of headers are in small letters. `transport` is its connection."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    transport: asyncio.Transport


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})

    def encoded(self) -> bytes:
        lines = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        head = f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n{lines}Content-Length: {len(self.body)}"
        return f"{head}\r\n\r\n".encode("latin-1") + self.body


Handler = Callable[[Request], Awaitable[Answer | None]]
"""Answers a request; None: it has written to `transport` itself."""


@asynccontextmanager
async def serving(handler: Handler, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[int]:
    """Serve while the context lasts; gives the port. An exception in `handler` is a 500 without its text."""
    loop = asyncio.get_running_loop()
    connections: set[_Connection] = set()
    server = await loop.create_server(lambda: _Connection(handler, connections), host, port, backlog=2048)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in list(connections):
            connection.end()
        await asyncio.gather(*(one.task for one in connections if one.task is not None), return_exceptions=True)


class _Connection(asyncio.Protocol):
    def __init__(self, handler: Handler, connections: set[_Connection]) -> None:
        self.task: asyncio.Task[None] | None = None
        self._handler, self._connections = handler, connections
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        if self.task is not None:
            self.task.cancel()

    def end(self) -> None:
        if self.task is not None:
            self.task.cancel()
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self.task is None:
            self._next()

    def _next(self) -> None:
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            if len(self._data) > MOST_HEAD:
                self._transport.abort()
            return
        first, *lines = self._data[:end].decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        words = first.split(" ")
        length = headers.get("content-length", "0")
        if len(words) != 3 or not re.fullmatch("[0-9]{1,18}", length) or int(length) > MOST_BODY:
            self._transport.write(Answer(400, b"{}").encoded())
            self._transport.close()
            return
        if "transfer-encoding" in headers:
            self._transport.write(Answer(411, b"{}").encoded())
            self._transport.close()
            return
        whole = end + 4 + int(length)
        if len(self._data) < whole:
            return
        body = bytes(self._data[end + 4 : whole])
        del self._data[:whole]
        request = Request(words[0], words[1], headers, body, self._transport)
        self.task = asyncio.get_running_loop().create_task(self._answer(request))

    async def _answer(self, request: Request) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                answer = await self._answered(request)
                if answer is not None:
                    self._transport.write(answer.encoded())
        finally:
            self.task = None
        if request.headers.get("connection", "").lower() == "close":
            self._transport.close()
        elif self._data and not self._transport.is_closing():
            self._next()

    async def _answered(self, request: Request) -> Answer | None:
        try:
            return await self._handler(request)
        except Exception as error:  # the boundary: the client learns that it failed, the log why
            asyncio.get_running_loop().call_exception_handler({"message": "a request failed", "exception": error})
            return Answer(500, b'{"error": {"message": "internal error", "type": "server_error"}}')
