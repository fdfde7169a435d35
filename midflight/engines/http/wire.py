"""HTTP/1.1 to one server over connections that are kept: what asking a model server takes, and no more.

A general client costs 0.3 to 4 ms of the event loop a request with a thousand of them open, this one 0.1 ms
(docs/engines.md). It follows no redirects, knows no proxies and asks for no compression.

Invariant: a connection has one request at a time. One that was cancelled, failed or said something unexpected is
closed at once, so the server sees it, and an answer never reaches the wrong request.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque
from collections.abc import AsyncGenerator
from functools import partial
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from midflight.engines.http.deadlines import Deadlines

MOST_HEAD = 65_536
MOST_BODY = 256_000_000
"""Bytes of an answer; what is larger is no answer of a model."""

MOST_CONNECTING = 32
"""Connections that are being made at a time: a server's queue of those it has not taken yet is often 128 long, and what
does not fit waits for a second. So too the first requests leave while the next connections are made."""
CONNECT_SECONDS = 10.0
"""For one connection; a lost first packet is sent again after 1, 3 and 7 s."""
MOST_DIGITS = 18
"""Of a length; Python reads no number of thousands."""


class WireError(Exception):
    """The connection broke, or what came is not HTTP."""


class _Silent(WireError):
    """The connection ended before one byte of the answer."""


class Reply(NamedTuple):
    """A server's answer; names of headers are in small letters."""

    status: int
    headers: dict[str, str]
    body: bytes


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
        self._waiting: dict[asyncio.Future[_Connection], bool] = {}  # in order; True: it has to be a new one
        self._without: deque[asyncio.Future[_Connection]] = deque()  # those for whom no connection was begun
        self._connecting: dict[asyncio.Future[_Connection], asyncio.Task[None]] = {}  # by whom each was begun for
        self._forsaken: list[asyncio.Future[_Connection]] = []  # those whose request was cancelled meanwhile
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
        self._waiting, self._without, self._connecting, self._forsaken = {}, deque(), {}, []
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

    def _give(self, connection: _Connection) -> None:
        """To the first who may have it, else to those that are kept."""
        for waiter, new in self._waiting.items():
            if not waiter.done() and not (new and connection.kept):  # done: it was cancelled, and is about to go
                del self._waiting[waiter]
                waiter.set_result(connection)
                return
        connection.kept = True  # also one that was never used: the server may close it
        self._idle.append(connection)

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
            if waiter in self._connecting:
                self._forsaken.append(waiter)
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
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
            task = self._connecting[waiter] = self._loop.create_task(self._connected(waiter))
            task.add_done_callback(partial(self._tried, waiter))

    def _made_place(self) -> bool:
        """By giving up a connection that was begun for a request that was cancelled since: it may hang, as that did."""
        while self._forsaken:
            task = self._connecting.pop(self._forsaken.pop(), None)
            if task is not None:
                task.cancel()
                return True
        return False

    def _tried(self, waiter: asyncio.Future[_Connection], _: object) -> None:
        if self._connecting.pop(waiter, None) is not None:
            self._connect()

    async def _connected(self, waiter: asyncio.Future[_Connection]) -> None:
        """Make a connection and give it to who has waited longest, or say to `waiter`, if it still waits, why not."""
        assert self._loop is not None
        limit = self._deadlines.within(CONNECT_SECONDS)
        try:
            with limit:
                made = self._loop.create_connection(_Connection, self._host, self._port, ssl=self._context)
                _, connection = await made
        except Exception as error:
            if not waiter.done():
                del self._waiting[waiter]
                late = TimeoutError(f"no connection within {CONNECT_SECONDS:g} s")
                waiter.set_exception(late if limit.expired else error)
            return
        self._open.add(connection)
        self._give(connection)


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
        self._reading = _Reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self.reusable = True

    def ask(self, data: bytes) -> asyncio.Future[Reply]:
        self.reusable, self._silent, self._reading = False, True, _Reading()
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


