"""Every loss against the literal oracle, its gradient against differences of the oracle, and its invariances."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midflight.training.losses import Clip, LossInputs, importance_corrections, objective
from tests.training import oracle
from tests.training.oracle import Token, Trajectory, Turn

LOW, HIGH, DUAL, CAP = 0.2, 0.3, 1.5, 1.2
VARIANTS = [
    {"surrogate": "ppo_clip"},
    {"surrogate": "ppo_clip", "dual": DUAL},
    {"surrogate": "ppo_clip", "high": LOW},
    {"surrogate": "ppo_clip", "cap": CAP},
    {"surrogate": "gspo"},
    {"surrogate": "gspo", "dual": DUAL, "cap": CAP},
    {"surrogate": "cispo"},
    {"surrogate": "reinforce"},
    {"surrogate": "ppo_clip", "kl_name": "k1", "kl_beta": 0.05},
    {"surrogate": "ppo_clip", "kl_name": "k2", "kl_beta": 0.05},
    {"surrogate": "ppo_clip", "kl_name": "k3", "kl_beta": 0.05, "entropy_beta": 0.1},
    {"surrogate": "ppo_clip", "kl_name": "k2", "kl_beta": 0.05, "entropy_beta": 0.1, "cap": CAP},
]
NAMES = ["-".join(f"{key}={value}" for key, value in one.items()) for one in VARIANTS]
WEIGHTINGS = ("trajectory", "turn", "token")

logprob = st.floats(-3, -0.01)
token = st.builds(Token, new=logprob, drawn=logprob, ref=logprob, entropy=st.floats(0, 3), old=logprob)
turn = st.builds(Turn, tokens=st.lists(token, min_size=1, max_size=3), reward=st.floats(-2, 2))
trajectory = st.builds(Trajectory, reward=st.just(0.0), turns=st.lists(turn, min_size=1, max_size=3))
batch = st.lists(st.lists(trajectory, min_size=2, max_size=3), min_size=1, max_size=2)


def advantages_of(groups):
    """Any numbers do here: each turn's `reward` stands for its advantage."""
    return [[[one.reward for one in path.turns] for path in group] for group in groups]


def tokens_of(groups):
    """Every token with its turn, advantage and place."""
    for g, group in enumerate(groups):
        for i, path in enumerate(group):
            for t, one in enumerate(path.turns):
                for single in one.tokens:
                    yield single, one, (g, i, t), path, group


def inputs_of(groups, weighting, cap, by_turn=False):
    found = list(tokens_of(groups))

    def column(values):
        return torch.tensor(list(values), dtype=torch.float64)

    def gap(turn):
        return oracle.mean([one.new - (one.drawn if cap is None else one.old) for one in turn.tokens])

    drawn, old = column(one.drawn for one, *_ in found), column(one.old for one, *_ in found)
    pair = (drawn, old)
    if by_turn:
        pair = tuple(
            column(oracle.mean([getattr(one, name) for one in turn.tokens]) for _, turn, *_ in found)
            for name in ("drawn", "old")
        )
    return LossInputs(
        logprobs=column(one.new for one, *_ in found),
        behaviour=drawn if cap is None else old,
        advantages=column(turn.reward for _, turn, *_ in found),
        weights=column(oracle.weight(groups, group, path, turn, weighting) for _, turn, _, path, group in found),
        reference=column(one.ref for one, *_ in found),
        entropies=column(one.entropy for one, *_ in found),
        turn_gaps=column(gap(turn) for _, turn, *_ in found),
        corrections=None if cap is None else importance_corrections(*pair, cap),
    )


def loss_of(inputs, variant):
    settings = {"kl_beta": variant.get("kl_beta", 0.0), "entropy_beta": variant.get("entropy_beta", 0.0)}
    return objective(
        inputs,
        surrogate=variant["surrogate"],
        clip=Clip(LOW, variant.get("high", HIGH), variant.get("dual")),
        kl_estimate=variant.get("kl_name", "k3"),
        **settings,
    ).loss


def literal(groups, weighting, variant):
    return oracle.loss(groups, advantages_of(groups), weighting=weighting, **{"low": LOW, "high": HIGH, **variant})


def chosen(inputs, index):
    """Some of the tokens."""
    values = {name: getattr(inputs, name) for name in LossInputs.__dataclass_fields__}
    return LossInputs(**{name: None if value is None else value[index] for name, value in values.items()})


@pytest.mark.parametrize("variant", VARIANTS, ids=NAMES)
@settings(max_examples=15, deadline=None)
@given(groups=batch, weighting=st.sampled_from(WEIGHTINGS))
def test_value_equals_the_oracle(variant, groups, weighting):
    found = loss_of(inputs_of(groups, weighting, variant.get("cap"), variant["surrogate"] == "gspo"), variant)
    assert float(found) == pytest.approx(literal(groups, weighting, variant), abs=1e-9)


def near_a_kink(groups, variant):
    """Where min, max or clip change branch no derivative exists."""
    edges = (1 - LOW, 1 + variant.get("high", HIGH), DUAL, 1.0)
    for single, turn, *_ in tokens_of(groups):
        base = single.drawn if "cap" not in variant else single.old
        gaps = [one.new - (one.drawn if "cap" not in variant else one.old) for one in turn.tokens]
        for ratio in (math.exp(single.new - base), math.exp(oracle.mean(gaps))):
            if any(abs(ratio - edge) < 1e-3 for edge in edges):
                return True
        if abs(turn.reward) < 1e-3:
            return True
    return False


@pytest.mark.parametrize("variant", [one for one in VARIANTS if one["surrogate"] != "cispo"])
@settings(max_examples=8, deadline=None)
@given(groups=batch, weighting=st.sampled_from(WEIGHTINGS))
def test_gradient_equals_differences_of_the_oracle(variant, groups, weighting):
    if near_a_kink(groups, variant):
        return
    inputs = inputs_of(groups, weighting, variant.get("cap"), variant["surrogate"] == "gspo")
    inputs.logprobs.requires_grad_(True)
    (gradient,) = torch.autograd.grad(loss_of(inputs, variant), inputs.logprobs)
    step = 1e-6
    for index, (single, *_) in enumerate(tokens_of(groups)):
        value, found = single.new, []
        for sign in (1, -1):
            single.new = value + sign * step
            found.append(literal(groups, weighting, variant))
        single.new = value
        assert float(gradient[index]) == pytest.approx((found[0] - found[1]) / (2 * step), abs=1e-5)


@pytest.mark.parametrize("variant", VARIANTS, ids=NAMES)
@settings(max_examples=15, deadline=None)
@given(groups=batch, weighting=st.sampled_from(WEIGHTINGS), rng=st.randoms(), cut=st.integers(1, 5))
def test_permuting_splitting_merging_and_padding_change_nothing(variant, groups, weighting, rng, cut):
    inputs = inputs_of(groups, weighting, variant.get("cap"), variant["surrogate"] == "gspo")
    inputs.logprobs.requires_grad_(True)
    whole = loss_of(inputs, variant)
    (expected,) = torch.autograd.grad(whole, inputs.logprobs)

    order = list(range(len(inputs.weights)))
    rng.shuffle(order)
    parts = []
    for start in range(0, len(order), cut):  # micro-batches of any tokens, each padded with tokens of weight 0
        part = chosen(inputs, order[start : start + cut])
        values = {name: getattr(part, name) for name in LossInputs.__dataclass_fields__}
        zeros = torch.zeros(3, dtype=torch.float64)
        padded = {name: None if value is None else torch.cat([value, zeros]) for name, value in values.items()}
        parts.append(loss_of(LossInputs(**padded), variant))
    assert float(sum(parts).detach()) == pytest.approx(float(whole.detach()), abs=1e-9)
    (found,) = torch.autograd.grad(sum(parts), inputs.logprobs)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-9)


def test_cispo_keeps_the_gradient_where_ppo_loses_it():
    """Ratio e^0.5 with a positive advantage: PPO's gradient is 0, CISPO's is the clipped ratio times A."""
    new = torch.tensor([0.5]).requires_grad_(True)
    inputs = LossInputs(new, torch.zeros(1), torch.tensor([2.0]), torch.ones(1))
    for surrogate, expected in (("ppo_clip", 0.0), ("cispo", -1.3 * 2.0), ("reinforce", -2.0)):
        (gradient,) = torch.autograd.grad(objective(inputs, surrogate=surrogate, clip=Clip(0.2, 0.3)).loss, new)
        assert float(gradient) == pytest.approx(expected), surrogate


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_holds_its_ratio_constant_where_it_is_not_clipped_too(advantage):
    """Were the ratio e^0.1 not held, the gradient of ratio A logprob would be (1 + logprob) times as large."""
    new = torch.tensor([0.1]).requires_grad_(True)
    inputs = LossInputs(new, torch.zeros(1), torch.tensor([advantage]), torch.ones(1))
    (gradient,) = torch.autograd.grad(objective(inputs, surrogate="cispo", clip=Clip(0.2, 0.3)).loss, new)
    assert float(gradient) == pytest.approx(-math.exp(0.1) * advantage)


def test_dual_clip_bounds_what_a_negative_advantage_costs():
    new = torch.tensor([2.0]).requires_grad_(True)
    inputs = LossInputs(new, torch.zeros(1), torch.tensor([-1.0]), torch.ones(1))
    free = objective(inputs)
    assert float(free.loss.detach()) == pytest.approx(math.exp(2.0)) and float(free.clipped) == 0
    bounded = objective(inputs, clip=Clip(0.2, 0.2, 3.0))
    assert float(bounded.loss.detach()) == pytest.approx(3.0) and float(bounded.clipped) == 1
    assert float(torch.autograd.grad(bounded.loss, new)[0]) == 0.0


def test_what_is_logged_has_no_importance_weights_and_the_largest_ratio_is_new_over_old():
    lp = torch.tensor([-1.0, -2.0, -1.5])
    inputs = LossInputs(
        lp,
        torch.tensor([-1.2, -1.5, -1.5]),
        torch.ones(3),
        torch.ones(3),
        reference=lp - 1.0,
        entropies=torch.tensor([1.0, 2.0, 3.0]),
        corrections=torch.tensor([0.5, 0.5, 0.5]),
    )
    found = objective(inputs)
    assert float(found.kl) == pytest.approx(3 * math.exp(-1.0)) and float(found.entropy) == 6.0
    assert float(found.ratio_max) == pytest.approx(math.exp(0.2))


def test_importance_corrections_are_capped_ratios():
    found = importance_corrections(torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -2.0, 1.0]), 2.0)
    assert found.tolist() == pytest.approx([1.0, math.exp(-1.0), 2.0])


def test_on_policy_loss_is_minus_the_weighted_advantage_and_entropy_is_subtracted():
    lp = torch.tensor([-1.0, -2.0])
    inputs = LossInputs(
        logprobs=lp,
        behaviour=lp,
        advantages=torch.tensor([1.0, -0.5]),
        weights=torch.tensor([0.5, 0.25]),
        entropies=torch.tensor([2.0, 4.0]),
    )
    found = objective(inputs, entropy_beta=0.1)
    assert float(found.entropy) == 2.0
    assert float(found.loss) == pytest.approx(-(0.5 - 0.125) - 0.2)
    assert float(found.clipped) == 0
    assert float(found.ratio_max) == 1.0


def test_the_kl_that_is_logged_is_k3_whatever_trains():
    inputs = LossInputs(
        torch.tensor([-1.0]), torch.tensor([-1.0]), torch.zeros(1), torch.ones(1), reference=torch.tensor([-2.0])
    )
    for estimate, loss in (("k1", 1.0), ("k2", 0.5), ("k3", math.exp(-1.0))):
        found = objective(inputs, kl_beta=1.0, kl_estimate=estimate)
        assert float(found.kl) == pytest.approx(math.exp(-1.0))
        assert float(found.loss) == pytest.approx(loss)
    assert float(objective(inputs).loss) == 0.0


def test_clip_bites_only_where_it_lowers_the_objective():
    old = torch.zeros(4)
    new = torch.tensor([0.5, 0.5, -0.5, -0.5]).requires_grad_(True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    found = objective(LossInputs(new, old, advantages, torch.ones(4)))
    (gradient,) = torch.autograd.grad(found.loss, new)
    assert gradient.tolist() == pytest.approx([0.0, math.exp(0.5), -math.exp(-0.5), 0.0])
    assert float(found.clipped) == 2
