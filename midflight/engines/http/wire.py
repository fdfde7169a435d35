"""HTTP/1.1 to one server over connections that are kept: what asking a model server takes, and no more.

A general client costs 0.3 to 4 ms of the event loop a request with a thousand of them open, this one 0.1 ms
(docs/engines.md). It follows no redirects, knows no proxies and asks for no compression.

Invariant: a connection has one request at a time. One that was cancelled, failed or said something unexpected is
closed at once, so the server sees it, and an answer never reaches the wrong request. For each request that waits for
a connection one is in the making, or will be as soon as there is a place.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from typing import cast
from urllib.parse import urlsplit

from midflight.engines.http.deadlines import Deadlines
from midflight.engines.http.reading import Reading, Reply, WireError

MOST_CONNECTING = 32
"""Connections that are being made at a time: a server's queue of those it has not taken yet is often 128 long, and what
does not fit waits for a second. So too the first requests leave while the next connections are made."""
CONNECT_SECONDS = 10.0
"""For one connection; a lost first packet is sent again after 1, 3 and 7 s."""


class _Silent(WireError):
    """The connection ended before one byte of the answer."""


class Pool:
    """Connections to one server, made as they are needed: one that has come free goes to who has waited longest, even
    while one is being made for them.

    They belong to the running event loop and are closed when it ends: `asyncio.run` ends its asynchronous generators.

    Raises:
        ValueError: `base_url` is not http(s)://host.
    """

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not re.fullmatch("[!-~]+", base_url):
            raise ValueError("not http://host or https://host in ASCII")
        self._host = parts.hostname
        self._host.encode("idna")  # as it is looked up; its UnicodeError is a ValueError
        self._tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._named = f"Host: {host}:{self._port}\r\n"
        self._context = ssl.create_default_context() if self._tls else None  # it takes a while
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: AsyncGenerator[None, None] | None = None
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._waiting: OrderedDict[asyncio.Future[_Connection], bool] = OrderedDict()  # True: it has to be a new one
        self._without: deque[asyncio.Future[_Connection]] = deque()  # those for whom no connection was begun
        self._connecting: dict[asyncio.Future[_Connection], asyncio.Task[None]] = {}  # by whom each was begun for
        self._forsaken: set[asyncio.Future[_Connection]] = set()  # those of `_connecting` that were cancelled
        self.replaced = 0
        """Requests that were sent again, as a kept connection ended without a byte; the server may have seen both."""

    async def ask(self, method: str, path: str, headers: str = "", body: bytes = b"") -> Reply:
        """One request. `headers` are whole lines; `path` goes behind that of the base URL, "//" starts at the root.

        A kept connection that the server had closed is replaced by a new one: that is no failure of the server.

        Raises:
            WireError: the connection broke, or what came is not HTTP.
            OSError: no connection.
        """
        if asyncio.get_running_loop() is not self._loop:
            await self._begin()
        target = path[1:] if path.startswith("//") else self._path + path
        head = f"{method} {target} HTTP/1.1\r\n{self._named}{headers}Content-Length: {len(body)}\r\n\r\n"
        data = head.encode("latin-1") + body
        connection = self._kept() or await self._next()
        kept = connection.kept
        while True:
            try:
                reply = await connection.ask(data)
            except _Silent:
                self._drop(connection)
                if not kept:
                    raise
            except BaseException:
                self._drop(connection)
                raise
            else:
                if connection.reusable:
                    connection.kept = True
                    self._give(connection)
                else:
                    self._drop(connection)
                return reply
            self.replaced += 1
            connection, kept = await self._next(new=True), False

    async def _begin(self) -> None:
        """Start over in the running event loop."""
        self._loop, self._idle, self._open = asyncio.get_running_loop(), [], set()
        self._waiting, self._without, self._connecting, self._forsaken = OrderedDict(), deque(), {}, set()
        self._deadlines = Deadlines()
        self._closing = _closing(self._open)
        await anext(self._closing)

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
            self._drop(connection)
        return None

    def _drop(self, connection: _Connection) -> None:
        self._open.discard(connection)
        connection.abort()

    def _give(self, connection: _Connection) -> asyncio.Future[_Connection] | None:
        """To the first who may have it, who is returned, else to those that are kept."""
        for waiter, new in self._waiting.items():
            if not waiter.done() and not (new and connection.kept):  # done: it was cancelled, and is about to go
                del self._waiting[waiter]
                waiter.set_result(connection)
                return waiter
        connection.kept = True  # also one that was never used: the server may close it
        self._idle.append(connection)
        return None

    async def _next(self, *, new: bool = False) -> _Connection:
        """The next connection that was made; or, unless it has to be `new`, that has come free."""
        assert self._loop is not None
        waiter: asyncio.Future[_Connection] = self._loop.create_future()
        self._waiting[waiter] = new
        self._without.append(waiter)
        self._connect()
        try:
            return await waiter
        except asyncio.CancelledError:
            self._waiting.pop(waiter, None)
            if waiter.cancelled() and waiter in self._connecting:
                self._forsaken.add(waiter)
                self._connect()
            elif waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._give(waiter.result())
            raise

    def _connect(self) -> None:
        """Begin a connection for each who waits and has none begun, within the bound."""
        assert self._loop is not None
        while self._without:
            if self._without[0].done():
                self._without.popleft()
                continue
            if len(self._connecting) >= MOST_CONNECTING and not self._made_place():
                return
            waiter = self._without.popleft()
            self._connecting[waiter] = self._loop.create_task(self._connected(waiter))

    def _made_place(self) -> bool:
        """By giving up a connection that was begun for a request that was cancelled since: it may hang, as that did."""
        if not self._forsaken:
            return False
        self._connecting.pop(self._forsaken.pop()).cancel()
        return True

    def _instead(self) -> None:
        """Begin again for the first for whom nothing is begun: an attempt failed that was begun for one who had got the
        connection of another meanwhile, so that other is without."""
        begun = {*self._connecting, *self._without}
        for waiter in self._waiting:
            if waiter not in begun and not waiter.done():
                self._without.appendleft(waiter)
                return

    async def _connected(self, waiter: asyncio.Future[_Connection]) -> None:
        """Make a connection and give it to who has waited longest, or say to `waiter`, if it still waits, why not."""
        assert self._loop is not None
        limit = self._deadlines.within(CONNECT_SECONDS)
        connection, problem = None, None
        try:
            with limit:
                made = self._loop.create_connection(_Connection, self._host, self._port, ssl=self._context)
                _, connection = await made
        except Exception as error:
            problem = TimeoutError(f"no connection within {CONNECT_SECONDS:g} s") if limit.expired else error
        self._forsaken.discard(waiter)
        self._connecting.pop(waiter, None)
        if connection is not None:
            self._open.add(connection)
            if self._give(connection) not in self._connecting and not waiter.done():
                self._without.appendleft(waiter)  # who got it has none in the making, which `waiter` could have instead
        elif problem is not None and not waiter.done():
            del self._waiting[waiter]
            waiter.set_exception(problem)
        elif not waiter.cancelled():
            self._instead()
        self._connect()


async def _closing(connections: set[_Connection]) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        for connection in connections:
            connection.abort()


class _Connection(asyncio.Protocol):
    """One connection; `reusable` while it is open with no request on it, `kept` since it was ready and had none."""

    def __init__(self) -> None:
        self.reusable = self.kept = False
        self._silent, self._over = True, ""
        self._waiter: asyncio.Future[Reply] | None = None
        self._reading = Reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self.reusable = True

    def ask(self, data: bytes) -> asyncio.Future[Reply]:
        self.reusable, self._silent, self._reading = False, True, Reading()
        self._waiter = asyncio.get_running_loop().create_future()
        if self._over:  # since it was given
            self._ended(self._over)
        else:
            self._transport.write(data)
        return self._waiter

    def abort(self) -> None:
        self.reusable = False
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.done():  # nobody asked
            self.abort()
            return
        self._silent = False
        try:
            reply = self._reading.feed(data)
        except WireError as error:
            self._waiter.set_exception(error)
            return
        if reply is not None:
            self.reusable = self._reading.keeps
            self._waiter.set_result(reply)

    def eof_received(self) -> None:
        self._ended("the server closed the connection")

    def connection_lost(self, error: Exception | None) -> None:
        self._ended(f"the connection broke ({error})" if error else "the server closed the connection")

    def _ended(self, why: str) -> None:
        self.reusable, self._over = False, why
        if self._waiter is None or self._waiter.done():
            return
        reply = self._reading.at_end()
        if reply is None:
            error = _Silent if self._silent else WireError
            self._waiter.set_exception(error(f"{why} before its answer was whole"))
        else:
            self._waiter.set_result(reply)
