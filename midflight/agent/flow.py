"""AgentFlow: planner, executor and verifier in turn until the loop stops, then the generator.

Invariant: the flow holds no state of a trajectory. Memory and clock are made by `run` and die with it, so a thousand
runs on one flow cannot see each other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from midflight.agent.analyst import Analyst
from midflight.agent.executor import Execution, Executor
from midflight.agent.generator import Generator
from midflight.agent.memory import Memory
from midflight.agent.planner import Planner
from midflight.agent.types import (
    Answer,
    ErrorKind,
    Generation,
    Query,
    StopReason,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
)
from midflight.agent.verifier import Verifier
from midflight.engines.base import EngineError, PromptTooLong
from midflight.seeds import derive
from midflight.tools.base import FINISH, InfrastructureError, Toolset

T = TypeVar("T")
OnTurn = Callable[[Turn], None]


class AgentFlow:
    """The agent. Build it once, call `run` for each query, as many at a time as you like.

    Args:
        planner, executor, verifier, generator: the four modules.
        toolset: what the planner may call.
        max_turns: most turns of a trajectory.
        max_seconds: most wall-clock seconds of a trajectory; a running tool is interrupted.
        tool_seconds: most seconds of one tool call.
        analyst: makes the query analysis, if given.
        retries: how often a failed engine or service is tried again before the trajectory ends INFRASTRUCTURE.
        backoff: seconds before the first retry, doubled for each further one.
    """

    def __init__(
        self,
        planner: Planner,
        executor: Executor,
        verifier: Verifier,
        generator: Generator,
        toolset: Toolset,
        *,
        max_turns: int = 5,
        max_seconds: float = 120.0,
        tool_seconds: float = 10.0,
        analyst: Analyst | None = None,
        retries: int = 2,
        backoff: float = 0.5,
    ) -> None:
        self.planner, self.executor, self.verifier, self.generator = planner, executor, verifier, generator
        self.toolset = toolset
        self.analyst = analyst
        self.max_turns, self.max_seconds, self.tool_seconds = max_turns, max_seconds, tool_seconds
        self.retries, self.backoff = retries, backoff

    async def run(self, query: Query, on_turn: OnTurn | None = None, cancel: asyncio.Event | None = None) -> Trajectory:
        """One trajectory. `on_turn` sees each turn as it ends; setting `cancel` ends the run as CANCELLED.

        Cancelling the task itself raises CancelledError as usual.
        """
        started = time.monotonic()
        run = _Run(self, query, on_turn)
        work = asyncio.ensure_future(run.loop())
        waits: set[asyncio.Future[object]] = {work}  # type: ignore[arg-type]
        if cancel is not None:
            waits.add(asyncio.ensure_future(cancel.wait()))  # type: ignore[arg-type]
        reason, error, answer = StopReason.MAX_SECONDS, "", None
        try:
            done, _ = await asyncio.wait(waits, timeout=self.max_seconds, return_when=asyncio.FIRST_COMPLETED)
            if work in done:
                reason, answer = work.result()
            elif done:
                reason = StopReason.CANCELLED
        except PromptTooLong as problem:
            reason, error = StopReason.CONTEXT_OVERFLOW, str(problem)
        except (EngineError, InfrastructureError) as problem:
            reason, error = StopReason.INFRASTRUCTURE, str(problem)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        return Trajectory(
            query=query,
            turns=run.memory.turns,
            stop_reason=reason,
            answer=answer,
            analysis=run.analysis,
            error=error,
            seconds=time.monotonic() - started,
        )


class _Run:
    """The state of one trajectory."""

    def __init__(self, flow: AgentFlow, query: Query, on_turn: OnTurn | None) -> None:
        self.flow, self.query, self.on_turn = flow, query, on_turn
        self.memory = Memory()
        self.analysis = ""

    async def loop(self) -> tuple[StopReason, Answer]:
        flow, query = self.flow, self.query
        if flow.analyst is not None:
            analyst = flow.analyst
            self.analysis = await self.retry(lambda: analyst.analyse(query, flow.toolset, self.seed("analyst")))
        reason = StopReason.MAX_TURNS
        for index in range(1, flow.max_turns + 1):
            stop = await self.turn(index)
            if stop is not None:
                reason = stop
                break
        made = await self.retry(
            lambda: flow.generator.generate(query, self.memory, self.analysis, self.seed("generator"))
        )
        return reason, made.answer

    async def turn(self, index: int) -> StopReason | None:
        """One pass: plan, execute, verify, remember."""
        flow, query, started = self.flow, self.query, time.monotonic()
        left = flow.max_turns - index + 1
        plan = await self.retry(lambda: flow.planner.plan(query, flow.toolset, self.memory, left, self.analysis))
        action, others = plan.action, list[tuple[str, Generation]]()
        if action is None:
            done = Execution(None, ToolResult(plan.problem, ErrorKind.INVALID_ACTION))
        elif action.tool == FINISH:
            done = Execution(None, ToolResult(""))
        else:
            seed = self.seed("executor", index)
            done = await self.retry(lambda: flow.executor.execute(action, flow.toolset, flow.tool_seconds, seed))
        if done.generation is not None:
            others.append(("executor", done.generation))
        turn = Turn(index, plan.generation, action, done.call, done.result, Verdict(stop=False))
        stop = StopReason.FINISHED if action is not None and action.tool == FINISH else None
        if stop is None:
            seed = self.seed("verifier", index)
            judged = await self.retry(lambda: flow.verifier.verify(query, turn, self.memory, seed))
            if judged.generation is not None:
                others.append(("verifier", judged.generation))
            turn = replace(turn, verdict=judged.verdict)
            stop = StopReason.VERIFIED if judged.verdict.stop else None
        turn = replace(turn, seconds=time.monotonic() - started, other_generations=tuple(others))
        self.memory.append(turn)
        if self.on_turn is not None:
            self.on_turn(turn)
        return stop

    def seed(self, *names: object) -> int | None:
        return None if self.query.seed is None else derive(self.query.seed, *names)

    async def retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try again what failed for want of a service; the last failure goes up."""
        for number in range(self.flow.retries):
            try:
                return await attempt()
            except (EngineError, InfrastructureError):
                await asyncio.sleep(self.flow.backoff * 2**number)
        return await attempt()
