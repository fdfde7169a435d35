"""The workspace family: one folder of a trajectory, read, written, tested and gone with it, or kept."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import pytest

from midflight.agent import AgentFlow, DirectExecutor, LastResultGenerator, LLMPlanner, Query, RuleVerifier
from midflight.agent.executor import Execution
from midflight.agent.types import Action, StopReason
from midflight.building import context_of
from midflight.engines.scripted import ScriptedEngine
from midflight.errors import InfrastructureError, UserError
from midflight.recipe import RecipeError, load_recipe
from midflight.sandbox import File, Limits, ListFiles, Python, ReadFile, WriteFile
from midflight.sandbox import workspace as workspace_module
from midflight.sandbox.bubblewrap import Box, BubblewrapSandbox
from midflight.sandbox.bubblewrap.inside import files as inside_files
from midflight.sandbox.choose import shared_sandbox
from midflight.sandbox.folder import FolderSession
from midflight.sandbox.options import SandboxOptions
from midflight.sandbox.unsafe import UnsafeSandbox
from midflight.sandbox.wasi import WasiSandbox
from midflight.sandbox.workspace import StartFiles, Workspace
from midflight.tools import ErrorKind, Scope, ToolCall, Toolset
from midflight.tools.options import ToolContext
from midflight.tools.programs import workspace
from midflight.tools.programs.python import PythonTool
from midflight.tools.programs.workspace import WorkspaceOptions, workspace_tools
from tests.sandbox.ready import need_bubblewrap


@pytest.fixture(scope="module")
def sandbox() -> Iterator[BubblewrapSandbox]:
    need_bubblewrap()
    with BubblewrapSandbox(Limits(wall_seconds=20), Box(preload=())) as made:
        yield made


class Tools:
    """The family in one scope, called by name."""

    def __init__(self, sandbox: BubblewrapSandbox, scope: Scope, keep: Path | None = None) -> None:
        self.toolset = Toolset(workspace_tools(sandbox, keep=keep).values()).scoped(scope)

    async def __call__(self, name: str, **arguments: object) -> tuple[str, ErrorKind | None]:
        assert self.toolset.validate(name, arguments) is None
        tool = self.toolset.get(name)
        assert tool is not None
        result = await tool.call(arguments, 15)
        return result.text, result.error


@pytest.mark.asyncio
async def test_a_failing_test_is_mended(sandbox: BubblewrapSandbox) -> None:
    async with Scope() as scope:
        run = Tools(sandbox, scope)
        assert await run("list_files", path=".") == ("no files in .", None)
        assert await run("write_file", path="src/m.py", content="def f(x):\n    return x\n") == (
            "wrote 23 characters to src/m.py",
            None,
        )
        test = (
            "from src.m import f\n\ndef test_f():\n    assert f(1) == 2\n\ndef test_g():\n    assert f(0) in (0, 1)\n"
        )
        await run("write_file", path="test_m.py", content=test)
        await run("write_file", path="conftest.py", content="")
        text, error = await run("run_tests", path=".")
        assert error is ErrorKind.TOOL_ERROR and text.startswith("1 passed, 1 failed\nFAILED test_m.py::test_f\n")
        assert "assert 1 == 2" in text
        await run("write_file", path="src/m.py", content="def f(x):\n    return x + 1\n")
        assert await run("run_tests", path=".") == ("2 passed", None)
        assert await run("read_file", path="src/m.py", first_line=2) == ("    return x + 1\n", None)
        assert await run("read_file", path="src/m.py", first_line=1, last_line=1) == ("def f(x):\n", None)
        assert await run("read_file", path="src/m.py", first_line=9) == ("src/m.py has 2 lines", ErrorKind.TOOL_ERROR)
        assert await run("list_files", path="src") == ("src/m.py 27", None)
        assert await run("shell", command="wc -l < src/m.py; pwd") == ("2\n/workspace", None)


@pytest.mark.asyncio
async def test_of_very_many_tests_those_that_failed_are_told(sandbox: BubblewrapSandbox) -> None:
    many = "import pytest\n@pytest.mark.parametrize('n', range(1100))\ndef test_n(n):\n    "
    async with Scope() as scope:
        run = Tools(sandbox, scope)
        await run("write_file", path="test_a.py", content=many + "assert n not in (1, 1050)")
        text, error = await run("run_tests", path=".")
        assert error is ErrorKind.TOOL_ERROR and text.startswith("1098 passed, 2 failed\nFAILED test_a.py::test_n[1]\n")
        assert "\nFAILED test_a.py::test_n[1050]\n" in text and "more that did not pass" not in text
        long = "assert n >= 1050, '\U0001f600' * 3000"
        await run("write_file", path="test_a.py", content=many + long)
        text, error = await run("run_tests", path=".")
        told = text.count("\nFAILED ")
        assert text.startswith("50 passed, 1050 failed\n") and 100 < told < 300 and error is ErrorKind.TOOL_ERROR
        assert text.endswith(f"\nand {1050 - told} more that did not pass")


@pytest.mark.asyncio
async def test_what_goes_wrong_is_said(sandbox: BubblewrapSandbox) -> None:
    async with Scope() as scope:
        run = Tools(sandbox, scope)
        failed = ErrorKind.TOOL_ERROR
        assert await run("read_file", path="none") == ("none: No such file or directory", failed)
        assert await run("read_file", path="../etc/passwd") == (
            "../etc/passwd: outside the workspace; give a path without ..",
            failed,
        )
        assert await run("shell", command="echo a; echo b >&2; exit 3") == (
            "error: exit code 3\na\n[standard error]\nb",
            failed,
        )
        await run("shell", command="ln -s /etc/passwd l; head -c 3 /dev/urandom > r; printf '\\377\\0' > b; touch e")
        assert await run("read_file", path="l") == ("l: a symbolic link, which is not followed", failed)
        assert await run("read_file", path="b") == ("b: no text in UTF-8, 2 bytes", failed)
        assert await run("read_file", path="e") == ("", None)
        assert await run("list_files", path=".") == ("b 2\ne 0\nl 11 (a symbolic link)\nr 3", None)
        text, error = await run("run_tests", path=".")
        assert text.startswith("no tests were found\nerror: exit code 5") and error is failed
        text, error = await run("run_tests", path="none.py")
        assert text.startswith("no test ran\nerror: exit code 4") and error is failed
        assert await run("run_tests", path="-x") == (
            "-x: a path or a test id, not an option of pytest",
            ErrorKind.INVALID_ARGUMENTS,
        )


@pytest.mark.asyncio
async def test_trajectories_do_not_share_and_nothing_stays(sandbox: BubblewrapSandbox) -> None:
    async with Scope() as one, Scope() as other:
        mine, theirs = Tools(sandbox, one), Tools(sandbox, other)
        await mine("write_file", path="a", content="1")
        assert await theirs("list_files", path=".") == ("no files in .", None)
    async with Scope() as again:
        assert await Tools(sandbox, again)("list_files", path=".") == ("no files in .", None)
    assert not sandbox._core or not sandbox._core._open


@pytest.mark.asyncio
async def test_tools_made_one_by_one_of_equal_options_share_a_workspace() -> None:
    need_bubblewrap()
    options = SandboxOptions(packages=())
    contexts = [ToolContext(sandbox=lambda: shared_sandbox(options.model_copy())) for _ in range(2)]
    python = PythonTool(contexts[0].sandbox())
    write: Any = workspace.write_file(WorkspaceOptions(), contexts[1])
    async with Scope() as scope:
        assert (await write.scoped(scope).call({"path": "a", "content": "b"}, 10)).error is None
        assert (await python.scoped(scope).call({"code": "print(open('a').read())"}, 10)).text == "b"
    python.close()


def test_a_sandbox_of_programs_alone_has_no_shell() -> None:
    context = ToolContext(sandbox=WasiSandbox)
    assert workspace.read_file(WorkspaceOptions(), context).name == "read_file"
    with pytest.raises(UserError, match="^the sandbox wasi runs Python programs alone; shell takes bubblewrap: "):
        workspace.shell(WorkspaceOptions(), context)


@pytest.mark.asyncio
async def test_a_workspace_begins_with_the_files_of_a_folder(sandbox: BubblewrapSandbox, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.bin").write_bytes(b"\x00\xff")
    (tmp_path / "link").symlink_to("/etc/passwd")
    context = ToolContext(sandbox=lambda: sandbox, files=StartFiles(tmp_path))
    listing: Any = workspace.list_files(WorkspaceOptions(), context)
    write: Any = workspace.write_file(WorkspaceOptions(), context)
    for _ in range(2):  # each trajectory's are its own
        async with Scope() as scope:
            assert (await listing.scoped(scope).call({"path": "."}, 10)).text == "a/b.bin 2"
            await write.scoped(scope).call({"path": "c", "content": "x"}, 10)
        (tmp_path / "a" / "b.bin").write_bytes(b"longer")  # they are read once, so all begin alike


@pytest.mark.asyncio
async def test_a_workspace_begins_with_files_of_any_size_that_can_be_executed(
    sandbox: BubblewrapSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace_module, "PIECE", 10)
    (tmp_path / "run.sh").write_text("#!/bin/sh\ncat empty long; stat -c %a run.sh long\n")
    (tmp_path / "run.sh").chmod(0o740)
    (tmp_path / "long").write_bytes(bytes(range(65, 91)))
    (tmp_path / "empty").touch()
    for made in (sandbox, UnsafeSandbox()):
        async with Workspace(made, files=StartFiles(tmp_path)) as workspace:
            program = "import subprocess\nsubprocess.run(['./run.sh'], capture_output=True, check=True).stdout"
            assert (await workspace.run(Python(program))).out == "b'ABCDEFGHIJKLMNOPQRSTUVWXYZ755\\n644\\n'\n"
            await workspace.run(WriteFile("run.sh", b"x"))  # what is written over it stays executable
            assert (await workspace.run(Python("import os\noct(os.stat('run.sh').st_mode)"))).out == "'0o100755'\n"


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"a/big": 2**20 + 1}, "a/big has 1048577 bytes; raise agent.sandbox.file_mb = 1, or take it out"),
        ({"a": 2**20, "b": 2**20, "c": 1}, "more than agent.sandbox.disk_mb = 2 holds; raise it, or take some out"),
        ({"a/b/c": 1, "d/e": 1}, "more than 4 files and folders; take some out"),
        ({"a/b/c/d": 1}, "a/b/c/d has 4 parts, more than 3; take it out"),
        ({"a": 2**20, "b/c": 1, "b/d": 2**20 - 4096}, ""),
    ],
)
def test_files_that_no_workspace_has_room_for_are_told_with_the_recipe(
    files: dict[str, int], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace_module, "MOST_FILES", 4)
    monkeypatch.setattr(workspace_module, "DEEPEST", 3)
    for name, size in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "link").symlink_to("/usr")
    overrides = [f"agent.sandbox.files={tmp_path}", "agent.sandbox.file_mb=1", "agent.sandbox.disk_mb=2"]
    with pytest.raises(RecipeError) if told else nullcontext() as raised:
        load_recipe("coding", overrides)
    assert raised is None or str(raised.value) == f"agent.sandbox.files = {tmp_path}: {told}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_files_that_cannot_be_read_are_told_with_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    (tmp_path / "a").chmod(0)
    with pytest.raises(RecipeError, match=r": a cannot be read; change its permissions, or take it out$"):
        load_recipe("coding", [f"agent.sandbox.files={tmp_path}"])
    (tmp_path / "b").mkdir(mode=0)
    (tmp_path / "a").unlink()
    with pytest.raises(RecipeError, match=r"Permission denied: .*/b'; change its permissions, or take it out$"):
        load_recipe("coding", [f"agent.sandbox.files={tmp_path}"])
    (tmp_path / "b").chmod(0o700)


def test_the_tools_of_a_recipe_read_its_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("1")
    recipe = load_recipe("coding", [f"agent.sandbox.files={tmp_path}"])
    read: list[Path] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path), read_bytes(path))[1])
    files = context_of(recipe, lambda _: None).files
    assert files is not None and read == []
    with ThreadPoolExecutor(4) as threads:  # trajectories that begin at once
        assert list(threads.map(lambda _: files.read(), range(8))) == [[WriteFile("a.txt", b"1")]] * 8
    assert read == [tmp_path / "a.txt"]


@pytest.mark.asyncio
async def test_a_kept_workspace_holds_regular_files_alone(sandbox: BubblewrapSandbox, tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    for _ in range(2):
        async with Scope() as scope:
            run = Tools(sandbox, scope, keep)
            await run("write_file", path="a/b.txt", content="ä")
            await run("shell", command="ln -s /etc/passwd l; ln -s / d; mkfifo p; touch \"$(printf 'e\\033')\"")
    async with Scope() as scope:
        await Tools(sandbox, scope, keep)("list_files", path=".")  # nothing in it: nothing kept
    found = sorted(str(path.relative_to(keep)) for path in keep.rglob("*") if not path.is_dir())
    assert found == [f"workspace-{number}{name}" for number in (1, 2) for name in (".left-out", "/a/b.txt")]
    assert (keep / "workspace-1.left-out").read_text().splitlines() == [
        "d: no regular file",
        "e\\x1b: a name that a host should not have",
        "l: no regular file",
        "p: no regular file",
    ]
    assert (keep / "workspace-1" / "a" / "b.txt").read_text() == "ä" and not os.path.islink(keep / "workspace-1" / "l")


@pytest.mark.asyncio
async def test_every_file_is_kept_or_named(
    sandbox: BubblewrapSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = "import os\nopen('g', 'wb').write(b'ab' * 20 * 2**20)\nopen('z', 'w').write('42')\n"
    fill += "os.mkdir('closed', 0)\nopen('y', 'w').write('!')\nos.chmod('y', 0)\n"
    fill += "for number in range(20):\n    os.mkdir('n' * 250)\n    os.chdir('n' * 250)\nopen('long', 'w').close()"
    limits = Limits(wall_seconds=20, memory_bytes=2**27, file_bytes=2**26)
    async with Workspace(sandbox, keep=tmp_path) as workspace:
        assert (await workspace.run(Python(fill), limits)).ok
    kept = tmp_path / "workspace-1"
    assert (kept / "z").read_text() == "42" and (kept / "g").read_bytes() == b"ab" * 20 * 2**20
    assert {path.name for path in kept.iterdir() if path.is_file()} == {"g", "z"}
    left_out = (tmp_path / "workspace-1.left-out").read_text().splitlines()
    assert [line for line in left_out if line[:2] != "nn"] == [
        ".: some folders are too deep, or cannot be read",
        "y: y: Permission denied",
    ]
    assert len(left_out) == 3 and left_out[-1].endswith("/long: a path too long for the host")
    monkeypatch.setattr(workspace_module, "MOST_KEPT", 5)
    async with Workspace(sandbox, keep=tmp_path) as workspace:
        for name in ("a", "b", "c"):
            await workspace.run(WriteFile(name, b"123" if name != "c" else b"12"))
    assert sorted(path.name for path in tmp_path.glob("workspace-2/*")) == ["a", "c"]
    assert (tmp_path / "workspace-2.left-out").read_text() == "b: 3 bytes, more than is left of 5\n"


NAMES = """
for name in ("a\\r\\nb", "a\\nb", "a\\tb", "A", "a", "c/D", "c/d/e"):
    import os
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    open(name, "w").write(repr(name))
"""


@pytest.mark.asyncio
async def test_names_that_are_one_to_the_host_lose_a_file_and_not_the_trajectory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def new(target: Path) -> IO[bytes]:  # as a file system does to which A and a are the same
        return made(tmp_path / str(target.relative_to(tmp_path)).lower())

    made = workspace_module._new
    monkeypatch.setattr(workspace_module, "_new", new)
    async with Workspace(UnsafeSandbox(), keep=tmp_path) as workspace:
        assert (await workspace.run(Python(NAMES))).ok
        listed = [file.path for file in (await workspace.run(ListFiles())).files]
    assert listed == ["A", "a", "a\\tb", "a\\nb", "a\\r\\nb", "c/D", "c/d/e"]
    kept = {
        str(path.relative_to(tmp_path)): path.read_text()
        for path in tmp_path.glob("workspace-1/**/*")
        if path.is_file()
    }
    assert kept == {"workspace-1/a": "'A'", "workspace-1/c/d": "'c/D'"}
    assert (tmp_path / "workspace-1.left-out").read_text().splitlines() == [
        "a: a name that another file has on the host",
        "a\\tb: a name that a host should not have",
        "a\\nb: a name that a host should not have",
        "a\\r\\nb: a name that a host should not have",
        "c/d/e: a name that another file has on the host",
    ]


@pytest.mark.asyncio
async def test_what_is_kept_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[type] = []
    run = FolderSession.run
    monkeypatch.setattr(
        FolderSession, "run", lambda own, request, *more: (asked.append(type(request)), run(own, request, *more))[1]
    )
    async with Workspace(UnsafeSandbox(), keep=tmp_path) as workspace:
        await workspace.run(WriteFile("a", b"1"))
    assert asked == [WriteFile, ListFiles, ReadFile]


@pytest.mark.asyncio
async def test_lines_are_those_that_compilers_count() -> None:
    async with Scope() as scope:
        tools: dict[str, Any] = {name: tool.scoped(scope) for name, tool in workspace_tools(UnsafeSandbox()).items()}
        await tools["write_file"].call({"path": "m.py", "content": "x = '\u2028\x85'\r\ny = '\x0c\x1c'\n\n1 / 0"}, 10)
        for line, text in enumerate(("x = '\u2028\x85'\r\n", "y = '\x0c\x1c'\n", "\n", "1 / 0"), 1):
            given = {"path": "m.py", "first_line": line, "last_line": line}
            assert (await tools["read_file"].call(given, 10)).text == text
        assert (await tools["read_file"].call({"path": "m.py", "first_line": 5}, 10)).text == "m.py has 4 lines"
        program = "x = '\u2028'\r\ny = '\x0c'\r\nz = 1 / 0"
        told = (await PythonTool(UnsafeSandbox()).call({"code": program}, 10)).text
    assert 'File "<program>", line 3, in <module>\n    z = 1 / 0\n' in told


@pytest.mark.asyncio
@pytest.mark.parametrize(("bound", "most"), [("_MOST_LISTED", 3), ("_MOST_CHARACTERS", 11)])
async def test_more_files_than_one_list_holds_are_all_kept(
    bound: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inside_files, bound, most)
    async with Workspace(UnsafeSandbox(), keep=tmp_path) as workspace:
        for number in range(10):
            await workspace.run(WriteFile(f"{number % 2}/{number}", str(number).encode()))
        listed = await workspace.run(ListFiles())
        assert [file.path for file in listed.files] == ["0/0", "0/2", "0/4"] and listed.more_files
        listed = await workspace.run(ListFiles(skip=8))
        assert [file.path for file in listed.files] == ["1/7", "1/9"] and not listed.more_files
    kept = {path.name: path.read_text() for path in tmp_path.glob("workspace-1/*/*")}
    assert kept == {str(number): str(number) for number in range(10)}
    assert [path.name for path in tmp_path.iterdir()] == ["workspace-1"]


@pytest.mark.asyncio
async def test_a_session_that_ends_while_it_is_kept_is_not_begun_anew(
    sandbox: BubblewrapSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Workspace(sandbox, keep=tmp_path) as workspace:
        for name in ("a", "b"):
            await workspace.run(WriteFile(name, b"1"))
        copied = workspace._copied

        async def lose(file: File, target: Path) -> str:
            if file.path == "b":
                assert workspace._session is not None
                await workspace._session.close()
            return await copied(file, target)

        monkeypatch.setattr(workspace, "_copied", lose)
    assert [path.name for path in tmp_path.glob("workspace-1/*")] == ["a"]
    assert (tmp_path / "workspace-1.left-out").read_text().startswith("b: the session of this trajectory ended")


@pytest.mark.asyncio
async def test_a_lost_session_is_followed_by_one_that_begins_alike(sandbox: BubblewrapSandbox, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    async with Workspace(sandbox, files=StartFiles(tmp_path)) as workspace:
        await workspace.run(WriteFile("b", b"2"))
        assert workspace._session is not None
        await workspace._session.close()
        assert [file.path for file in (await workspace.run(ListFiles())).files] == ["a"]


def test_no_name_leads_out_of_what_is_kept(tmp_path: Path) -> None:
    for path in ("../a", "a/../../b", "/etc/a", "a\\b", "", "."):
        assert workspace_module._below(tmp_path, File(path, 1)) is None, path
    assert workspace_module._below(tmp_path, File("a", 1, "link")) is None
    assert workspace_module._below(tmp_path, File("a/b", 1)) == tmp_path / "a" / "b"


class Folder(UnsafeSandbox):
    """Counts the sessions that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[FolderSession] = []

    async def open(self) -> FolderSession:
        self.opened.append(await super().open())
        return self.opened[-1]


