"""The WASI sandbox: the same results for what it does, a plain word for what it does not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from midflight.errors import InfrastructureError, UserError
from midflight.sandbox import Command, Limits, ListFiles, Outcome, Python, ReadFile, RunTests, WriteFile, choose, wasi
from midflight.sandbox.choose import choose_sandbox
from midflight.sandbox.unsafe import UnsafeSandbox
from midflight.sandbox.wasi import WasiSandbox
from midflight.sandbox.wasi import sandbox as implementation
from midflight.tools.programs.python import PythonTool
from midflight.tools.programs.workspace import workspace_tools
from tests.sandbox.ready import NEEDED


@pytest.fixture(scope="module")
def sandbox() -> Iterator[WasiSandbox]:
    lacking = wasi.missing()
    assert not (lacking and os.environ.get(NEEDED)), lacking
    if lacking:
        pytest.skip(lacking)
    made = WasiSandbox(Limits(wall_seconds=30, cpu_seconds=20))
    yield made
    made.close()


@dataclass(frozen=True)
class Case:
    name: str
    code: str
    outcome: Outcome = Outcome.ERROR
    shows: str = ""
    limits: Limits | None = None


CASES = [
    Case("a value", "6 * 7", Outcome.OK, "42\n"),
    Case("input", "int(input()) + int(input())", Outcome.OK, "7\n"),
    Case("recursion", "def f(n): return 1 if n < 2 else n * f(n - 1)\nf(10)", Outcome.OK, "3628800\n"),
    Case("a helper in a comprehension", "def g(x): return x * x\n[g(x) for x in range(3)]", Outcome.OK, "[0, 1, 4]\n"),
    Case("an import in a function", "def f():\n    import math\n    return math.pi > 3\nf()", Outcome.OK, "True\n"),
    Case("unicode", "print('ß→😀', '\\ud800')", Outcome.OK, "ß→😀 \\ud800\n"),
    Case("an error", "def f():\n    return {}['ä']\nf()", shows="KeyError: 'ä'"),
    Case("exit", "import sys\nprint(1)\nsys.exit(3)", shows="1\n"),
    Case("host file", "open('/etc/passwd')", shows="FileNotFoundError"),
    Case("up and out", "open('../../../../etc/passwd')", shows="PermissionError"),
    Case("a link out", "import os\nos.symlink('/etc/passwd', 'l')\nopen('l')", shows="PermissionError"),
    Case("a link up", "import os\nos.symlink('../../x', 'l')\nopen('l')", shows="PermissionError"),
    Case("the runner", "open('/program/main.py', 'w')", shows="PermissionError"),
    Case("environment", "import os\nsorted(os.environ)", Outcome.OK, "['HOME', 'PYTHONDONTWRITEBYTECODE']"),
    Case("network", "import socket\nsocket.socket()", shows="OSError"),
    Case("processes", "import os\nos.fork()", shows="AttributeError"),
    Case("threads", "import threading\nthreading.Thread(target=print).start()", Outcome.PROCESS_LIMIT),
    Case("memory", "kept = []\nwhile True: kept.append(bytearray(2**24))", Outcome.MEMORY_LIMIT),
    Case("time", "import time\ntime.sleep(60)", Outcome.WALL_LIMIT, limits=Limits(wall_seconds=1)),
    Case("processor", "while True: pass", Outcome.CPU_LIMIT, limits=Limits(wall_seconds=60, cpu_seconds=0.5)),
    Case("output", "while True: print('x' * 1000)", Outcome.OUTPUT_LIMIT, "xxx"),
    Case("one large file", "open('x', 'wb').write(bytes(2**26))", Outcome.FILE_LIMIT, "File too large"),
    Case("large files", "for i in range(99): open(str(i), 'wb').write(bytes(2**24))", Outcome.FILE_LIMIT),
    Case("many files", "for i in range(5000): open(str(i), 'w').close()", Outcome.FILE_LIMIT),
    Case("many folders", "import os\nfor i in range(5000): os.mkdir(str(i))", Outcome.FILE_LIMIT),
    Case("a forged answer", "open('/reply/reply', 'wb').write(b'\\xff' * 99)\nimport os\nos._exit(0)", Outcome.OK),
    Case("a link for an answer", "import os\nos.symlink('../workspace', '/reply/x')\nos._exit(2)"),
    Case("escapes", r"print('\x1b[2J')", Outcome.OK, r"\x1b[2J"),
]


@pytest.mark.asyncio
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
async def test_case(case: Case, sandbox: WasiSandbox) -> None:
    result = await sandbox.run(Python(case.code, "3\n4\n"), case.limits)
    assert result.outcome is case.outcome and case.shows in result.out + result.err, result
    assert (result.problem == "") == result.ok


@pytest.mark.asyncio
async def test_a_session_keeps_its_files_and_removes_them(sandbox: WasiSandbox) -> None:
    before = set(os.listdir(tempfile.gettempdir()))
    one, other = await sandbox.open(), await sandbox.open()
    assert (await one.run(WriteFile("a/b", "ä".encode()))).ok
    assert (await one.run(Python("open('c', 'w').write(open('a/b').read() * 2)"))).out == "2\n"
    assert (await one.run(ReadFile("c"))).data == "ää".encode()
    assert (await other.run(ListFiles())).files == ()
    assert (await one.run(Python("c = 1"))).ok and (await one.run(Python("c"))).exception == "NameError"
    made = set(os.listdir(tempfile.gettempdir())) - before
    assert len([name for name in made if name.startswith("midflight-")]) == 2
    await one.close()
    await other.close()
    assert not [
        name for name in made if (Path(tempfile.gettempdir()) / name).exists() and name.startswith("midflight-")
    ]
    assert (await one.run(Python("1"))).outcome is Outcome.KILLED


KILLED = """
import asyncio, os, signal
from midflight.sandbox.unsafe import UnsafeSandbox
session = asyncio.run(UnsafeSandbox().open())
print(session._root, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.asyncio
async def test_what_a_killed_agent_left_is_gone_when_the_next_sandbox_starts(sandbox: WasiSandbox) -> None:
    def killed() -> Path:
        done = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, check=False)
        assert done.returncode == -signal.SIGKILL
        return Path(done.stdout.strip())

    left = killed()
    assert left.parent == Path(tempfile.gettempdir()) and (left / "workspace").is_dir()
    live = await UnsafeSandbox().open()
    assert not left.exists()
    left = killed()
    other = WasiSandbox()
    try:
        assert (await other.run(Python("6 * 7"))).out == "42\n"
        assert not left.exists()
    finally:
        other.close()
    assert (await live.run(WriteFile("a.txt", b"x"))).outcome == Outcome.OK  # a living one stays
    await live.close()


