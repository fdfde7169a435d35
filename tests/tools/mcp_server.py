"""An MCP server for tests, over standard input and output or, with a port, by HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from mcp import MCPError
from mcp.server import MCPServer
from mcp.types import ImageContent

server = MCPServer("shop")


@server.tool()
def price(item: str, count: int = 1) -> str:
    """Price of an item."""
    if item == "nothing":
        raise ValueError("there is no such item")
    return f"{count} x {item}: {len(item) * count}"


@server.tool()
def refuse(why: str = "not today") -> str:
    """Answers with an error of the protocol."""
    raise MCPError(-32000, why)


@server.tool()
def stock() -> dict[str, int]:
    """What there is."""
    return {"apple": 3}


@server.tool()
def picture() -> ImageContent:
    """A picture."""
    return ImageContent(type="image", data="AAAA", mime_type="image/png")


@server.tool()
def environment(variable: str) -> str:
    """A variable of the server's environment."""
    return os.environ.get(variable, "not set")


@server.tool()
def process() -> int:
    """Which one answers."""
    return os.getpid()


@server.tool()
async def slow(duration: float) -> str:
    """Takes its time, and answers others meanwhile."""
    import anyio

    await anyio.sleep(duration)
    return "done"


@server.tool()
async def stuck(file: str) -> str:
    """Never answers, and nobody else meanwhile."""
    Path(file).write_text(str(os.getpid()))
    time.sleep(600)
    return "done"


@server.tool()
def crash() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def detach() -> int:
    """Starts a process in a session of its own."""
    null = subprocess.DEVNULL  # its own pipes would keep those of the server open
    return subprocess.Popen(["sleep", "300"], start_new_session=True, stdin=null, stdout=null, stderr=null).pid


@server.tool(description=f"Sends {os.environ.get('SHOP_KEY', 'nothing')} along.")
def keyed() -> str:
    return "sent"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