@pytest.mark.asyncio
async def test_a_workspace_that_is_not_filled_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Folder()
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"1")
    tool: Any = workspace_tools(sandbox, files=StartFiles(tmp_path))["list_files"]
    read, on_loop = Path.read_bytes, threading.get_ident()
    failing = [True]

    def read_bytes(path: Path) -> bytes:
        assert threading.get_ident() != on_loop
        if path.name == "b" and failing:
            failing.clear()
            raise OSError(5, "Input/output error")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    async with Scope() as scope:
        with pytest.raises(InfrastructureError, match=r"agent.sandbox.files: .*/b: .*Input/output error"):
            await tool.scoped(scope).call({"path": "."}, 10)
        assert [session.lost for session in sandbox.opened] == [True]
        assert (await tool.scoped(scope).call({"path": "."}, 10)).text == "a 1\nb 1"
    assert [session.lost for session in sandbox.opened] == [True, True]


@pytest.mark.asyncio
async def test_a_workspace_that_cannot_be_kept_ends_its_trajectory_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sandbox = Folder()
    flow = AgentFlow(
        LLMPlanner(ScriptedEngine(["write_file: a", "finish"] * 2), format="compact", grammar=False),
        Writing(),
        RuleVerifier(),
        LastResultGenerator(),
        Toolset(workspace_tools(sandbox, keep=tmp_path / "file" / "keep").values()),
    )
    trajectory = await flow.run(Query("?"))
    assert trajectory.stop_reason is StopReason.INFRASTRUCTURE and trajectory.answer is None
    assert trajectory.error.startswith("agent.sandbox.keep: ") and str(tmp_path) in trajectory.error
    assert [session.lost for session in sandbox.opened] == [True]
    running = asyncio.current_task()
    assert running is not None
    with pytest.raises(asyncio.CancelledError):
        await flow.run(Query("?"), lambda turn: running.cancel() and None)
    running.uncancel()


