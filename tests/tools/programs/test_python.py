"""The python tool: given or written code, state and figures of a trajectory, errors that the planner can read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from midflight.agent import AgentFlow, DirectExecutor, LastResultGenerator, LLMPlanner, Query, RuleVerifier
from midflight.agent.types import StopReason
from midflight.engines.base import EngineError, FinishReason, GenerateRequest, Generation
from midflight.engines.scripted import ScriptedEngine
from midflight.errors import InfrastructureError, UserError
from midflight.sandbox import Limits
from midflight.sandbox.bubblewrap import Box, BubblewrapSandbox
from midflight.sandbox.unsafe import UnsafeSandbox
from midflight.tools import ErrorKind, Scope, ToolResult, Toolset, read_options
from midflight.tools.programs.python import FORGOTTEN, FORGOTTEN_BEFORE, PythonOptions, PythonTool, program_of
from midflight.tools.programs.workspace import workspace_tools
from tests.sandbox.ready import need_bubblewrap


@pytest.fixture(scope="module")
def sandbox() -> Iterator[BubblewrapSandbox]:
    need_bubblewrap()
    with BubblewrapSandbox(Limits(wall_seconds=20), Box(preload=())) as made:
        yield made


@pytest.mark.asyncio
async def test_what_a_program_gives(sandbox: BubblewrapSandbox) -> None:
    tool = PythonTool(sandbox)
    Toolset([tool])

    async def told(code: str, seconds: float = 10, **more: str) -> tuple[str, ErrorKind | None]:
        result = await tool.call({"code": code, **more}, seconds)
        return result.text, result.error

    assert await told("print('a')\n6 * 7") == ("a\n42", None)
    assert await told("x = 1") == ("(no output)", None)
    assert await told("print(input())", stdin="hi") == ("hi", None)
    assert await told("import sys\nprint(1)\nprint(2, file=sys.stderr)") == ("1\n[standard error]\n2", None)
    text, error = await told("print('a')\n1 / 0")
    assert error is ErrorKind.TOOL_ERROR and text.startswith("error: exit code 1\na\n[standard error]\nTraceback")
    assert text.endswith("ZeroDivisionError: division by zero")
    text, error = await told("import time\ntime.sleep(60)", seconds=0.5)
    assert (text, error) == ("wall_limit: killed after 0.5 s", ErrorKind.TOOL_TIMEOUT)
    text, error = await told("bytearray(2**40)")
    assert text.startswith("memory_limit: more than 512 MB of memory\n") and error is ErrorKind.TOOL_ERROR


@pytest.mark.asyncio
async def test_state_and_files_are_those_of_a_trajectory(sandbox: BubblewrapSandbox) -> None:
    tool = PythonTool(sandbox, keep_state=True)
    other = PythonTool(sandbox)
    async with Scope() as scope, Scope() as second:
        mine, theirs, shared = tool.scoped(scope), tool.scoped(second), other.scoped(scope)
        assert (await mine.call({"code": "x = 1\nopen('f', 'w').write('g');"}, 10)).error is None
        assert (await mine.call({"code": "x"}, 10)).text == "1"
        assert "NameError" in (await theirs.call({"code": "x"}, 10)).text
        assert "NameError" in (await shared.call({"code": "x"}, 10)).text
        assert (await shared.call({"code": "open('f').read()"}, 10)).text == "'g'"
        assert "FileNotFoundError" in (await theirs.call({"code": "open('f')"}, 10)).text
        read = workspace_tools(sandbox)["read_file"].scoped(scope)
        assert (await read.call({"path": "f"}, 10)).text == "g"


@pytest.mark.asyncio
async def test_lost_variables_are_told_once(sandbox: BubblewrapSandbox) -> None:
    async with Scope() as scope:
        tool = PythonTool(sandbox, keep_state=True).scoped(scope)
        shell = workspace_tools(sandbox)["shell"].scoped(scope)

        async def told(code: str, seconds: float = 10) -> tuple[str, ErrorKind | None]:
            result = await tool.call({"code": code}, seconds)
            return result.text, result.error

        assert await told("x = 1") == ("(no output)", None)
        late = await told("while True: pass", 0.2)
        assert late == (f"wall_limit: killed after 0.2 s\n{FORGOTTEN}", ErrorKind.TOOL_TIMEOUT)
        text, error = await told("x")
        assert text.endswith("\nNameError: name 'x' is not defined") and error is ErrorKind.TOOL_ERROR
        assert await told("print(1)\nimport os\nos._exit(0)") == (f"1\n{FORGOTTEN}", None)
        assert await told("import os\nos._exit(3)") == (f"error: exit code 3\n{FORGOTTEN}", ErrorKind.TOOL_ERROR)
        assert await told("x = 1") == ("(no output)", None)
        assert (await shell.call({"command": "kill -9 -1; echo on"}, 10)).text == "on"
        assert await told("x = 2") == (f"(no output)\n{FORGOTTEN_BEFORE}", None)
        assert await told("x") == ("2", None)
        session = (await tool._shared(scope))._session
        assert session is not None
        await session.close()
        assert await told("x = 3") == (f"(no output)\n{FORGOTTEN_BEFORE}", None)
        assert await told("x") == ("3", None)
    alone = await PythonTool(sandbox).call({"code": "import os\nos._exit(0)"}, 10)
    assert (alone.text, alone.error) == ("(no output)", None)


@pytest.mark.asyncio
async def test_figures_are_named_and_kept(sandbox: BubblewrapSandbox, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code = "import matplotlib.pyplot as plt\nplt.plot([1, 2]);"
    async with Scope() as scope:
        result = await PythonTool(sandbox, keep=tmp_path / "kept").scoped(scope).call({"code": code}, 10)
    assert result.text.endswith("\nsaved figure-1.png") and result.error is None
    assert (tmp_path / "kept" / "workspace-1" / "figure-1.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.asyncio
async def test_an_engine_writes_the_program_from_a_task(sandbox: BubblewrapSandbox) -> None:
    engine = ScriptedEngine(
        [
            "Here it is:\n```python\nprint(sum(range(5)))\n```\nIt prints 10.",
            "print(3)",
            "```\n1\n```\n```\n2\n```",
            "",
            EngineError("down"),
            Generation("pri", FinishReason.LENGTH),
        ]
    )
    tool = PythonTool(sandbox, engine=lambda: engine)
    assert tool.parameters["required"] == ["task"]
    texts = [await tool.call({"task": "add 0 to 4"}, 10) for _ in range(4)]
    assert [(one.text, one.error) for one in texts] == [
        ("10", None),
        ("3", None),
        ("no program: the engine wrote 2 blocks of code instead of one", ErrorKind.TOOL_ERROR),
        ("no program: the engine wrote nothing", ErrorKind.TOOL_ERROR),
    ]
    assert engine.requests[0].messages[1].parts == ("Task: add 0 to 4",)
    with pytest.raises(InfrastructureError, match="down"):
        await tool.call({"task": "x"}, 10)
    assert (await tool.call({"task": "x"}, 10)).text == "no program: the engine had not ended after 1024 tokens"
    short = PythonTool(sandbox, engine=lambda: ScriptedEngine(["1"], context_length=1030))
    assert "the text is too long" in (await short.call({"task": "x" * 400}, 10)).text


@pytest.mark.parametrize(
    ("packages", "saves", "told"),
    [
        ((), "", "standard library alone"),
        (("numpy", "no-such-package"), "", "numpy"),
        (("numpy", "matplotlib"), ", and saves its figures as files", "numpy, matplotlib"),
    ],
)
def test_the_planner_is_told_what_programs_may_import(packages: tuple[str, ...], saves: str, told: str) -> None:
    for name in set(packages) - {"no-such-package"}:
        pytest.importorskip(name)
    tool = PythonTool(BubblewrapSandbox(box=Box(packages=packages)))
    assert tool.description == (
        f"runs a Python program; gives what it prints and the value of its last line{saves}; every call starts without "
        f"variables; {told}; no network"
    )
    told = "standard library alone" if not packages else f"standard library with {told}"
    assert f"There is the {told}, and no network." in tool._system()


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"engine": "a"}, "engine writes programs from tasks: set from_task=true, or leave engine out"),
        (
            {"max_tokens": 1024},
            "max_tokens is of programs written from tasks: set from_task=true, or leave max_tokens out",
        ),
    ],
)
def test_options_of_writing_are_refused_where_nothing_is_written(option: dict[str, object], told: str) -> None:
    with pytest.raises(UserError) as caught:
        read_options(PythonOptions, option, "agent.tool_options.python")
    assert str(caught.value) == f"agent.tool_options.python: {told}"
    assert read_options(PythonOptions, {**option, "from_task": True}, "agent.tool_options.python").from_task


def test_a_program_is_taken_out_of_its_fence() -> None:
    assert program_of("````python\nprint('''\n```\n''')\n````") == "print('''\n```\n''')\n"
    assert program_of("x = 1\n") == "x = 1\n"
    assert program_of("  x = 1\n") == "  x = 1\n"  # it stays an error


def test_a_program_in_a_thought_is_a_draft() -> None:
    draft = "<think>\nso:\n```python\nprint(6)\n```\n"
    assert program_of(f"\n{draft}</think>\n\n```python\nprint(42)\n```") == "print(42)\n"
    assert program_of(f"{draft}</think>\n\nprint(42)") == "print(42)"
    for text in (draft, f"{draft}</think>\n{draft}</think>\nprint(42)"):
        with pytest.raises(ValueError, match="^no program: the engine wrote a thought that is not one whole block$"):
            program_of(text)
    with pytest.raises(ValueError, match="^no program: the engine wrote nothing$"):
        program_of(f"{draft}</think>\n")


@pytest.mark.asyncio
async def test_the_agent_goes_on_after_each_kind_of_failure(sandbox: BubblewrapSandbox) -> None:
    codes = ["1 / 0", "import os; os.kill(os.getpid(), 9)", "print('y' * 2**22)", "print(6 * 7)"]
    flow = AgentFlow(
        LLMPlanner(ScriptedEngine([*(f"python: {code}" for code in codes), "finish"]), format="compact", grammar=False),
        DirectExecutor(),
        RuleVerifier(),
        LastResultGenerator(),
        Toolset([PythonTool(sandbox)]),
    )
    trajectory = await flow.run(Query("?"))
    assert [turn.result.error for turn in trajectory.turns] == [ErrorKind.TOOL_ERROR] * 3 + [None, None]
    assert [turn.result.text.partition(":")[0] for turn in trajectory.turns[:3]] == ["error", "killed", "output_limit"]
    assert trajectory.stop_reason is StopReason.FINISHED and trajectory.answer is not None
    assert trajectory.answer.text == "42"


class Slow(ScriptedEngine):
    """Takes `seconds` for an answer."""

    seconds = 0.3

    async def generate(self, request: GenerateRequest) -> Generation:
        await asyncio.sleep(self.seconds)
        return await super().generate(request)


@pytest.mark.asyncio
async def test_writing_and_running_have_one_time_limit() -> None:
    sandbox = UnsafeSandbox()
    began = time.monotonic()
    tool = PythonTool(sandbox, engine=lambda: Slow(["import time\ntime.sleep(60)"]))
    result = await tool.call({"task": "x"}, 1.0)
    assert result.error is ErrorKind.TOOL_TIMEOUT and result.text.startswith("wall_limit: killed after 0.")
    Slow.seconds = 60
    assert await tool.call({"task": "x"}, 0.3) == ToolResult(
        "python took longer than 0.3 seconds: no program was written in that time", ErrorKind.TOOL_TIMEOUT
    )
    assert time.monotonic() - began < 30
