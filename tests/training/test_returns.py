"""From groups to weighted rows: signal, shaping, over-long turns, denominators."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as settings_of
from hypothesis import strategies as st

from midflight.agent.types import (
    Action,
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
from midflight.engines.base import FinishReason, Sampling
from midflight.recipe.config import GigpoConfig, ShapingConfig, TrainingConfig
from midflight.tasks.base import Task
from midflight.training.returns import Place, advantages, rows_of, turn_kl, weighted_rows, with_signal
from midflight.training.rollouts import Group
from tests.training import oracle

TASK = Task("t", "Q?", "A")
PLAIN = TrainingConfig()


def trajectory(lengths, stop=StopReason.FINISHED, errors=(), cut=False, prompts=None):
    """Turns of so many tokens, the last of each forced."""
    turns = []
    for index, length in enumerate(lengths, 1):
        drawn = Generation(
            text="x",
            finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
            prompt_ids=(1, 2) if prompts is None else prompts[index - 1],
            ids=tuple(range(length)),
            logprobs=(-1.0,) * length,
            forced=(False,) * (length - 1) + (True,),
            supports=((4, 5),) * length,
            weights_version=7,
            sampling=Sampling(temperature=0.7),
            grammar="g",
        )
        error = errors[index - 1] if errors else None
        turns.append(Turn(index, drawn, Action("", "a", "b"), None, ToolResult("r", error), Verdict(False)))
    return Trajectory(Query("Q?"), tuple(turns), stop, Answer("A"))


def trained(groups, settings=PLAIN):
    return weighted_rows(groups, rows_of(groups), advantages(groups, settings), settings)


def settings(**changes):
    return TrainingConfig(**changes)


def test_rows_weigh_every_trajectory_and_every_turn_alike():
    group = Group(TASK, (trajectory([3]), trajectory([2, 5])), (1.0, 0.0))
    rows = trained([group, group])
    assert [row.advantage for row in rows] == [1.0, -1.0, -1.0] * 2
    # 1 / (2 groups * 2 trajectories * T_i * unforced tokens)
    assert [row.weight for row in rows] == [1 / 8, 1 / 8, 1 / 32] * 2
    assert sum(row.weight * (len(row.ids) - 1) for row in rows) == pytest.approx(1.0)
    assert [row.trajectory for row in rows] == [0, 1, 1, 2, 3, 3]
    assert (rows[0].temperature, rows[0].grammar, rows[0].weights_version) == (0.7, "g", 7)
    assert rows[0].supports == ((4, 5),) * 3


@pytest.mark.parametrize(("weighting", "weights"), [("turn", [1 / 6, 1 / 3, 1 / 12]), ("token", [1 / 7, 1 / 7, 1 / 7])])
def test_other_denominators(weighting, weights):
    group = Group(TASK, (trajectory([3]), trajectory([2, 5])), (1.0, 0.0))
    rows = trained([group], settings(weighting=weighting))
    assert [row.weight for row in rows] == pytest.approx(weights)
    assert sum(row.weight * (len(row.ids) - 1) for row in rows) == pytest.approx(1.0)


lengths = st.lists(st.integers(2, 5), min_size=1, max_size=3)
"""Tokens of each turn, the last of them forced."""


@settings_of(max_examples=20, deadline=None)
@given(
    batch=st.lists(st.lists(lengths, min_size=2, max_size=3), min_size=1, max_size=3),
    weighting=st.sampled_from(["trajectory", "turn", "token"]),
)
def test_weights_equal_the_oracles(batch, weighting):
    groups = [Group(TASK, tuple(map(trajectory, one)), (1.0, *[0.0] * (len(one) - 1))) for one in batch]
    literal = [
        [oracle.Trajectory(0.0, [oracle.Turn([oracle.Token(0.0, 0.0)] * (n - 1)) for n in path]) for path in one]
        for one in batch
    ]
    expected = [
        oracle.weight(literal, group, path, turn, weighting)
        for group in literal
        for path in group
        for turn in path.turns
    ]
    assert [row.weight for row in trained(groups, settings(weighting=weighting))] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("weighting", ["trajectory", "turn", "token"])
def test_groups_without_signal_give_no_rows_and_do_not_count(weighting):
    live = Group(TASK, (trajectory([3]), trajectory([3])), (1.0, 0.0))
    dead = Group(TASK, (trajectory([3]), trajectory([3])), (1.0, 1.0))
    chosen = settings(weighting=weighting)
    assert trained([dead], chosen) == []
    assert trained([live, dead], chosen) == trained([live], chosen)
    assert with_signal([live, dead, live], chosen) == 2


def test_a_group_of_one_outcome_trains_where_the_baseline_is_the_batchs():
    groups = [Group(TASK, (trajectory([3]), trajectory([3])), (reward, reward)) for reward in (1.0, 0.0)]
    chosen = settings(advantage="reinforce_pp")
    assert [row.advantage for row in trained(groups, chosen)] == [1.0, 1.0, -1.0, -1.0]
    assert [row.weight for row in trained(groups, chosen)] == [1 / (2 * 2 * 2)] * 4
    assert trained(groups) == []
    assert [with_signal(some, chosen) for some in (groups, groups[:1], [])] == [2, 0, 0]


def test_a_trajectory_ended_by_infrastructure_is_left_out_of_the_group():
    lost = trajectory([3], StopReason.INFRASTRUCTURE)
    group = Group(TASK, (trajectory([3]), lost, trajectory([3]), trajectory([3])), (1.0, None, 0.0, 0.0))
    (placed,) = advantages([group], PLAIN)
    assert [turns[0] for turns in placed] == pytest.approx([1.4142136, -0.7071068, -0.7071068], abs=1e-6)
    assert [row.weight for row in trained([group])] == [1 / (3 * 2)] * 3


def test_the_number_of_turns_does_not_change_an_advantage():
    rewards = (1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    mixed = Group(TASK, tuple(trajectory([2] * turns) for turns in (1, 1, 3, 3, 3, 3, 3, 3)), rewards)
    (placed,) = advantages([mixed], PLAIN)
    assert placed[0] == pytest.approx([1.7320508]) and placed[7] == pytest.approx([-0.5773503] * 3)
    (wrong,) = advantages([mixed], settings(advantage="turn_normalised"))
    assert wrong[0] == pytest.approx([2.92], abs=0.005)


def test_a_turn_all_forced_trains_nothing_and_still_counts_as_a_turn():
    group = Group(TASK, (trajectory([1, 3]), trajectory([3])), (1.0, 0.0))
    assert list(rows_of([group])) == [Place(0, 0, 1), Place(0, 1, 0)]
    assert [row.weight for row in trained([group])] == [1 / (2 * 2 * 2), 1 / (2 * 2)]


def test_a_turn_in_two_runs_of_free_tokens_is_one_turn():
    """Where the forced tokens lie changes nothing: each free token weighs 1 / (G * T_i * |a|), |a| the free ones."""

    def group(*forced):
        one = trajectory([len(forced)])
        drawn = replace(one.turns[0].generation, forced=forced)
        return Group(
            TASK, (replace(one, turns=(replace(one.turns[0], generation=drawn),)), trajectory([3])), (1.0, 0.0)
        )

    whole, split = trained([group(False, False, False, True)]), trained([group(False, True, False, False)])
    assert [row.weight for row in whole] == [row.weight for row in split] == [1 / (2 * 3), 1 / (2 * 2)]
    assert trained([group(True, False, True, True)])[0].weight == 1 / 2


def test_shaping_costs_are_taken_off_before_the_mean():
    shaping = ShapingConfig(tool_error=0.5, format_error=0.25, length=0.01, turn=0.1)
    failed = trajectory([3, 3], errors=[ErrorKind.TOOL_ERROR, ErrorKind.INVALID_ACTION])
    group = Group(TASK, (failed, trajectory([3])), (1.0, 1.0))
    chosen = settings(shaping=shaping, advantage="dr_grpo")
    # 1 - (0.5 + 0.25 + 4 * 0.01 + 0.2) = 0.01 and 1 - (2 * 0.01 + 0.1) = 0.88
    assert advantages([group], chosen) == [[pytest.approx([-0.435, -0.435]), pytest.approx([0.435])]]
    assert with_signal([group], chosen) == 1 and with_signal([group], PLAIN) == 0


def test_equal_costs_in_other_turns_leave_a_group_without_signal():
    """59 drawn tokens each: the two totals differ in their last bit, which neither trains nor lets the KL be scaled."""
    shaping = ShapingConfig(length=0.001)
    group = Group(TASK, (trajectory([21, 40]), trajectory([23, 38])), (1.0, 1.0))
    assert trained([group], settings(shaping=shaping)) == []
    chosen = settings(shaping=shaping, kl_in="reward", kl_estimate="k1")
    rows = {
        place: replace(row, reference=tuple(value - 1e-3 * place.trajectory for value in row.logprobs))
        for place, row in rows_of([group]).items()
    }
    assert advantages([group], chosen, rows) == [[[0.0, 0.0]] * 2]
    assert trained([Group(TASK, (trajectory([21, 40]), trajectory([24, 38])), (1.0, 1.0))], settings(shaping=shaping))


sixteenths = st.sampled_from([0.0, 0.0625, 0.25])
a_turn = st.builds(
    oracle.Turn,
    tokens=st.lists(
        st.builds(oracle.Token, new=st.just(-1.0), drawn=st.just(-1.0), ref=st.sampled_from([-1.0, -1.5, -3.0])),
        min_size=1,
        max_size=3,
    ),
    invalid=st.booleans(),
    failed=st.booleans(),
    cut=st.sampled_from([False, False, True]),
)
a_path = st.builds(
    oracle.Trajectory, reward=st.sampled_from([0.0, 1.0]), turns=st.lists(a_turn, min_size=1, max_size=2)
)


def ours(path):
    """A literal trajectory as one of the agent's."""
    errors = [
        ErrorKind.INVALID_ACTION if one.invalid else ErrorKind.TOOL_ERROR if one.failed else None for one in path.turns
    ]
    made = trajectory([len(one.tokens) + 1 for one in path.turns], errors=errors)
    reasons = [FinishReason.LENGTH if one.cut else FinishReason.STOP for one in path.turns]
    turns = [
        replace(turn, generation=replace(turn.generation, finish_reason=reason))
        for turn, reason in zip(made.turns, reasons, strict=True)
    ]
    return replace(made, turns=tuple(turns))


