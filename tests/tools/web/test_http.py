"""The HTTP base: what is not public is never spoken to, in whatever spelling, and every answer is bounded."""

from __future__ import annotations

import asyncio
import gzip
import socket
import ssl
import time
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from midflight.errors import GivenUp
from midflight.tools.base import InfrastructureError, ToolError, TransientError
from midflight.tools.web import http
from midflight.tools.web.addresses import Refused, is_public
from midflight.tools.web.http import Answer, Web, WebOptions, check_page, check_service, json_of, retry_after
from tests.tools.web.serving import Received, Reply, Server, in_turn, serving

PRIVATE = """
127.0.0.1 127.8.9.1 0.0.0.0 10.1.2.3 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254 169.254.1.1 100.64.0.1
100.100.100.200 168.63.129.16 192.0.0.192 192.0.0.8 192.0.2.1 198.18.0.1 198.51.100.1 203.0.113.9 192.88.99.1 224.0.0.1
239.1.1.1 240.0.0.1 255.255.255.255
::1 :: ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:169.254.169.254 ::ffff:10.0.0.1 64:ff9b::127.0.0.1 64:ff9b::a9fe:a9fe
64:ff9b:1::1 2002:7f00:1:: 2002:a9fe:a9fe:: 2001:0:7f00:1:: fe80::1 fe80::1%1 fec0::1 fc00::1 fd00:ec2::254 ff02::1
100::1 2001:db8::1 3fff::1 5f00::1 2606:4700::5efe:127.0.0.1 2606:4700::200:5efe:10.0.0.1
fd00::5efe:8.8.8.8 fe80::5efe:8.8.8.8 ff02::5efe:8.8.8.8 fc00::200:5efe:8.8.8.8
""".split()
PUBLIC = """
1.1.1.1 8.8.8.8 93.184.216.34 172.32.0.1 2606:4700:4700::1111 64:ff9b::8.8.8.8 ::ffff:8.8.8.8 2606:4700::5efe:8.8.8.8
""".split()


def fetch(url: str, resolve: Any = None, **options: Any) -> Answer:
    settings = WebOptions(**options)
    web = Web(settings) if resolve is None else Web(settings, resolve=resolve)
    return asyncio.run(web.get(url))


@pytest.fixture
def never() -> Any:
    """A server that nobody may reach."""
    with serving(lambda received: Reply("secret")) as server:
        yield server
        assert server.received == []


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are(address: str) -> None:
    assert is_public(address)


def test_loopback_is_for_tests_and_nothing_else_comes_with_it() -> None:
    assert [address for address in PRIVATE if is_public(address, loopback=True)] == [
        "127.0.0.1",
        "127.8.9.1",
        "::1",
        "::ffff:127.0.0.1",
        "64:ff9b::127.0.0.1",
        "2606:4700::5efe:127.0.0.1",
    ]


@pytest.mark.parametrize(
    "host",
    """127.0.0.1 127.1 2130706433 0x7f000001 0x7f.1 017700000001 0177.0.0.1 0 127。0。0。1 localhost LOCALHOST
    localhost. [::1] [::ffff:127.0.0.1] [::ffff:7f00:1] [0:0:0:0:0:ffff:127.0.0.1] [64:ff9b::7f00:1] [2002:7f00:1::]
    [::127.0.0.1] [fe80::1%25lo]""".split(),
)
def test_every_spelling_of_this_machine_is_refused(host: str, never: Server) -> None:
    with pytest.raises((Refused, ToolError, TransientError)) as caught:
        fetch(f"http://{host}:{never.server_address[1]}/")
    assert isinstance(caught.value, Refused) or "not a URL" in str(caught.value) or "no such host" in str(caught.value)


@pytest.mark.parametrize("host", "169.254.169.254 0xa9fea9fe 2852039166 0251.0376.0251.0376 [::ffff:a9fe:a9fe]".split())
def test_every_spelling_of_the_metadata_service_is_refused(host: str) -> None:
    with pytest.raises(ToolError, match=r"169\.254\.169\.254|::ffff:a9fe:a9fe|not a URL"):
        fetch(f"http://{host}/latest/meta-data/")


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://example.com/", "gopher://1.1.1.1/", "//1.1.1.1/", "x", "http://", "http://[::1"],
)
def test_what_is_no_web_address_is_refused(url: str) -> None:
    with pytest.raises(ToolError):
        fetch(url)


