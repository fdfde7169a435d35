"""JSON over HTTP to a model server, with a key that stays here.

Invariant: the key is sent to the server and goes nowhere else: whatever comes back, errors included, has it taken out,
where it is a secret (`midflight.redacting`).
"""

from __future__ import annotations

import email.utils
import json
import re
import ssl
import time
from collections.abc import Callable, Coroutine, Iterable
from datetime import UTC
from functools import partial
from types import CoroutineType
from typing import Any, TypeVar
from urllib.parse import urljoin

import pydantic_core

from midflight.engines.base import EngineGaveUp
from midflight.engines.http.patience import Patience, Transient
from midflight.engines.http.reading import Reply, WireError
from midflight.engines.http.wire import Pool
from midflight.redacting import redact, redact_all, spellings

T = TypeVar("T")

TRANSIENT = frozenset({408, 409, 425, 429, *range(500, 600)} - {501, 505})
"""Statuses after which the same request may succeed."""
FOR_GOOD = frozenset({"insufficient_quota", "billing_hard_limit_reached"})
"""Codes that servers send with status 429 and that waiting does not change."""
TOO_LONG = frozenset({"context_length_exceeded", "exceed_context_size_error"})
"""Codes and types of a request whose text is too long."""
_LONG_WORDS = (
    *TOO_LONG,
    "context length",
    "context window",
    "context size",
    "maximum context",
    "maximum model length",
    "maximum number of tokens allowed",
    "prompt is too long",
    "reduce the length of",
    "`inputs` must have less than",
    "`max_new_tokens` must be <=",
)
"""Servers that have no code for that say one of these."""
WHOLE = frozenset({200, 201, 203})
"""Statuses of an answer."""
_OF_LENGTH = ("messages", "prompt", "input", "content", "max_")
"""Parameters that such an error may name begin so, where it names one: vLLM has `input_tokens` and `max_tokens`."""
_SCHEMA_WORDS = (
    "invalid schema",
    "invalid json schema",
    "invalid_json_schema",
    "invalid grammar",
    "grammar error",
    "failed to parse grammar",
    "schema conversion failed",
)
"""An error with one of these is about a schema or grammar, which it may quote, whatever words are in that."""
MOVED = frozenset({301, 302, 303, 307, 308})
MOST_SAID = 300
"""Characters of a server's error that are shown."""


class Malformed(Exception):
    """An answer is not what the protocol says; the message names the field."""


class PromptRefused(EngineGaveUp):
    """The server refuses the request as it is: a 400, 413 or 422; `too_long`: for the length of its text."""

    def __init__(self, message: str, *, too_long: bool = False) -> None:
        super().__init__(message)
        self.too_long = too_long


class NotThere(EngineGaveUp):
    """The server has no such path, model or adapter: a 404 or 405."""


