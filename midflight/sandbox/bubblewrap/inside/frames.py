"""How the agent and the inside of a sandbox talk: one JSON object a frame, behind its length. Bytes are base64.

Invariant: reading a frame only ever gives a dict of plain values; a frame over `MOST` bytes, or one that is no JSON
object, is a ValueError.
"""

from __future__ import annotations

import base64
import json
import socket
from typing import Any

MOST = 64 * 2**20
HEAD = 4
"""Bytes of the length, big-endian."""


def pack(message: dict[str, Any]) -> bytes:
    """The frame of `message`."""
    body = json.dumps(message).encode()
    if len(body) > MOST:
        raise ValueError(f"a frame of {len(body)} bytes is over {MOST}")
    return len(body).to_bytes(HEAD, "big") + body


def length(head: bytes) -> int:
    """Bytes that follow this head."""
    count = int.from_bytes(head, "big")
    if count > MOST:
        raise ValueError(f"a frame of {count} bytes is over {MOST}")
    return count


def unpack(body: bytes) -> dict[str, Any]:
    """The message of a frame's body."""
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError("a frame is not an object")
    return message


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """The next message of a blocking socket; None at its end."""
    head = _exactly(channel, HEAD)
    body = None if head is None else _exactly(channel, length(head))
    return None if body is None else unpack(body)


def _exactly(channel: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = channel.recv(min(count - len(parts), 2**20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def to_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def to_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
