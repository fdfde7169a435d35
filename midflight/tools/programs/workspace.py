"""The tools of a coding agent: files, tests and a shell in one sandboxed folder that dies with the trajectory.

Invariant: each call happens inside the sandbox, files too; so no path, link or race leads to the agent's own files.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

from midflight.errors import UserError
from midflight.sandbox import choose
from midflight.sandbox.base import (
    Command,
    Limits,
    ListFiles,
    Outcome,
    ReadFile,
    Request,
    RunTests,
    Sandbox,
    SandboxResult,
    WriteFile,
)
from midflight.sandbox.workspace import StartFiles, Workspace
from midflight.tools.base import ErrorKind, Tool, ToolResult
from midflight.tools.options import ToolContext, ToolOptions
from midflight.tools.scope import Scope

Arguments = Mapping[str, Any]
NEED_FULL = ("run_tests", "shell")
"""Tools that a sandbox of programs alone (WASI) has not."""


class WorkspaceOptions(ToolOptions):
    cacheable: ClassVar[bool] = False


class SandboxTool:
    """What works in the workspace of a trajectory, which tools share that have one sandbox, `keep` and `files`.

    Args:
        sandbox: where it works.
        limits: of one call; the sandbox's own when None.
        keep: a folder of the host that the files of each trajectory go to, into its next `workspace-N`; None keeps
            nothing.
        files: what the workspace begins with; None: nothing.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        limits: Limits | None = None,
        keep: Path | None = None,
        files: StartFiles | None = None,
    ) -> None:
        self.sandbox, self.limits, self.keep, self.files = sandbox, limits, keep, files
        self._scope: Scope | None = None

    def scoped(self, scope: Scope) -> Self:
        """See `ScopedTool`."""
        own = copy.copy(self)
        own._scope = scope
        return own

    def close(self) -> None:
        """End the sandbox with all its sessions, a shared one with its last user; a later call starts it again."""
        self.sandbox.close()

    async def _run(self, request: Request, seconds: float) -> SandboxResult:
        """`request` in the trajectory's workspace; outside of one, in a workspace of its own."""
        limits = self.limits or self.sandbox.limits
        limits = replace(limits, wall_seconds=min(limits.wall_seconds, seconds))
        if self._scope is None:
            async with self._made() as workspace:
                return await workspace.run(request, limits)
        return await (await self._shared(self._scope)).run(request, limits)

    async def _forgot(self) -> bool:
        """Whether variables of the trajectory's programs were lost since this was last asked."""
        return self._scope is not None and (await self._shared(self._scope)).forgot()

    async def _shared(self, scope: Scope) -> Workspace:
        return await scope.get(("workspace", self.sandbox, self.keep, self.files), self._made)

    def _made(self) -> Workspace:
        return Workspace(self.sandbox, self.keep, self.files)


