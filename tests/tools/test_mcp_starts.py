"""How MCP servers start again, in the time of a call and after it, and what of them is left at their end: nothing."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from midflight.errors import UserError
from midflight.tools import ToolResult, TransientError, make_toolset
from midflight.tools.mcp import McpConnection, McpServer, http
from tests.tools.test_mcp import COMMAND, SERVER, call
from tests.tools.web.serving import Received, Reply, serving

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


class Silent:
    """Answers by HTTP as an MCP server does, but to one of `methods` when `done` is set, or after 10 seconds."""

    def __init__(self, *methods: str) -> None:
        self.methods, self.asked, self.done, self.late = methods, set[str](), threading.Event(), False

    def __call__(self, received: Received) -> Reply:
        message = received.json if received.method == "POST" else {"method": received.method}
        method, number = message["method"], message.get("id")
        self.asked.add(method)
        if method in self.methods and not self.done.wait(10):
            self.late = True
        if number is None:
            return Reply(b"", {"GET": 405, "DELETE": 200}.get(method, 202))
        result: dict[str, Any] = {"tools": [{"name": "go", "inputSchema": {"type": "object"}}]}
        if method == "initialize":
            version = message["params"]["protocolVersion"]
            result = {"protocolVersion": version, "serverInfo": {"name": "s", "version": "1"}, "capabilities": {}}
        return Reply({"jsonrpc": "2.0", "id": number, "result": result}, headers={"mcp-session-id": "a"})


def test_a_server_that_does_not_answer_to_the_end_of_a_session_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "END_SECONDS", 0.2)
    answer = Silent("DELETE")
    with serving(answer) as server:
        toolset = make_toolset([], servers={"shop": {"url": f"{server.url}/mcp"}})
        assert toolset.names == ("shop.go", "finish")
        toolset.close()
        assert "DELETE" in answer.asked and not answer.late
        answer.done.set()


def test_a_server_that_does_not_list_its_tools_is_left_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "END_SECONDS", 0.2)
    answer = Silent("tools/list", "DELETE")
    with serving(answer) as server:
        with pytest.raises(UserError, match=r"^agent.mcp_servers.shop: no answer within 0\.5 seconds$"):
            make_toolset([], servers={"shop": {"url": f"{server.url}/mcp", "start_seconds": 0.5}})
        assert "DELETE" in answer.asked and not answer.late
        answer.done.set()


def runs(process: int) -> bool:
    """Whether it does within a second."""
    stat, end = Path(f"/proc/{process}/stat"), time.monotonic() + 1
    while time.monotonic() < end:
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return False
        time.sleep(0.05)
    return True
