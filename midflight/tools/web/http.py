"""The HTTP client of all tools: public addresses only, with bounds on time, body and redirects.

Invariant: every request, redirected ones too, goes to an address that `addresses` has checked, past any proxy; a body
is read to `max_bytes` at most, a request takes `request_seconds` at most. A key travels in a header, is never sent on
to another address by a redirect, and never enters an error's text.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any
from urllib.parse import urljoin

import httpx2
from pydantic import AfterValidator, Field

from midflight import __version__
from midflight.errors import GivenUp
from midflight.redacting import redact
from midflight.section import MOST_SECONDS
from midflight.tools.base import ToolError, TransientError, one_line
from midflight.tools.options import ToolOptions
from midflight.tools.web.addresses import Refused, Resolve, checked_addresses, system_resolve

USER_AGENT = f"midflight/{__version__} (tool-using agent)"
UNPACKED = ("gzip", "deflate")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TRANSIENT = frozenset({408, 425, 429, *range(500, 600)} - {501, 505})
"""Statuses after which the same request may be answered. A server that does not know the method (501) or the version of
HTTP (505) will not know it soon."""
_LAST_PORT = 65535


class WebOptions(ToolOptions):
    """Of every tool that speaks to the network."""

    seconds: float | None = Field(default=30.0, gt=0, le=MOST_SECONDS)
    """Time limit of a call, retries included."""
    retries: int = Field(default=2, ge=0, le=10)
    """Further attempts after a lost connection, a time-out, 408, 425, 429, or 5xx but 501 and 505; Retry-After is
    obeyed."""
    result_characters: int | None = Field(default=20_000, ge=200, le=1_000_000_000)
    """A longer result keeps its head and its tail."""
    request_seconds: float = Field(default=10.0, gt=0, le=MOST_SECONDS)
    """Time limit of one request with its redirects."""
    max_bytes: int = Field(default=5_000_000, ge=1, le=1_000_000_000)
    """Of a body, unpacked; a larger one is refused."""
    unsafe_allow_loopback: bool = False
    """For tests alone: servers on this machine can be reached, by the agent's web tools and so by what it reads."""


@dataclass(frozen=True)
class Answer:
    """What a server sent, whatever its status."""

    url: str
    """Where redirects ended."""
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def charset(self) -> str | None:
        for part in self.headers.get("content-type", "").split(";")[1:]:
            name, _, value = part.partition("=")
            if name.strip().lower() == "charset":
                return value.strip(" \"'") or None
        return None


class Web:
    """Requests within a tool's options.

    Args:
        service: the name of what is asked, where it is a service that the recipe chose; each failure to get an answer
            is then one of the infrastructure. Empty for pages, which the planner chose and can leave.
        resolve: name to addresses; tests give their own.
    """

    def __init__(self, options: WebOptions, service: str = "", resolve: Resolve = system_resolve) -> None:
        self.options, self.service, self._resolve = options, service, resolve

    async def get(
        self,
        url: str,
        *,
        params: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
        redirects: int = 5,
    ) -> Answer:
        """GET a URL, through at most `redirects` redirects.

        Raises:
            Refused: the address, or one it redirects to, is not public.
            ToolError: no http(s) URL, no such host, a certificate that is not trusted, too large, too many redirects.
            TransientError: the connection failed or took too long; of a service as one of the infrastructure.
            GivenUp: any of the others, of a service.
        """
        return await self._request("GET", url, redirects, params=params, headers=headers)

    async def post(self, url: str, data: Mapping[str, Any], *, headers: Mapping[str, str]) -> Answer:
        """POST a JSON object; a redirect is not followed. Raises as `get` does."""
        return await self._request("POST", url, 0, json=data, headers=headers)

    async def _request(self, method: str, url: str, redirects: int, **settings: Any) -> Answer:
        try:
            return await self._followed(method, url, redirects, **settings)
        except TransientError as error:
            if not self.service:
                raise
            raise TransientError(f"{self.service}: {error}", retry_after=error.retry_after) from error
        except ToolError as error:
            if not self.service:
                raise
            raise GivenUp(f"{self.service}: {error}") from error

    async def _followed(self, method: str, url: str, redirects: int, **settings: Any) -> Answer:
        try:
            async with asyncio.timeout(self.options.request_seconds) as limit, self._client() as client:
                for _ in range(redirects + 1):
                    answer = await self._one(client, method, url, **settings)
                    if answer.status not in _REDIRECTS or "location" not in answer.headers or not redirects:
                        return answer
                    url = urljoin(answer.url, answer.headers["location"])
                    settings.pop("params", None)
                raise ToolError(f"{url}: more than {redirects} redirects")
        except TimeoutError:
            if not limit.expired():
                raise
            raise TransientError(
                f"{_shown(url)}: no answer within {self.options.request_seconds:g} seconds", infrastructure=False
            ) from None
        except (httpx2.TransportError, httpx2.StreamError, httpx2.DecodingError) as error:
            reason = one_line(str(error)) or type(error).__name__
            if _is_of_a_certificate(error):
                raise ToolError(f"{_shown(url)}: {reason}") from error
            raise TransientError(f"{_shown(url)}: {reason}", infrastructure=False) from error
        except (httpx2.InvalidURL, ValueError) as error:
            raise ToolError(f"{_shown(url)}: not a URL that can be read ({one_line(str(error))})") from error

    def _client(self) -> httpx2.AsyncClient:
        transport = _Checked(self.options.unsafe_allow_loopback, self._resolve)
        headers = {"User-Agent": USER_AGENT, "Accept-Encoding": ", ".join(UNPACKED)}
        timeout = httpx2.Timeout(self.options.request_seconds)
        return httpx2.AsyncClient(transport=transport, headers=headers, timeout=timeout, trust_env=False)

    async def _one(self, client: httpx2.AsyncClient, method: str, url: str, **settings: Any) -> Answer:
        parsed = _parsed(url)
        async with client.stream(method, url, **settings) as response:
            packed = {name.strip().lower() for name in response.headers.get("content-encoding", "").split(",")}
            if unknown := packed - {"", "identity", *UNPACKED}:
                raise ToolError(
                    f"{_shown(url)}: packed as {one_line(', '.join(sorted(unknown)), 60)}, which cannot be unpacked"
                )
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > self.options.max_bytes:
                    raise ToolError(f"{_shown(url)}: larger than {self.options.max_bytes} bytes")
            headers = {name.lower(): value for name, value in response.headers.items()}
            return Answer(str(parsed), response.status_code, headers, bytes(body))


