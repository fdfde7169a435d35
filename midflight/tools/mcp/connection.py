"""Tools of MCP servers (modelcontextprotocol.io), started or called as `agent.mcp_servers` says.

Invariant: a server sees of the environment what the package mcp passes to any, and the variables that the recipe names.
A connection that is lost, or does not answer soon after a time-out, is made anew for the next call. What a
server writes to its standard error is never shown, but for the last line where it fails; what it writes that is no
message is never shown.

A server's sessions live in a thread with an event loop of its own, so that they outlast the loop of any one run.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import re
import shlex
import sys
import threading
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from midflight.errors import UserError
from midflight.redacting import is_secret, redact
from midflight.section import MOST_SECONDS
from midflight.tools.base import ErrorKind, InfrastructureError, ToolResult, TransientError, one_line
from midflight.tools.mcp.faults import BrokenMessage, ErrorOutput, is_broken_message, reason
from midflight.tools.mcp.processes import MARK, end_marked
from midflight.tools.mcp.schemas import problem, readable
from midflight.tools.options import ToolOptions, installed, key_from, to_install

if TYPE_CHECKING:
    from mcp import Client

T = TypeVar("T")

MOST_TOOLS = 500
"""Of a server that the recipe does not choose from: more than any planner's prompt can hold."""
ALIVE_SECONDS = 2.0
"""Within which a server that let a call time out must answer another request; the call does not wait for that."""


class McpServer(ToolOptions):
    """One server; the limits are those of each of its tools."""

    cacheable: ClassVar[bool] = False
    paths: ClassVar[tuple[str, ...]] = ("cwd",)

    command: tuple[str, ...] = ()
    """Program and arguments of a server that is started and spoken to over its standard input and output."""
    cwd: str | None = None
    """Folder the command runs in, relative to the recipe; null: the current one."""
    env: tuple[str, ...] = ()
    """Names of environment variables that the command gets, beside the usual few (PATH, HOME). A value of 8 characters
    or more is taken for a key: where a tool shows it, `[key]` stands in its place."""
    url: str | None = None
    """Of a server that is called by HTTP. It is the recipe's word: it may be on this machine."""
    headers: dict[str, str] = {}
    """HTTP headers, each by the name of the environment variable that holds its value."""
    tools: tuple[str, ...] | None = None
    """Only these; null: all that the server has."""
    start_seconds: float = Field(default=30.0, gt=0, le=MOST_SECONDS)
    """Time limit of starting the server and listing its tools."""
    result_characters: int | None = Field(default=20_000, ge=200, le=1_000_000_000)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.command) == (self.url is not None):
            raise ValueError("give either command or url")
        for name, given in (("cwd", self.cwd), ("env", self.env)):
            if given and self.url is not None:
                raise ValueError(f"{name} does nothing with url; leave it out")
        if self.headers and self.url is None:
            raise ValueError("headers do nothing with command; leave them out")
        if not all(re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) for name in (*self.env, *self.headers.values())):
            raise ValueError("env and headers take names of environment variables, such as SHOP_TOKEN, and never a key")
        return self

    @property
    def keys(self) -> list[str]:
        """Values that no description, result or error may show: those of the variables it names."""
        sent = [key_from(variable) for variable in self.headers.values()]
        values = (*map(key_from, self.env), *sent, *(value.rpartition(" ")[2] for value in sent))  # "Bearer KEY"
        return [value for value in values if is_secret(value)]

    def missing(self) -> str:
        if not installed("mcp"):
            return to_install(["mcp"], "mcp")
        unset = [variable for variable in (*self.env, *self.headers.values()) if not key_from(variable)]
        return f"set {', '.join(unset)} in the environment" if unset else ""


