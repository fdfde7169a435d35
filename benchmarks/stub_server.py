"""A server that answers each chat request with the same text after a fixed time, as cheaply as can be.

Run by `benchmarks/loop_overhead.py` in a process of its own, so that what it costs is not counted. The first line it
prints is its port. All answers wait equally long, so they leave in the order of their requests: a queue is enough.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections import deque


def answer_of(text: str) -> bytes:
    message = {"role": "assistant", "content": text}
    body = json.dumps(
        {
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 300, "completion_tokens": 15},
        }
    ).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def whole(data: bytes) -> bool:
    """Whether a request is there to its end."""
    end = data.find(b"\r\n\r\n")
    at = data.find(b"Content-Length: ") + 16
    return end >= 0 and len(data) >= end + 4 + int(data[at : data.find(b"\r", at)])


def serve(listening: socket.socket, answer: bytes, seconds: float) -> None:
    """Answer each request `seconds` after it is whole, until the process is ended."""
    poll, listener = select.epoll(), listening.fileno()
    poll.register(listener, select.EPOLLIN)
    connections: dict[int, socket.socket] = {}
    came: dict[int, bytes] = {}
    waiting: deque[tuple[float, socket.socket]] = deque()
    while True:
        left = waiting[0][0] - time.monotonic() if waiting else None
        for number, _ in poll.poll(None if left is None else max(left, 0.0), 64):
            if number == listener:
                connection, _ = listening.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connections[connection.fileno()] = connection
                came[connection.fileno()] = b""
                poll.register(connection.fileno(), select.EPOLLIN)
                continue
            connection = connections[number]
            try:
                data = connection.recv(65_536)
            except ConnectionResetError:
                data = b""
            if not data:
                poll.unregister(number)
                del connections[number]
                connection.close()
                continue
            came[number] += data
            if whole(came[number]):
                came[number] = b""
                waiting.append((time.monotonic() + seconds, connection))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            connection = waiting.popleft()[1]
            if connection.fileno() >= 0:
                connection.send(answer)


def main(text: str, seconds: float) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listening:
        print(listening.getsockname()[1], flush=True)
        serve(listening, answer_of(text), seconds)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
