"""The HTTP client for a server that is called by HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2

END_SECONDS = 2.0
"""Within which a server must answer that a session has ended; it is left then."""


class HttpClient(httpx2.AsyncClient):
    """Sends `headers`, and waits for an answer as long as who asks does; nobody limits the end of a session but this.

    A session ends with a DELETE, to which the package mcp waits for the answer.
    """

    def __init__(self, headers: dict[str, str]) -> None:
        super().__init__(headers=headers, timeout=None, trust_env=False, follow_redirects=False)
        self._end: float | None = None

    async def send(self, request: httpx2.Request, **settings: Any) -> httpx2.Response:
        """See `httpx2.AsyncClient.send`.

        Raises:
            TimeoutError: no answer to a DELETE within `END_SECONDS`, redirects included.
        """
        if request.method != "DELETE":
            return await super().send(request, **settings)
        if self._end is None:
            self._end = asyncio.get_running_loop().time() + END_SECONDS
        async with asyncio.timeout_at(self._end):
            return await super().send(request, **{**settings, "stream": False})  # so its body is read in time as well
