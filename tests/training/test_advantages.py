import pytest
from hypothesis import given
from hypothesis import strategies as st

from midflight.training.advantages import (
    Outcome,
    carries,
    dr_grpo,
    estimate,
    flow_grpo,
    gigpo,
    has_signal,
    reinforce_pp,
    rloo,
    turn_normalised,
)
from tests.training import oracle


def test_two_right_of_eight_give_the_papers_numbers():
    found = flow_grpo([1, 1, 0, 0, 0, 0, 0, 0])
    assert found == pytest.approx([1.7320508, 1.7320508] + [-0.5773503] * 6, abs=1e-7)


def test_unequal_rewards_by_hand():
    # mean 0.6125, deviations 0.2375 0.2875 -0.3125 -0.2125, population variance 0.07046875, std 0.2654595
    assert flow_grpo([0.85, 0.90, 0.3, 0.4]) == pytest.approx([0.8946750, 1.0830276, -1.1772039, -0.8004987], abs=1e-6)


def test_equal_rewards_carry_no_signal():
    assert flow_grpo([1.0] * 8) == [0.0] * 8
    assert flow_grpo([0.3]) == [0.0]
    assert not has_signal([0.0] * 8)
    assert not has_signal([1.0])
    assert has_signal([0.0, 1e-9]) and has_signal([1e6, 1e6 + 0.1])


def test_what_only_rounding_tells_apart_is_alike():
    """Two right trajectories of 59 tokens at 0.001 each, in turns of 20 + 39 and of 22 + 37."""
    group = [Outcome(1.0, (-0.001 * 20, -0.001 * 39)), Outcome(1.0, (-0.001 * 22, -0.001 * 37))] * 2
    totals = [outcome.total for outcome in group]
    assert totals[0] < totals[1] and not has_signal(totals)
    for name in ESTIMATORS:
        (placed,) = estimate(name, [group])
        assert placed == [[0.0, 0.0]] * 4 and not carries(placed)
    later = [Outcome(1.0, (-0.1, -0.2), ("s", "t")), Outcome(1.0, (-0.2, -0.1), ("s", "u"))]
    assert later[0].returns(1.0)[0] != later[1].returns(1.0)[0]
    assert gigpo(later, step_weight=1.0, discount=1.0) == [[0.0, 0.0]] * 2
    assert not has_signal([1e6, 1e6 + 1e-4])  # a std that is tiny against the values


def test_costs_that_cancel_the_outcome_leave_nothing_of_their_rounding():
    spent = Outcome(1.0, (-0.1,) * 10, tuple("abcdefghij"))
    assert spent.total == 0.0 and spent.returns(1.0)[0] == 0.0
    assert flow_grpo([spent.total, Outcome(0.0, ()).total]) == [0.0, 0.0]


def test_a_group_at_the_mean_of_the_batch_carries_no_signal():
    """The mean of the six rewards is the float above 0.1."""
    at_the_mean, apart = [Outcome(0.1, (0.0,))] * 4, [Outcome(0.2, (0.0,)), Outcome(0.0, (0.0,))]
    placed = estimate("reinforce_pp", [at_the_mean, apart])
    assert placed[0] == [[0.0]] * 4 and not carries(placed[0]) and carries(placed[1])


def test_rewards_too_close_to_square_their_difference_give_zeros():
    assert flow_grpo([0.0, 1e-248]) == [0.0, 0.0]


def test_the_released_codes_fault_is_what_the_ablation_reproduces():
    found = turn_normalised([1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 3, 3, 3, 3, 3, 3])
    assert found[0] == pytest.approx(2.92, abs=0.005)
    assert found[7] == pytest.approx(-0.32, abs=0.005)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16), st.randoms())
def test_advantages_follow_their_rewards_under_permutation(rewards, rng):
    order = list(range(len(rewards)))
    rng.shuffle(order)
    straight = flow_grpo(rewards)
    assert flow_grpo([rewards[i] for i in order]) == pytest.approx([straight[i] for i in order], abs=1e-6)


ESTIMATORS = ("flow_grpo", "dr_grpo", "rloo", "reinforce_pp", "gigpo", "turn_normalised")
path = st.builds(
    oracle.Trajectory,
    reward=st.sampled_from([0.0, 0.5, 1.0]),
    turns=st.lists(
        st.builds(oracle.Turn, tokens=st.just([]), reward=st.sampled_from([0.0, 0.0, -0.25]), state=st.integers(0, 2)),
        min_size=1,
        max_size=3,
    ),
)
batch = st.lists(st.lists(path, max_size=4), min_size=1, max_size=3)


def outcomes(groups):
    return [
        [Outcome(one.reward, tuple(t.reward for t in one.turns), tuple(t.state for t in one.turns)) for one in group]
        for group in groups
    ]


@pytest.mark.parametrize("name", ESTIMATORS)
@given(groups=batch)
def test_each_estimator_equals_the_oracle(name, groups):
    found = estimate(name, outcomes(groups), step_weight=0.7, discount=0.9)
    for g, group in enumerate(groups):
        for i, one in enumerate(group):
            expected = [oracle.advantage(groups, g, i, t, name, 0.7, 0.9) for t in range(len(one.turns))]
            assert found[g][i] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_batch_without_signal_or_without_trajectories_gives_zeros(name):
    alike = [Outcome(1.0, (0.0, 0.0), ("s", "u"))] * 3
    found = estimate(name, [alike, []])
    assert found == [[[0.0, 0.0]] * 3, []]
    assert not carries(found[0]) and not carries(found[1])


def test_the_variants_by_hand():
    rewards = [1.0, 0.0, 0.0, 0.0]
    assert dr_grpo(rewards) == [0.75, -0.25, -0.25, -0.25]
    assert rloo(rewards) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert reinforce_pp([[1.0, 1.0], [0.0, 0.0]]) == [[1.0, 1.0], [-1.0, -1.0]]
    assert carries(estimate("reinforce_pp", [[Outcome(1.0, (0.0,))], [Outcome(0.0, (0.0,))]])[0])


def test_turn_rewards_are_added_to_the_outcome():
    assert Outcome(1.0, (-0.5, 0.25)).total == 0.75
    assert Outcome(1.0, (-0.5, 0.25)).returns(0.5) == [0.125, 1.25]
    found = estimate("dr_grpo", [[Outcome(1.0, (-0.5, -0.5)), Outcome(1.0, (0.0,))]])
    assert found == [[[-0.5, -0.5], [0.5]]]


def test_gigpo_compares_turns_that_share_a_state():
    """Both begin in `s`; after that one is in `won`, the other in `lost`: there is nobody to compare with."""
    group = [Outcome(1.0, (0.0, 0.0), ("s", "won")), Outcome(0.0, (0.0, 0.0), ("s", "lost"))]
    assert gigpo(group, step_weight=0.5, discount=0.9) == [[1.5, 1.0], [-1.5, -1.0]]


def test_gigpo_finds_signal_in_how_late_a_reward_came():
    """Both are right, one a turn later: the outcomes tell nothing apart, the returns from the shared state do."""
    group = [Outcome(1.0, (0.0,), ("s",)), Outcome(1.0, (0.0, 0.0), ("s", "t"))]
    assert gigpo(group, step_weight=1.0, discount=0.9) == [pytest.approx([1.0]), pytest.approx([-1.0, 0.0])]
    assert gigpo(group, step_weight=1.0, discount=1.0) == [[0.0], [0.0, 0.0]]
