"""Limits around a tool: time, calls of a trajectory, rate, retries, a cache on disk, the size of a result.

Invariant: the tool inside is called at most `1 + retries` times a call, again only after a `TransientError`, and only
successful results are cached, under a key that holds tool, its code, what it holds, version, options and every
argument. Whatever is wrong with the cache costs no call: it is as if there were none, but for a line that says so.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from midflight import __version__
from midflight.tools.base import ClosableTool, ErrorKind, InfrastructureError, Tool, ToolResult, TransientError
from midflight.tools.clock import TimeLimit
from midflight.tools.options import ToolOptions
from midflight.tools.origin import code_of, state_of
from midflight.tools.scope import Scope, ScopedTool, ToolAround
from midflight.tools.threads import Threads

T = TypeVar("T")

FIRST_PAUSE = 0.5
"""Seconds before the first retry where the service names none; doubles with each."""
CACHE_SECONDS = 5.0
"""Most that reading an entry of the cache, or writing one, may take."""

_CACHE = Threads("tool cache", 32)
_FORMAT = "the text after its digest"
"""Of an entry: a power cut can leave a file without what was written to it, which the digest tells."""
_DIGEST = len(hashlib.sha256().hexdigest())


class LimitedTool(ToolAround):
    """`tool` within the limits of `options`; the same to the planner.

    Raises:
        UserError: its results are to be cached, and what it holds does not tell whose they are.
    """

    def __init__(self, tool: Tool, options: ToolOptions, cache_folder: Path) -> None:
        super().__init__(tool)
        self.options, self.cache_folder = options, cache_folder
        self._scope: Scope | None = None
        self._said: set[str] = set()
        self._rate = _Rate(options.calls_per_minute)
        self._origin = self._found_origin() if options.cache_hours is not None else []

    def _found_origin(self) -> list[str]:
        if type(self.options) is not ToolOptions:  # they say all that a tool of ours, or a server, was made with
            return code_of(self.tool)
        key = f"agent.tool_options.{self.name}.cache_hours = {self.options.cache_hours:g}"
        return [*code_of(self.tool), state_of(self.tool, key)]

    @property
    def description(self) -> str:
        return self.tool.description

    @property
    def parameters(self) -> dict[str, Any]:
        return self.tool.parameters

    def scoped(self, scope: Scope) -> Self:
        """The tool that counts the calls of one trajectory; the rate is still shared by all."""
        own = copy.copy(self)
        own._scope = scope
        if isinstance(self.tool, ScopedTool):
            own.tool = self.tool.scoped(scope)
        return own

    def close(self) -> None:
        """Close the tool inside, where it holds something."""
        if isinstance(self.tool, ClosableTool):
            self.tool.close()

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        """See `Tool.call`. A retry waits for the rate as well. Neither that waiting is the call's time, nor the cache;
        retries are."""
        most = self.options.max_calls
        if most is None or self._scope is None:
            return await self._answered(arguments, seconds)
        calls = self._scope.calls
        if calls[self.name] >= most:
            text = f"{self.name} may be called {most} times for one question, and was; use what is known"
            return ToolResult(text, ErrorKind.CALL_LIMIT)
        calls[self.name] += 1
        try:
            return await self._answered(arguments, seconds)
        except InfrastructureError:  # it will be tried again, and that is the same call
            calls[self.name] -= 1
            raise

    async def _answered(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        """From the cache, or by a call."""
        entry = self._entry(arguments)
        cached = await self._cached("read", partial(_read, entry, self.options.cache_hours)) if entry else None
        result, new = (ToolResult(cached), False) if cached is not None else await self._called(arguments, seconds)
        if entry and new:
            await self._cached("written", partial(_write, entry, result.text))
        return shortened(result, self.options.result_characters)

    async def _cached(self, done: str, work: Callable[[], T]) -> T | None:
        """What `work` on the cache gives; None where it fails or takes too long, which is said once."""
        limit = asyncio.timeout(CACHE_SECONDS)
        try:
            async with limit:
                return await _CACHE.run(work)
        except (OSError, _Damaged, InfrastructureError) as error:  # the first is that of the limit as well
            problem = f"takes longer than {CACHE_SECONDS:g} seconds" if limit.expired() else str(error)
        if done not in self._said:
            self._said.add(done)
            folder = self.cache_folder / "results" / self.name
            print(f"{self.name}: the cache of results {folder} cannot be {done}: {problem}", file=sys.stderr)
        return None

    async def _called(self, arguments: Mapping[str, Any], seconds: float) -> tuple[ToolResult, bool]:
        """The result, and whether a cache may keep it."""
        await self._rate.turn()
        async with TimeLimit(None) as clock:
            return await self._tried(arguments, seconds, clock)

    async def _tried(self, arguments: Mapping[str, Any], seconds: float, clock: TimeLimit) -> tuple[ToolResult, bool]:
        loop = asyncio.get_running_loop()
        limit = left = self.options.seconds or seconds
        end, attempt = loop.time() + left, 0
        while True:
            try:
                result = await self.tool.call(arguments, left)
                if result.error is ErrorKind.TOOL_TIMEOUT and attempt:  # it tells what was left for the last attempt
                    whole = f" {limit:g} seconds, with {attempt} more attempts"
                    result = replace(result, text=result.text.replace(f" {left:g} seconds", whole))
                return result, result.error is None
            except TransientError as error:
                pause = FIRST_PAUSE * 2**attempt if error.retry_after is None else error.retry_after
                if attempt == self.options.retries or loop.time() + pause >= end + clock.waited:
                    ending = error.ending()
                    if ending is None:
                        raise
                    return ending, False
            attempt += 1
            await asyncio.sleep(pause)
            end += await self._rate.turn()
            left = end + clock.waited - loop.time()

    def _entry(self, arguments: Mapping[str, Any]) -> Path | None:
        """The file that keeps the result; None without a cache."""
        if self.options.cache_hours is None:
            return None
        limits = ToolOptions.model_fields.keys()
        options = self.options.model_dump(mode="json", exclude=set(limits))
        what = [_FORMAT, self.name, self._origin, __version__, options, dict(arguments)]
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
        return self.cache_folder / "results" / self.name / digest


def shortened(result: ToolResult, limit: int | None) -> ToolResult:
    """`result` with a text of at most `limit` characters: head and tail around a line that says what is left out."""
    if limit is None or len(result.text) <= limit:
        return result
    room = limit - len(_mark(len(result.text)))
    tail = room // 3
    cut = len(result.text) - room
    text = result.text[: room - tail] + _mark(cut) + result.text[len(result.text) - tail :]
    return replace(result, text=text, whole=result.text)


def _mark(characters: int) -> str:
    return f"\n[... {characters} characters left out ...]\n"


class _Rate:
    """Turns that are at least 60 / `per_minute` seconds apart, in the order of asking."""

    def __init__(self, per_minute: float | None) -> None:
        self._apart = 60 / per_minute if per_minute else 0.0
        self._next = 0.0

    async def turn(self) -> float:
        """Wait for a turn; the seconds that it took."""
        if not self._apart:
            return 0.0
        now = time.monotonic()
        mine = max(now, self._next)
        self._next = mine + self._apart
        if mine > now:
            await asyncio.sleep(mine - now)
        return mine - now


class _Damaged(Exception):
    """An entry of the cache that is not as it was written."""


def _read(entry: Path, hours: float | None) -> str | None:
    """The text that an entry keeps; None where there is none, or an old one."""
    try:
        if hours is None or time.time() - entry.stat().st_mtime > hours * 3600:
            return None
        data = entry.read_bytes()
    except FileNotFoundError:
        return None
    kept, data = data[:_DIGEST], data[_DIGEST:]
    if hashlib.sha256(data).hexdigest().encode() != kept:
        raise _Damaged(f"{entry.name} is damaged; it is made anew")
    return data.decode("utf-8", "surrogatepass")


def _write(entry: Path, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    entry.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(prefix=".", dir=entry.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(data).hexdigest().encode() + data)
        os.replace(aside, entry)
    except OSError:
        os.unlink(aside)
        raise