class McpConnection:
    """A connection to one server, made anew when it is lost.

    Args:
        name: what the recipe calls the server.
    """

    def __init__(self, name: str, options: McpServer) -> None:
        self.name, self.options = name, options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"mcp-{name}", daemon=True)
        self._thread.start()
        self._keeper: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Client] | None = None
        self._checking: asyncio.Task[bool] | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._errors = ErrorOutput()
        self._told = False
        atexit.register(self.close)

    def tools(self) -> list[McpTool]:
        """The server's tools: those that the options name, else all that can be used, with a line for each other.

        Raises:
            UserError: it does not start or answer, or a tool that is named is not there or cannot be used.
        """
        try:
            listed = self._submit(self._list()).result()
        except InfrastructureError as error:
            raise UserError(f"agent.mcp_servers.{self.name}: {error}") from error
        found = {str(entry.name): entry for entry in listed}
        for wanted in self.options.tools or ():
            if wanted not in found:
                raise UserError(
                    f"agent.mcp_servers.{self.name}.tools = {wanted}: the server has no such tool; it has "
                    f"{', '.join(found) or 'none'}"
                )
        names = found if self.options.tools is None else self.options.tools
        if len(names) > MOST_TOOLS and self.options.tools is None:
            raise UserError(
                f"agent.mcp_servers.{self.name}: has {len(names)} tools, more than {MOST_TOOLS}; name those to use in "
                f"agent.mcp_servers.{self.name}.tools"
            )
        return self._usable([found[name] for name in names])

    def _usable(self, listed: Sequence[Any]) -> list[McpTool]:
        """Those of the tools that can be used.

        Raises:
            UserError: one that is named cannot be used, or none can.
        """
        key, usable, odd = f"agent.mcp_servers.{self.name}", [], []
        for entry in listed:
            try:
                tool = McpTool(self, entry)
                why = problem(tool)
            except RecursionError:
                why = "its schema is nested too deep"
            if why:
                odd.append(one_line(redact(f"{entry.name!r}: {why}", self.options.keys)))
            else:
                usable.append(tool)
        if odd and self.options.tools is not None:
            raise UserError(f"{key}.tools: cannot use {odd[0]}; leave it out")
        if odd and not usable:
            raise UserError(f"{key}: has no tool that can be used; {odd[0]}")
        for line in odd:
            print(f"{key}: leaves out {line}", file=sys.stderr)
        return usable

    async def call(self, tool: str, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        """Call a tool from any event loop.

        Raises:
            TransientError: the connection is lost; the next call makes another.
        """
        return await asyncio.wrap_future(self._submit(self._call(tool, arguments, seconds)))

    def close(self) -> None:
        """End the connection and, where it was started here, the server. Safe to call twice."""
        atexit.unregister(self.close)
        if not self._thread.is_alive():
            return
        self._submit(self._drop()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _submit(self, coroutine: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _list(self) -> list[Any]:
        end = self._loop.time() + self.options.start_seconds
        client = await self._connected()
        try:
            async with asyncio.timeout_at(end):
                found, cursor = [], None
                while True:
                    page = await self._answer(client.list_tools(cursor=cursor))
                    found += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        return found
        except TimeoutError:
            said = self._late()
            await self._drop()
            raise InfrastructureError(said) from None
        except Exception as error:  # the boundary to a server that may do anything
            raise InfrastructureError(reason(error, self.options.keys)) from error

    async def _call(self, tool: str, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        from mcp import MCPError

        end = self._loop.time() + seconds
        try:
            async with asyncio.timeout_at(end):
                client = await self._connected()
        except TimeoutError:  # it goes on starting, for the next call
            raise TransientError(f"MCP server {self.name}: has not started in the time of the call") from None
        try:
            async with asyncio.timeout_at(end):
                result = await self._answer(client.call_tool(tool, dict(arguments)))
        except TimeoutError:
            self._checking = asyncio.create_task(self._check(client))
            return ToolResult(f"{tool} took longer than {seconds:g} seconds", ErrorKind.TOOL_TIMEOUT)
        except Exception as error:  # the boundary to a server that may do anything
            alive = await self._check(client)
            if alive and isinstance(error, MCPError | ValidationError | BrokenMessage | RuntimeError):
                return ToolResult(reason(error, self.options.keys), ErrorKind.TOOL_ERROR)
            raise TransientError(
                f"MCP server {self.name}: {reason(error, self.options.keys)}{self._last_said()}"
            ) from error
        text = redact(_text(result), self.options.keys)  # a server may show what it was given
        return ToolResult(text, ErrorKind.TOOL_ERROR if result.is_error else None)

    async def _answer(self, asked: Coroutine[Any, Any, T]) -> T:
        """The answer to a request.

        Raises:
            BrokenMessage: the server sent one that cannot be read: it may be this answer, which never comes then.
        """
        broken: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(broken)
        asking = asyncio.create_task(asked)
        try:
            either: set[asyncio.Future[Any]] = {asking, broken}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise BrokenMessage
            return asking.result()
        finally:
            self._waiting.discard(broken)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _received(self, message: object) -> None:
        """Of the messages that are no answer only those that are none matter."""
        if not isinstance(message, ValidationError):
            return
        if is_broken_message(message):
            for broken in self._waiting:
                if not broken.done():
                    broken.set_result(None)
        elif not self._told:
            self._told = True
            line = "writes to its standard output what is no message, which is passed over"
            print(f"agent.mcp_servers.{self.name}: {line}", file=sys.stderr)

    def _late(self) -> str:
        return f"no answer within {self.options.start_seconds:g} seconds{self._last_said()}"

    def _last_said(self) -> str:
        """The last line of the server's standard error, or how to see why it fails; for the end of an error."""
        if self.options.url is not None:
            return ""
        if line := self._errors.last_line(self.options.keys):
            return f"; it said: {line}"
        return f"; run it by hand to see why: {one_line(redact(shlex.join(self.options.command), self.options.keys))}"

    async def _connected(self) -> Client:
        """The client, connected at the first need, and known to answer."""
        if self._checking is not None:
            await asyncio.wait([self._checking])
        if self._client is None:
            self._client = self._loop.create_future()
            self._keeper = asyncio.create_task(self._keep(self._client))
        return await asyncio.shield(self._client)

    async def _keep(self, ready: asyncio.Future[Client]) -> None:
        """Hold one connection open until the task is cancelled: entered and left in one task, as anyio needs it."""
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self.options.start_seconds) as limit:
                    client = await self._open(stack)
                ready.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:  # the boundary to a server that may do anything
            if not ready.done():
                why = self._late() if limit.expired() else reason(error, self.options.keys) + self._last_said()
                ready.set_exception(TransientError(f"MCP server {self.name}: {why}"))
                ready.exception()  # whoever waits gets it; nobody may
        finally:
            if self._client is ready:
                self._client = self._keeper = None

    async def _open(self, stack: AsyncExitStack) -> Client:
        from mcp import Client, StdioServerParameters, stdio_client

        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # it would print what servers send, keys and all
        if self.options.url is None:
            program, *arguments = self.options.command
            mark = uuid.uuid4().hex
            stack.callback(end_marked, mark)
            environment = {MARK: mark, **{name: os.environ[name] for name in self.options.env}}
            parameters = StdioServerParameters(command=program, args=arguments, env=environment, cwd=self.options.cwd)
            errors = stack.enter_context(self._errors.opened())
            client = Client(stdio_client(parameters, errlog=errors), message_handler=self._received)
            return await stack.enter_async_context(client)
        from mcp.client.streamable_http import streamable_http_client

        from midflight.tools.mcp.http import HttpClient

        headers = {header: key_from(variable) for header, variable in self.options.headers.items()}
        http = await stack.enter_async_context(HttpClient(headers))
        spoken = streamable_http_client(self.options.url, http_client=http)
        return await stack.enter_async_context(Client(spoken, message_handler=self._received))

    async def _check(self, client: Client) -> bool:
        """Whether the connection is alive; one that is not is dropped."""
        try:
            async with asyncio.timeout(ALIVE_SECONDS):
                await client.list_tools(cache_mode="bypass")  # newer versions of the protocol have no ping
            return True
        except Exception:  # dead in whatever way: the next call connects anew
            if self._client is not None and self._client.done() and self._client.result() is client:
                await self._drop()
            return False

    async def _drop(self) -> None:
        keeper = self._keeper
        if keeper is not None:
            self._client = self._keeper = None
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)


class McpTool:
    """One tool of a server, named `server.tool`."""

    def __init__(self, connection: McpConnection, listed: Any) -> None:
        self._connection, self._tool = connection, str(listed.name)
        self.name = f"{connection.name}.{listed.name}"
        said = redact(listed.description or listed.title or self._tool, connection.options.keys)
        self.description = one_line(said, 1000)
        self.parameters: dict[str, Any] = {"type": "object", "properties": {}, **readable(listed.input_schema)}

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        """See `Tool.call`."""
        return await self._connection.call(self._tool, arguments, seconds)

    def close(self) -> None:
        """End the connection, which all tools of the server share."""
        self._connection.close()


def connect(name: str, options: McpServer) -> list[McpTool]:
    """The tools of a server.

    Raises:
        UserError: it cannot be reached.
    """
    missing = options.missing()
    if not missing and options.cwd is not None and not Path(options.cwd).is_dir():
        missing = f"cwd = {options.cwd}: no such folder"
    if missing:
        raise UserError(f"agent.mcp_servers.{name}: {missing}")
    connection = McpConnection(name, options)
    try:
        return connection.tools()
    except BaseException:
        connection.close()
        raise


def _text(result: Any) -> str:
    """The content of a result as text; what is no text is named."""
    parts = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource" and getattr(block.resource, "text", None) is not None:
            parts.append(block.resource.text)
        else:
            parts.append(f"[{block.type}{f', {block.mime_type}' if getattr(block, 'mime_type', None) else ''}]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