@pytest.mark.parametrize("overlong", ["keep", "mask", "penalise"])
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@settings_of(max_examples=15, deadline=None)
@given(
    literal=st.lists(st.lists(a_path, min_size=2, max_size=3), min_size=1, max_size=2),
    costs=st.fixed_dictionaries(dict.fromkeys(("tool_error", "format_error", "length", "turn"), sixteenths)),
    name=st.sampled_from(["flow_grpo", "dr_grpo", "rloo", "reinforce_pp", "turn_normalised"]),
    kl_estimate=st.sampled_from(["k1", "k2"]),
    weighting=st.sampled_from(["trajectory", "turn", "token"]),
)
def test_shaping_penalties_masks_and_the_kl_equal_the_oracles(
    overlong, kl_in, literal, costs, name, kl_estimate, weighting
):
    """All costs are sixteenths, so that sums are exact and a group has signal in both or in none."""
    if kl_in == "reward":
        name = "dr_grpo"  # those that divide by a std take no KL alone
    chosen = settings(
        shaping=ShapingConfig(**costs),
        overlong=overlong,
        overlong_penalty=0.5,
        advantage=name,
        weighting=weighting,
        kl_beta=0.125,
        kl_in=kl_in,
        kl_estimate=kl_estimate,
    )
    groups = [Group(TASK, tuple(map(ours, group)), tuple(one.reward for one in group)) for group in literal]
    rows = {
        place: replace(
            row,
            reference=(*(one.ref for one in literal[place.group][place.trajectory].turns[place.turn].tokens), 0.0),
        )
        for place, row in rows_of(groups).items()
    }
    found = weighted_rows(groups, rows, advantages(groups, chosen, rows), chosen)

    penalty, beta = 0.5 if overlong == "penalise" else 0.0, 0.125 if kl_in == "reward" else 0.0
    paid = [[oracle.shaped(one, costs, penalty, beta, kl_estimate) for one in group] for group in literal]

    def placed(g, i, t):
        return oracle.advantage(paid, g, i, t, name)

    live = [g for g, group in enumerate(paid) if any(abs(placed(g, i, 0)) > 1e-9 for i in range(len(group)))]
    expected = [
        (placed(g, i, t), oracle.weight([paid[one] for one in live], paid[g], path, turn, weighting))
        for g in live
        for i, path in enumerate(paid[g])
        if not (overlong == "mask" and oracle.overlong(path))
        for t, turn in enumerate(path.turns)
    ]
    assert [row.advantage for row in found] == pytest.approx([one for one, _ in expected], abs=1e-9)
    assert [row.weight for row in found] == pytest.approx([one for _, one in expected], rel=1e-12)


