"""The WASI sandbox: the same results for what it does, a plain word for what it does not."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from midflight.errors import InfrastructureError, UserError
from midflight.sandbox import (
    Command,
    Limits,
    ListFiles,
    Outcome,
    Python,
    ReadFile,
    RunTests,
    Session,
    WriteFile,
    choose,
    wasi,
)
from midflight.sandbox.choose import choose_sandbox
from midflight.sandbox.folder import Ended
from midflight.sandbox.wasi import WasiSandbox
from midflight.sandbox.wasi import sandbox as implementation
from midflight.tools.programs.python import PythonTool
from midflight.tools.programs.workspace import workspace_tools
from tests.sandbox.ready import wasi_sandbox

sandbox = pytest.fixture(scope="module")(wasi_sandbox)


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
    Case("an end of its own", "import atexit\n_ = atexit.register(print, 'bye')", Outcome.OK, "bye\n"),
    Case("a crash", "import os\nos.abort()", Outcome.KILLED, "wasm trap"),
    Case("an exit code", "import os\nos._exit(70)"),
    Case("an error", "def f():\n    return {}['ä']\nf()", shows="KeyError: 'ä'"),
    Case("exit", "import sys\nprint(1)\nsys.exit(3)", shows="1\n"),
    Case("host file", "open('/etc/passwd')", shows="FileNotFoundError"),
    Case("up and out", "open('../../../../etc/passwd')", shows="PermissionError"),
    Case("a link out", "import os\nos.symlink('/etc/passwd', 'l')\nopen('l')", shows="PermissionError"),
    Case("a link up", "import os\nos.symlink('../../x', 'l')\nopen('l')", shows="PermissionError"),
    Case("the runner", "open('/program/main.py', 'w')", shows="PermissionError"),
    Case("environment", "import os\nsorted(os.environ)", Outcome.OK, "['HOME', 'PYTHONDONTWRITEBYTECODE']"),
    Case("network", "import socket\nsocket.socket()", shows="OSError"),
    Case("a folder for an answer", "import os\nos.mkdir('/reply/reply')\nos._exit(0)", Outcome.OK),
    Case("deep folders", "import os\nfor _ in range(300):\n    os.mkdir('d')\n    os.chdir('d')", Outcome.FILE_LIMIT),
    Case("both standard inputs", "import sys\ninput() + sys.__stdin__.read()", Outcome.OK, "'34\\n'"),
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
async def test_a_session_goes_on_after_each_answer_it_could_leave(sandbox: WasiSandbox) -> None:
    session = await sandbox.open()
    for code in ("os.mkdir('/reply/reply')", "os.symlink('x', '/reply/reply')", "os.makedirs('/reply/reply/a/b')"):
        await session.run(Python(f"import os\n{code}\nos._exit(0)"))
        after = await session.run(Python("import os\nprint(os.listdir('/reply'))\n{}['a']"))
        assert (after.out, after.exception) == ("[]\n", "KeyError")
    await session.close()


@pytest.mark.asyncio
async def test_who_asks_once_does_not_wait_for_who_asks_often() -> None:
    sandbox = WasiSandbox(Limits(wall_seconds=30), running=2)
    often, once = await sandbox.open(), await sandbox.open()
    spans: dict[str, tuple[float, ...]] = {}

    async def ask(name: str, session: Session) -> None:
        result = await session.run(Python("import time\nbegan = time.time()\ntime.sleep(1)\nprint(began, time.time())"))
        spans[name] = tuple(map(float, result.out.split()))

    await asyncio.gather(*(ask(f"often {number}", often) for number in range(3)), ask("once", once))
    assert spans["once"][0] < spans["often 0"][1] < spans["often 1"][0]
    others = [await sandbox.open() for _ in range(2)]
    await asyncio.gather(*(ask(f"{number}", session) for number, session in enumerate([often, *others])))
    assert sorted(span[0] for name, span in spans.items() if len(name) == 1)[2] > min(spans[name][1] for name in "012")
    await asyncio.to_thread(sandbox.close)


@pytest.mark.asyncio
async def test_input_is_any_text(sandbox: WasiSandbox) -> None:
    result = await sandbox.run(Python("ascii(input())", "\ud800é\udc80\n"))
    assert (result.outcome, result.out) == (Outcome.OK, "\"'\\\\ud800\\\\xe9\\\\udc80'\"\n")


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


@pytest.mark.asyncio
async def test_what_it_cannot_do_is_said(sandbox: WasiSandbox) -> None:
    for request in (Command(("ls",)), RunTests(), Python("1", keep_state=True)):
        result = await sandbox.run(request)
        assert result.problem == "the sandbox wasi runs programs of their own alone: no commands, tests or state"
    assert sorted(workspace_tools(sandbox)) == ["list_files", "read_file", "write_file"]
    with pytest.raises(UserError, match="keep_state = true: wasi keeps no state; it takes bubblewrap"):
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
@pytest.mark.parametrize(("count", "size"), [(60, 1), (8, 2**20)])
async def test_a_workspace_with_too_many_files_can_be_emptied(count: int, size: int) -> None:
    sandbox = WasiSandbox(disk_bytes=4 * 2**20, disk_files=40)
    session = await sandbox.open()
    write = f"import os\nfor number in range({count}):\n    open(f'LETTER{{number}}', 'wb').write(bytes({size}))"
    assert (await session.run(Python(write.replace("LETTER", "a")))).outcome is Outcome.FILE_LIMIT
    assert (await session.run(Python("print(1)"))).out == "1\n"
    assert (await session.run(Python(write.replace("LETTER", "b")))).outcome is Outcome.FILE_LIMIT
    assert (await session.run(WriteFile("c", b""))).outcome is Outcome.FILE_LIMIT
    assert (await session.run(Python("import os\nfor name in os.listdir(): os.unlink(name)"))).ok
    assert (await session.run(WriteFile("c", b""))).ok
    assert (await session.run(Python(write.replace("LETTER", "d")))).outcome is Outcome.FILE_LIMIT
    await asyncio.to_thread(sandbox.close)


@pytest.mark.asyncio
async def test_files_that_are_open_and_have_no_name_count() -> None:
    sandbox = WasiSandbox(disk_bytes=4 * 2**20, disk_files=40)
    write = (
        "import os, time\nheld = []\nfor number in range({}):\n    held.append(open('/workspace/f', 'wb'))\n"
        "    os.unlink('/workspace/f')\n    held[-1].write(bytes({}))\n    held[-1].flush()\ntime.sleep(9)"
    )
    for count, size in ((8, 2**20), (50, 1)):
        result = await sandbox.run(Python(write.format(count, size)))
        assert result.outcome is Outcome.FILE_LIMIT and result.seconds < 9
    assert (await sandbox.run(Python(write.format(8, 2**18).replace("9)", "0.3)")))).ok
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


@pytest.mark.asyncio
async def test_a_cache_that_cannot_be_made_is_no_error_of_the_program(tmp_path: Path) -> None:
    if wasi.missing():
        pytest.skip(wasi.missing())
    (tmp_path / "file").write_text("")
    made = WasiSandbox(cache=tmp_path / "file" / "wasi")
    told = f"the WASI interpreter cannot be kept in {tmp_path}/file/wasi: .*Not a directory.*; XDG_CACHE_HOME names"
    with pytest.raises(InfrastructureError, match=told):
        await PythonTool(made).call({"code": "1"}, 9.0)
    made.close()


@pytest.fixture
def compiled(sandbox: WasiSandbox, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What compiling gives from now on, without the work: one after the other, the last one for good."""
    assert sandbox.run_blocking(Python("1")).ok
    (good,) = sandbox._cache.glob(f"python-{implementation.SHA256[:16]}-wasmtime-{version('wasmtime')}")
    given = [good.read_bytes()]

    async def copied(command: list[str], *_: object) -> Ended:
        Path(command[-1]).write_bytes(given.pop(0) if len(given) > 1 else given[0])
        return Ended("exit", 0, b"", b"", 0.0)

    monkeypatch.setattr(implementation, "run_bounded", copied)
    return given