def test_a_url_with_a_password_is_refused() -> None:
    with pytest.raises(Refused, match="user name or password"):
        fetch("http://user:secret@1.1.1.1/")


def test_a_name_that_resolves_to_a_private_address_is_refused_even_among_public_ones(never: Server) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["93.184.216.34", "127.0.0.1"]

    with pytest.raises(Refused, match=r"rebind.example: 127\.0\.0\.1"):
        fetch(f"http://rebind.example:{never.server_address[1]}/", resolve)


def test_a_name_is_resolved_once_and_the_checked_address_connected_to() -> None:
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]

    with serving(lambda received: Reply(received.headers["host"])) as server:
        url = f"http://pinned.example:{server.server_address[1]}/"
        answer = fetch(url, resolve, unsafe_allow_loopback=True)
    assert answer.body.decode() == f"pinned.example:{server.server_address[1]}"
    assert asked == ["pinned.example"] and answer.url == url


def test_the_next_address_is_tried_when_the_first_does_not_answer() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.2", 0))

        async def resolve(host: str, port: int) -> list[str]:
            return ["127.0.0.2", "127.0.0.1"]

        with serving(lambda received: Reply("here")) as server:
            url = f"http://two.example:{server.server_address[1]}/"
            assert fetch(url, resolve, unsafe_allow_loopback=True).body == b"here"


@pytest.mark.parametrize("location", ["http://10.0.0.1/", "http://169.254.169.254/latest", "//192.168.0.1/x"])
def test_a_redirect_to_a_private_address_is_refused(location: str) -> None:
    with serving(lambda received: Reply(status=302, headers={"Location": location})) as server, pytest.raises(Refused):
        fetch(server.url, unsafe_allow_loopback=True)


def test_redirects_are_followed_and_bounded_and_lead_to_no_file() -> None:
    def hop(received: Received) -> Reply:
        number = int(received.path.removeprefix("/"))
        return Reply("end") if number == 0 else Reply(status=301, headers={"Location": f"/{number - 1}"})

    with serving(hop) as server:
        assert fetch(f"{server.url}/5", unsafe_allow_loopback=True).url == f"{server.url}/0"
        with pytest.raises(ToolError, match="more than 5 redirects"):
            fetch(f"{server.url}/6", unsafe_allow_loopback=True)
    with serving(lambda received: Reply(status=302, headers={"Location": "file:///etc/passwd"})) as server:
        with pytest.raises(ToolError, match="not an http or https URL"):
            fetch(server.url, unsafe_allow_loopback=True)


def test_a_key_does_not_follow_a_redirect() -> None:
    with serving(lambda received: Reply("x")) as other:
        reply = Reply(status=307, headers={"Location": other.url})
        with serving(lambda received: reply) as server:
            web = Web(WebOptions(unsafe_allow_loopback=True), "service")
            answer = asyncio.run(web.post(server.url, {}, headers={"Authorization": "Bearer secret"}))
    assert answer.status == 307 and other.received == []


def test_a_body_is_bounded_also_when_packed() -> None:
    bomb = gzip.compress(b"0" * 50_000_000)
    assert len(bomb) < 100_000
    replies = in_turn(Reply(bomb, headers={"Content-Encoding": "gzip"}), Reply(b"x" * 1001), Reply(b"x" * 1000))
    with serving(replies) as server:
        for _ in range(2):
            with pytest.raises(ToolError, match="larger than 1000 bytes"):
                fetch(server.url, max_bytes=1000, unsafe_allow_loopback=True)
        assert len(fetch(server.url, max_bytes=1000, unsafe_allow_loopback=True).body) == 1000


def test_a_body_that_drips_is_cut_off_in_time() -> None:
    with serving(lambda received: Reply([b"x"] * 100, pause=0.1)) as server:
        started = time.monotonic()
        with pytest.raises(TransientError, match="no answer within 0.5 seconds"):
            fetch(server.url, request_seconds=0.5, unsafe_allow_loopback=True)
        assert time.monotonic() - started < 8


