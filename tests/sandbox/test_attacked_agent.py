"""An agent whose planner runs each of the attacks: the turn has an error of its kind, and the next turn works."""

from __future__ import annotations

import asyncio
import json
import platform

import pytest

from midflight.agent import ErrorKind, LLMExecutor, Query, StopReason, Trajectory
from midflight.engines.scripted import ScriptedEngine
from midflight.sandbox import Outcome
from midflight.sandbox.bubblewrap import BubblewrapSandbox
from midflight.tools.programs.python import PythonTool
from tests.agent.doubles import compact_flow, prompt
from tests.sandbox.attacks import ATTACKS, Attack

FULL = ("many files", "large files", "one large file", "deep folders")
"""Leave no room in the workspace, which is the trajectory's own."""
LATE = (Outcome.WALL_LIMIT, Outcome.CPU_LIMIT)
AFTER = """import os
alive = [one for one in os.listdir('/proc') if one.isdigit() and ') Z ' not in open(f'/proc/{one}/stat').read()]
print(6 * 7, len(alive), os.path.exists('survived'))"""
"""Nothing is left of the attack; those that the interpreter did not wait for are dead."""


def kinds(attack: Attack) -> set[ErrorKind | None]:
    """What the planner may read of it."""
    return {
        None if outcome is Outcome.OK else ErrorKind.TOOL_TIMEOUT if outcome in LATE else ErrorKind.TOOL_ERROR
        for outcome in attack.expected
    }


NO_ANSWER = ("garbage for an answer",)
"""It ends well where each program has its own interpreter; one that is kept has died without an answer."""


async def attacked(attack: Attack, sandbox: BubblewrapSandbox, keep_state: bool) -> tuple[Trajectory, str]:
    """A trajectory of the attack, a program behind it and the end; and the prompt of the second turn."""
    code = attack.code.replace("{{", "{").replace("}}", "}").replace("{secret!r}", "'/etc/shadow'")
    code = code.replace("{port}", "22").replace("{name}", "nobody")
    writer = ScriptedEngine([json.dumps({"code": code}), json.dumps({"code": AFTER})])
    flow, planner = compact_flow(
        ["python: attack", "python: go on", "finish"],
        PythonTool(sandbox, limits=attack.limits, keep_state=keep_state),
        executor=LLMExecutor(writer),
        memory_tokens=1_000_000,
        max_seconds=600,
        tool_seconds=60,
    )
    return await flow.run(Query("?")), prompt(planner.requests[1])


@pytest.mark.asyncio
@pytest.mark.parametrize("keep_state", [False, True], ids=["fresh", "kept"])
async def test_every_attack_leaves_a_typed_error_and_the_agent_goes_on(
    sandbox: BubblewrapSandbox, keep_state: bool
) -> None:
    attacks = [one for one in ATTACKS if "libc.syscall(" not in one.code or platform.machine() == "x86_64"]
    made = await asyncio.gather(*(attacked(one, sandbox, keep_state) for one in attacks))
    wrong = []
    for attack, (trajectory, read) in zip(attacks, made, strict=True):
        assert trajectory.stop_reason is StopReason.FINISHED, (attack.name, trajectory.error)
        first, second, _ = (turn.result for turn in trajectory.turns)
        expected = kinds(attack) | ({ErrorKind.TOOL_ERROR} if keep_state and attack.name in NO_ANSWER else set())
        if first.error not in expected:
            wrong.append((attack.name, first))
        elif first.error is not None and f"Error: {first.error}: " not in read:
            wrong.append((attack.name, "not read", read[-300:]))
        if attack.name not in FULL and (second.error, second.text) != (None, "42 1 False"):
            wrong.append((attack.name, second))
    assert wrong == [], "\n".join(map(str, wrong))