class Writing:
    """An executor that writes a file whatever the action."""

    async def execute(
        self,
        action: Action,
        toolset: Toolset,
        seconds: float,
        seed: int | None = None,
        turn: int = 1,
        on_call: object = None,
    ) -> Execution:
        tool = toolset.get("write_file")
        assert tool is not None
        call = ToolCall("write_file", {"path": "a", "content": "b"})
        return Execution(call, await tool.call(call.arguments, seconds))


@pytest.mark.asyncio
async def test_a_trajectory_that_goes_on_has_its_files_and_variables_again(sandbox: BubblewrapSandbox) -> None:
    actions = ["shell: echo gold > a", "python: held = open('a').read()", "python: print(held, end='')", "read_file: a"]
    tools = [PythonTool(sandbox, keep_state=True), *workspace_tools(sandbox).values()]

    def flow(script: list[str]) -> AgentFlow:
        planner = LLMPlanner(ScriptedEngine(script), format="compact", grammar=False)
        modules = (planner, DirectExecutor(), RuleVerifier(), LastResultGenerator(), Toolset(tools))
        return AgentFlow(*modules, max_turns=4, tool_seconds=15)

    whole = await flow(actions).run(Query("?"))
    assert [turn.result.text for turn in whole.turns] == ["(no output)", "(no output)", "gold", "gold\n"]
    for done in range(1, 4):
        again = await flow(actions[done:]).run(Query("?"), history=whole.turns[:done])
        assert [turn.result for turn in again.turns] == [turn.result for turn in whole.turns]
