"""The example programs that need no model of their own."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from midflight.server.wire import Answer, Request
from tests.engines.serving import chat, ok, served

PROGRAM = Path(__file__).parents[1] / "examples" / "on_a_server.py"


def module_answer(request: Request) -> Answer:
    """What a model would write for the module that asks."""
    text = request.body.decode()
    (item,) = set(re.findall(r"How many (\w+) do we have", text)) or set(re.findall(r"Context:\\n```\\n(\w+)", text))
    if "arguments of one tool call" in text:
        return ok(chat(f'{{"item": "{item}"}}'))
    if "check the work" in text:
        return ok(chat("Result: valid\nMemory: sufficient\nContradictions: none\nReason: it is there"))
    if "write the final answer" in text:
        (found,) = set(re.findall(r"Result:\\n```\\n(\d+)", text))
        return ok(chat(f"Answer: {found} [turn 1]"))
    return ok(chat(f"Sub-goal: look it up\nTool: stock\nContext: {item}"))


@pytest.mark.asyncio
async def test_an_agent_on_a_server_answers_many_questions_at_once() -> None:
    async with served(module_answer, delay=0.02) as server, asyncio.timeout(60):
        program = await asyncio.create_subprocess_exec(
            sys.executable, str(PROGRAM), server.base_url, "m", stdout=asyncio.subprocess.PIPE
        )
        said, _ = await program.communicate()
        usage, *answers = said.decode().splitlines()
        assert program.returncode == 0 and server.most_at_once == 8
        assert usage == "32 requests, 224 prompt + 96 completion tokens"
        assert answers[0] == "How many bolts do we have? verified 120" and len(answers) == 8
        assert answers[-1] == "How many clamps do we have? verified 27"