def test_tls_verifies_the_name_not_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = certified("pinned.example", tmp_path)

    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    def answer(received: Received) -> Reply:
        other = f"https://other.example:{port}/"
        return Reply(status=302, headers={"Location": other}) if received.path == "/go" else Reply("safe")

    trusting = ssl.create_default_context(cafile=str(tmp_path / "certificate.pem"))
    with serving(answer, context) as server:
        port = server.server_address[1]
        with pytest.raises(ToolError, match="(?i)certificate"):  # as the system trusts
            fetch(f"https://pinned.example:{port}/", resolve, unsafe_allow_loopback=True)
        monkeypatch.setattr(http, "_tls", lambda: trusting)
        assert fetch(f"https://pinned.example:{port}/", resolve, unsafe_allow_loopback=True).body == b"safe"
        with pytest.raises(ToolError, match="(?i)certificate|hostname"):
            fetch(f"https://other.example:{port}/", resolve, unsafe_allow_loopback=True)
        with pytest.raises(ToolError, match="(?i)certificate|hostname"):  # nor on the connection to its neighbour
            fetch(f"https://pinned.example:{port}/go", resolve, unsafe_allow_loopback=True)


@pytest.mark.parametrize(
    ("raised", "lasts"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), True),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), False),
        (UnicodeError("label empty or too long"), True),
        (OSError(24, "Too many open files"), False),
    ],
)
def test_a_name_that_cannot_be_resolved_is_tried_again_where_it_may_be(raised: Exception, lasts: bool) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        raise raised

    for service in ("", "search"):
        kinds = {"": ToolError, "search": GivenUp} if lasts else {"": TransientError, "search": TransientError}
        with pytest.raises(kinds[service]) as caught:
            asyncio.run(Web(WebOptions(), service, resolve).get("http://a.example/"))
        assert str(caught.value) == f"{service and 'search: '}a.example: no such host ({raised})"


@pytest.mark.parametrize("port", [0, 65536, 99999999999])
def test_a_port_that_is_none_is_told(port: int) -> None:
    said = f"http://1.1.1.1:{port}/: there is no port {port}; they go from 1 to 65535"
    with pytest.raises(ToolError) as caught:
        fetch(f"http://1.1.1.1:{port}/?q=secret")
    assert str(caught.value) == said
    with serving(lambda received: Reply(status=302, headers={"Location": f"http://1.1.1.1:{port}/"})) as server:
        with pytest.raises(ToolError) as caught:
            fetch(server.url, unsafe_allow_loopback=True)
    assert str(caught.value) == said


def test_a_cookie_goes_back_to_its_own_host_only() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    def answer(received: Received) -> Reply:
        host = received.headers["host"]
        if received.path == "/":
            return Reply(status=302, headers={"Location": "/again", "Set-Cookie": "visit=1"})
        if host.startswith("one."):
            seen = received.headers.get("cookie")
            return Reply(status=302, headers={"Location": f"http://two.example:{port}/{seen}"})
        return Reply(f"{received.path} {received.headers.get('cookie')}")

    with serving(answer) as server:
        port = server.server_address[1]
        found = fetch(f"http://one.example:{port}/", resolve, unsafe_allow_loopback=True)
    assert found.body == b"/visit=1 None"