class Client:
    """One server. `key` is sent as a bearer token; `others` are keys of other servers, which this one may know too."""

    def __init__(
        self, base_url: str, patience: Patience, *, key: str | None = None, others: Iterable[str] = ()
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.patience = patience
        self.pool = Pool(self.base_url)
        self._keys = (key, *others)
        self._spelt = [spelt.encode() for spelt in spellings(self._keys)]
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        wanted = "Accept: application/json\r\nAccept-Encoding: identity\r\n"
        self._headers = f"{authorization}{wanted}Content-Type: application/json\r\n"

    def hide(self, text: str) -> str:
        """`text` without the keys."""
        return redact(text, self._keys)

    def ask(
        self,
        path: str,
        body: Any,
        read: Callable[[Any], T | Coroutine[Any, Any, T]],
        *,
        tokens: int = 0,
        before: Callable[[int], None] | None = None,
        waited: float = 0.0,
        method: str = "POST",
    ) -> Coroutine[Any, Any, T]:
        """What `read` makes of the JSON answer, awaited or not; it raises Malformed where that is not as it should be.

        `path` goes behind the base URL, "//" starts at the server's root. `tokens`, `before`, `waited`: see
        `Patience.run`.

        Raises:
            PromptRefused: the server will not have this request.
            EngineGaveUp: it refuses us, or failed every time.
        """
        data = b"" if body is None else written(body)

        return self.patience.run(partial(self._attempt, method, path, data, read), tokens, before, waited)

    def tell(self, path: str, body: Any) -> Coroutine[Any, Any, str]:
        """Ask for something to be done; what the server says to it, on one line.

        Raises: as `ask`.
        """
        data = b"" if body is None else written(body)

        def said(reply: Reply) -> str:
            return " ".join(self.hide(_decoded(reply)).split())

        return self.patience.run(partial(self._attempt, "POST", path, data, said, raw=True))

    async def _attempt(
        self,
        method: str,
        path: str,
        data: bytes,
        read: Callable[[Any], T | Coroutine[Any, Any, T]],
        *,
        raw: bool = False,
    ) -> T:
        """What `read` makes of the answer's JSON; `raw`: of the answer."""
        try:
            reply = await self.pool.ask(method, path, self._headers, data)
        except ssl.SSLCertVerificationError as error:
            said = f"{_line(self.hide(str(error)))}; check base_url, or name its authority's file in SSL_CERT_FILE"
            raise EngineGaveUp(f"{self.base_url}: {said}") from None
        except (WireError, OSError) as error:
            raise Transient(f"{self.base_url}: {_line(self.hide(str(error)))}") from None
        if reply.status not in WHOLE:
            self._refused(reply, path)
        try:
            found: Any = read(reply if raw else self._json(reply))
            answer: T = await found if isinstance(found, CoroutineType) else found
            return answer
        except Malformed as error:
            if _is_error(reply.body):
                self._refused(reply, path)
            raise Transient(self.hide(f"{self.base_url}: the answer has {error}")) from None

    def _json(self, reply: Reply) -> Any:
        try:
            value = parsed(reply.body)
            if self._spelt and (b"\\" in reply.body or any(spelt in reply.body for spelt in self._spelt)):
                # Where nothing is spelt with a backslash, a look at the bytes tells.
                value = redact_all(value, self._keys)
            return value
        except (ValueError, RecursionError):
            coding = reply.headers.get("content-encoding")
            coded = "" if coding is None else f", but {_line(self.hide(coding))}, for which it was not asked"
            raise Transient(f"{self.base_url}: the answer is not JSON{coded} ({len(reply.body)} bytes)") from None

    def _refused(self, reply: Reply, path: str) -> None:
        """Raises what the status means; with 200 there is an error in place of an answer, whose code is the status."""
        codes, parameter, said = _said(_decoded(reply), self._keys)
        long_words = _says_too_long(parameter, " ".join((said, *codes)).lower())
        said, status = _line(self.hide(said)), reply.status
        message = f"{self.base_url}: HTTP {status}{f': {said}' if said else ''}"
        if status in WHOLE:
            status = next((int(code) for code in codes if re.fullmatch("[45][0-9][0-9]", code)), 500)
        too_long = not codes.isdisjoint(TOO_LONG)
        if status in TRANSIENT and not too_long and codes.isdisjoint(FOR_GOOD):
            raise Transient(message, retry_after(reply.headers.get("retry-after", "")))
        if status in (400, 413, 422) or too_long:
            raise PromptRefused(message, too_long=too_long or long_words)
        if status in (401, 403):
            message += "; check key_variable and what its key may do"
        if status in MOVED and "location" in reply.headers:
            message += f"; it names {_line(self.hide(reply.headers['location']))}, and base_url has to be where it is"
        if status in (404, 405):
            asked = urljoin(self.base_url, path[1:]) if path.startswith("//") else self.base_url + path
            raise NotThere(f"{message}; {asked} was asked for, base_url often ends in /v1")
        raise EngineGaveUp(message)


def written(body: Any) -> bytes:
    """JSON, in a fifth of the time `json` takes; what only `json` writes, half of a surrogate pair, as it does."""
    try:
        return pydantic_core.to_json(body)
    except pydantic_core.PydanticSerializationError:
        return json.dumps(body).encode()


def parsed(text: bytes) -> Any:
    """The value of a JSON text, likewise.

    Raises:
        ValueError, RecursionError: it is none.
    """
    try:
        return pydantic_core.from_json(text)
    except ValueError:
        return json.loads(text.decode("utf-8-sig", "surrogatepass"))  # of bytes it would read UTF-16 too


def _decoded(reply: Reply) -> str:
    """Without the zeros that would stand between the letters of a key in UTF-16."""
    return reply.body.decode("utf-8", "replace").replace("\0", "")


def _is_error(body: bytes) -> bool:
    """Whether an answer that is not as it should be is an error instead."""
    try:
        answer = parsed(body)
    except (ValueError, RecursionError):
        return False
    if not isinstance(answer, dict) or answer.get("choices") or answer.get("data"):
        return False
    return bool(answer.get("error")) or answer.get("object") == "error"


def _said(body: str, keys: Iterable[str | None]) -> tuple[set[str], str, str]:
    """Code and type, the parameter at fault, and the message, of an error, as far as the body has them; keys may still
    be in what is not JSON."""
    codes, parameter, said = set[str](), "", body
    try:
        error = redact_all(json.loads(body), keys)
    except (ValueError, RecursionError):
        error = None
    if isinstance(error, dict):
        inner = error.get("error") or error.get("detail") or error
        if isinstance(inner, dict):
            codes = {str(inner[name]) for name in ("code", "type") if inner.get(name)}
            parameter = inner["param"] if isinstance(inner.get("param"), str) else ""
            said = str(inner.get("message", inner))
        else:
            said = str(inner)
    return codes, parameter, said


def _says_too_long(parameter: str, said: str) -> bool:
    if parameter and not parameter.startswith(_OF_LENGTH):
        return False
    return any(words in said for words in _LONG_WORDS) and not any(words in said for words in _SCHEMA_WORDS)


def _line(said: str) -> str:
    """Without the key already: it is cut."""
    line = " ".join(said.split())
    return line if len(line) <= MOST_SAID else line[: MOST_SAID - 3] + "..."


def retry_after(value: str) -> float:
    """Seconds, from a number or a date, at most a day; 0 where it says neither."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            moment = email.utils.parsedate_to_datetime(value)
            seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return 0.0
    return max(0.0, min(seconds, 86_400.0))