def test_an_overlong_trajectory_is_kept_masked_or_penalised():
    cut, full = trajectory([3], cut=True), trajectory([3])
    crowded = trajectory([3], stop=StopReason.CONTEXT_OVERFLOW)
    group = Group(TASK, (cut, full, crowded, full), (1.0, 1.0, 0.0, 0.0))
    assert [row.advantage for row in trained([group])] == [1.0, 1.0, -1.0, -1.0]
    masked = trained([group], settings(overlong="mask"))
    assert [(row.advantage, row.trajectory, row.weight) for row in masked] == [(1.0, 1, 1 / 8), (-1.0, 3, 1 / 8)]
    penalised = settings(overlong="penalise", overlong_penalty=2.0, advantage="dr_grpo")
    assert [row.advantage for row in trained([group], penalised)] == [-0.5, 1.5, -1.5, 0.5]


@pytest.mark.parametrize(("weighting", "weight"), [("trajectory", 1 / 8), ("turn", 1 / 10), ("token", 1 / 10)])
def test_one_turn_that_was_cut_off_makes_a_trajectory_overlong_and_it_counts_in_the_denominators(weighting, weight):
    cut = trajectory([3, 3])
    last = replace(cut.turns[1].generation, finish_reason=FinishReason.LENGTH)
    cut = replace(cut, turns=(cut.turns[0], replace(cut.turns[1], generation=last)))
    full = trajectory([3])
    group = Group(TASK, (cut, full, full, full), (0.0, 1.0, 1.0, 0.0))
    masked = trained([group], settings(overlong="mask", weighting=weighting))
    assert [row.trajectory for row in masked] == [1, 2, 3]
    assert [row.weight for row in masked] == pytest.approx([weight] * 3)