class _Reading:
    """One answer, as far as it has come."""

    __slots__ = ("_came", "_chunks", "_data", "_headers", "_length", "_status", "keeps")

    def __init__(self) -> None:
        self.keeps = False
        self._data = bytearray()
        self._status = 0
        self._headers: dict[str, str] = {}
        self._length: int | None = None
        self._chunks: list[bytes] | None = None
        self._came = 0

    def feed(self, data: bytes) -> Reply | None:
        """The answer, once it is whole.

        Raises:
            WireError: this is not HTTP, or goes on behind its end.
        """
        self._data += data
        while not self._status or self._status < 200:  # 1xx announce the answer
            if not self._head():
                return None
        if len(self._data) > MOST_BODY:
            raise WireError(f"an answer of more than {MOST_BODY} bytes")
        if self._chunks is not None:
            return self._chunked(self._chunks)
        if self._length is None or len(self._data) < self._length:
            return None
        if len(self._data) > self._length:
            raise WireError("more came than the answer announced")
        return Reply(self._status, self._headers, bytes(self._data))

    def at_end(self) -> Reply | None:
        """The answer if the end of the connection is its end."""
        if self._status < 200 or self._length is not None or self._chunks is not None:
            return None
        return Reply(self._status, self._headers, bytes(self._data))

    def _head(self) -> bool:
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            if len(self._data) > MOST_HEAD:
                raise WireError(f"headers of more than {MOST_HEAD} bytes")
            if b"\n\n" in self._data:
                raise WireError("not HTTP: lines that end in \\n alone")
            return False
        first, *lines = self._data[:end].decode("latin-1").split("\r\n")
        del self._data[: end + 4]
        version, _, rest = first.partition(" ")
        code = rest[:3]
        if not version.startswith("HTTP/1.") or not (code.isascii() and code.isdigit() and int(code) >= 100):
            raise WireError(f"not HTTP: {first!r}")
        self._status, self._headers = int(code), {}
        self._length = self._chunks = None  # of the head before, if there was one
        for line in lines:
            name, _, value = line.partition(":")
            self._headers[name.strip().lower()] = value.strip()
        if len(self._headers) < len(lines):
            self._check_lengths(lines)
        self.keeps = self._headers.get("connection", "keep-alive").lower() != "close" and version != "HTTP/1.0"
        if self._status in (204, 304):
            self._length = 0
        elif "transfer-encoding" in self._headers:
            if self._headers["transfer-encoding"].lower() != "chunked":
                raise WireError(f"not HTTP: transfer-encoding {self._headers['transfer-encoding']!r}")
            self._chunks = []
        elif "content-length" in self._headers:
            announced = self._headers["content-length"]
            if not (announced.isascii() and announced.isdigit()):
                raise WireError(f"not HTTP: content-length {announced!r}")
            if len(announced) > MOST_DIGITS:
                raise WireError(f"an answer of more than {MOST_BODY} bytes")
            self._length = int(announced)
        else:
            self.keeps = False
        return True

    def _check_lengths(self, lines: list[str]) -> None:
        """Of headers of which some came twice."""
        named = [line.partition(":") for line in lines]
        lengths = {value.strip() for name, _, value in named if name.strip().lower() == "content-length"}
        if len(lengths) > 1:
            raise WireError(f"not HTTP: content-lengths {', '.join(sorted(lengths))!r}")

    def _chunked(self, chunks: list[bytes]) -> Reply | None:
        while True:
            end = self._data.find(b"\r\n")
            if end > MOST_HEAD or (end < 0 and len(self._data) > MOST_HEAD):
                raise WireError(f"a chunk's size in more than {MOST_HEAD} bytes")
            if end < 0:
                return None
            size = self._size(bytes(self._data[:end]))
            if size == 0:
                over = self._data.find(b"\r\n\r\n", end)  # behind trailers, if there are any
                if over < 0:
                    if len(self._data) > MOST_HEAD:
                        raise WireError(f"trailers of more than {MOST_HEAD} bytes")
                    return None
                if len(self._data) > over + 4:
                    raise WireError("more came than the answer announced")
                return Reply(self._status, self._headers, b"".join(chunks))
            if self._came + size > MOST_BODY:
                raise WireError(f"an answer of more than {MOST_BODY} bytes")
            behind = end + 2 + size
            if len(self._data) < behind + 2:
                return None
            if not self._data.startswith(b"\r\n", behind):
                raise WireError("not HTTP: a chunk of another size than it announced")
            self._came += size
            chunks.append(bytes(self._data[end + 2 : behind]))
            del self._data[: behind + 2]

    def _size(self, line: bytes) -> int:
        """Of a chunk."""
        digits = line.split(b";")[0].rstrip(b" \t")
        if not digits or digits.strip(b"0123456789abcdefABCDEF"):
            raise WireError(f"not HTTP: a chunk of size {line!r}")
        if len(digits) > MOST_DIGITS:
            raise WireError(f"an answer of more than {MOST_BODY} bytes")
        return int(digits, 16)