@pytest.mark.asyncio
async def test_an_interpreter_that_is_damaged_is_compiled_again(compiled: list[bytes], tmp_path: Path) -> None:
    compiled[:0] = [compiled[0][: len(compiled[0]) // 2]]
    made = WasiSandbox(Limits(wall_seconds=30), cache=tmp_path)
    assert [one.out for one in await asyncio.gather(*(made.run(Python("6 * 7")) for _ in range(2)))] == ["42\n"] * 2
    session = await made.open()
    (file,) = tmp_path.iterdir()
    file.unlink()  # as someone does who empties the cache
    assert (await session.run(Python("6 * 7"))).out == "42\n" and file.read_bytes() == compiled[0]
    made.close()


@pytest.mark.asyncio
async def test_an_interpreter_that_never_loads_is_no_error_of_the_program(
    compiled: list[bytes], tmp_path: Path
) -> None:
    compiled[0] = b""
    made = WasiSandbox(cache=tmp_path)
    with pytest.raises(InfrastructureError, match="^the WASI interpreter does not start: [^ ]"):
        await made.run(Python("1"))
    made.close()


@pytest.mark.asyncio
async def test_limits_too_small_to_begin_are_no_error_of_the_program(sandbox: WasiSandbox) -> None:
    with pytest.raises(InfrastructureError, match="^the WASI interpreter does not start: .* exceeds memory limits"):
        await sandbox.run(Python("1"), Limits(memory_bytes=2**20))


@pytest.mark.asyncio
async def test_a_folder_that_is_gone_is_no_error_of_the_request() -> None:
    made = WasiSandbox()
    session = await made.open()
    shutil.rmtree(session._session._root)
    for request in (WriteFile("a", b""), Python("1")):
        with pytest.raises(InfrastructureError, match="the sandbox wasi cannot .*No such file"):
            await session.run(request)
    await asyncio.to_thread(made.close)


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
