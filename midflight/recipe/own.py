"""What a program gives a run as objects: questions, which its folder keeps, and tools, which no folder can keep.

Invariant: a run made with them goes on with the same questions and tools, or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from midflight.errors import UserError, reading
from midflight.recipe.config import HeldOutTasks, Recipe, RecipeError, TaskSource
from midflight.store.folder import RunFolder
from midflight.tasks.base import Task
from midflight.tasks.jsonl import to_jsonl
from midflight.tools import BUILTIN
from midflight.tools.base import Tool


def check_tools(tools: Sequence[object]) -> None:
    """Refuse what is no tool.

    Raises:
        UserError: one line with the index.
    """
    for index, tool in enumerate(tools):
        if all(hasattr(tool, name) for name in ("name", "description", "parameters", "call")):
            continue
        if callable(tool):
            raise UserError(f"tools[{index}]: a function without @tool; decorate it")
        raise UserError(f"tools[{index}]: not a tool but {type(tool).__name__}; see midflight.tools.tool")


def own_tools(recipe: Recipe, tools: Sequence[Tool] | None) -> list[str]:
    """Names of those among `tools` that the recipe uses and that are not built in."""
    used = [tool for tool in tools or () if tool.name in recipe.agent.tools]
    return [tool.name for tool in used if tool.name not in BUILTIN or not BUILTIN[tool.name].is_tool(tool)]


def kept_tools(folder: RunFolder) -> list[str]:
    """Names of the program's tools that a run was made with."""
    file = folder.own_tools
    if not file.is_file():
        return []
    with reading(file, "repair it: it lists the tools that the run's program gave"):
        names = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(names, list):
            raise ValueError("no list")
        return [str(name) for name in names]


def keep_tools(folder: RunFolder, names: Sequence[str]) -> None:
    """Mark a run as made with a program's tools."""
    if names and kept_tools(folder) != names:
        folder.inputs.mkdir(parents=True, exist_ok=True)
        folder.own_tools.write_text(json.dumps(names) + "\n", encoding="utf-8")


def check_kept_tools(folder: RunFolder, recipe: Recipe, given: Collection[str] = ()) -> None:
    """Refuse a run's recipe without the program's tools that it was made with; `given` are those at hand.

    Raises:
        RecipeError: one line with what to do.
    """
    missing = [name for name in kept_tools(folder) if name in recipe.agent.tools and name not in given]
    if missing:
        raise RecipeError(
            f"{folder.path}: made with tools of a program: go on with your program, train_on(..., resume=True); "
            f"midflight.solve and midflight.credit take tools=[{', '.join(missing)}]"
        )


def with_own_tasks(
    recipe: Recipe, folder: RunFolder, tasks: Sequence[Task] | None, eval_tasks: Sequence[Task] | None
) -> Recipe:
    """The recipe with the files of the program's questions as its task sections; no held-out ones are `null`."""
    sources: dict[str, TaskSource | None] = {}
    inputs = folder.inputs.resolve()
    if tasks is not None:
        sources["train_tasks"] = TaskSource(family=str(inputs / folder.own_tasks.name))
    if eval_tasks:
        sources["eval_tasks"] = HeldOutTasks(family=str(inputs / folder.own_eval_tasks.name))
    elif tasks is not None or eval_tasks is not None:
        sources["eval_tasks"] = None
    return recipe.model_copy(update=sources)


def keep_tasks(
    folder: RunFolder, tasks: Sequence[Task] | None, eval_tasks: Sequence[Task] | None, *, resume: bool
) -> None:
    """Write the files of `with_own_tasks`; on a resume compare them.

    Raises:
        UserError: the run was made with other questions.
    """
    files = {"tasks": (folder.own_tasks, tasks), "eval_tasks": (folder.own_eval_tasks, eval_tasks)}
    for name, (file, given) in files.items():
        if not given:
            continue
        if not resume:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(to_jsonl(given), encoding="utf-8")
        elif not file.is_file() or file.read_bytes() != to_jsonl(given).encode():
            raise UserError(
                f"{name}: not those of the run in {folder.path}; a run keeps its questions: give the same ones, or "
                "name another run_dir"
            )
