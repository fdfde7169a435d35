"""HTTP/1.1 answers, read as they come.

Invariant: what is not plainly one whole answer is a WireError, never a shorter or longer one.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_HEAD = 65_536
MOST_BODY = 256_000_000
"""Bytes of an answer; what is larger is no answer of a model."""
MOST_DIGITS = 18
"""Of a length; Python reads no number of thousands."""


class WireError(Exception):
    """The connection broke, or what came is not HTTP."""


class Reply(NamedTuple):
    """A server's answer; names of headers are in small letters."""

    status: int
    headers: dict[str, str]
    body: bytes


class Reading:
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
            *before, last = (coding.strip() for coding in self._headers["transfer-encoding"].lower().split(","))
            if last != "chunked" or any(coding != "identity" for coding in before):
                raise WireError(f"not HTTP: transfer-encoding {self._headers['transfer-encoding']!r}")
            self._chunks = []
        elif "content-length" in self._headers:
            self._length = self._announced(self._headers["content-length"])
        else:
            self.keeps = False
        return True

    def _announced(self, said: str) -> int:
        """The length; a header may say the same one several times."""
        if "," in said:
            length, *again = [one.strip() for one in said.split(",")]
            if any(one != length for one in again):
                raise WireError(f"not HTTP: content-length {said!r}")
            said = length
        if not (said.isascii() and said.isdigit()):
            raise WireError(f"not HTTP: content-length {said!r}")
        if len(said) > MOST_DIGITS:
            raise WireError(f"an answer of more than {MOST_BODY} bytes")
        return int(said)

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
