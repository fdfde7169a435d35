"""The loop: plan, execute, verify, remember; then answer.

Invariant: an `AgentFlow` holds no state of a run. Memory, scope and clock are made by `run` and die with it, so any
number of trajectories run at once and none sees another. What the agent does wrong is a recorded turn; what breaks
under it (engine, sandbox) is retried and then ends the trajectory without an answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from midflight.agent.actions import ReferenceNotFound, resolve
from midflight.agent.executor import Execution, Executor
from midflight.agent.generator import Generator
from midflight.agent.memory import Memory
from midflight.agent.planner import Analyst, Plan, Planner
from midflight.agent.types import UNJUDGED, Action, Answer, Query, StopReason, Trajectory, Turn
from midflight.agent.verifier import Verification, Verifier
from midflight.engines.base import BudgetSpent, EngineError, EngineGaveUp, Generation, PromptTooLong
from midflight.engines.waits import OF_TRAJECTORY, Waits
from midflight.errors import GivenUp
from midflight.tools.base import FINISH, ErrorKind, InfrastructureError, ToolCall, ToolResult, call_tool
from midflight.tools.scope import Scope

if TYPE_CHECKING:
    from midflight.tools.base import Toolset

__all__ = ["AgentFlow", "NotReplayable"]

P = ParamSpec("P")
T = TypeVar("T")


class NotReplayable(ValueError):
    """What a history's calls left to its tools cannot be made again; the message names the turn."""


@dataclass
class _Run:
    """What one call of `AgentFlow.run` has so far."""

    query: Query
    memory: Memory
    toolset: Toolset
    cancel: asyncio.Event | None
    waits: Waits
    analysis: str = ""
    answer: Answer | None = None
    problem: str = ""


