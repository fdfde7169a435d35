"""Rows of a linear map, and attention, give the same bits whatever is computed beside them."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear as plain_linear

from midflight.engines.local import attention, batch_invariant
from midflight.engines.local.batch_invariant import (
    COUNTS,
    Agreement,
    BatchInvariantLinear,
    agreement,
    linear,
    make_batch_invariant,
)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(576, 576), (192, 576), (1536, 576), (576, 1536)])
def test_a_row_has_the_same_bits_in_every_batch(shape, threads):
    draws = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(shape, generator=draws), torch.randn(shape[0], generator=draws)
    x = torch.randn(700, shape[1], generator=draws)
    whole = linear(x, weight, bias)
    assert torch.allclose(whole, plain_linear(x, weight, bias), atol=2e-4)
    for rows in (*range(1, 80), 100, 129, 200, 256, 300, 513):
        assert torch.equal(linear(x[:rows], weight, bias), whole[:rows]), rows
        assert torch.equal(linear(x[None, -rows:], weight, bias)[0], whole[-rows:]), rows


def test_its_gradients_are_the_linear_maps():
    weight, x = torch.randn(576, 1536, requires_grad=True), torch.randn(3, 30, 1536, requires_grad=True)
    found = torch.autograd.grad(linear(x, weight).square().sum(), [weight, x])
    wanted = torch.autograd.grad(plain_linear(x, weight).square().sum(), [weight, x])
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-2)


def test_rows_are_cut_and_padded_to_numbers_that_agree():
    some = Agreement((1, 8, 16, 32, 64, 96, 128), (16, 32, 128))
    assert some.cuts(0) == []
    assert some.cuts(1) == [16]
    assert some.cuts(16) == [16]
    assert some.cuts(20) == [20]  # between two that agree
    assert some.cuts(40) == [32, 16]
    assert some.cuts(64) == [32, 32]
    assert some.cuts(100) == [32, 32, 32, 16]
    assert some.cuts(128) == [128]
    assert some.cuts(1000) == [1000]  # as the last that was tried
    assert Agreement((1, 8, 16), (1, 8)).cuts(19) == [8, 8, 3]


def test_the_cheapest_of_the_sets_that_agree_is_taken(monkeypatch):
    def rounding(kinds):
        """A BLAS that adds what belongs to the number of rows."""
        return lambda x, weight: plain_linear(x, weight) * 0 + kinds(len(x))

    def found(kinds, outputs):
        monkeypatch.setattr(batch_invariant, "plain_linear", rounding(kinds))
        return agreement(outputs, 8, threads=-1).alike  # a number of threads that no other test has

    few = (1, 2, 3, 4, 5, 6, 7, 8)
    assert found(lambda rows: 0.0, 3) == (*few, *COUNTS[4:])
    assert found(lambda rows: float(rows < 16), 4) == COUNTS[4:]
    assert found(lambda rows: float(64 <= rows <= 192), 5) == (*few, 16, 24, 32, 48, 224, 256, 320, 384, 512)
    assert found(lambda rows: float(rows > 96), 6) == (*few, *COUNTS[4:10])
    assert found(lambda rows: float(rows in (5, 6, 7)), 7) == (1, 2, 3, 4, 8, *COUNTS[4:])
    monkeypatch.setattr(batch_invariant, "plain_linear", rounding(lambda rows: float(rows == 23)))
    assert agreement(8, 8, threads=3).alike == (*range(1, 23), 24, *COUNTS[6:])
    agreement.cache_clear()


def test_large_maps_are_tried_with_few_rows(monkeypatch):
    monkeypatch.setattr(batch_invariant, "MOST_TRIED", 100 * 11 * 7)
    assert agreement(11, 7, 1).tried == (1, 2, 3, 4, 5, 6, 7, 8, *COUNTS[4:10])
    assert agreement(1100, 70, 1).tried == (1,)


def test_only_float32_on_the_cpu_is_changed():
    made = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    assert not make_batch_invariant(made.bfloat16())
    assert [type(part) for part in made] == [torch.nn.Linear, torch.nn.ReLU, torch.nn.Linear]
    assert make_batch_invariant(made.float())
    assert [type(part) for part in made] == [BatchInvariantLinear, torch.nn.ReLU, BatchInvariantLinear]


def _attention(query, key, value, mask, **options):
    found, _ = attention.attention(SimpleNamespace(layer_idx=0, training=False), query, key, value, mask, **options)
    return found


def test_exact_attention_has_the_same_bits_wherever_the_trunk_ends():
    draws = torch.Generator().manual_seed(2)
    query = torch.randn(1, 9, 5, 64, generator=draws)
    key, value = torch.randn(2, 1, 3, 300, 64, generator=draws)
    least = torch.finfo(torch.float32).min
    mask = torch.cat([torch.zeros(5, 295), torch.full((5, 5), least).triu(1)], dim=1)[None, None]
    whole = _attention(query, key, value, mask, exact=True)
    plain = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True).transpose(1, 2)
    assert whole.dtype == torch.float32
    assert (whole - plain).abs().max() < 1e-5
    for cut in (1, 17, 64, 200, 295):
        trunk = [(key[0, :, :cut].double(), value[0, :, :cut].double())]
        rest = [part[:, :, cut:].double() for part in (key, value)]
        assert torch.equal(_attention(query, *rest, mask[..., cut:], trunk=trunk, exact=True), whole), cut
    gap = torch.randn(1, 3, 40, 64, generator=draws)  # hidden columns between, as other rows' tokens are
    spread = [torch.cat([part[:, :, :100], gap, part[:, :, 100:]], dim=2) for part in (key, value)]
    hidden = torch.cat([mask[..., :100], torch.full((1, 1, 5, 40), least), mask[..., 100:]], dim=-1)
    assert torch.equal(_attention(query, *spread, hidden, exact=True), whole)


def test_the_gradients_of_exact_attention_are_sdpas():
    query = torch.randn(1, 6, 40, 16, requires_grad=True)
    key, value = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(2))
    mask = torch.full((40, 40), torch.finfo(torch.float32).min).triu(1)[None, None]
    towards = torch.randn(1, 40, 6, 16)
    plain = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True).transpose(1, 2)
    ours, theirs = (
        torch.autograd.grad((found * towards).sum(), [query, key, value])
        for found in (_attention(query, key, value, mask, exact=True), plain)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