class _Checked(httpx2.AsyncBaseTransport):
    """Connects to a checked address of the request's host; TLS still verifies the host's name.

    No connection is kept: one to an address may not serve another name there, whose certificate nobody checked.
    """

    def __init__(self, loopback: bool, resolve: Resolve) -> None:
        self._loopback, self._resolve = loopback, resolve
        limits = httpx2.Limits(max_keepalive_connections=0)
        self._inner = httpx2.AsyncHTTPTransport(verify=_tls(), trust_env=False, limits=limits)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        url = request.url
        host = url.raw_host.decode("ascii").strip("[]")
        port = url.port or (443 if url.scheme == "https" else 80)
        addresses = await checked_addresses(host, port, loopback=self._loopback, resolve=self._resolve)
        request.extensions = {**request.extensions, "sni_hostname": host}
        for number, address in enumerate(addresses, start=1):
            request.url = url.copy_with(host=address)
            try:
                return await self._inner.handle_async_request(request)
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                if number == len(addresses):
                    raise
            finally:
                request.url = url  # cookies go by it
        raise AssertionError("there is at least one address")

    async def aclose(self) -> None:
        await self._inner.aclose()


@cache
def _tls() -> ssl.SSLContext:
    return httpx2.create_ssl_context(trust_env=False)


def _parsed(url: str) -> httpx2.URL:
    """An http or https URL.

    Raises:
        Refused: it has a password in it.
        ToolError, httpx2.InvalidURL: it is something else.
    """
    parsed = httpx2.URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ToolError(f"{_shown(url)}: not an http or https URL")
    if parsed.userinfo:
        raise Refused(f"{parsed.host}: a URL with a user name or password is not read")
    if parsed.port is not None and not 1 <= parsed.port <= _LAST_PORT:
        raise ToolError(f"{_shown(url)}: there is no port {parsed.port}; they go from 1 to {_LAST_PORT}")
    return parsed


def _of_a_service(url: str) -> str:
    try:
        if url:
            _parsed(url)
    except (ToolError, httpx2.InvalidURL) as error:
        raise ValueError(str(error)) from error
    return url


ServiceUrl = Annotated[str, AfterValidator(_of_a_service)]
"""An option that says where a service is; it may be empty."""


def _is_of_a_certificate(error: BaseException | None) -> bool:
    """Whether a connection failed since who answers is not trusted."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None


def _shown(url: str) -> str:
    """A URL as an error names it: a query may hold anything, so without one."""
    return one_line(url.partition("?")[0], 120)


def check_service(answer: Answer, service: str, key: str = "") -> None:
    """Refuse an answer of a search service that is none.

    Raises:
        TransientError: busy or broken for now; with the pause the service asks for.
        ToolError: it finds the request itself wrong.
        GivenUp: the key is refused, or anything else.
    """
    status = answer.status
    if 200 <= status < 300:
        return
    if status in _TRANSIENT:
        raise TransientError(f"{service}: HTTP {status}", retry_after=retry_after(answer))
    if status in (401, 403):
        raise GivenUp(f"{service}: HTTP {status}, access is refused; check its key and plan")
    said = one_line(redact(answer.body.decode("utf-8", "replace"), [key]))
    if status in (400, 414, 422):
        raise ToolError(f"{service} refuses the query: {said}")
    raise GivenUp(f"{service}: HTTP {status}: {said}")


def check_page(answer: Answer) -> None:
    """Refuse an answer that is no page.

    Raises:
        TransientError, ToolError: by its status; both end as text for the planner.
    """
    if 200 <= answer.status < 300:
        return
    said = f"{_shown(answer.url)}: HTTP {answer.status}"
    if answer.status in _TRANSIENT:
        raise TransientError(said, retry_after=retry_after(answer), infrastructure=False)
    raise ToolError(said)


def retry_after(answer: Answer) -> float | None:
    """Seconds that a Retry-After header asks for, given as seconds or as a date (RFC 9110, 10.2.3)."""
    value = answer.headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def json_of(answer: Answer, service: str) -> dict[str, Any]:
    """The JSON object in an answer.

    Raises:
        TransientError: it holds something else.
    """
    try:
        found = json.loads(answer.body)
    except (ValueError, RecursionError) as error:
        raise TransientError(f"{service}: the answer is not JSON") from error
    if not isinstance(found, dict):
        raise TransientError(f"{service}: the answer is not a JSON object")
    return found