@dataclass(frozen=True)
class AgentFlow:
    """Four modules and a toolset, ready to run queries.

    Args:
        max_turns: most turns of a trajectory.
        max_calls: most calls of its tools together; one more is refused with CALL_LIMIT. None: `max_turns` bounds them.
        max_seconds: wall clock of a trajectory; a running tool is interrupted. When modules and tools waited for
            engines for more than half of it, all waits together, the end is INFRASTRUCTURE; whatever else a tool waits
            for is its own time. Closing what its tools hold, such as keeping a workspace, comes after it and is waited
            for.
        memory_tokens: budget of the rendered memory.
        tool_seconds: time limit of one tool call.
        grounded: a context's `#n` is replaced by the result of turn n before the call.
        analyst: analyses the query before the first turn; None leaves that out.
        retries: how often a module is called again after an infrastructure failure. Engines on servers try again
            themselves (`engines.http.patience`): what they give up on is not retried here.
        backoff: seconds before the first retry; doubles with each.
        clock: seconds, for `Turn.seconds` and `Trajectory.seconds`.
    """

    planner: Planner
    executor: Executor
    verifier: Verifier
    generator: Generator
    toolset: Toolset
    _: KW_ONLY
    max_turns: int = 5
    max_calls: int | None = None
    max_seconds: float = 120.0
    memory_tokens: int = 512
    tool_seconds: float = 10.0
    grounded: bool = False
    analyst: Analyst | None = None
    retries: int = 2
    backoff: float = 0.5
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    async def run(
        self,
        query: Query,
        on_turn: Callable[[Turn], None] | None = None,
        cancel: asyncio.Event | None = None,
        *,
        history: Sequence[Turn] = (),
        analysis: str | None = None,
        on_difference: Callable[[Turn, ToolResult], None] | None = None,
    ) -> Trajectory:
        """Run one query to its end.

        `on_turn` is called with each finished turn. Setting `cancel` ends the run with CANCELLED and the finished
        turns. After MAX_SECONDS, CANCELLED, CONTEXT_OVERFLOW, INFRASTRUCTURE and BUDGET the answer is None: the
        generator is not called. Cancelling the task itself raises `asyncio.CancelledError`, as everywhere.

        With `history` the run goes on behind these finished turns, with which the trajectory then begins; `on_turn` and
        the time limit see only what is new. Calls of tools that hold something for a trajectory (a workspace) are made
        again first, so that it is there; memory keeps the recorded results, and `on_difference` is called with each
        turn whose call gave another one, and that one. Other tools are not called again. Behind a turn that ended its
        run, the answer alone is left to make. `analysis` stands for the query's analysis, which is then not made again.

        Raises:
            ValueError: the turns of `history` are not numbered 1, 2, and so on.
            NotReplayable: `history` has a call that the toolset does not know or take.
        """
        started = self.clock()
        again = self._to_replay(history)
        replayed = {turn.index for turn, _ in again}
        scope = Scope(calls_of(turn for turn in history if turn.index not in replayed)) if history else Scope()
        run = _Run(
            query, Memory(self.memory_tokens), self.toolset.scoped(scope), cancel, Waits(self.clock), analysis or ""
        )
        for turn in history:
            run.memory.append(turn)
        error, outer = "", OF_TRAJECTORY.set(run.waits)
        try:
            async with scope:
                if again:
                    async with _limit(None, cancel) as limit:
                        for turn, call in again:
                            result = await self._replayed(run, call)
                            if result != turn.result and on_difference is not None:
                                on_difference(turn, result)
                    run.waits.seconds.clear()
                async with _limit(self.max_seconds, cancel) as limit:
                    stop_reason = await self._loop(run, on_turn, analyse=analysis is None)
                    error = run.problem
        except PromptTooLong as problem:
            stop_reason, error = StopReason.CONTEXT_OVERFLOW, str(problem)
        except InfrastructureError as problem:
            stop_reason, error = StopReason.INFRASTRUCTURE, str(problem)
            run.answer = None  # there is one where the end of a tool's scope failed
        except BudgetSpent as problem:
            stop_reason, error = StopReason.BUDGET, str(problem)
        except TimeoutError:
            if not limit.expired():
                raise
            stop_reason, error = self._out_of_time(run)
        finally:
            OF_TRAJECTORY.reset(outer)
        return Trajectory(query, run.memory.turns, stop_reason, run.answer, run.analysis, error, self.clock() - started)

    async def _loop(self, run: _Run, on_turn: Callable[[Turn], None] | None, *, analyse: bool) -> StopReason:
        if self.analyst is not None and analyse:
            run.analysis = await self._asked(run, "analyst", self.analyst.analyse, run.query, run.toolset)
        stop_reason = self._stop_reason(run.memory.turns[-1]) if run.memory.turns else None
        while stop_reason is None:
            if run.cancel is not None and run.cancel.is_set():
                return StopReason.CANCELLED
            turn = await self._turn(run)
            run.memory.append(turn)
            if on_turn is not None:
                on_turn(turn)
            stop_reason = self._stop_reason(turn)
        generated = await self._asked(run, "generator", self.generator.generate, run.query, run.memory, run.analysis)
        run.answer, run.problem = generated.answer, generated.problem
        return stop_reason

    async def _turn(self, run: _Run) -> Turn:
        """One pass: plan, execute, verify."""
        started = self.clock()
        query, memory, index = run.query, run.memory, run.memory.next_index
        turns_left = self.max_turns - index + 1
        plan: Plan = await self._asked(
            run, "planner", self.planner.plan, query, run.toolset, memory, turns_left, run.analysis
        )
        action, verification = plan.action, None
        if action is None:
            execution = Execution(None, ToolResult(plan.problem, ErrorKind.INVALID_ACTION))
        elif action.tool == FINISH:
            execution = Execution(ToolCall(FINISH, {}), ToolResult(""))
        else:
            execution = await self._executed(run, action, index)
            verification = await self._asked(
                run,
                "verifier",
                self.verifier.verify,
                query,
                action,
                execution.result,
                memory,
                run.analysis,
                execution.call,
            )
        return _record(index, plan, execution, verification, self.clock() - started)

    def _to_replay(self, history: Sequence[Turn]) -> list[tuple[Turn, ToolCall]]:
        """The turns whose calls left something to their tools; see `run` for what is raised."""
        found = []
        for turn in history:
            call = turn.call
            if call is None or turn.result.error is ErrorKind.CALL_LIMIT:  # nothing was called
                continue
            if call.tool not in self.toolset or self.toolset.holds(call.tool):
                problem = self.toolset.validate(call.tool, call.arguments)
                if problem is not None:
                    raise NotReplayable(f"the call of {call.tool} in turn {turn.index} cannot be made again: {problem}")
                found.append((turn, call))
        return found

    async def _replayed(self, run: _Run, call: ToolCall) -> ToolResult:
        tool = run.toolset.get(call.tool)
        assert tool is not None, "_to_replay lets no other through"
        return await self._asked(None, "executor", call_tool, tool, call.arguments, self.tool_seconds)

    def _stop_reason(self, turn: Turn) -> StopReason | None:
        if turn.action is not None and turn.action.tool == FINISH:
            return StopReason.FINISHED
        if turn.verdict.stop:
            return StopReason.VERIFIED
        return StopReason.MAX_TURNS if turn.index >= self.max_turns else None

    def _out_of_time(self, run: _Run) -> tuple[StopReason, str]:
        """Why the time limit ended a run. One that mostly waited for engines is not to blame."""
        if _is_set(run.cancel):
            return StopReason.CANCELLED, ""
        run.waits.end()
        waited = sum(run.waits.seconds.values())
        if waited <= self.max_seconds / 2:
            return StopReason.MAX_SECONDS, ""
        longest = max(run.waits.seconds, key=run.waits.seconds.__getitem__)
        said = f"{waited:.1f} s had been waited for engines at the time limit, longest by the {longest}"
        return StopReason.INFRASTRUCTURE, said

    async def _executed(self, run: _Run, action: Action, index: int) -> Execution:
        """`_asked` of the executor; until it calls the tool it waits for its engine, if for anything."""
        if self.max_calls is not None and action.tool in run.toolset:
            if calls_of(run.memory.turns).total() >= self.max_calls:
                said = f"the {self.max_calls} calls that one question may have were made; finish with what is known"
                return Execution(None, ToolResult(said, ErrorKind.CALL_LIMIT))
        if self.grounded:
            try:
                action = replace(action, context=resolve(action.context, run.memory.turns))
            except ReferenceNotFound as problem:
                return Execution(None, ToolResult(str(problem), ErrorKind.INVALID_ARGUMENTS))

        async def execute() -> Execution:
            try:
                return await self.executor.execute(
                    action, run.toolset, self.tool_seconds, run.query.seed, index, run.waits.end
                )
            except InfrastructureError as error:
                if not run.waits.of_module:  # the call was made, and may have done what it does; its `retries` are over
                    raise GivenUp(str(error)) from error
                raise

        return await self._asked(run, "executor", execute)

    async def _asked(
        self, run: _Run | None, module: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`call(...)`, again after each infrastructure failure, at most `retries` times; not what gave up itself.

        It counts as waiting of `run` for the module's engine.

        Raises:
            InfrastructureError: the last attempt failed too; the message names the module and the failure.
        """
        if run is not None:
            run.waits.begin(module)
        for attempt in range(self.retries + 1):
            try:
                answer = await call(*args, **kwargs)
            except (EngineGaveUp, GivenUp) as error:
                raise InfrastructureError(f"{module} failed: {error}") from error
            except (EngineError, InfrastructureError) as error:
                if attempt == self.retries:
                    raise InfrastructureError(f"{module} failed {attempt + 1} times: {error}") from error
            else:
                if run is not None:
                    run.waits.end()
                return answer
            await asyncio.sleep(self.backoff * 2**attempt)
        raise ValueError(f"retries={self.retries} must be 0 or more")


def calls_of(turns: Iterable[Turn]) -> Counter[str]:
    """How often each tool was called; what was refused for its limit was not."""
    return Counter(turn.call.tool for turn in turns if turn.call and turn.result.error is not ErrorKind.CALL_LIMIT)


def _record(index: int, plan: Plan, execution: Execution, verification: Verification | None, seconds: float) -> Turn:
    others: tuple[tuple[str, Generation], ...] = ()
    if execution.generation is not None:
        others = (("executor", execution.generation),)
    if verification is not None and verification.generation is not None:
        others += (("verifier", verification.generation),)
    return Turn(
        index,
        plan.generation,
        plan.action,
        execution.call,
        execution.result,
        verification.verdict if verification else UNJUDGED,
        seconds,
        others,
    )


def _is_set(event: asyncio.Event | None) -> bool:
    return event is not None and event.is_set()


def _limit(seconds: float | None, cancel: asyncio.Event | None) -> AbstractAsyncContextManager[asyncio.Timeout]:
    """A timeout that also expires as soon as `cancel` is set."""
    return asyncio.timeout(seconds) if cancel is None else _until(seconds, cancel)


@asynccontextmanager
async def _until(seconds: float | None, cancel: asyncio.Event) -> AsyncIterator[asyncio.Timeout]:
    async with asyncio.timeout(seconds) as limit:
        watcher = asyncio.create_task(_expire(limit, cancel))
        try:
            yield limit
        finally:
            watcher.cancel()


async def _expire(limit: asyncio.Timeout, cancel: asyncio.Event) -> None:
    await cancel.wait()
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())
