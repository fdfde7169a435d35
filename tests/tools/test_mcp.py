"""Tools of real MCP servers, over standard input and output and by HTTP: schemas, time-outs, restarts."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from midflight.building import toolset_of
from midflight.errors import UserError
from midflight.recipe import RecipeError, load_recipe
from midflight.tools import ErrorKind, ToolResult, Toolset, TransientError, make_toolset, tool
from midflight.tools.mcp import McpConnection
from midflight.tools.mcp.faults import ErrorOutput
from tests.recipe.test_config import MINIMAL

pytest.importorskip("mcp")

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = [sys.executable, str(SERVER)]
LIAR = [sys.executable, str(SERVER.with_name("mcp_liar.py"))]


@pytest.fixture(scope="module")
def shop() -> Iterator[Toolset]:
    toolset = make_toolset([], servers={"shop": {"command": COMMAND}})
    yield toolset
    toolset.close()


def call(toolset: Toolset, name: str, seconds: float = 20.0, **arguments: Any) -> ToolResult:
    found = toolset.get(f"shop.{name}")
    assert found is not None and toolset.validate(found.name, arguments) is None
    return asyncio.run(found.call(arguments, seconds))


def test_the_tools_of_a_server_have_its_descriptions_and_schemas(shop: Toolset) -> None:
    assert shop.names == (
        *(
            f"shop.{name}"
            for name in (
                "price",
                "refuse",
                "stock",
                "picture",
                "environment",
                "process",
                "slow",
                "stuck",
                "crash",
                "detach",
                "keyed",
            )
        ),
        "finish",
    )
    price = shop.get("shop.price")
    assert price is not None and price.description == "Price of an item."
    assert price.parameters["required"] == ["item"]
    assert shop.validate("shop.price", {"item": "a", "count": "2"}) == "count: '2' is not of type 'integer'"


def test_results_of_every_kind_are_text(shop: Toolset) -> None:
    assert call(shop, "price", item="apple", count=2) == ToolResult("2 x apple: 10")
    assert "".join(call(shop, "stock").text.split()) == '{"apple":3}'
    assert call(shop, "picture") == ToolResult("[image, image/png]")
    assert call(shop, "refuse") == ToolResult("MCPError: not today", ErrorKind.TOOL_ERROR)
    assert call(shop, "price", item="nothing") == ToolResult("Error executing tool price", ErrorKind.TOOL_ERROR)


def test_a_time_out_is_the_tools_and_a_server_that_still_answers_stays(shop: Toolset) -> None:
    before = call(shop, "process")
    expected = ToolResult("slow took longer than 0.3 seconds", ErrorKind.TOOL_TIMEOUT)
    assert call(shop, "slow", 0.3, duration=60) == expected
    assert call(shop, "process") == before and before.error is None


def test_a_server_that_dies_is_started_again_for_the_next_call(shop: Toolset) -> None:
    with pytest.raises(TransientError, match="MCP server shop: "):
        call(shop, "crash")
    assert call(shop, "price", item="fig") == ToolResult("1 x fig: 3")


def test_a_server_that_hangs_is_ended_and_started_again(shop: Toolset, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    assert call(shop, "stuck", 1.0, file=str(file)).error is ErrorKind.TOOL_TIMEOUT
    assert call(shop, "price", item="fig") == ToolResult("1 x fig: 3")
    assert not Path(f"/proc/{file.read_text()}").exists()


def test_many_trajectories_share_a_server(shop: Toolset) -> None:
    price, slow = shop.get("shop.price"), shop.get("shop.slow")
    assert price is not None and slow is not None

    async def many() -> list[ToolResult]:
        calls = [slow.call({"duration": 1.0}, 10.0) for _ in range(5)]
        return await asyncio.gather(*calls, *(price.call({"item": "x" * n}, 10.0) for n in range(1, 6)))

    started = time.monotonic()
    assert [result.text[-1] for result in asyncio.run(many())] == ["e"] * 5 + list("12345")
    assert time.monotonic() - started < 4.5


def test_cancelling_a_call_leaves_the_server(shop: Toolset) -> None:
    slow = shop.get("shop.slow")
    assert slow is not None

    async def cancelled() -> None:
        task = asyncio.create_task(slow.call({"duration": 60}, 60.0))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert call(shop, "price", item="fig") == ToolResult("1 x fig: 3")


def test_only_named_variables_reach_a_server_and_closing_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_TOKEN", "yes")
    monkeypatch.setenv("TAVILY_API_KEY", "no")
    settings = {"command": COMMAND, "env": ["SHOP_TOKEN"], "tools": ["environment", "price"], "max_calls": 9}
    toolset = make_toolset(["calculator"], servers={"shop": settings})
    assert toolset.names == ("calculator", "shop.environment", "shop.price", "finish")
    assert call(toolset, "environment", variable="SHOP_TOKEN").text == "yes"
    assert call(toolset, "environment", variable="TAVILY_API_KEY").text == "not set"
    toolset.close()
    toolset.close()
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    lines = [Path(f"/proc/{child}/cmdline").read_text() for child in children if Path(f"/proc/{child}").exists()]
    assert len([line for line in lines if "mcp_server" in line]) <= 1  # the other tests' own


def test_no_error_shows_the_value_of_a_variable_or_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_KEY", "shop-5ecret")
    monkeypatch.setenv("SHOP_MODE", "1")
    toolset = make_toolset([], servers={"shop": {"command": COMMAND, "env": ["SHOP_KEY", "SHOP_MODE"]}})
    try:
        for before in (0, 220, 224):
            found = call(toolset, "refuse", why="x" * before + "shop-5ecret 1").text
            assert "sho" not in found and found.startswith("MCPError: " + "x" * before)
        assert call(toolset, "refuse", why="shop-5ecret 1").text == "MCPError: [key] 1"
    finally:
        toolset.close()


def test_no_result_and_no_description_shows_the_value_of_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_KEY", "shop-5ecret")
    options = {"command": COMMAND, "env": ["SHOP_KEY"], "result_characters": 200}
    toolset = make_toolset([], servers={"shop": options})
    try:
        assert call(toolset, "environment", variable="SHOP_KEY") == ToolResult("[key]")
        assert call(toolset, "price", item="shop-5ecret") == ToolResult("1 x [key]: 11")
        for before in range(120, 180):  # part of it is not found where a result is cut
            found = call(toolset, "price", item="x" * before + "shop-5ecret" + "y" * 100)
            assert found.whole is not None and "sho" not in found.text and "5ecret" not in found.text + found.whole
        tool = toolset.get("shop.keyed")
        assert tool is not None and tool.description == "Sends [key] along."
    finally:
        toolset.close()


def test_a_server_by_http_and_its_restart() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen([*COMMAND, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return process
            time.sleep(0.05)
        raise AssertionError("the server does not start")

    process = start()
    toolset = make_toolset([], servers={"shop": {"url": f"http://127.0.0.1:{port}/mcp", "tools": ["price"]}})
    try:
        assert call(toolset, "price", item="apple") == ToolResult("1 x apple: 5")
        process.kill()
        process.wait()
        with pytest.raises(TransientError):
            call(toolset, "price", item="apple")
        process = start()
        assert call(toolset, "price", item="apple") == ToolResult("1 x apple: 5")
    finally:
        toolset.close()
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("server", "line"),
    [
        ({"command": ["/no/such/program"]}, "agent.mcp_servers.shop: MCP server shop: FileNotFoundError"),
        (
            {"command": [sys.executable, "-c", "pass"]},
            "agent.mcp_servers.shop: MCP server shop: MCPError: Connection closed; run it by hand to see why: "
            f"{sys.executable} -c pass",
        ),
        (
            {"command": [*LIAR, "import"], "env": ["LIAR_KEY"]},
            "agent.mcp_servers.shop: MCP server shop: MCPError: Connection closed; it said: ImportError: [31mno module "
            "[key]",
        ),
        (
            {"command": [sys.executable, "-c", "import sys, time; print('waits', file=sys.stderr); time.sleep(60)"]}
            | {"start_seconds": 0.5},
            "agent.mcp_servers.shop: MCP server shop: no answer within 0.5 seconds; it said: waits",
        ),
        ({"command": [*LIAR, "many"]}, "agent.mcp_servers.shop: has 501 tools, more than 500; name those to use in "),
        (
            {"command": [*LIAR, "schema"]},
            "agent.mcp_servers.shop: its answer is not of the protocol: tools.0.inputSchema.type: Input should be ",
        ),
        (
            {"command": [sys.executable, "-c", "import time; time.sleep(60)"], "start_seconds": 0.5},
            "agent.mcp_servers.shop: MCP server shop: no answer within 0.5 seconds",
        ),
        (
            {"command": COMMAND, "tools": ["prize"]},
            "agent.mcp_servers.shop.tools = prize: the server has no such tool; it has price, refuse",
        ),
        ({"command": COMMAND, "env": ["NOT_SET_HERE"]}, "agent.mcp_servers.shop: set NOT_SET_HERE in the environment"),
        ({"command": COMMAND, "cwd": "/no/folder"}, "agent.mcp_servers.shop: cwd = /no/folder: no such folder"),
        ({"url": "http://127.0.0.1:9/mcp"}, "agent.mcp_servers.shop: MCP server shop: "),
    ],
)
def test_a_server_that_cannot_be_used_is_told_in_one_line(
    server: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIAR_KEY", "sk-secret-1234")
    with pytest.raises(UserError) as caught:
        make_toolset([], servers={"shop": server})
    assert str(caught.value).startswith(line)


def test_a_name_that_clashes_is_told_and_the_server_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    end = McpConnection.close
    monkeypatch.setattr(McpConnection, "close", lambda self: (closed.append(self.name), end(self)))

    @tool(name="shop.price")
    def price(item: str) -> str:
        """Another one."""
        return item

    with pytest.raises(UserError, match="agent.tools: two tools are named 'shop.price': rename one of them"):
        make_toolset(["shop.price"], given=[price], servers={"shop": {"command": COMMAND, "tools": ["price"]}})
    assert closed == ["shop"]


def test_servers_come_from_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    (tmp_path / "shop").mkdir()
    server = f"{{command: ['{sys.executable}', '{SERVER}'], cwd: shop, tools: [price]}}"
    file.write_text(MINIMAL.replace("[calculator]", f"[]\n  mcp_servers: {{shop: {server}}}"))
    recipe = load_recipe(str(file))
    assert recipe.agent.mcp_servers["shop"]["cwd"] == str(tmp_path / "shop")
    toolset = toolset_of(recipe)
    assert toolset.names == ("shop.price", "finish")
    toolset.close()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("agent.mcp_servers.shop={}", "agent.mcp_servers.shop: give either command or url"),
        ("agent.mcp_servers.a.b={url: x}", "agent.mcp_servers.a.b = {'url': 'x'}: unknown key; valid keys: "),
        ("agent.mcp_servers={a.b: {url: x}}", "agent.mcp_servers.a.b: name it with 1 to 32 letters"),
        (
            "agent.mcp_servers.a.urll=x",
            "agent.mcp_servers.a.urll = x: unknown key; did you mean agent.mcp_servers.a.url?",
        ),
        (
            "agent.mcp_servers.a={url: x, env: [A]}",
            "agent.mcp_servers.a: env does nothing with url; leave it out",
        ),
        ("agent.mcp_servers.a={command: [x], headers: {A: B}}", "agent.mcp_servers.a: headers do nothing with command"),
        ("agent.tools=[]", "agent.tools = []: there is nothing to choose; name a tool, or give agent.mcp_servers"),
    ],
)
def test_what_is_wrong_in_the_recipe_is_one_line(override: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(MINIMAL)
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(tmp_path / "r.yaml"), [override])
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("fault", "result"),
    [
        ("prints", ToolResult("fine")),
        ("half", ToolResult("a message of the server cannot be read", ErrorKind.TOOL_ERROR)),
        (
            "result",
            ToolResult(
                "its answer is not of the protocol: content: Input should be a valid list", ErrorKind.TOOL_ERROR
            ),
        ),
    ],
)
def test_an_answer_that_is_none_is_told_at_once_and_in_our_words(
    fault: str, result: ToolResult, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    toolset = make_toolset([], servers={"shop": {"command": [*LIAR, fault]}})
    try:
        start = time.monotonic()
        assert [call(toolset, "go"), call(toolset, "go")] == [result, result]
        assert time.monotonic() - start < 10
    finally:
        toolset.close()
    line = "agent.mcp_servers.shop: writes to its standard output what is no message, which is passed over\n"
    assert capfd.readouterr().err == (line if fault == "prints" else "") and caplog.text == ""


@pytest.mark.parametrize(
    ("said", "last"),
    [
        (b"one\ntwo [\xff]\n \n", "two [\ufffd]"),
        (b"sk-secret-1234" + b"x" * 8185, ""),  # what is left of the key could not be told
        (b"sk-secret-1234" + b"x" * 8000 + b"\nends", "ends"),
        (b"", ""),
    ],
)
def test_the_last_words_of_a_server_hold_no_part_of_a_key(said: bytes, last: str) -> None:
    async def write() -> ErrorOutput:
        output = ErrorOutput()
        with output.opened() as errors:
            os.write(errors.fileno(), said)
        return output

    assert asyncio.run(write()).last_line(["sk-secret-1234"]) == last


def test_a_server_that_dies_in_a_call_leaves_its_last_words() -> None:
    toolset = make_toolset([], servers={"shop": {"command": [*LIAR, "dies"]}})
    try:
        with pytest.raises(TransientError) as caught:
            call(toolset, "go")
    finally:
        toolset.close()
    assert str(caught.value) == "MCP server shop: MCPError: Connection closed; it said: no room left"
