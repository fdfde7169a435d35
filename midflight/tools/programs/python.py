"""The tool `python`: runs a program in the sandbox, given as code or written by an engine from a task.

Invariant: no line of it runs in the agent's process, and each program runs exactly once.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Template
from typing import Any, Self

from pydantic import Field, model_validator

from midflight.engines.base import Engine, FinishReason, Sampling
from midflight.engines.thoughts import said
from midflight.errors import InfrastructureError
from midflight.sandbox.base import Limits, Python, Sandbox
from midflight.sandbox.workspace import StartFiles
from midflight.tools.base import ErrorKind, Tool, ToolError, ToolResult
from midflight.tools.language.asking import drawn
from midflight.tools.options import ToolContext
from midflight.tools.programs.workspace import SandboxTool, WorkspaceOptions, not_enough, result_of

SYSTEM = Template("""You write one Python program that does a task and prints its result.
There is $packages, and no network. Files are in the current folder.
Answer with the program alone, in one block that begins with ```python and ends with ```.""")
FORGOTTEN = "all variables are lost: the next program begins without any"
"""What a program's result ends with, of `keep_state`, where the interpreter ended with it."""
FORGOTTEN_BEFORE = "the variables of earlier programs had been lost before this one began"
"""Where it had ended in between."""
_BLOCK = re.compile(
    r"^(?P<fence>`{3,})(?:python|py)?[ \t]*\n(?P<code>.*?)^(?P=fence)`*[ \t]*$", re.DOTALL | re.MULTILINE
)


class PythonOptions(WorkspaceOptions):
    from_task: bool = False
    """It is given a task, and a language model writes the program; else it is given the program."""
    engine: str | None = None
    """Name of the language model that writes; null: as for the tool `generalist`. Used by `from_task`."""
    max_tokens: int = Field(default=1024, ge=1, le=100_000_000)
    """Most new tokens of a program. Used by `from_task`."""
    keep_state: bool = False
    """One interpreter for all calls of a trajectory, so variables stay."""

    @model_validator(mode="after")
    def _writer(self) -> Self:
        if self.engine is not None and not self.from_task:
            raise ValueError("engine writes programs from tasks: set from_task=true, or leave engine out")
        if "max_tokens" in self.model_fields_set and not self.from_task:
            raise ValueError(
                "max_tokens is of programs written from tasks: set from_task=true, or leave max_tokens out"
            )
        return self

    @property
    def engines(self) -> frozenset[str | None]:
        return frozenset({self.engine} if self.from_task else ())


