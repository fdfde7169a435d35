"""HTTP: what is an answer, and what is none."""

from __future__ import annotations

import asyncio

import pytest

from midflight.engines.http.reading import WireError
from midflight.engines.http.wire import Pool
from tests.engines.serving import served, whole


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (whole(b"{}", b"Content-Length: 2"), b"{}"),
        (whole(b"{}", b"Connection: close"), b"{}"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + whole(b"{}", b"content-length: 2"), b"{}"),
        (whole(b"1\r\n[\r\n3;x=y\r\n1, \r\n2\r\n2]\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"), b"[1, 2]"),
        (whole(b"2\r\n{}\r\n0\r\nTrailer: 1\r\n\r\n", b"Transfer-Encoding: chunked"), b"{}"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (whole(b"", b"Content-Length: 0"), b""),
        (whole(b"{}", b"Content-Length: 2\r\nContent-Length: 2"), b"{}"),
        (whole(b"{}", b"Content-Length: 2, 2"), b"{}"),
        (whole(b"2\r\n{}\r\n0\r\n\r\n", b"Transfer-Encoding: identity, Chunked"), b"{}"),
        (b"HTTP/1.1 103 Early Hints\r\nContent-Length: 1\r\n\r\n" + whole(b"{}", b"Content-Length: 2"), b"{}"),
        (b"HTTP/1.1 103 Early Hints\r\nContent-Length: 1\r\n\r\n" + whole(b"{}", b"Connection: close"), b"{}"),
    ],
)
async def test_answers_are_read_however_they_are_sent(raw: bytes, body: bytes) -> None:
    for size in (len(raw), 1):

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int = size) -> None:
            await reader.readuntil(b"\r\n\r\n")
            for at in range(0, len(raw), size):
                writer.write(raw[at : at + size])
                await writer.drain()
                await asyncio.sleep(0)
            writer.close()

        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            assert (await Pool(f"http://127.0.0.1:{port}").ask("GET", "/")).body == body


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "the server closed the connection before its answer was whole"),
        (whole(b"{", b"Content-Length: 2"), "the server closed the connection before its answer was whole"),
        (whole(b"5\r\n{}\r\n", b"Transfer-Encoding: chunked"), "the server closed the connection before"),
        (whole(b"xyz\r\n", b"Transfer-Encoding: chunked"), "not HTTP: a chunk of size b'xyz'"),
        (whole(b"-2\r\n{}\r\n", b"Transfer-Encoding: chunked"), "not HTTP: a chunk of size b'-2'"),
        (whole(b"0x2\r\n{}\r\n", b"Transfer-Encoding: chunked"), "not HTTP: a chunk of size b'0x2'"),
        (whole(b";\r\n{}\r\n", b"Transfer-Encoding: chunked"), "not HTTP: a chunk of size b';'"),
        (whole(b"f" * 5000 + b"\r\n{}\r\n", b"Transfer-Encoding: chunked"), "an answer of more than 256000000 bytes"),
        (whole(b"2\r\n{}XX0\r\n\r\n", b"Transfer-Encoding: chunked"), "not HTTP: a chunk of another size than it ann"),
        (whole(b"2\r\n{}\r\n0\r\n\r\nX", b"Transfer-Encoding: chunked"), "more came than the answer announced"),
        (whole(b"{}", b"Content-Length: two"), "not HTTP: content-length 'two'"),
        (whole(b"{}", b"Content-Length: " + b"9" * 5000), "an answer of more than 256000000 bytes"),
        (whole(b"{}{}", b"Content-Length: 2"), "more came than the answer announced"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP: 'SSH-2.0-OpenSSH'"),
        (b"HTTP/1.1 banana\r\n\r\n", "not HTTP: 'HTTP/1.1 banana'"),
        (whole(b"\r" * 70_000, b"Transfer-Encoding: chunked"), "a chunk's size in more than 65536 bytes"),
        (whole(b"0\r\n" + b"x" * 70_000, b"Transfer-Encoding: chunked"), "trailers of more than 65536 bytes"),
        (whole(b"{}", b"Transfer-Encoding: identity"), "not HTTP: transfer-encoding 'identity'"),
        (whole(b"{}", b"Transfer-Encoding: chunked, gzip"), "not HTTP: transfer-encoding 'chunked, gzip'"),
        (whole(b"{}", b"Transfer-Encoding: gzip, chunked"), "not HTTP: transfer-encoding 'gzip, chunked'"),
        (whole(b"{}", b"Content-Length: 2, 3"), "not HTTP: content-length '2, 3'"),
        (whole(b"{}", b"Content-Length: \xb2"), "not HTTP: content-length '²'"),
        (whole(b"{}", b"Content-Length: 2\r\nContent-length: 3"), "not HTTP: content-lengths '2, 3'"),
        (b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}", "not HTTP: lines that end in \\n alone"),
        (b"x" * 70_000, "headers of more than 65536 bytes"),
    ],
)
async def test_what_is_not_a_whole_answer_is_an_error(raw: bytes, message: str) -> None:
    async with served(raw) as server:
        with pytest.raises(WireError) as caught:
            await Pool(server.base_url).ask("POST", "/x")
        assert str(caught.value).startswith(message) and len(server.requests) == 1