def certified(name: str, folder: Path) -> ssl.SSLContext:
    """A server's side of TLS with a certificate of its own for `name`, which is written into `folder`."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(pem))
    (folder / "key.pem").write_bytes(key.private_bytes(pem, *plain))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    return context


def test_what_does_not_answer_is_transient_and_of_a_service_infrastructure() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        with pytest.raises(TransientError) as caught:
            fetch(url, unsafe_allow_loopback=True)
        assert not caught.value.infrastructure
        with pytest.raises(TransientError, match="^search: ") as caught:
            asyncio.run(Web(WebOptions(unsafe_allow_loopback=True), "search").get(url))
        assert caught.value.infrastructure
    with pytest.raises(InfrastructureError, match="search: 127.0.0.1: 127.0.0.1 is no public address"):
        asyncio.run(Web(WebOptions(), "search").get("http://127.0.0.1/"))


def test_a_password_of_netrc_is_not_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with serving(lambda received: Reply(received.headers.get("authorization", "none"))) as server:
        assert fetch(server.url, unsafe_allow_loopback=True).body == b"none"


def test_the_parameters_of_a_request_are_not_added_to_a_redirect() -> None:
    def answer(received: Received) -> Reply:
        there = Reply(status=302, headers={"Location": "/there?b=2"})
        return there if received.path == "/" else Reply(str(received.query))

    with serving(answer) as server:
        web = Web(WebOptions(unsafe_allow_loopback=True))
        assert asyncio.run(web.get(server.url, params={"a": "1"})).body == b"{'b': '2'}"


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch, never: Server) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, never.url)
    with serving(lambda received: Reply("direct")) as server:
        assert fetch(server.url, unsafe_allow_loopback=True).body == b"direct"


def answer(status: int, body: str = "", **headers: str) -> Answer:
    return Answer("http://a.example/x?q=secret", status, headers, body.encode())


def test_the_status_of_a_service_says_whose_fault_it_is() -> None:
    check_service(answer(200), "s")
    with pytest.raises(TransientError) as busy:
        check_service(answer(429, **{"retry-after": "7"}), "s")
    assert busy.value.retry_after == 7 and busy.value.infrastructure
    with pytest.raises(InfrastructureError, match="s: HTTP 401, access is refused"):
        check_service(answer(401), "s")
    with pytest.raises(ToolError, match=r"s refuses the query: bad \[key\] word"):
        check_service(answer(422, "bad k-1234567 word"), "s", "k-1234567")
    with pytest.raises(InfrastructureError, match=r"HTTP 404: no \[key\]"):
        check_service(answer(404, "no k-1234567"), "s", "k-1234567")


def test_the_status_of_a_page_is_the_planners_to_read() -> None:
    check_page(answer(204))
    with pytest.raises(TransientError, match=r"^http://a.example/x: HTTP 503$") as busy:
        check_page(answer(503))
    assert not busy.value.infrastructure
    with pytest.raises(ToolError, match="HTTP 404"):
        check_page(answer(404))


def test_what_may_be_answered_later_is_every_5xx_but_two() -> None:
    def passes(status: int) -> bool:
        errors: list[Exception] = []
        for check in (check_page, lambda answer: check_service(answer, "s")):
            with pytest.raises((ToolError, InfrastructureError)) as caught:
                check(answer(status))
            errors.append(caught.value)
        page, service = (isinstance(error, TransientError) for error in errors)
        assert page is service and (service or isinstance(errors[1], GivenUp | ToolError))
        return service

    lasting = [status for status in range(400, 600) if not passes(status)]
    assert lasting == [*(status for status in range(400, 500) if status not in (408, 425, 429)), 501, 505]


def test_retry_after_is_seconds_or_a_date() -> None:
    assert retry_after(answer(503)) is None
    assert retry_after(answer(503, **{"retry-after": "soon"})) is None
    assert retry_after(answer(503, **{"retry-after": " 12 "})) == 12
    later = retry_after(answer(503, **{"retry-after": formatdate(time.time() + 60, usegmt=True)}))
    assert later is not None and 57 < later <= 60
    assert retry_after(answer(503, **{"retry-after": formatdate(0, usegmt=True)})) == 0


@pytest.mark.parametrize(
    "said", ["²", "-5", "1.5", "Fri, 31 Dec 9999 23:59:59 +99999999999999", "Mon, 01 Jan " + "9" * 30]
)
def test_a_retry_after_that_is_no_time_is_none(said: str) -> None:
    assert retry_after(answer(503, **{"retry-after": said})) is None


@pytest.mark.parametrize("body", ["", "<html>", "[1]", '{"a": '])
def test_what_is_no_json_object_is_told(body: str) -> None:
    with pytest.raises(TransientError, match="JSON"):
        json_of(answer(200, body), "s")
