"""A server that answers each chat request with the same text after a fixed time, as cheaply as can be.

Run by `benchmarks/loop_overhead.py` in a process of its own, so that what it costs is not counted. The first line it
prints is its port.
"""

from __future__ import annotations

import asyncio
import json
import sys


class Stub(asyncio.Protocol):
    """One connection: a request is answered `seconds` after it is whole."""

    def __init__(self, answer: bytes, seconds: float) -> None:
        self._answer, self._seconds = answer, seconds
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        at = self._data.find(b"Content-Length: ") + 16
        if len(self._data) < end + 4 + int(self._data[at : self._data.find(b"\r", at)]):
            return
        self._data.clear()
        asyncio.get_running_loop().call_later(self._seconds, self._transport.write, self._answer)  # type: ignore[attr-defined]


async def main(text: str, seconds: float) -> None:
    message = {"role": "assistant", "content": text}
    body = json.dumps(
        {
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 300, "completion_tokens": 15},
        }
    ).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    server = await asyncio.get_running_loop().create_server(lambda: Stub(answer, seconds), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