class WorkspaceTool(SandboxTool):
    """A tool that is one request: `ask` makes it of the arguments, `answer` makes text of what came of it.

    `ask` may raise ValueError: what is wrong with the arguments.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        name: str,
        description: str,
        parameters: dict[str, Any],
        ask: Callable[[Arguments], Request],
        answer: Callable[[Arguments, SandboxResult], ToolResult],
        *,
        limits: Limits | None = None,
        keep: Path | None = None,
        files: StartFiles | None = None,
    ) -> None:
        super().__init__(sandbox, limits=limits, keep=keep, files=files)
        self.name, self.description, self.parameters = name, description, parameters
        self._ask, self._answer = ask, answer

    async def call(self, arguments: Arguments, seconds: float) -> ToolResult:
        """See `Tool.call`."""
        try:
            request = self._ask(arguments)
        except ValueError as error:
            return ToolResult(str(error), ErrorKind.INVALID_ARGUMENTS)
        return self._answer(arguments, await self._run(request, seconds))


def workspace_tools(
    sandbox: Sandbox, *, limits: Limits | None = None, keep: Path | None = None, files: StartFiles | None = None
) -> dict[str, WorkspaceTool]:
    """`write_file`, `read_file`, `list_files`, `run_tests` and `shell` on one workspace, by name.

    The last two only in a sandbox that can do more than programs.
    """
    path = {"type": "string", "description": "relative to the workspace"}
    line = {"type": "integer", "minimum": 1}
    tools = (
        WorkspaceTool(
            sandbox,
            "write_file",
            "writes a text file of the workspace, over what it held; makes the folders to it",
            _schema(path=path, content={"type": "string"}),
            lambda given: WriteFile(given["path"], given["content"].encode("utf-8", "surrogateescape")),
            lambda given, result: _plain(result, f"wrote {len(given['content'])} characters to {given['path']}"),
        ),
        WorkspaceTool(
            sandbox,
            "read_file",
            "reads a text file of the workspace, or some lines of it",
            _schema("first_line", "last_line", path=path, first_line=line, last_line=line),
            lambda given: ReadFile(given["path"]),
            _lines,
        ),
        WorkspaceTool(
            sandbox,
            "list_files",
            "lists the files below a folder of the workspace with their sizes in bytes; . is the workspace itself",
            _schema(path=path),
            lambda given: ListFiles(given["path"]),
            _listing,
        ),
        WorkspaceTool(
            sandbox,
            "run_tests",
            "runs pytest in the workspace on a file, a folder or a test id (. for all); which tests passed and failed",
            _schema(path=path),
            lambda given: RunTests((_no_option(given["path"]),)),
            lambda _, result: _tests(result),
        ),
        WorkspaceTool(
            sandbox,
            "shell",
            "runs a command with sh in the workspace; no network; nothing goes on running when it has ended",
            _schema(command={"type": "string"}),
            lambda given: Command(("sh", "-c", given["command"])),
            lambda _, result: result_of(result),
        ),
    )
    for tool in tools:
        tool.limits, tool.keep, tool.files = limits, keep, files
    return {tool.name: tool for tool in tools if sandbox.full or tool.name not in NEED_FULL}


def _no_option(path: str) -> str:
    if path.startswith("-"):
        raise ValueError(f"{path}: a path or a test id, not an option of pytest")
    return path


def not_enough(what: str) -> UserError:
    """What is raised where a sandbox does less than `what` takes; says how to have one that does more."""
    return UserError(f"{what} takes bubblewrap: {choose.bubblewrap_problem() or 'set agent.sandbox.kind=bubblewrap'}")


def _named(name: str, context: ToolContext) -> Tool:
    sandbox = context.sandbox()
    if name in NEED_FULL and not sandbox.full:
        raise not_enough(f"the sandbox {sandbox.name} runs Python programs alone; {name}")
    return workspace_tools(sandbox, keep=context.keep, files=context.files)[name]


def write_file(options: WorkspaceOptions, context: ToolContext) -> Tool:
    """The tool within its options; so for the others."""
    return _named("write_file", context)


def read_file(options: WorkspaceOptions, context: ToolContext) -> Tool:
    return _named("read_file", context)


def list_files(options: WorkspaceOptions, context: ToolContext) -> Tool:
    return _named("list_files", context)


def run_tests(options: WorkspaceOptions, context: ToolContext) -> Tool:
    return _named("run_tests", context)


def shell(options: WorkspaceOptions, context: ToolContext) -> Tool:
    return _named("shell", context)


def result_of(result: SandboxResult) -> ToolResult:
    """What a program or command wrote, behind the reason where it did not end well."""
    parts = [] if result.ok else [f"{result.outcome}: {result.problem}"]
    out, err = result.out.rstrip("\n"), result.err.rstrip("\n")
    parts += [out] if out else []
    parts += ["[standard error]", err] if err and out else [err] if err else []
    text = "\n".join(parts) or "(no output)"
    return ToolResult(text, None if result.ok else _kind(result))


def _kind(result: SandboxResult) -> ErrorKind:
    late = result.outcome in (Outcome.WALL_LIMIT, Outcome.CPU_LIMIT)
    return ErrorKind.TOOL_TIMEOUT if late else ErrorKind.TOOL_ERROR


def _plain(result: SandboxResult, text: str) -> ToolResult:
    return ToolResult(text) if result.ok else ToolResult(result.problem, _kind(result))


def _lines(given: Arguments, result: SandboxResult) -> ToolResult:
    if not result.ok:
        return _plain(result, "")
    try:
        text = result.data.decode()
    except UnicodeDecodeError:
        return ToolResult(f"{given['path']}: no text in UTF-8, {len(result.data)} bytes", ErrorKind.TOOL_ERROR)
    first, last = given.get("first_line", 1), given.get("last_line")
    if first == 1 and last is None:
        return ToolResult(text)
    lines = list(io.StringIO(text, newline="\n"))  # as compilers and pytest count: a form feed ends none
    if first > len(lines) or (last is not None and last < first):
        return ToolResult(f"{given['path']} has {len(lines)} lines", ErrorKind.TOOL_ERROR)
    return ToolResult("".join(lines[first - 1 : last]))


def _listing(given: Arguments, result: SandboxResult) -> ToolResult:
    marks = {"file": "", "link": " (a symbolic link)", "other": " (no regular file)"}
    rows = [f"{file.path} {file.size}{marks.get(file.kind, '')}" for file in result.files]
    rows += ["and more"] if result.more_files else []
    return _plain(result, "\n".join(rows) or f"no files in {given['path']}")


def _tests(result: SandboxResult) -> ToolResult:
    """Counts, then each test that did not pass with its message. All passed: no error."""
    if not result.tests or result.outcome not in (Outcome.OK, Outcome.ERROR):
        found = "" if result.tests else "no tests were found\n" if result.exit_code == 5 else "no test ran\n"
        text = result_of(result)
        return ToolResult(found + text.text, text.error or ErrorKind.TOOL_ERROR)
    counts = {outcome: result.test_counts.get(outcome, 0) for outcome in ("passed", "failed", "error", "skipped")}
    rows = [", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)]
    told = [test for test in result.tests if test.outcome != "passed"]
    for test in told:
        rows.append(f"{test.outcome.upper()} {test.name}" + (f"\n{test.message}" if test.message else ""))
    if left := sum(counts.values()) - counts["passed"] - len(told):
        rows.append(f"and {left} more that did not pass")
    return ToolResult("\n".join(rows), None if result.ok else ErrorKind.TOOL_ERROR)


def _schema(*optional: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }
