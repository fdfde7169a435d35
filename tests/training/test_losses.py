"""The loss against a literal double loop over the formula, and its invariances."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midflight.training.losses import LossInputs, flow_grpo_loss

EPSILON, BETA = 0.2, 0.05


def literal(groups):
    """-J of REFERENCE: mean over groups of 1/G sum_i 1/T_i sum_t 1/|a| sum_j (min(..) - beta k3), with math only."""
    total = 0.0
    for group in groups:
        for advantage, turns in group:
            for turn in turns:
                for new, old, ref in turn:
                    rho = math.exp(new - old)
                    surrogate = min(rho * advantage, min(max(rho, 1 - EPSILON), 1 + EPSILON) * advantage)
                    k3 = math.exp(ref - new) - (ref - new) - 1
                    total += (surrogate - BETA * k3) / (len(groups) * len(group) * len(turns) * len(turn))
    return -total


def flat(groups):
    columns = ([], [], [], [], [])
    for group in groups:
        for advantage, turns in group:
            for turn in turns:
                weight = 1 / (len(groups) * len(group) * len(turns) * len(turn))
                for values, column in zip(zip(*turn, strict=True), columns[:3], strict=True):
                    column.extend(values)
                columns[3].extend([advantage] * len(turn))
                columns[4].extend([weight] * len(turn))
    return [torch.tensor(column, dtype=torch.float64) for column in columns]


def loss_of(new, old, ref, advantages, weights):
    inputs = LossInputs(logprobs=new, behaviour=old, advantages=advantages, weights=weights, reference=ref)
    return flow_grpo_loss(inputs, epsilon=EPSILON, kl_beta=BETA, entropy_beta=0.0).loss


logprob = st.floats(-3, -0.01)
token = st.tuples(logprob, logprob, logprob)
turn = st.lists(token, min_size=1, max_size=3)
trajectory = st.tuples(st.floats(-2, 2), st.lists(turn, min_size=1, max_size=3))
batch = st.lists(st.lists(trajectory, min_size=2, max_size=3), min_size=1, max_size=2)


@settings(max_examples=60, deadline=None)
@given(batch)
def test_value_equals_the_double_loop(groups):
    assert float(loss_of(*flat(groups))) == pytest.approx(literal(groups), abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(batch)
def test_gradient_equals_finite_differences_of_the_double_loop(groups):
    new, old, ref, advantages, weights = flat(groups)
    # Keep away from the kinks of min and clip, where no derivative exists.
    ratio = (new - old).exp()
    if ((ratio - 1 - EPSILON).abs() < 1e-3).any() or ((ratio - 1 + EPSILON).abs() < 1e-3).any():
        return
    if (ratio - 1).abs().lt(1e-3).any() or advantages.abs().lt(1e-3).any():
        return
    new.requires_grad_(True)
    (gradient,) = torch.autograd.grad(loss_of(new, old, ref, advantages, weights), new)
    step = 1e-6
    for index in range(len(new)):
        values = []
        for sign in (1, -1):
            shifted = new.detach().clone()
            shifted[index] += sign * step
            values.append(literal(unflat(groups, shifted.tolist())))
        assert float(gradient[index]) == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-5)


def unflat(groups, values):
    stream = iter(values)
    return [
        [(advantage, [[(next(stream), old, ref) for _, old, ref in turn] for turn in turns]) for advantage, turns in g]
        for g in groups
    ]


@settings(max_examples=30, deadline=None)
@given(batch, st.randoms(), st.integers(1, 5))
def test_permuting_splitting_and_padding_change_nothing(groups, rng, cut):
    columns = flat(groups)
    whole = loss_of(*columns)
    order = list(range(len(columns[0])))
    rng.shuffle(order)
    shuffled = [column[order] for column in columns]
    assert float(loss_of(*shuffled)) == pytest.approx(float(whole), abs=1e-9)
    parts = [loss_of(*[column[a : a + cut] for column in shuffled]) for a in range(0, len(order), cut)]
    assert float(sum(parts)) == pytest.approx(float(whole), abs=1e-9)
    padded = [torch.cat([column, torch.zeros(3, dtype=torch.float64)]) for column in columns]
    assert float(loss_of(*padded)) == pytest.approx(float(whole), abs=1e-9)


def test_on_policy_loss_is_minus_the_weighted_advantage_and_entropy_is_subtracted():
    lp = torch.tensor([-1.0, -2.0])
    inputs = LossInputs(
        logprobs=lp,
        behaviour=lp,
        advantages=torch.tensor([1.0, -0.5]),
        weights=torch.tensor([0.5, 0.25]),
        entropies=torch.tensor([2.0, 4.0]),
    )
    found = flow_grpo_loss(inputs, epsilon=0.2, kl_beta=0.0, entropy_beta=0.1)
    assert float(found.entropy) == 2.0
    assert float(found.loss) == pytest.approx(-(0.5 - 0.125) - 0.2)
    assert float(found.clipped) == 0
    assert float(found.ratio_max) == 1.0


def test_clip_bites_only_where_it_lowers_the_objective():
    old = torch.zeros(4)
    new = torch.tensor([0.5, 0.5, -0.5, -0.5]).requires_grad_(True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    found = flow_grpo_loss(LossInputs(new, old, advantages, torch.ones(4)), epsilon=0.2, kl_beta=0, entropy_beta=0)
    (gradient,) = torch.autograd.grad(found.loss, new)
    assert gradient.tolist() == pytest.approx([0.0, math.exp(0.5), -math.exp(-0.5), 0.0])
    assert float(found.clipped) == 2