def test_turns_without_a_choice_do_not_count_among_turns():
    group = Group(TASK, (trajectory([1, 3]), trajectory([3])), (1.0, 0.0))
    assert [row.weight for row in trained([group], settings(weighting="turn"))] == [1 / (2 * 2)] * 2


def test_gigpo_places_advantages_on_turns_by_their_prompts():
    won = trajectory([3, 3], prompts=[(1,), (1, 2)])
    lost = trajectory([3, 3], prompts=[(1,), (1, 3)])
    chosen = settings(advantage="gigpo", gigpo=GigpoConfig(step_weight=0.5, discount=1.0))
    rows = trained([Group(TASK, (won, lost), (1.0, 0.0))], chosen)
    assert [row.advantage for row in rows] == [1.5, 1.0, -1.5, -1.0]
    late = Group(TASK, (trajectory([3], prompts=[(1,)]), trajectory([3, 3], prompts=[(1,), (1, 2)])), (1.0, 1.0))
    assert with_signal([late], settings(advantage="gigpo")) == 1  # the outcome is the same, and comes a turn later


def test_kl_in_the_reward_is_a_cost_of_the_turn():
    group = Group(TASK, (trajectory([3]), trajectory([3])), (1.0, 1.0))
    chosen = settings(kl_in="reward", kl_estimate="k1", kl_beta=0.1, advantage="dr_grpo")
    rows = rows_of([group])
    for place, reference in ((Place(0, 0, 0), (-3.0, -2.0, 0.0)), (Place(0, 1, 0), (-1.0, -1.0, 0.0))):
        rows[place] = replace(rows[place], reference=reference)
    assert turn_kl(rows[Place(0, 0, 0)], chosen) == pytest.approx(0.1 * (2.0 + 1.0))
    placed = advantages([group], chosen, rows)
    assert placed == [[pytest.approx([-0.15]), pytest.approx([0.15])]]
    assert advantages([group], settings(advantage="dr_grpo"), rows) == [[[0.0], [0.0]]]


@pytest.mark.parametrize("advantage", ["flow_grpo", "turn_normalised", "reinforce_pp"])
def test_kl_in_the_reward_is_not_scaled_to_full_strength_where_nothing_else_differs(advantage):
    def scored(*rewards):
        return Group(TASK, tuple(trajectory([3, 3]) for _ in rewards), rewards)

    chosen = settings(kl_in="reward", kl_estimate="k1", kl_beta=0.001, advantage=advantage)

    def of(*groups):
        rows = {
            place: replace(row, reference=tuple(value - 1e-6 * place.trajectory for value in row.logprobs))
            for place, row in rows_of(groups).items()
        }
        return advantages(groups, chosen, rows)

    assert of(scored(1.0, 1.0)) == [[[0.0, 0.0]] * 2]
    live, alike = of(scored(1.0, 0.0), scored(1.0, 1.0))
    assert live[0][0] > 0.5 > 0 > live[1][0]
    if advantage == "reinforce_pp":  # it compares with the batch, which differs
        assert alike[0] == pytest.approx([1 / 3**0.5] * 2, abs=1e-6) and alike[0] > alike[1]
    else:
        assert alike == [[0.0, 0.0]] * 2
