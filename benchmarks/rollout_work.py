"""The work of one step's rollout: recorded in the live agent, so that other engines can do the same work.

Invariant: whoever replays a `Workload` continues the same prompts for as many tokens as were drawn live, all
trajectories at once, and turn t + 1 of a trajectory only after its turn t.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rollout_cost import Forwards, counting

from midflight.agent.types import StopReason
from midflight.building import assemble, check_prompt_fits, local_engine, toolset_of
from midflight.engines.base import Engine, GenerateRequest, Generation
from midflight.engines.local import LocalEngine
from midflight.engines.local.batch_invariant import make_batch_invariant
from midflight.errors import UserError
from midflight.evaluation.held_out import file_tasks
from midflight.loading import load_named
from midflight.recipe import Recipe
from midflight.rewards import score
from midflight.seeds import derive
from midflight.training.data import ListSource, TaskStream, atlas_source
from midflight.training.rollouts import collect

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One request of a trajectory and what was drawn for it; `forced` of the `ids` were the grammar's only choice."""

    request: GenerateRequest
    prompt: Ids
    ids: Ids
    forced: int = 0


@dataclass(frozen=True)
class Workload:
    """The calls of each trajectory, in order."""

    trajectories: tuple[tuple[Call, ...], ...]

    @property
    def calls(self) -> list[Call]:
        return [call for calls in self.trajectories for call in calls]

    @property
    def drawn(self) -> int:
        return sum(len(call.ids) for call in self.calls)

    def waves(self) -> list[list[Call]]:
        """The first calls of all trajectories, then the second ones of those that have one, and so on."""
        longest = max(map(len, self.trajectories), default=0)
        return [[calls[turn] for calls in self.trajectories if turn < len(calls)] for turn in range(longest)]

    def tokens(self) -> dict[str, int]:
        """How many tokens it takes.

        `total` is what computing each call by itself takes, prompt and drawn; `unique` counts each distinct beginning
        once, the least that sharing can leave; the `prompt_` ones leave out what was drawn.
        """
        prompts = [call.prompt for call in self.calls]
        whole = [call.prompt + call.ids for call in self.calls]
        return {
            "drawn_tokens": self.drawn,
            "forced_tokens": sum(call.forced for call in self.calls),
            "prompt_tokens_total": sum(map(len, prompts)),
            "prompt_tokens_unique": unique_tokens(prompts),
            "total_tokens": sum(map(len, whole)),
            "unique_tokens": unique_tokens(whole),
        }


@dataclass(frozen=True)
class Timing:
    """One pass over the work."""

    seconds: float
    tokens: int
    """Drawn."""
    reused: int | None = None
    """Prompt tokens that a prefix cache served, where the engine counts them."""

    @property
    def rate(self) -> float:
        """Drawn tokens a second."""
        return self.tokens / self.seconds


def unique_tokens(sequences: Iterable[Ids]) -> int:
    """Nodes of the prefix tree of `sequences`: a token counts once for each distinct path that ends in it."""
    count, before = 0, ()
    for ids in sorted(sequences):
        shared = 0
        while shared < min(len(before), len(ids)) and before[shared] == ids[shared]:
            shared += 1
        count += len(ids) - shared
        before = ids
    return count


@dataclass
class Recorder:
    """An engine that passes everything on to `engine` and keeps it, by the task that asked: a trajectory is one."""

    engine: Engine
    _calls: dict[asyncio.Task[object] | None, list[Call]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def context_length(self) -> int:
        return self.engine.context_length

    def count_tokens(self, text: str) -> int:
        return self.engine.count_tokens(text)

    async def generate(self, request: GenerateRequest) -> Generation:
        calls = self._calls.setdefault(asyncio.current_task(), [])
        found = await self.engine.generate(request)
        calls.append(Call(request, found.prompt_ids, found.ids, sum(found.forced)))
        return found

    @property
    def work(self) -> Workload:
        """What was asked so far; trajectories in the order of their first call."""
        return Workload(tuple(map(tuple, self._calls.values())))


async def replay(work: Workload, continue_: Callable[[Call], Awaitable[int]]) -> Timing:
    """Do `work` again: `continue_` takes one call and gives the number of tokens it drew."""

    async def one(calls: Sequence[Call]) -> int:
        return sum([await continue_(call) for call in calls])

    began = time.perf_counter()
    drawn = await asyncio.gather(*(one(calls) for calls in work.trajectories))
    return Timing(time.perf_counter() - began, sum(drawn))


class Rollout:
    """The first step's rollout of `recipe`, on the CPU: its questions, seeds and untrained weights.

    Each pass gets an engine of its own from `engine`, so that nothing is known from the pass before: no prefix, no
    compiled grammar, no tokenised text.
    """

    def __init__(self, recipe: Recipe, loaded: object = None) -> None:
        self.recipe = recipe
        self.toolset = toolset_of(recipe)
        self.loaded = loaded or load_named(recipe, recipe.model.name)
        wanted = recipe.train_tasks
        if wanted.family == "atlas":
            source = atlas_source(wanted.split, wanted.kinds)
        else:
            source = ListSource(file_tasks(wanted), recipe.seed)
        stream = TaskStream(source, recipe.seed, recipe.training.curriculum, recipe.training.most_queries)
        self.tasks = stream.draw(1, 0, recipe.training.queries_per_step)

    def engine(self) -> LocalEngine:
        """An engine that has seen nothing and draws as for a trainer; close it."""
        engine = local_engine(self.recipe, self.loaded)
        engine.exact = make_batch_invariant(self.loaded.model)
        return engine

    def live(self, engine: LocalEngine) -> tuple[Timing, Workload]:
        """Run the agent.

        Raises:
            UserError: the prompt does not fit.
            RuntimeError: a trajectory ended by infrastructure; its time would mean nothing.
        """
        recorder = Recorder(engine)
        flow = assemble(self.recipe, self.toolset, recorder, recorder, training=True)
        check_prompt_fits(self.recipe, flow, engine)
        seed = derive(self.recipe.seed, "rollouts", 1, 0)
        began = time.perf_counter()
        groups = asyncio.run(collect(flow, self.tasks, self.recipe.training.group_size, score, seed))
        seconds = time.perf_counter() - began
        for one in (trajectory for group in groups for trajectory in group.trajectories):
            if one.stop_reason is StopReason.INFRASTRUCTURE:
                raise RuntimeError(f"a trajectory ended by infrastructure: {one.error}")
        work = recorder.work
        if not work.calls:
            raise UserError("the rollout asked no language model: there is nothing to measure")
        return Timing(seconds, work.drawn), work

    def counted(self) -> tuple[Timing, Workload, Forwards]:
        """Run the agent on an engine of its own, and count the forwards."""
        engine = self.engine()
        try:
            with counting(self.loaded.model) as forwards:
                timing, work = self.live(engine)
        finally:
            engine.close()
        return timing, work, forwards

    def again(self, engine: LocalEngine, work: Workload) -> Timing:
        """Replay `work` with its grammars and seeds: unless rounding flips a draw, the same tokens are drawn."""

        async def continue_(call: Call) -> int:
            return len((await engine.generate(call.request)).ids)

        return asyncio.run(replay(work, continue_))
