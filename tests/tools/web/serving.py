"""Real HTTP servers on loopback whose answers a test writes."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class Received:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Reply:
    """`body` is sent at once, or piece by piece with `pause` seconds between and nothing said of its length."""

    body: bytes | str | dict[str, Any] | list[bytes] = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    pause: float = 0.0


class Server(ThreadingHTTPServer):
    daemon_threads = True
    answer: Callable[[Received], Reply]

    def __init__(self, answer: Callable[[Received], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.received: list[Received] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"  # connections are kept, where the client keeps them

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        headers = {name.lower(): value for name, value in self.headers.items()}
        received = Received(self.command, parts.path, query, headers, body)
        self.server.received.append(received)
        reply = self.server.answer(received)
        self.send_response(reply.status)
        body_sent = json.dumps(reply.body) if isinstance(reply.body, dict) else reply.body
        content = body_sent.encode() if isinstance(body_sent, str) else body_sent
        kind = "application/json" if isinstance(reply.body, dict) else "text/html; charset=utf-8"
        headers = {"Content-Type": kind, **reply.headers}
        if isinstance(content, bytes):
            headers["Content-Length"] = str(len(content))
        else:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        for piece in [content] if isinstance(content, bytes) else content:
            self.wfile.write(piece)
            self.wfile.flush()
            time.sleep(reply.pause)

    do_POST = do_DELETE = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        """Silent."""


@contextmanager
def serving(answer: Callable[[Received], Reply], tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    server = Server(answer)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def in_turn(*replies: Reply) -> Callable[[Received], Reply]:
    """One reply after the other, the last one for ever."""
    left = list(replies)
    return lambda received: left.pop(0) if len(left) > 1 else left[0]
