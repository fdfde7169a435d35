"""What the server says of where it is, and of what it was started with."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from midflight.errors import UserError
from midflight.server.__main__ import base_url, main

pytestmark = pytest.mark.model  # its engine brings torch


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


def test_a_key_in_place_of_its_variables_name_is_not_shown() -> None:
    for name, shown in (
        ("NOT_SET_HERE", "NOT_SET_HERE"),
        ("hush7", "... (not shown, for it may be a key and no name)"),
    ):
        with pytest.raises(UserError) as caught:
            main("smollm2-135m", key_variable=name)
        assert str(caught.value) == f"--key-variable {shown}: not set in the environment"
