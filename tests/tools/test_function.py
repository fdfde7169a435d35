"""`@tool`: schema from the signature, and every outcome of a call as a typed result."""

import asyncio
import sys
import threading
import time
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from midflight.tools import ErrorKind, FunctionTool, InfrastructureError, ToolError, ToolResult, tool


def call(one: FunctionTool, seconds: float = 5.0, **arguments: Any) -> ToolResult:
    return asyncio.run(one.call(arguments, seconds))


@tool
def repeat(text: str, times: Annotated[int, Field(ge=1)] = 2, mode: Literal["plain", "loud"] = "plain") -> str:
    """Say a text
    several times.

    Args:
        text: what to say,
            in any language
        times (int): how often

    Returns:
        text: nothing of the arguments
    """
    return (text.upper() if mode == "loud" else text) * times


def test_schema_and_description_come_from_the_function() -> None:
    assert repeat.name == "repeat"
    assert repeat.description == "Say a text several times."
    assert repeat.parameters == {
        "type": "object",
        "additionalProperties": False,
        "required": ["text"],
        "properties": {
            "text": {"type": "string", "description": "what to say, in any language"},
            "times": {"type": "integer", "minimum": 1, "default": 2, "description": "how often"},
            "mode": {"enum": ["plain", "loud"], "type": "string", "default": "plain"},
        },
    }


def test_names_that_pydantic_reserves_are_ordinary_parameters() -> None:
    @tool(name="odd-names")
    def odd(schema: str, copy: int, _x: int = 1) -> str:
        """Odd."""
        return f"{schema}{copy}{_x}"

    assert odd.name == "odd-names"
    assert call(odd, schema="a", copy=3) == ToolResult("a31")


def test_pattern_reaches_the_schema_and_the_call() -> None:
    @tool
    def year(text: Annotated[str, Field(pattern="^[0-9]{4}$", description="a year")]) -> str:
        """Year."""
        return text

    assert year.parameters["properties"]["text"] == {
        "type": "string",
        "pattern": "^[0-9]{4}$",
        "description": "a year",
    }
    assert call(year, text="1999").text == "1999"
    assert call(year, text="99").error is ErrorKind.INVALID_ARGUMENTS


def test_arguments_are_not_repaired() -> None:
    assert call(repeat, text="a", times="2").error is ErrorKind.INVALID_ARGUMENTS
    assert call(repeat, text="a", other=1).error is ErrorKind.INVALID_ARGUMENTS
    assert call(repeat).error is ErrorKind.INVALID_ARGUMENTS
    assert call(repeat, text=object()).error is ErrorKind.INVALID_ARGUMENTS
    assert call(repeat, text="ab", mode="loud") == ToolResult("ABAB")


def test_functions_that_cannot_be_tools_are_refused_at_once() -> None:
    def bare(a: int) -> int:
        return a

    def untyped(a) -> int:  # type: ignore[no-untyped-def]
        """Doc."""
        return int(a)

    def starred(*a: int) -> int:
        """Doc."""
        return len(a)

    def wrongly_described(a: int) -> int:
        """Doc.

        Args:
            b: no such parameter
        """
        return a

    for function, message in (
        (bare, "docstring"),
        (untyped, "annotation"),
        (starred, "'a' must be"),
        (wrongly_described, "'b'"),
    ):
        with pytest.raises(TypeError, match=message):
            tool(function)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as is", "as is"),
        (3, "3"),
        (3.0, "3"),
        (1 / 3, "0.3333333333"),
        ([1, "é"], '[1, "é"]'),
        (True, "true"),
        (None, "null"),
    ],
)
def test_return_values_as_text(value: object, text: str) -> None:
    @tool(blocking=False)
    def give() -> Any:
        """Give."""
        return value

    assert call(give) == ToolResult(text)


@pytest.mark.parametrize("blocking", [True, False])
def test_exceptions_are_results(blocking: bool) -> None:
    @tool(blocking=blocking)
    def fail(how: str) -> str:
        """Fail."""
        if how == "exit":
            sys.exit(3)
        if how == "panic":
            raise BaseException("panic")
        raise {
            "tool": ToolError("not found"),
            "key": KeyError("x"),
            "time": TimeoutError("inner"),
            "stop": StopIteration(1),
            "down": InfrastructureError("search is down"),
        }[how]

    assert call(fail, how="tool") == ToolResult("not found", ErrorKind.TOOL_ERROR)
    assert call(fail, how="key") == ToolResult("KeyError: 'x'", ErrorKind.TOOL_ERROR)
    assert call(fail, how="time") == ToolResult("TimeoutError: inner", ErrorKind.TOOL_ERROR)
    assert call(fail, how="stop").error is ErrorKind.TOOL_ERROR
    assert call(fail, how="exit").error is ErrorKind.TOOL_ERROR
    assert call(fail, how="panic").error is ErrorKind.TOOL_ERROR
    with pytest.raises(InfrastructureError, match="search is down"):
        call(fail, how="down")


def test_time_limit_interrupts_an_async_tool() -> None:
    interrupted: list[bool] = []

    @tool
    async def slow() -> str:
        """Slow."""
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            interrupted.append(True)
            raise
        return "done"

    began = time.monotonic()
    assert call(slow, seconds=0.05) == ToolResult("slow took longer than 0.05 seconds", ErrorKind.TOOL_TIMEOUT)
    assert interrupted == [True]
    assert time.monotonic() - began < 5


def test_time_limit_of_a_sync_tool_returns_while_its_thread_goes_on() -> None:
    release, ended = threading.Event(), threading.Event()

    @tool
    def stuck() -> str:
        """Stuck."""
        release.wait(30)
        ended.set()
        return "late"

    began = time.monotonic()
    assert call(stuck, seconds=0.05).error is ErrorKind.TOOL_TIMEOUT
    assert time.monotonic() - began < 5  # asyncio.run did not wait for the thread
    assert not ended.is_set()
    release.set()
    assert ended.wait(5)


def test_cancellation_passes_through() -> None:
    @tool
    async def slow() -> str:
        """Slow."""
        await asyncio.sleep(30)
        return ""

    async def cancel() -> None:
        task = asyncio.create_task(slow.call({}, 60))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())


def test_a_tool_that_does_not_block_runs_on_the_calling_thread() -> None:
    @tool(blocking=False)
    def here() -> bool:
        """Here."""
        return threading.current_thread() is threading.main_thread()

    @tool
    def there() -> bool:
        """There."""
        return threading.current_thread() is threading.main_thread()

    assert call(here).text == "true"
    assert call(there).text == "false"
