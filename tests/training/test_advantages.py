import pytest
from hypothesis import given
from hypothesis import strategies as st

from midflight.training.advantages import flow_grpo, has_signal, turn_normalised


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
    assert has_signal([0.0, 1e-9])


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
