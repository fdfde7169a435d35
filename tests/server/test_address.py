"""What the server says of where it is."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from midflight.server.__main__ import base_url


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/v1"),
        ("localhost", "http://localhost:8000/v1"),
        ("::1", "http://[::1]:8000/v1"),
    ],
)
def test_the_base_url_is_one_that_clients_can_read(host: str, url: str) -> None:
    assert base_url(host, 8000) == url
    parts = urlsplit(url)
    assert (parts.hostname, parts.port) == (host, 8000)
