"""A command that a signal ends says so in one line, and its exit code says by which."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.serving import chat, ok, served
from tests.test_on_servers import KEY, written

PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell of these tests ignores
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from midflight.cli import main
sys.argv[0] = "midflight"
main()
"""
OWN = '''
import asyncio
from pathlib import Path
from midflight.tools import tool

@tool
async def wait(text: str) -> str:
    """Wait for long."""
    Path("started").touch()
    await asyncio.sleep(60)
    return text
'''


async def ended(sent: str, folder: Path, started: Callable[[], bool], *arguments: str) -> tuple[int | None, list[str]]:
    """Exit code and lines on stderr of a command that got a signal once it had `started`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        *arguments,
        cwd=folder,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "STRONG_KEY": KEY, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    async with asyncio.timeout(60):
        while not started() and process.returncode is None:
            await asyncio.sleep(0.02)
        process.send_signal(signal.Signals[sent])
        _, said = await process.communicate()
    return process.returncode, said.decode().splitlines()


CASES = [
    ("SIGINT", 130, "midflight: interrupted"),
    ("SIGTERM", 143, "midflight: interrupted by SIGTERM"),
    ("SIGHUP", 129, "midflight: interrupted by SIGHUP"),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("sent", "code", "line"), CASES)
@pytest.mark.parametrize("command", ["solve", "eval", "tools"])
async def test_a_signal_is_one_line_behind_what_was_used_and_its_exit_code(
    tmp_path: Path, command: str, sent: str, code: int, line: str
) -> None:
    async with served(ok(chat("Sub-goal: multiply\nTool: calculator\nContext: 6 * 7")), None) as server:
        recipe = str(written(tmp_path, server.base_url))
        if command == "tools":
            (tmp_path / "mine.py").write_text(OWN)
            started = (tmp_path / "started").exists
            found = await ended(sent, tmp_path, started, "tools", "run", "mine.py:wait", "text=x")
        else:
            arguments = ["solve", "x", "--recipe", recipe] if command == "solve" else ["eval", recipe]
            found = await ended(sent, tmp_path, lambda: len(server.requests) == 2, *arguments)
            spent = "planner on strong: 1 requests, 7 prompt + 3 completion tokens"
            assert [spent in said for said in found[1]].count(True) == 1, found
    assert found[0] == code and found[1][-1] == line
    assert not any("Traceback" in said for said in found[1]), found


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("encoding", "shown"), [("utf-8", "?]0;x? ? 中 ok"), ("latin-1", "?]0;x? ? \\u4e2d ok")], ids=["utf-8", "latin-1"]
)
async def test_an_answer_does_nothing_to_a_terminal_and_fails_on_none(
    tmp_path: Path, encoding: str, shown: str
) -> None:
    answers = chat("Sub-goal: end\nTool: finish"), chat("Answer: \x1b]0;x\x07 \ud800 中 ok\n")
    async with served(*map(ok, answers)) as server:
        recipe = str(written(tmp_path, server.base_url))
        program = [sys.executable, "-c", PROGRAM, "solve", "x", "--recipe", recipe]
        process = await asyncio.create_subprocess_exec(
            *program,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "STRONG_KEY": KEY, "PYTHONIOENCODING": encoding},
        )
        out, _ = await process.communicate()
    assert process.returncode == 0 and out.decode(encoding).splitlines()[-2] == shown


@pytest.mark.asyncio
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
async def test_what_a_daemon_has_closed_is_no_fault(tmp_path: Path, closed: str) -> None:
    async with served(*map(ok, (chat("Sub-goal: end\nTool: finish"), chat("Answer: 42\n")))) as server:
        recipe = str(written(tmp_path, server.base_url))
        line = shlex.join([sys.executable, "-c", PROGRAM, "solve", "x", "--recipe", recipe])
        process = await asyncio.create_subprocess_shell(f"{line} {closed}", env={**os.environ, "STRONG_KEY": KEY})
        assert await process.wait() == 0 and len(server.requests) == 2