@pytest.mark.asyncio
async def test_what_it_cannot_do_is_said(sandbox: WasiSandbox) -> None:
    for request in (Command(("ls",)), RunTests(), Python("1", keep_state=True)):
        result = await sandbox.run(request)
        assert result.problem == "the sandbox wasi runs programs of their own alone: no commands, tests or state"
    assert sorted(workspace_tools(sandbox)) == ["list_files", "read_file", "write_file"]
    with pytest.raises(UserError, match="keep_state = true: the sandbox wasi keeps no state; it takes bubblewrap"):
        PythonTool(sandbox, keep_state=True)
    tool = PythonTool(sandbox)
    assert "standard library alone" in tool.description and (await tool.call({"code": "1 + 1"}, 30)).text == "2"


@pytest.mark.asyncio
async def test_cancelling_ends_the_process(sandbox: WasiSandbox) -> None:
    running = asyncio.create_task(sandbox.run(Python("while True: pass")))
    await asyncio.sleep(0.5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    end = asyncio.get_running_loop().time() + 5
    while workers() and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.02)
    assert workers() == []


@pytest.mark.asyncio
async def test_no_file_is_written_where_there_are_too_many() -> None:
    sandbox = WasiSandbox(disk_files=9)
    session = await sandbox.open()
    written = [await session.run(WriteFile(f"{number}", b"")) for number in range(9)]
    assert [one.ok for one in written].index(False) in range(2, 9)
    assert written[-1].outcome is Outcome.FILE_LIMIT and written[-1].problem == "8: no room for more files"
    await asyncio.to_thread(sandbox.close)


@pytest.mark.asyncio
async def test_closing_during_a_call_is_no_error_of_its_program(sandbox: WasiSandbox) -> None:
    session = await sandbox.open()
    asked = [asyncio.create_task(session.run(Python("while True: pass"))) for _ in range(2)]
    await asyncio.sleep(0.5)
    await asyncio.to_thread(sandbox.close)
    ended = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 5)
    assert [type(one) for one in ended] == [InfrastructureError] * 2


def workers() -> list[str]:
    listed = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.split()[0] == str(os.getpid()) and "worker.py" in line]


@pytest.mark.asyncio
async def test_another_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if wasi.missing():
        pytest.skip(wasi.missing())
    monkeypatch.setattr(implementation, "SHA256", "0" * 64)
    made = WasiSandbox(cache=tmp_path)
    with pytest.raises(InfrastructureError, match="is not the WASI interpreter that is known"):
        await made.run(Python("1"))
    made.close()


def test_auto_takes_the_first_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "bubblewrap_problem", lambda: "no bwrap")
    monkeypatch.setattr(choose.wasi, "missing", lambda: "")
    assert choose_sandbox().name == choose_sandbox("wasi").name == "wasi"
    with pytest.raises(UserError, match="no sandbox for code that a model writes: no bwrap$"):
        choose_sandbox("bubblewrap")
    monkeypatch.setattr(choose.wasi, "missing", lambda: "pip install it")
    with pytest.raises(UserError, match="no sandbox for code that a model writes: no bwrap; or pip install it$"):
        choose_sandbox()
    monkeypatch.setattr(choose, "bubblewrap_problem", lambda: "")
    assert choose_sandbox().name == "bubblewrap"


@pytest.mark.asyncio
async def test_no_sandbox_still_has_a_folder_a_clock_and_an_empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDFLIGHT_TEST_KEY", "sesame")
    made = UnsafeSandbox(Limits(wall_seconds=5))
    session = await made.open()
    await session.run(WriteFile("a", b"b"))
    result = await session.run(
        Python("import os\nprint(open('a').read(), 'MIDFLIGHT_TEST_KEY' in os.environ, input())", "c\n")
    )
    assert result.out == "b False c\n" and result.ok
    late = await session.run(Python("import time\ntime.sleep(60)"), Limits(wall_seconds=0.5))
    assert late.outcome is Outcome.WALL_LIMIT
    failed = await session.run(Python("import sys\nsys.exit(2)"))
    assert (failed.outcome, failed.exit_code) == (Outcome.ERROR, 2)
    await session.close()
    assert sys.executable  # the agent's own interpreter ran it