class PythonTool(SandboxTool):
    """Runs Python in the trajectory's workspace; what it prints, and the value of a last expression, is the result.

    A figure of pyplot that is open at the end is saved as figure-N.png in the workspace, and named in the result.

    Args:
        sandbox: where programs run.
        engine: gives what writes the program from a task; None to be given code.
        keep_state: one interpreter for all calls of a trajectory, so variables stay. Without it every program begins
            in a fresh one.
        sampling: how the engine writes.
        limits: of one program; the sandbox's own when None.
        keep, files: see `SandboxTool`.

    Raises:
        UserError: `keep_state` in a sandbox that keeps none.
    """

    name = "python"

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        engine: Callable[[], Engine] | None = None,
        keep_state: bool = False,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        keep: Path | None = None,
        files: StartFiles | None = None,
    ) -> None:
        super().__init__(sandbox, limits=limits, keep=keep, files=files)
        if keep_state and not sandbox.full:
            raise not_enough(f"agent.tool_options.python.keep_state = true: {sandbox.name} keeps no state; it")
        self.engine, self.keep_state = engine, keep_state
        self.sampling = sampling or Sampling(temperature=0.0, max_tokens=1024)

    @property
    def description(self) -> str:
        """For the planner."""
        what = "runs a Python program" if self.engine is None else "writes a Python program for a task and runs it"
        state = "variables stay from call to call" if self.keep_state else "every call starts without variables"
        gives = "gives what it prints and the value of its last line"
        if "matplotlib" in self.sandbox.packages:
            gives += ", and saves its figures as files"
        packages = ", ".join(self.sandbox.packages) or "standard library alone"
        return f"{what}; {gives}; {state}; {packages}; no network"

    @property
    def parameters(self) -> dict[str, Any]:
        """Code, or a task where an engine writes the code; and what `input()` reads."""
        given = ("code", "a Python program") if self.engine is None else ("task", "what to compute, with all it needs")
        name, description = given
        stdin = {"type": "string", "description": "lines that input() reads", "default": ""}
        return {
            "type": "object",
            "properties": {name: {"type": "string", "description": description}, "stdin": stdin},
            "required": [name],
            "additionalProperties": False,
        }

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        """See `Tool.call`."""
        if self.engine is None:
            code, left = arguments["code"], seconds
        else:
            began = time.monotonic()
            limit = asyncio.timeout(seconds)  # of writing and running together
            try:
                async with limit:
                    code = await self._written(self.engine(), arguments["task"])
            except (ToolError, ValueError) as error:
                return ToolResult(str(error), ErrorKind.TOOL_ERROR)
            except TimeoutError as error:
                if not limit.expired():
                    raise InfrastructureError(f"the engine of python failed: {error}") from error
                late = f"python took longer than {seconds:g} seconds: no program was written in that time"
                return ToolResult(late, ErrorKind.TOOL_TIMEOUT)
            left = max(seconds - (time.monotonic() - began), 0.001)
        request = Python(code, arguments.get("stdin", ""), keep_state=self.keep_state, figures=self.sandbox.full)
        result = await self._run(request, left)
        told = result_of(result)
        lines = [told.text, *(f"saved {file.path}" for file in result.files)]
        if self.keep_state and await self._forgot():
            lines.append(FORGOTTEN_BEFORE if result.state_kept else FORGOTTEN)
        return ToolResult("\n".join(lines), told.error)

    def _system(self) -> str:
        packages = ", ".join(self.sandbox.packages)
        return SYSTEM.substitute(packages=f"the standard library {f'with {packages}' if packages else 'alone'}")

    async def _written(self, engine: Engine, task: str) -> str:
        """The program that `engine` writes for `task`.

        Raises:
            ValueError: it writes none; the message says why.
            ToolError, InfrastructureError, BudgetSpent: as `drawn`.
        """
        generation = await drawn(engine, self._system(), f"Task: {task}", self.sampling)
        if generation.finish_reason is FinishReason.LENGTH:
            raise ValueError(f"no program: the engine had not ended after {self.sampling.max_tokens} tokens")
        return program_of(generation.text)


def python(options: PythonOptions, context: ToolContext) -> Tool:
    """The tool within its options."""
    return PythonTool(
        context.sandbox(),
        engine=(lambda: context.engine(options.engine)) if options.from_task else None,
        keep_state=options.keep_state,
        sampling=Sampling(temperature=0.0, max_tokens=options.max_tokens),
        keep=context.keep,
        files=context.files,
    )


def program_of(text: str) -> str:
    """The program in an engine's answer: its one block of code, or the whole answer where it has no block; see also
    `said`.

    Raises:
        ValueError: more than one block, or nothing; or a thought without an end, in which a block is but a draft.
    """
    if text.lstrip().startswith("<think>"):
        text = said(text)
        if text.startswith("<think>"):
            raise ValueError("no program: the engine wrote a thought that is not one whole block")
    blocks = [match["code"] for match in _BLOCK.finditer(text)]
    if len(blocks) > 1:
        raise ValueError(f"no program: the engine wrote {len(blocks)} blocks of code instead of one")
    code = blocks[0] if blocks else text
    if not code.strip():
        raise ValueError("no program: the engine wrote nothing")
    return code
