"""Credit on trajectories whose decisive turn is known."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest
from matplotlib.figure import Figure

from midflight.agent import AgentFlow, Query, StopReason, Trajectory, Turn
from midflight.agent.prompting import request_seed
from midflight.engines.base import EngineError, GenerateRequest
from midflight.evaluation import (
    GroupValue,
    TrajectoryCredit,
    TurnCredit,
    bootstrap_mean,
    difference,
    group_credit,
    monte_carlo_credit,
    wilson,
    write_credit_plot,
)
from midflight.evaluation.credit import Change, turn_credits
from midflight.evaluation.plots import draw_credit
from midflight.evaluation.statistics import Estimate
from midflight.rewards import score
from midflight.seeds import derive
from midflight.store import TrajectoryRecord
from midflight.tasks.base import Task
from tests.agent.doubles import BoxTool, LookupTool, compact_flow, user_parts
from tests.evaluation.build import trajectory, turn

DOORS = Task("doors", "What is behind the door?", "gold")
LOOK = LookupTool("look", {"map": "two doors"})
DOOR = LookupTool("door", {"left": "gold", "right": "stone"})


def record(made: Trajectory, reward: float | None, number: int = 1, **changes: object) -> TrajectoryRecord:
    stored = TrajectoryRecord(
        id=number,
        run_id=1,
        phase="train",
        step=3,
        group=DOORS.id,
        member=number,
        task=DOORS,
        trajectory=made,
        reward=reward,
        advantage=None,
    )
    return replace(stored, **changes)  # type: ignore[arg-type]


def opened_left(seed: int | None, share: float) -> bool:
    return Random(seed).random() < share


def doors(share: float, lost: float = 0.0) -> AgentFlow:
    """Looks at the map, then opens the left door with probability `share`, then finishes; the door decides.

    With probability `lost` the engine fails where it should finish.
    """

    def act(request: GenerateRequest) -> str | Exception:
        number = len(user_parts(request)) - 1
        if number == 1:
            return "look: map"
        if number == 2:
            return f"door: {'left' if opened_left(request.sampling.seed, share) else 'right'}"
        return EngineError("down") if opened_left(request.sampling.seed, lost) else "finish"

    return compact_flow(act, LOOK, DOOR, retries=0)[0]


def one(flow: AgentFlow, door: str) -> TrajectoryRecord:
    """A trajectory that opened `door`."""
    for seed in range(100):
        made = asyncio.run(flow.run(Query(DOORS.question, DOORS.id, seed)))
        if len(made.turns) == 3 and made.turns[1].action and made.turns[1].action.context == door:
            return record(made, float(door == "left"))
    raise AssertionError(f"never opened {door}")


def credited(flow: AgentFlow, of: TrajectoryRecord, n: int = 64, seed: int = 5, **more: object) -> TrajectoryCredit:
    return asyncio.run(monte_carlo_credit(flow, of, continuations=n, score=score, seed=seed, **more))  # type: ignore[arg-type]


def share_of_left(done: int, n: int, seed: int) -> float:
    """What the flow above draws in turn 2 with the seeds that the continuations have by contract."""
    seeds = (request_seed(derive(seed, "credit", done, number), "planner", 2) for number in range(n))
    return sum(opened_left(value, 0.5) for value in seeds) / n


@pytest.mark.parametrize(("door", "reward"), [("left", 1.0), ("right", 0.0)])
def test_the_turn_that_opens_the_door_is_the_turning_point(door: str, reward: float) -> None:
    flow = doors(0.5)
    found = credited(flow, one(flow, door))
    first, second, third = found.turns
    assert [value.turn for value in found.turns] == [1, 2, 3]
    for value, done in ((first, 0), (second, 1)):
        mean = share_of_left(done, 64, 5)
        assert value.before == Estimate(mean, *wilson(mean, 64), 64)
    assert first.before != second.before  # seeds differ by state
    assert second.after == third.before == Estimate(reward, *wilson(reward, 64), 64)
    assert third.after == Estimate(reward, reward, reward, 0)
    assert found.turning_point is second
    assert second.change is not None and second.before is not None
    assert second.change.mean == reward - second.before.mean
    assert first.change is not None and not first.change.decided
    assert third.change is not None and third.change.mean == 0.0 and not third.change.decided
    assert credited(flow, one(flow, door)) == found
    assert credited(flow, one(flow, door), seed=6) != found


def test_changes_add_up_to_the_reward_less_the_value_of_the_start() -> None:
    flow = doors(0.5)
    for door in ("left", "right"):
        found = credited(flow, one(flow, door), n=10)
        changes = [value.change.mean for value in found.turns if value.change]
        start = found.turns[0].before
        assert start is not None and sum(changes) == pytest.approx(found.reward - start.mean, abs=1e-12)


def test_a_policy_that_always_wins_lost_all_with_the_one_wrong_turn() -> None:
    wrong = one(doors(0.5), "right")
    found = credited(doors(1.0), wrong, n=16)
    before, after = Estimate(1.0, *wilson(1.0, 16), 16), Estimate(0.0, *wilson(0.0, 16), 16)
    assert [value.before for value in found.turns] == [before, before, after]
    assert [value.change and value.change.mean for value in found.turns] == [0.0, -1.0, 0.0]
    assert found.turning_point is found.turns[1]
    assert found.to_json()["turning_point"] == 2
    right = credited(doors(1.0), one(doors(1.0), "left"), n=16)
    assert right.turning_point is None and right.to_json()["turning_point"] is None
    assert [value.change and value.change.mean for value in right.turns] == [0.0, 0.0, 0.0]


def boxes(share: float, box: BoxTool | None = None) -> AgentFlow:
    """Puts gold into the box; stone over it or, with probability `share`, looks at the map; then sees, and finishes."""

    def act(request: GenerateRequest) -> str:
        number = len(user_parts(request)) - 1
        if number == 2:
            return "look: map" if opened_left(request.sampling.seed, share) else "box: put stone"
        return {1: "box: put gold", 3: "box: see", 4: "finish"}[number]

    return compact_flow(act, box or BoxTool(), LOOK)[0]


def one_box(share: float) -> TrajectoryRecord:
    made = asyncio.run(boxes(share).run(Query(DOORS.question, DOORS.id, 1)))
    assert made.answer is not None
    return record(made, score(DOORS, made.answer.text))


def test_what_a_tool_holds_is_in_the_state() -> None:
    """The box decides: from each state a continuation has in it what the trajectory had put there."""
    right = credited(boxes(1.0), one_box(1.0), n=16)
    assert right.reward == 1.0 and right.turning_point is None
    assert [value.before and value.before.mean for value in right.turns] == [1.0] * 4
    wrong = credited(boxes(1.0), one_box(0.0), n=16)
    assert wrong.reward == 0.0 and wrong.turning_point is wrong.turns[1]
    assert [value.before and value.before.mean for value in wrong.turns] == [1.0, 1.0, 0.0, 0.0]
    even = credited(boxes(0.5), one_box(1.0))
    assert even.turning_point is even.turns[1]
    means = [share_of_left(done, 64, 5) for done in (0, 1)]
    assert [value.before and value.before.mean for value in even.turns] == [*means, 1.0, 1.0]
    assert [value.differing for value in (*right.turns, *wrong.turns, *even.turns)] == [0] * 12


def test_calls_that_gave_another_result_when_made_again_are_counted_by_turn() -> None:
    found = credited(boxes(0.0, BoxTool(extra="!")), one_box(0.0), n=5)
    assert [value.differing for value in found.turns] == [15, 10, 5, 0]
    assert [value["differing"] for value in found.to_json()["turns"]] == [15, 10, 5, 0]


def test_infrastructure_failures_are_left_out_and_counted() -> None:
    flow, n = doors(0.5, lost=0.3), 40
    found = credited(flow, one(flow, "left"), n=n, seed=1)

    def fails(done: int, number: int) -> bool:
        return opened_left(request_seed(derive(1, "credit", done, number), "planner", 3), 0.3)

    lost = [sum(fails(done, number) for number in range(n)) for done in range(3)]
    assert all(5 < count < 20 for count in lost)
    assert [value.lost for value in found.turns] == lost and found.lost == sum(lost)
    assert [value.before and value.before.n for value in found.turns] == [n - count for count in lost]
    assert found.turns[2].before == Estimate(1.0, *wilson(1.0, n - lost[2]), n - lost[2])

    last = credited(doors(0.5, lost=1.0), one(flow, "left"), n=4)
    assert [(value.before, value.change, value.lost) for value in last.turns] == [(None, None, 4)] * 3
    assert last.turning_point is None and last.lost == 12
    assert last.turns[2].after == Estimate(1.0, 1.0, 1.0, 0)


@dataclass
class Watched:
    """Notes what each continuation began with and how many ran at once; odd ones have no answer."""

    running: int = 0
    most: int = 0
    begun: list[tuple[int, str | None, int | None, str]] = field(default_factory=list)

    async def run(self, query: Query, *, history: Sequence[Turn], analysis: str | None, **_: object) -> Trajectory:
        self.begun.append((len(history), analysis, query.seed, query.id))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        return trajectory(*history, answer="gold" if len(self.begun) % 2 else None)


THREE = replace(
    trajectory(turn(1, "look", "map"), turn(2, "door", "left"), turn(3, "finish")),
    query=Query("Q?", "q", 99),
    analysis="of it",
)


@pytest.mark.parametrize(("concurrency", "most"), [(100, 15), (4, 4), (1, 1)])
def test_all_states_are_continued_at_once_within_the_bound(concurrency: int, most: int) -> None:
    flow, done = Watched(), list[Trajectory]()
    credited(flow, record(THREE, 1.0), n=5, seed=2, concurrency=concurrency, on_done=done.append)  # type: ignore[arg-type]
    assert flow.most == most and len(done) == 15
    expected = [
        (before, "of it", derive(2, "credit", before, number), "q") for before in range(3) for number in range(5)
    ]
    assert flow.begun == expected
    assert len({seed for _, _, seed, _ in flow.begun}) == 15


def test_no_answer_is_scored_as_none_and_a_fault_of_the_scorer_is_raised_as_it_is() -> None:
    asked: list[str | None] = []

    def keep(task: Task, answer: str | None) -> float:
        asked.append(answer)
        return 0.0

    asyncio.run(monte_carlo_credit(Watched(), record(THREE, 1.0), continuations=2, score=keep, concurrency=1))
    assert asked.count(None) == 3 and asked.count("gold") == 3

    def broken(task: Task, answer: str | None) -> float:
        raise KeyError("no such checker")

    with pytest.raises(KeyError, match="no such checker"):
        asyncio.run(monte_carlo_credit(Watched(), record(THREE, 1.0), score=broken))


@pytest.mark.parametrize(
    ("of", "settings", "message"),
    [
        (record(THREE, None), {}, "trajectory 1 has no turns or no reward"),
        (record(replace(THREE, stop_reason=StopReason.INFRASTRUCTURE), 0.0), {}, "no turns or no reward"),
        (record(replace(THREE, turns=()), 1.0), {}, "no turns or no reward"),
        (record(THREE, 1.0), {"n": 0}, "continuations=0"),
        (record(THREE, 1.0), {"concurrency": 0}, "concurrency=0"),
    ],
)
def test_what_has_no_credit_is_refused(of: TrajectoryRecord, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        credited(Watched(), of, **settings)  # type: ignore[arg-type]


def cheap(reward: float, turns: int) -> TrajectoryCredit:
    return TrajectoryCredit(1, reward, tuple(TurnCredit(number, None, None) for number in range(1, turns + 1)))


def test_intervals_of_changes_hold_for_all_turns_together() -> None:
    found = turn_credits(cheap(0.0, 2), [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0]])
    assert found.turns[0].before == Estimate(0.5, *wilson(0.5, 4), 4)
    last = found.turns[1].change
    assert last is not None  # Wilson at 0.975 for 2 of 4: 0.126927 to 0.873073
    assert (last.mean, last.low, last.high) == pytest.approx((-0.5, -0.873073, -0.126927), abs=1e-6)
    first = found.turns[0].change
    width = 2**0.5 * 0.373073
    assert first is not None and (first.mean, first.low, first.high) == pytest.approx((0.0, -width, width), abs=1e-6)
    single = turn_credits(cheap(0.0, 1), [[1.0, 0.0, 1.0, 0.0]]).turns[0].change
    low, high = wilson(0.5, 4)
    assert single is not None and (single.low, single.high) == pytest.approx((-high, -low))


def test_rewards_of_another_scale_get_bootstrap_intervals() -> None:
    states = [[-2.0, 3.0, 3.0, -2.0, 3.0], [3.0, 3.0, -2.0, 3.0, 3.0]]
    found = turn_credits(cheap(3.0, 2), states)
    for value, rewards in zip(found.turns, states, strict=True):
        assert value.before == Estimate(sum(rewards) / 5, *bootstrap_mean(rewards), 5)
    wider = [(sum(rewards) / 5, *bootstrap_mean(rewards, confidence=0.975)) for rewards in states]
    change = found.turns[0].change
    assert change is not None and (change.low, change.high) == difference(wider[1], wider[0])
    assert change.mean == 1.0
    fractions = turn_credits(cheap(0.5, 1), [[0.25, 0.75]]).turns[0]
    assert fractions.before == Estimate(0.5, *wilson(0.5, 2), 2)


def test_the_turning_point_is_the_first_of_the_largest_decided_changes() -> None:
    def of(*changes: Change | None) -> TurnCredit | None:
        turns = (TurnCredit(place, None, None, change=change) for place, change in enumerate(changes, start=1))
        return TrajectoryCredit(1, 1.0, tuple(turns)).turning_point

    small, large, wide = Change(0.2, 0.1, 0.3), Change(-0.4, -0.6, -0.1), Change(0.9, -0.1, 1.0)
    assert of(small, wide, large, Change(0.4, 0.1, 0.6)) == TurnCredit(3, None, None, change=large)
    assert of(wide, None) is None
    assert of(Change(1e-17, 1e-17, 1e-17)) is None


def prompted(*prompts: tuple[int, ...], stop: StopReason = StopReason.FINISHED) -> Trajectory:
    turns = [turn(number, "look", "map") for number in range(1, len(prompts) + 1)]
    pairs = zip(turns, prompts, strict=True)
    return trajectory(
        *(replace(made, generation=replace(made.generation, prompt_ids=ids)) for made, ids in pairs), stop=stop
    )


START, A, B = (1,), (1, 2), (1, 3)


def test_group_credit_by_hand() -> None:
    members = [
        record(prompted(START, A, (9,)), 1.0, 1),
        record(prompted(START, A, (8,)), 0.0, 2),
        record(prompted(START, A), 1.0, 3),
        record(prompted(START, B), 0.5, 4),
        record(prompted(START, B, stop=StopReason.INFRASTRUCTURE), 0.0, 5),
        record(prompted(START), None, 6),
        record(prompted(START, A), 0.0, 7, step=4),
        record(prompted(START, A), 0.0, 8, phase="interrupted"),
        record(prompted(START, A), 0.0, 9, group="another"),
        record(prompted(START, A), 0.0, 10, run_id=2),
    ]
    found = group_credit([*members, members[0]])
    assert sorted(found) == [1, 2, 3, 4, 7, 8, 9, 10]
    start, after_a = GroupValue(2.5 / 4, 4), GroupValue(2.0 / 3, 3)
    assert found[1].turns == (
        TurnCredit(1, start, after_a),
        TurnCredit(2, after_a, GroupValue(1.0, 1)),
        TurnCredit(3, GroupValue(1.0, 1), GroupValue(1.0, 1)),
    )
    assert [value.group_change for value in found[1].turns] == pytest.approx([1 / 24, 1 / 3, 0.0])
    assert found[3].turns[1] == TurnCredit(2, after_a, GroupValue(1.0, 1))
    assert found[4].turns == (
        TurnCredit(1, start, GroupValue(0.5, 1)),
        TurnCredit(2, GroupValue(0.5, 1), GroupValue(0.5, 1)),
    )
    assert found[7].turns[0].group_before == GroupValue(0.0, 1)
    assert (found[4].reward, found[4].trajectory, found[4].turning_point) == (0.5, 4, None)


def test_turns_at_the_same_prompt_but_another_place_and_turns_without_ids_share_no_state() -> None:
    found = group_credit([record(prompted(START, START), 1.0, 1), record(prompted((), START), 0.0, 2)])
    assert [value.group_before for value in found[1].turns] == [GroupValue(1.0, 1), GroupValue(0.5, 2)]
    assert [value.group_before for value in found[2].turns] == [None, GroupValue(0.5, 2)]
    assert [value.group_change for value in found[2].turns] == [None, -0.5]


def test_continuations_come_with_the_groups_estimates() -> None:
    of, other = record(prompted(START, A), 1.0, 1), record(prompted(START, B), 0.0, 2)
    for group in ([other], [other, of]):
        found = credited(Watched(), of, n=2, group=group)  # type: ignore[arg-type]
        assert [value.group_before for value in found.turns] == [GroupValue(0.5, 2), GroupValue(1.0, 1)]
    assert credited(Watched(), of, n=2).turns[0].group_before == GroupValue(1.0, 1)  # type: ignore[arg-type]


def drawn(found: TrajectoryCredit, actions: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    axes = Figure().add_subplot()
    draw_credit(axes, found, actions)
    assert [label.get_text() for label in axes.get_xticklabels()][:2] == ["start", f"turn 1\n{actions[0]}"]
    return {
        str(line.get_label()): [(float(x), float(y)) for x, y in line.get_xydata()]
        for line in axes.get_lines()
        if not str(line.get_label()).startswith("_")
    }


def test_the_plot_shows_states_group_and_turning_point(tmp_path: Path) -> None:
    of = record(prompted(START, A), 0.0, 1)
    found = turn_credits(group_credit([of, record(prompted(START, B), 1.0, 2)])[1], [[1.0] * 16, [0.0] * 16])
    assert drawn(found, ["look: map", "finish"]) == {
        "continuations": [(0.0, 1.0), (1.0, 0.0), (2.0, 0.0)],
        "group": [(0.0, 0.5), (1.0, 0.0), (2.0, 0.0)],
        "turning point": [(0.0, 1.0), (1.0, 0.0)],
    }
    assert set(drawn(group_credit([of])[1], ["look: map", "finish"])) == {"group"}
    assert set(drawn(turn_credits(cheap(1.0, 1), [[1.0]]), ["a"])) == {"continuations"}
    constant = turn_credits(cheap(3.3, 1), [[3.3] * 3])  # no width: no error bar may be negative
    write_credit_plot(tmp_path / "c.png", constant, [r"python: $x_$ \frac{"])
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
