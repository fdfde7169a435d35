"""How MCP servers start again, in the time of a call and after it, and what of them is left at their end: nothing."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from midflight.tools import ToolResult, TransientError, make_toolset
from midflight.tools.mcp import McpConnection, McpServer
from tests.tools.test_mcp import COMMAND, SERVER, call

pytest.importorskip("mcp")


def test_a_call_ends_in_its_seconds_also_while_the_server_starts(tmp_path: Path) -> None:
    slow = [sys.executable, str(SERVER.with_name("mcp_slow.py")), str(tmp_path / "began"), str(tmp_path / "go")]
    toolset = make_toolset([], servers={"shop": {"command": [*slow, str(SERVER)], "start_seconds": 60}})
    try:
        with pytest.raises(TransientError):
            call(toolset, "crash")
        started = time.monotonic()
        for _ in range(2):
            with pytest.raises(TransientError, match="^MCP server shop: has not started in the time of the call$"):
                call(toolset, "price", 0.5, item="fig")
        assert time.monotonic() - started < 10
        (tmp_path / "go").touch()
        assert call(toolset, "price", item="fig") == ToolResult("1 x fig: 3")
        assert (tmp_path / "began").read_text() == "xx"  # what the first call started was waited for
    finally:
        toolset.close()


def test_a_start_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    slow = [sys.executable, str(SERVER.with_name("mcp_slow.py")), str(tmp_path / "began"), str(tmp_path / "go")]
    options = McpServer(command=(*slow, str(SERVER)), tools=("crash", "price"))
    connection = McpConnection("shop", options)
    try:
        crash, price = connection.tools()
        with pytest.raises(TransientError):
            asyncio.run(crash.call({}, 20.0))
        connection.options = options.model_copy(update={"start_seconds": 1.0})
        with pytest.raises(TransientError, match="^MCP server shop: no answer within 1 seconds; run it by hand"):
            asyncio.run(price.call({"item": "fig"}, 60.0))
        connection.options = options
        (tmp_path / "go").touch()
        assert asyncio.run(price.call({"item": "fig"}, 20.0)) == ToolResult("1 x fig: 3")
        assert (tmp_path / "began").read_text() == "xxx"
    finally:
        connection.close()


def test_what_a_server_puts_into_another_session_ends_with_it(tmp_path: Path) -> None:
    others = make_toolset([], servers={"shop": {"command": COMMAND, "tools": ["detach"]}})
    toolset = make_toolset([], servers={"shop": {"command": COMMAND, "tools": ["detach", "crash"]}})
    try:
        kept = int(call(others, "detach").text)
        first = int(call(toolset, "detach").text)
        with pytest.raises(TransientError):
            call(toolset, "crash")
        second = int(call(toolset, "detach").text)  # by the server that was started again
        assert (runs(kept), runs(first), runs(second)) == (True, False, True)
        toolset.close()
        assert (runs(kept), runs(second)) == (True, False)
    finally:
        toolset.close()
        others.close()
    assert not runs(kept)


def runs(process: int) -> bool:
    """Whether it does within a second."""
    stat, end = Path(f"/proc/{process}/stat"), time.monotonic() + 1
    while time.monotonic() < end:
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return False
        time.sleep(0.05)
    return True
